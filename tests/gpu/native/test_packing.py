"""Packing kernels: the same bits as packing by torch; rows of packed weights as floats again."""

import numpy as np
import pytest
import torch

from ramify.gpu.native.grouped import PackedGroups, pack_groups
from ramify.gpu.native.host import Isa
from ramify.gpu.native.kernels import Kernels, table_kind
from ramify.gpu.native.linear import PackedWeight
from ramify.gpu.native.packer import Packer
from ramify.gpu.native.threads import Crew, Recording, aligned
from ramify.gpu.ops.linear.base import Linear, PlainWeight, Use
from ramify.gpu.ops.linear.blocks import BlockWeight
from ramify.gpu.ops.linear.grouped import GROUP, grouped, joined
from ramify.gpu.ops.linear.packed import CpuForms, cpu_weight, looked_up, table_weight
from tests.gguf_files import KINDS, blocks
from tests.gpu.native.packed import pack_weight

INPUTS = 512
# kinds of merged weights, what they become, how the product is used
CASES: dict[str, tuple[list[str], Use]] = {kind: ([kind], "rows") for kind in KINDS[3:]} | {
    "gated": (["Q4_0", "Q4_0"], "gated"),
    "4 bits, some with offsets": (["Q4_K", "Q4_0"], "rows"),
    "of every kind": ([*KINDS[3:]], "logits"),
}


@pytest.fixture(scope="module")
def packer(isa: Isa) -> Packer:
    return Packer(isa)


def raw_blocks(kind: str, rows: int) -> torch.Tensor:
    values = np.random.default_rng(rows).normal(size=(rows, INPUTS)).astype(np.float32)
    return torch.from_numpy(blocks(values, kind)[0])


def same(ours: object, theirs: object) -> None:
    assert isinstance(ours, PackedWeight | PackedGroups)
    assert type(ours) is type(theirs)
    for name in ours.__dataclass_fields__:
        one, other = getattr(ours, name), getattr(theirs, name)
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other, name


@pytest.mark.parametrize("case", CASES)
def test_blocks_keep_their_codes(packer: Packer, case: str) -> None:
    kinds, use = CASES[case]
    raws = [(kind, raw_blocks(kind, 50)) for kind in kinds]
    first, *others = (BlockWeight([one], INPUTS) for one in raws)
    order = torch.randperm(50 * len(kinds))
    linear = Linear(first.joined(others), torch.randn(50 * len(kinds)), use, order)
    linear.put_in_order()
    torch.testing.assert_close(linear.weight.floats(), first.joined(others).floats()[order])
    packed = cpu_weight(Linear(CpuForms(packer, kept=True).form(linear))).packed
    whole = joined([grouped(*one) for one in raws]).in_order(order).in_groups(GROUP)
    bits, padding = 4 if whole.bits == 4 else 8, -torch.inf if use == "logits" else 0.0
    same(packed, pack_groups(whole.codes, whole.scales, whole.offsets, bits, linear.bias, packer.isa,
                             use == "gated", padding))  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("use", ["gated", "logits"])
def test_floats_are_rounded_to_the_same_bits(packer: Packer, dtype: torch.dtype, use: Use) -> None:
    weight, bias = torch.randn(100, 80).to(dtype), torch.randn(100)
    weight[3] = 0
    linear = Linear(PlainWeight(weight), bias, use)
    packed = cpu_weight(Linear(CpuForms(packer, kept=True).form(linear))).packed
    padding = -torch.inf if use == "logits" else 0.0
    same(packed, pack_weight(weight, bias, packer.isa, use == "gated", padding))


def test_experts_are_stacked_by_whole_panels(packer: Packer) -> None:
    weight = torch.randn(3 * 40, 64)
    linear = Linear(PlainWeight(weight), use="gated", stacked=3)
    packed = cpu_weight(Linear(CpuForms(packer, kept=True).form(linear))).packed
    assert isinstance(packed, PackedWeight)
    panels = [pack_weight(one, None, packer.isa, True).panels for one in weight.chunk(3)]
    assert torch.equal(packed.panels, torch.cat(panels))


@pytest.mark.parametrize("kind", ["Q4_K", "Q8_0", "BF16"])
def test_tokens_are_looked_up_in_what_a_file_has(packer: Packer, kind: str) -> None:
    weight = PlainWeight(torch.randn(90, INPUTS).bfloat16())
    stored = weight if kind == "BF16" else BlockWeight([(kind, raw_blocks(kind, 90))], INPUTS)
    table = looked_up(Linear(table_weight(packer, Linear(stored))))
    kernels = Kernels(packer.isa, 32, torch.float16, [], (), table_kind(table))
    crew, count, ids = Crew(kernels.isa, 1), aligned(1), aligned(3)
    count[0], ids[:] = 3, [89, 0, 64]
    target = torch.zeros(3, INPUTS)
    crew.run(Recording([kernels.embed(count, ids, table, 1.5, target)]))
    crew.close()
    wanted = stored.floats()[ids] * 1.5
    room = 0.0 if kind == "BF16" else 1e-5  # scales and offsets are float16
    torch.testing.assert_close(target, wanted, rtol=200 * room, atol=room)
