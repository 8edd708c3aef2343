"""Weights as the CPU's own kernels read them: 8 bits a row, or 4 and 8 bits in groups of 32 inputs."""

from dataclasses import dataclass
from functools import partial

import torch

from ramify.gpu.native.grouped import PackedGroups, pack_groups
from ramify.gpu.native.host import Isa
from ramify.gpu.native.linear import PackedWeight, joined, pack_weight
from ramify.gpu.ops.linear.base import Form, Linear, PlainWeight, Weight
from ramify.gpu.ops.linear.grouped import GROUP, GroupedWeight, four_bits


@dataclass(slots=True)
class CpuWeight(Weight):
    """With its scales and its bias."""

    packed: PackedWeight | PackedGroups
    inputs: int  # without padding


def int8_form(isa: Isa) -> Form:
    """Rounds weights to 8 bits, a scale for each output."""
    return partial(_rounded, isa)


def int4_form(isa: Isa) -> Form:
    """Rounds weights to 4 bits in groups, but for those of the logits: to 8 bits, if they are floats."""
    return partial(_grouped, isa, True)


def kept_form(isa: Isa) -> Form:
    """Keeps blocks of a file as they are; floats are rounded to 8 bits."""
    return partial(_grouped, isa, False)


def _padding(linear: Linear) -> float:
    return -torch.inf if linear.use == "logits" else 0.0


def _rounded(isa: Isa, linear: Linear) -> Weight:
    if linear.use == "scores":
        return PlainWeight(linear.tensor.float())
    if linear.stacked:
        each = [pack_weight(*one, isa, linear.use == "gated") for one in linear.matrices()]
        return CpuWeight(joined(each), linear.tensor.shape[1])
    packed = pack_weight(linear.tensor, linear.bias, isa, linear.use == "gated", _padding(linear))
    return CpuWeight(packed, linear.tensor.shape[1])


def _grouped(isa: Isa, four: bool, linear: Linear) -> Weight:
    weight = linear.weight
    rounds = four and linear.use != "logits"
    if isinstance(weight, GroupedWeight):
        if rounds and weight.bits > 4:
            weight = four_bits(weight.floats())
    elif rounds:
        weight = four_bits(linear.tensor)
    else:
        return _rounded(isa, linear)
    weight = weight.in_groups(GROUP)
    packed = pack_groups(
        weight.codes, weight.scales, weight.offsets, 4 if weight.bits == 4 else 8, linear.bias, isa,
        linear.use == "gated", _padding(linear),
    )  # fmt: skip
    return CpuWeight(packed, weight.codes.shape[1])


def cpu_weight(linear: Linear) -> CpuWeight:
    """Its weight. Raises TypeError if that has another form."""
    if not isinstance(linear.weight, CpuWeight):
        raise TypeError(f"the CPU's kernels read packed weights, not a {type(linear.weight).__name__}")
    return linear.weight
