"""Weights of 4 bits as a GPU's kernels read them: integers, or MXFP4's floats, in groups with a scale.

128 inputs of an output are 32 words of 16 bits: a word has inputs n, n + 32, n + 64 and n + 96, the
lowest bits first. So a kernel that shifts and masks a tile of words has four tiles of neighbouring
inputs. Words of the same inputs lie together for all outputs, and so do scales.
"""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ramify.gpu.ops.linear.base import Form, Linear, Operand, Weight
from ramify.gpu.ops.linear.grouped import GROUP, GroupedWeight, four_bits, mxfp4

UNIT = 128  # inputs that are written together
MIDDLE = 8  # the code of 0 where there are no zero points
LARGEST = 192  # exponent of MXFP4: the kernel's factor for a larger one is no bfloat16
_FLOATS = (0, 1, 2, 3, 4, 6, 8, 12)  # twice the numbers of MXFP4's codes; of the next eight: negative
_BIAS = 127  # of MXFP4's exponents
_PACKED = 1 << 25  # numbers that are packed at a time

Zeros = Literal["none", "integers", "floats"]


@dataclass(slots=True)
class FourBitWeight(Weight):
    """A weight of codes int16 [units, outputs, 32] and scales [groups, outputs], floats.

    uint8 scales: codes are MXFP4's and scales exponents of 2. `zeros`, like scales: integers are the
    code of 0, floats the value of code 8. The last unit may be padded, `inputs` are not.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    group: int
    inputs: int
    coded: ClassVar[bool] = True

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[1], self.inputs

    @property
    def operand(self) -> Operand:
        return Operand(self.codes, self.scales, self.group, self.zeros)

    @property
    def is_mxfp4(self) -> bool:
        return self.scales.dtype == torch.uint8

    @property
    def zero_kind(self) -> Zeros:
        if self.zeros is None:
            return "none"
        return "floats" if self.zeros.is_floating_point() else "integers"

    def floats(self) -> Tensor:
        """Decode the numbers: float32 [outputs, inputs]."""
        words = self.codes.transpose(0, 1).int()
        parts = torch.stack([(words >> 4 * place) & 15 for place in range(4)], 2)
        codes = parts.flatten(1)
        each = torch.arange(codes.shape[1], device=codes.device) // self.group
        if self.is_mxfp4:
            table = torch.tensor([*_FLOATS, *(-value for value in _FLOATS)], device=codes.device) / 2
            exponents = (self.scales.t().int() - _BIAS)[:, each]
            return torch.ldexp(table[codes], exponents)[:, : self.inputs]
        scales = self.scales.t().float()[:, each]
        if self.zeros is None or self.zero_kind == "floats":
            values = (codes - MIDDLE) * scales
            return (values if self.zeros is None else values + self.zeros.t()[:, each])[:, : self.inputs]
        return ((codes - self.zeros.t().int()[:, each]) * scales)[:, : self.inputs]

    def rows(self, first: int, last: int) -> "FourBitWeight":
        zeros = None if self.zeros is None else self.zeros[:, first:last]
        codes, scales = self.codes[:, first:last], self.scales[:, first:last]
        return FourBitWeight(codes, scales, zeros, self.group, self.inputs)

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, self.floats().to(x.dtype), bias)


def four_bit_form(kind: Literal["int4", "mxfp4"], rounds: bool) -> Form:
    """Make the form that keeps stored weights; `rounds`: rounds others, except logits' and routers'."""
    return partial(_formed, kind, rounds)


def _formed(kind: str, rounds: bool, linear: Linear) -> Weight:
    weight = linear.weight
    if isinstance(weight, GroupedWeight):
        return packed(weight, weight.codes.shape[1])
    if not rounds or linear.use in ("logits", "scores"):
        return weight
    inputs = linear.tensor.shape[1]
    if kind == "mxfp4":
        return packed(mxfp4(linear.tensor), inputs)
    return packed(four_bits(linear.tensor, UNIT if inputs % UNIT == 0 else GROUP), inputs)


def packed(weight: GroupedWeight, inputs: int) -> FourBitWeight:
    """Lay out a weight of so many inputs. Raises ValueError if 4 bits do not hold its numbers."""
    group, outputs = weight.group, len(weight.codes)
    if group % GROUP or (group % UNIT if group > UNIT else UNIT % group):
        raise ValueError(f"groups of {group} inputs are not served: give groups of 32, 64 or 128")
    exponents = _exponents(weight)
    zeros: Tensor | None = None
    scales = exponents if exponents is not None else _narrowest(weight.scales)
    if exponents is None and weight.offsets is not None:
        zeros = _zeros(weight.scales, weight.offsets)
    units = -(-weight.codes.shape[1] // UNIT)
    more = -(-units * UNIT // group) - scales.shape[1]  # groups of padding
    added = 0 if exponents is not None or weight.offsets is not None else MIDDLE
    step = max(1, _PACKED // inputs)
    words = torch.empty((units, outputs, GROUP), dtype=torch.int16, device=weight.codes.device)
    for first in range(0, outputs, step):  # of all experts there are more than memory has room for twice
        codes = weight.codes[first : first + step]
        words[:, first : first + step] = _words(codes, added, exponents is not None).transpose(0, 1)

    def turned(values: Tensor) -> Tensor:
        return F.pad(values, (0, more)).t().contiguous()

    return FourBitWeight(words, turned(scales), None if zeros is None else turned(zeros), group, inputs)


def _words(codes: Tensor, more: int, is_mxfp4: bool) -> Tensor:
    """Pack int8 [R, inputs] to int16 [R, units, 32]. MXFP4's are in halves; others get `more` added."""
    if is_mxfp4:
        table = torch.zeros(32, dtype=torch.uint8)
        table[[16 + value for value in _FLOATS]] = torch.arange(8, dtype=torch.uint8)
        table[[16 - value for value in _FLOATS[1:]]] = torch.arange(9, 16, dtype=torch.uint8)
        codes = table.to(codes.device)[codes.int() + 16]
    else:
        codes = codes.view(torch.uint8) + more
    padded = F.pad(codes, (0, -codes.shape[1] % UNIT), value=0 if is_mxfp4 else MIDDLE)
    parts = padded.view(len(codes), -1, 4, GROUP).to(torch.int32)
    words = parts[:, :, 0] | parts[:, :, 1] << 4 | parts[:, :, 2] << 8 | parts[:, :, 3] << 12
    return words.to(torch.int16)


