"""Row by row: norms, 8-bit rounding."""

from collections.abc import Callable

import pytest
import torch

from ramify.gpu.native.kernels import Kernels, empty_quantised
from ramify.gpu.native.threads import Words, aligned


def words(*numbers: int) -> Words:
    made = aligned(len(numbers))
    made[:] = numbers
    return made


@pytest.mark.parametrize("normed", [False, True])
def test_quantising(kernels: Kernels, run: Callable[..., None], normed: bool) -> None:
    source, weight = torch.randn(5, 80), torch.rand(80) + 0.5
    source[3] = 0
    target = empty_quantised(5, 80, kernels.isa)
    norm = (weight, 1e-5) if normed else None
    run(kernels.quantise(words(5), source, 80, target, norm))
    wanted = source.double()
    if normed:
        wanted = wanted / (wanted.pow(2).mean(1, keepdim=True) + 1e-5).sqrt() * weight
    back = target.values[:, :80].to(torch.int32)
    back = torch.where(back > 127, back - 256, back) if kernels.isa.offset == 0 else back - 128
    found = back * target.scales[:, None].double()
    assert (found - wanted).abs().max() <= 0.501 * target.scales.max()
    assert not found[3].any()


def test_chosen_lines(kernels: Kernels, run: Callable[..., None]) -> None:
    source, target = torch.randn(9, 64), empty_quantised(2, 64, kernels.isa)
    run(kernels.quantise(words(2), source, 64, target, None, words(7, 2)))
    torch.testing.assert_close(target.scales, source[[7, 2]].abs().amax(1) / 127)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_spoils_its_row_alone(
    kernels: Kernels, run: Callable[..., None], bad: float
) -> None:
    source, target = torch.randn(3, 64), empty_quantised(3, 64, kernels.isa)
    source[1, 17] = bad
    run(kernels.quantise(words(3), source, 64, target, (torch.ones(64), 1e-5)))
    assert target.scales.isnan().tolist() == [False, True, False]


def test_adding_a_norm(kernels: Kernels, run: Callable[..., None]) -> None:
    source, target, weight = torch.randn(4, 64), torch.randn(4, 64), torch.randn(64)
    wanted = target + source / (source.pow(2).mean(1, keepdim=True) + 1e-6).sqrt() * weight
    run(kernels.norm_add(words(4), source, (weight, 1e-6), target))
    torch.testing.assert_close(target, wanted)
