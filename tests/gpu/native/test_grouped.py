"""Products of weights in groups: near float64, the same bits with every instruction set."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ramify.gpu.native.grouped import GROUP, Grouping, PackedGroups, pack_groups
from ramify.gpu.native.host import Isa
from ramify.gpu.native.kernels import Kernels, Quantised, empty_quantised
from ramify.gpu.native.linear import ROW_BLOCK
from ramify.gpu.native.threads import Crew, Recording, Words, aligned

GROUPINGS = [Grouping(bits, offsets) for bits in (4, 8) for offsets in (False, True)]
NAMES = [grouping.name for grouping in GROUPINGS]


def count_of(number: int) -> Words:
    count = aligned(1)
    count[0] = number
    return count


def weight_of(grouping: Grouping, outputs: int, inputs: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """Random codes, scales and offsets."""
    least = 0 if grouping.offsets and grouping.bits == 4 else -(1 << grouping.bits - 1)
    codes = torch.randint(least, least + (1 << grouping.bits), (outputs, inputs)).to(torch.int8)
    groups = (outputs, inputs // GROUP)
    scales = (torch.rand(groups) / (1 << grouping.bits)).half().float()
    return codes, scales, torch.randn(groups).half().float() if grouping.offsets else None


def floats(codes: Tensor, scales: Tensor, offsets: Tensor | None) -> Tensor:
    values = codes.double() * scales.double().repeat_interleave(GROUP, 1)
    return values if offsets is None else values + offsets.double().repeat_interleave(GROUP, 1)


def rounded(x: Tensor) -> Tensor:
    scales = x.abs().amax(1, keepdim=True) * (1 / 127)
    return (x * (127 / x.abs().amax(1, keepdim=True))).round().double() * scales.double()


def multiply(
    kernels: Kernels, run: Callable[..., None], x: Tensor, packed: PackedGroups, out: Tensor, ending: str
) -> Quantised:
    count, target = count_of(len(x)), empty_quantised(len(x), x.shape[1], kernels.isa, True)
    run(
        kernels.quantise(count, x, x.shape[1], target),
        kernels.linear(count, target, packed, out, ending),
    )
    return target


@pytest.fixture(scope="module")
def grouped(isa: Isa) -> Kernels:
    return Kernels(isa, 32, torch.float16, [], tuple(product(["store", "silu"], GROUPINGS)))


@pytest.fixture(scope="module")
def run_grouped(grouped: Kernels) -> Iterator[Callable[..., None]]:
    crew = Crew(grouped.isa, 2)
    yield lambda *instructions: crew.run(Recording(instructions))
    crew.close()


def test_every_instruction_set_gives_the_same_bits(isa: Isa) -> None:
    kinds = [isa, replace(isa, name="plain", dot="plain", offset=0)]
    if isa.code_offset:
        kinds += [Isa("AVX2", "madd256", 8, 0), Isa("AVX-512 without VNNI", "madd256", 32, 0)]
    if isa.dot == "vnni512":
        kinds += [Isa("AVX-512 VNNI, short", "vnni256", 8)]
    torch.manual_seed(1)
    some = [Grouping(4, True), Grouping(8, False)]
    x, parts = torch.randn(13, 96), [weight_of(grouping, 100, 96) for grouping in some]
    found: list[list[Tensor]] = []
    for kind in kinds:
        kernels = Kernels(kind, 32, torch.float32, [], tuple(product(["store"], some)))
        crew = Crew(kernels.isa, 1)
        found.append([])
        for grouping, own in zip(some, parts, strict=True):
            out = torch.zeros(13, 128)
            packed = pack_groups(*own, grouping.bits, None, kind)
            multiply(
                kernels, lambda *each, crew=crew: crew.run(Recording(each)), x, packed, out, "store"
            )
            found[-1].append(out[:, :100])
        crew.close()
    for index, own in enumerate(parts):
        wanted = rounded(x) @ floats(*own).t()
        torch.testing.assert_close(found[0][index].double(), wanted, rtol=1e-5, atol=1e-4)
        assert all(torch.equal(one[index], found[0][index]) for one in found)


@pytest.mark.parametrize("rows", [1, 2, 4, 6, 7, ROW_BLOCK + 1])
@pytest.mark.parametrize("ending", ["store", "silu"])
@pytest.mark.parametrize("grouping", GROUPINGS, ids=NAMES)
def test_each_ending(
    grouped: Kernels, run_grouped: Callable[..., None], grouping: Grouping, rows: int, ending: str
) -> None:
    torch.manual_seed(rows)
    x, parts, bias = torch.randn(rows, 96), weight_of(grouping, 140, 96), torch.randn(140)
    gated = ending == "silu"
    packed = pack_groups(*parts, grouping.bits, bias, grouped.isa, gated)
    out = torch.ones(rows, packed.outputs // (2 if gated else 1))
    multiply(grouped, run_grouped, x, packed, out, ending)
    wanted = rounded(x) @ floats(*parts).t() + bias
    if gated:
        gate, up = wanted.chunk(2, 1)
        wanted = F.silu(gate) * up
    torch.testing.assert_close(out[:, : wanted.shape[1]].double(), wanted, rtol=1e-4, atol=2e-4)


def test_activations_are_signed_and_summed(grouped: Kernels, run_grouped: Callable[..., None]) -> None:
    x = torch.randn(3, 112)  # the last group is half of one
    packed = pack_groups(*weight_of(GROUPINGS[0], 64, 128), 4, None, grouped.isa)
    target = multiply(grouped, run_grouped, x, packed, torch.zeros(3, 64), "store")
    wanted = torch.zeros(3, 128)
    wanted[:, :112] = (x * (127 / x.abs().amax(1, keepdim=True))).round()
    assert torch.equal(target.values.view(torch.int8).float(), wanted)
    assert target.sums is not None
    assert torch.equal(target.sums.float(), wanted.view(3, 4, GROUP).sum(2))


def test_padding_outputs_are_what_is_asked_for(
    grouped: Kernels, run_grouped: Callable[..., None]
) -> None:
    packed = pack_groups(*weight_of(GROUPINGS[0], 70, 64), 4, None, grouped.isa, padding=-torch.inf)
    out = torch.zeros(1, packed.outputs)
    multiply(grouped, run_grouped, torch.randn(1, 64), packed, out, "store")
    assert out[0, :70].isfinite().all()
    assert (out[0, 70:] == -torch.inf).all()
