"""Weights as the CPU's own kernels read them: 8 bits a row, or 4 and 8 bits in groups of 32 inputs."""

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from ramify.gpu.native.grouped import Grouping, PackedGroups, pack_groups
from ramify.gpu.native.linear import PackedWeight, panel_bias, panel_order
from ramify.gpu.native.packer import Packer
from ramify.gpu.ops.linear.base import Form, Linear, PlainWeight, Weight
from ramify.gpu.ops.linear.blocks import BlockWeight, row_addresses
from ramify.gpu.ops.linear.grouped import BITS, GROUP, WITH_OFFSETS, GroupedWeight, four_bits


@dataclass(slots=True)
class CpuWeight(Weight):
    """A packed weight with its scales and its bias."""

    packed: PackedWeight | PackedGroups
    inputs: int  # without padding


class CpuForms:
    """The forms of a model's weights for the CPU's kernels.

    `four`: floats are rounded to 4 bits in groups, those of the logits to 8; else all to 8 bits, with a
    scale for each output. `kept`: 4 and 8 bits of a checkpoint stay as they are.
    """

    def __init__(self, packer: Packer, four: bool = False, kept: bool = False) -> None:
        self._packer = packer
        self.rounded: Form = partial(_grouped, packer, True) if four else partial(_rounded, packer)
        self.form: Form = partial(_grouped, packer, False) if kept else self.rounded
        more: tuple[type[Weight], ...] = (GroupedWeight,) if four or kept else ()
        self.stored = (PlainWeight, *more, *((BlockWeight,) if kept else ()))

    def with_table(self, form: Form, head: Linear, table: Linear, tied: bool) -> Form:
        """Extend `form` by that of the embedding `table`; `tied`: head and table come from one tensor.

        Then packed blocks of the file are one tensor, too.
        """

        def formed(linear: Linear) -> Weight:
            if linear is table:
                return table_weight(self._packer, table)
            weight = form(linear)
            if linear is head and tied:
                same = isinstance(linear.weight, BlockWeight | GroupedWeight)  # which the head keeps
                table.weight = weight if same else table_weight(self._packer, linear)
            return weight

        return formed


def _padding(linear: Linear) -> float:
    return -torch.inf if linear.use == "logits" else 0.0


def _rounded(packer: Packer, linear: Linear) -> Weight:
    if linear.use == "scores":
        return PlainWeight(linear.tensor.float())
    tensor = linear.tensor
    order = _order(linear)
    rows = _table(row_addresses(tensor), order)
    bias = panel_bias(linear.bias, order, _padding(linear))
    return CpuWeight(packer.rounded(tensor.dtype, rows, tensor.shape[1], bias), tensor.shape[1])


def _order(linear: Linear) -> Tensor:
    """Compute which row each packed output is."""
    return panel_order(linear.weight.shape[0], linear.use == "gated", max(1, linear.stacked))


def _grouped(packer: Packer, four: bool, linear: Linear) -> Weight:
    weight, gated = linear.weight, linear.use == "gated"
    if linear.use == "scores":
        return PlainWeight(weight.floats())
    if isinstance(weight, BlockWeight):
        return _blocks(packer, weight, linear)
    rounds = four and linear.use != "logits"
    if isinstance(weight, GroupedWeight):
        if rounds and weight.bits > 4:
            weight = four_bits(weight.floats())
    elif rounds:
        weight = four_bits(linear.tensor)
    else:
        return _rounded(packer, linear)
    weight = weight.in_groups(GROUP)
    packed = pack_groups(
        weight.codes, weight.scales, weight.offsets, 4 if weight.bits == 4 else 8, linear.bias,
        packer.isa, gated, _padding(linear), max(1, linear.stacked),
    )  # fmt: skip
    return CpuWeight(packed, weight.codes.shape[1])


def _blocks(packer: Packer, weight: BlockWeight, linear: Linear) -> Weight:
    """Pack blocks, with the most bits of any of their kinds, and offsets if any has some."""
    order = _order(linear)
    parts = [(kind, _table(rows, order)) for kind, rows in weight.addresses()]
    bits = 4 if all(BITS[kind] == 4 for kind, _ in parts) else 8
    grouping = Grouping(bits, any(kind in WITH_OFFSETS for kind, _ in parts))
    bias = panel_bias(linear.bias, order, _padding(linear))
    return CpuWeight(packer.blocks(parts, weight.inputs, grouping, bias), weight.inputs)


def table_weight(packer: Packer, linear: Linear) -> Weight:
    """Make the embedding: blocks are packed, floats stay where and as they are."""
    weight = linear.weight
    kept = isinstance(weight, BlockWeight | GroupedWeight)
    return _grouped(packer, False, Linear(weight)) if kept else weight


def looked_up(table: Linear) -> PackedGroups | Tensor:
    """Return the embedding as the kernels read it."""
    if isinstance(table.weight, PlainWeight):
        return table.weight.tensor
    packed = cpu_weight(table).packed
    assert isinstance(packed, PackedGroups)
    return packed


def _table(rows: Tensor, order: Tensor) -> Tensor:
    """Put rows in their order; 0 for padding."""
    places = order.numpy()
    return torch.from_numpy(np.where(places < 0, 0, rows.numpy()[np.maximum(places, 0)]))


def cpu_weight(linear: Linear) -> CpuWeight:
    """Return the product's weight. Raises TypeError if that has another form."""
    if not isinstance(linear.weight, CpuWeight):
        raise TypeError(f"the CPU's kernels read packed weights, not a {type(linear.weight).__name__}")
    return linear.weight
