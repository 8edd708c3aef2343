"""The best token, or one drawn."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from ramify.gpu.native.kernels import DrawArrays, Kernels
from ramify.gpu.native.threads import aligned
from ramify.gpu.sampling.truncation import thresholds


def choose(
    kernels: Kernels,
    run: Callable[..., None],
    logits: Tensor,
    heat: float,
    uniforms: list[float],
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> list[int]:
    rows = len(logits)
    count, tokens = aligned(1), np.zeros(rows, dtype=np.int64)
    count[0] = rows
    draws = DrawArrays(np.full(rows, heat, dtype=np.float32), np.array(uniforms), tokens)
    draws.top_k[:], draws.top_p[:] = top_k, top_p
    draws.floors[:] = np.log(min_p) if min_p else -np.inf
    run(kernels.choose(count, logits, draws))
    found: list[int] = tokens.tolist()
    return found


def test_the_best_token_is_the_first_of_equals(kernels: Kernels, run: Callable[..., None]) -> None:
    logits = torch.randn(3, 64)
    logits[1, [40, 9, 25]] = 7.0
    logits[2] = -torch.inf
    logits[2, 33] = -5.0
    assert choose(kernels, run, logits, 0.0, [0.0] * 3) == [int(logits[0].argmax()), 9, 33]


def test_logits_that_are_not_finite_give_no_token(kernels: Kernels, run: Callable[..., None]) -> None:
    logits = torch.randn(4, 32)
    logits[0, 5], logits[1, 5], logits[2] = torch.nan, torch.inf, -torch.inf
    for heat in (0.0, 0.7):
        found = choose(kernels, run, logits, heat, [0.3] * 4)
        assert found[:3] == [-1, -1, -1]
        assert found[3] >= 0


def test_draws_invert_the_cumulative_distribution(kernels: Kernels, run: Callable[..., None]) -> None:
    torch.manual_seed(2)
    logits = torch.randn(1, 80) * 3
    logits[0, ::7] = -torch.inf
    masses = (logits[0].double() / 0.8).softmax(0).cumsum(0)
    for uniform in np.linspace(0.001, 0.999, 97):
        wanted = int(torch.searchsorted(masses, float(uniform), right=True))
        assert choose(kernels, run, logits, 0.8, [float(uniform)]) == [wanted]


def test_a_tiny_temperature_draws_the_best(kernels: Kernels, run: Callable[..., None]) -> None:
    logits = torch.randn(2, 48) * 10
    assert choose(kernels, run, logits, 1e-6, [0.0, 0.999]) == logits.argmax(1).tolist()


@pytest.mark.parametrize("spread", [0.01, 3.0])  # nearly equal: a nucleus of thousands
@pytest.mark.parametrize("heat", [0.7, 1.3])
def test_what_is_cut_off_is_what_torch_cuts_off(
    kernels: Kernels, run: Callable[..., None], heat: float, spread: float
) -> None:
    """Drawn at 64 numbers: the same tokens as of torch's thresholds and sums in float64."""
    torch.manual_seed(3)
    size = 1600
    logits = torch.randn(1, size) * spread + 2
    logits[0, ::9] = -torch.inf
    logits[0, 40:50] = logits[0].sort(descending=True).values[30]  # ties at the cut
    uniforms = np.linspace(0.001, 0.999, 64)
    scaled = (logits - logits.max()) / heat
    for top_k, top_p, min_p in (
        (1, 1.0, 0.0), (35, 1.0, 0.0), (size, 1.0, 0.0), (1300, 0.97, 0.0), (0, 0.9, 0.0),
        (0, 1e-20, 0.0), (0, 0.999999, 0.0), (40, 0.5, 0.0), (0, 1.0, 0.2), (40, 0.8, 0.05),
        (10**9, 0.3, 1.0),
    ):  # fmt: skip
        cut = torch.tensor([top_k]), torch.tensor([top_p]), torch.tensor([min_p], dtype=torch.float64)
        low = thresholds(scaled, *cut)
        masses = scaled.double().exp().masked_fill(scaled < low, 0.0)[0].cumsum(0)
        points = torch.from_numpy(uniforms) * masses[-1]
        wanted = torch.searchsorted(masses, points, right=True).tolist()
        rows = logits.expand(64, size).contiguous()
        found = choose(kernels, run, rows, heat, uniforms.tolist(), top_k, top_p, min_p)
        assert found == wanted, (top_k, top_p, min_p)


def test_a_cut_among_equals_keeps_them_all(kernels: Kernels, run: Callable[..., None]) -> None:
    logits = torch.zeros(4, 2048)
    uniforms = [0.0001, 0.3, 0.6, 0.9999]
    wanted = [int(uniform * 2048) for uniform in uniforms]
    assert choose(kernels, run, logits, 1.0, uniforms, top_k=3, top_p=0.2) == wanted