def _exponents(weight: GroupedWeight) -> Tensor | None:
    """Find MXFP4's exponents; None: the weights are integers of 4 bits. Raises ValueError: neither."""
    if weight.bits == 4:
        return None
    if weight.bits != 5 or weight.offsets is not None or weight.group != GROUP:
        raise ValueError(f"weights of {weight.bits} bits are not served in 4")
    mantissas, exponents = torch.frexp(weight.scales)  # half of the scale's own
    kept = torch.where(weight.scales == 0, 0, exponents + _BIAS)
    if not bool(((mantissas == 0.5) | (weight.scales == 0)).all()) or int(kept.max()) > LARGEST:
        raise ValueError(f"scales are not powers of 2 up to {2 ** (LARGEST - _BIAS)}")
    return kept.clamp_(min=0).to(torch.uint8)


def _narrowest(scales: Tensor) -> Tensor:
    """Convert scales to 16 bits, where these hold them."""
    for kind in (torch.float16, torch.bfloat16):
        narrow = scales.to(kind)
        if torch.equal(narrow.float(), scales):
            return narrow
    return scales


def _zeros(scales: Tensor, offsets: Tensor) -> Tensor:
    """Compute the codes of 0 if they are whole numbers up to 16, else the values of code 8."""
    codes = (-offsets / torch.where(scales == 0, 1.0, scales)).round_().clamp_(0, 16)
    if torch.equal(codes * -scales, offsets):
        return codes.to(torch.uint8)
    return offsets + MIDDLE * scales
