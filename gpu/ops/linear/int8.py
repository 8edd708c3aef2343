"""Weights as 8-bit integers, for the CPU's own kernels."""

from dataclasses import dataclass
from functools import partial

import torch

from ramify.gpu.native.host import Isa
from ramify.gpu.native.linear import PackedWeight, pack_weight
from ramify.gpu.ops.linear.base import Form, Linear, Weight


@dataclass(slots=True)
class Int8Weight(Weight):
    """With its scales and its bias, as `native.linear` reads them."""

    packed: PackedWeight
    inputs: int  # without padding


def int8_form(isa: Isa) -> Form:
    """Rounds weights for the kernels of `isa`."""
    return partial(_rounded, isa)


def _rounded(isa: Isa, linear: Linear) -> Weight:
    padding = -torch.inf if linear.use == "logits" else 0.0
    packed = pack_weight(linear.tensor, linear.bias, isa, linear.use == "gated", padding)
    return Int8Weight(packed, linear.tensor.shape[1])


def int8_weight(linear: Linear) -> Int8Weight:
    """Its weight. Raises TypeError if that has another form."""
    if not isinstance(linear.weight, Int8Weight):
        raise TypeError(f"the CPU's kernels read 8-bit weights, not a {type(linear.weight).__name__}")
    return linear.weight
