"""Weights as 8-bit floats (e4m3: a sign, 4 bits of exponent, 3 of mantissa) with scales.

A number is its code times its group's scale. A group is a row's inputs, or 128 of them. Checkpoints also
have one scale for a tensor, or for 128 x 128 numbers: each row gets a copy, so that rows of several
tensors can be merged and brought into any order.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ramify.gpu.ops.linear.base import Form, Linear, Operand, Weight

GROUP = 128
CODES = torch.float8_e4m3fn
_LARGEST = 448.0  # of a code
_LEAST = 1e-12  # of a row's largest number: one of zeros has a scale, too
_ROUNDED = 1 << 24  # numbers that are rounded at a time
_NO_NUMBER = 0x7F  # the code of none, with either sign


@dataclass(slots=True)
class Fp8Weight(Weight):
    """A weight of codes float8_e4m3fn [outputs, inputs] and scales float32 [outputs, groups]."""

    codes: Tensor
    scales: Tensor
    coded: ClassVar[bool] = True

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    @property
    def operand(self) -> Operand:
        group = GROUP if self.scales.shape[1] > 1 else self.codes.shape[1]
        return Operand(self.codes, self.scales, group)

    def floats(self) -> Tensor:
        groups = self.scales.shape[1]
        if groups == 1:
            return self.codes.float() * self.scales
        return self.codes.float() * self.scales.repeat_interleave(GROUP, 1)[:, : self.shape[1]]

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, self.floats().to(x.dtype), bias)

    def in_order(self, order: Tensor) -> "Fp8Weight":
        order = order.to(self.codes.device)
        return Fp8Weight(_bytes(self.codes)[order].view(CODES), self.scales[order])

    def rows(self, first: int, last: int) -> "Fp8Weight":
        return Fp8Weight(self.codes[first:last], self.scales[first:last])

    def columns(self, first: int, last: int) -> "Fp8Weight":
        scales = self.scales
        if scales.shape[1] > 1:
            if first % GROUP or (last % GROUP and last < self.shape[1]):
                raise ValueError(f"blocks of {GROUP} inputs cannot be divided from {first} to {last}")
            scales = scales[:, first // GROUP : -(-last // GROUP)]
        return Fp8Weight(_bytes(self.codes)[:, first:last].contiguous().view(CODES), scales)

    def joined(self, others: Sequence[Weight]) -> "Fp8Weight":
        parts = [self, *(each for each in others if isinstance(each, Fp8Weight))]
        groups = max(part.scales.shape[1] for part in parts)
        scales = [part.scales.expand(-1, groups) for part in parts]
        codes = torch.cat([_bytes(part.codes) for part in parts])
        return Fp8Weight(codes.view(CODES), torch.cat(scales))

    def on(self, device: torch.device) -> "Fp8Weight":
        return Fp8Weight(self.codes.to(device), self.scales.contiguous().to(device))


def _bytes(codes: Tensor) -> Tensor:
    """View codes as integers, which torch sorts and joins everywhere."""
    return codes.view(torch.uint8)


def rounded(weight: Tensor) -> Fp8Weight:
    """Round weight [outputs, inputs] to the nearest codes, with a scale for each row."""
    codes, scales = [], []
    for rows in torch.split(weight, max(1, _ROUNDED // weight.shape[1])):
        wide = rows.float()
        scale = wide.abs().amax(1, keepdim=True).clamp_(min=_LEAST) / _LARGEST
        codes.append(_bytes((wide / scale).clamp_(-_LARGEST, _LARGEST).to(CODES)))
        scales.append(scale)
    return Fp8Weight(torch.cat(codes).view(CODES), torch.cat(scales))


def fp8_form(device: torch.device, rounds: bool) -> Form:
    """Make the form that keeps stored weights; `rounds`: rounds others, except logits' and routers'."""

    def form(linear: Linear) -> Weight:
        weight = linear.weight
        if isinstance(weight, Fp8Weight):
            return weight.on(device)
        if not rounds or linear.use in ("logits", "scores"):
            return weight
        return rounded(linear.tensor)

    return form


@dataclass(frozen=True, slots=True)
class Fp8Format:
    """The format of checkpoints: a tensor of codes and one of scales, which has one of three shapes.

    `blocks`: a scale for 128 x 128 numbers; else for a row, or for all.
    """

    blocks: bool
    name: str = "fp8"

    def part(self, name: str, tensor: Tensor) -> tuple[str, str] | None:
        if tensor.dtype == CODES:
            return name, "codes"
        for ending, part in _PARTS:
            if name.endswith(ending):
                return name.removesuffix(ending) + (".weight" if ending[0] == "." else ""), part
        return None

    def missing(self, parts: Collection[str]) -> str | None:
        absent = [part for part in ("codes", "scales") if part not in parts]
        return f"no {absent[0]}" if absent else None

    def check(self, parts: dict[str, Tensor], shape: tuple[int, int]) -> None:
        codes, scales = parts["codes"], parts["scales"]
        if tuple(codes.shape) != shape:
            raise ValueError(f"codes have shape {list(codes.shape)}, config.json says {list(shape)}")
        if not scales.is_floating_point():
            raise ValueError(f"scales are {scales.dtype}: they must be floats")
        outputs, given = shape[0], list(scales.shape)
        tall, wide = (-(-size // GROUP) for size in shape)
        if self.blocks and given not in ([tall, wide], [tall, 1, wide, 1]):
            raise ValueError(f"scales have shape {given}: blocks of {GROUP} x {GROUP} have "
                             f"{[tall, wide]}")  # fmt: skip
        if not self.blocks and scales.numel() != 1 and given not in ([outputs], [outputs, 1]):
            raise ValueError(f"scales have shape {given}: a tensor has one, or {outputs}, one for "
                             "each output")  # fmt: skip

    def weight(self, parts: dict[str, Tensor], shape: tuple[int, int]) -> Fp8Weight:
        self.check(parts, shape)
        codes, scales, outputs = parts["codes"], parts["scales"].float(), shape[0]
        if not bool(scales.isfinite().all()):
            raise ValueError("scales have numbers that are not finite")
        if bool((_bytes(codes).bitwise_and(_NO_NUMBER) == _NO_NUMBER).any()):
            raise ValueError("codes have numbers that are not finite")
        if self.blocks:
            tall = -(-outputs // GROUP)
            scales = scales.view(tall, -1).repeat_interleave(GROUP, 0)[:outputs]
        else:
            scales = scales.view(-1, 1).expand(outputs, 1)
        return Fp8Weight(codes, scales)


# How names of a weight's tensors end where ".weight" stands, or behind the name of stacked ones. Scales
# of activations and of keys and values carry nothing here: those are found for each token.
_PARTS = (
    (".weight_scale_inv", "scales"),
    (".weight_scale", "scales"),
    (".input_scale", ""),
    (".activation_scale", ""),
    (".k_scale", ""),
    (".v_scale", ""),
    (".q_scale", ""),
    (".output_scale", ""),
    ("_scale_inv", "scales"),
)
