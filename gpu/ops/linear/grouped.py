"""Weights whose inputs are in groups with a scale each, as blocks of GGUF files have them.

A number is its group's scale times its code, plus the group's offset. The layouts are those of ggml's
`ggml-common.h`; the floats that come out equal those of the package `gguf` to the last bit.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import gcd

import torch
from torch import Tensor

from ramify.gpu.ops.linear.base import Weight

GROUP = 32
_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(slots=True)
class GroupedWeight(Weight):
    """A weight of codes int8 [outputs, inputs]; scales, offsets float32 [outputs, inputs / group size].

    Without offsets codes are signed; with them they are 0 or more. `bits`: of a code.
    """

    codes: Tensor
    scales: Tensor
    offsets: Tensor | None
    bits: int

    @property
    def group(self) -> int:
        """The number of inputs of a group."""
        return self.codes.shape[1] // self.scales.shape[1]

    def in_groups(self, size: int) -> "GroupedWeight":
        """Return the weight in smaller groups, whose size must divide its own."""
        times = self.group // size
        if times == 1:
            return self
        offsets = None if self.offsets is None else self.offsets.repeat_interleave(times, 1)
        return GroupedWeight(self.codes, self.scales.repeat_interleave(times, 1), offsets, self.bits)

    def floats(self) -> Tensor:
        """Decode the numbers: float32 [outputs, inputs]."""
        outputs, groups = self.scales.shape
        values = self.scales[:, :, None] * self.codes.view(outputs, groups, -1)
        if self.offsets is not None:
            values += self.offsets[:, :, None]
        return values.view(outputs, -1)

    def joined(self, others: Sequence[Weight]) -> "GroupedWeight":
        return joined([self, *(each for each in others if isinstance(each, GroupedWeight))])

    def columns(self, first: int, last: int) -> "GroupedWeight":
        size = gcd(first, last, self.group)
        if size % GROUP and size < self.group:
            raise ValueError(
                f"groups of {self.group} inputs cannot be divided from {first} to {last}, which are no "
                f"multiples of {GROUP}"
            )
        whole, groups = self.in_groups(size), slice(first // size, last // size)
        offsets = None if whole.offsets is None else whole.offsets[:, groups]
        codes = whole.codes[:, first:last].contiguous()
        return GroupedWeight(codes, whole.scales[:, groups], offsets, whole.bits)

    def in_order(self, order: Tensor) -> "GroupedWeight":
        """Return the weight with rows in `order`."""
        order = order.to(self.codes.device)
        offsets = None if self.offsets is None else self.offsets[order]
        return GroupedWeight(self.codes[order], self.scales[order], offsets, self.bits)


def joined(parts: Sequence[GroupedWeight]) -> GroupedWeight:
    """Join weights one below another, with the most bits of any, and offsets if any has some.

    Groups stay if they are all alike and of a multiple of 32 inputs; else they become 32 inputs.
    """
    sizes = {part.group for part in parts}
    if len(sizes) > 1 or sizes.pop() % GROUP:
        parts = [part.in_groups(GROUP) if part.group % GROUP == 0 else _rounded(part.floats(), 8)
                 for part in parts]  # fmt: skip
    if len(parts) == 1:
        return parts[0]
    bits, offsets = max(part.bits for part in parts), None
    codes = [part.codes for part in parts]
    if any(part.offsets is not None for part in parts):
        least = 8 if bits == 4 else 0  # with offsets codes of 4 bits are 0 or more
        codes = [part.codes + (least if part.offsets is None else 0) for part in parts]
        offsets = torch.cat(
            [-least * part.scales if part.offsets is None else part.offsets for part in parts]
        )
    scales = torch.cat([part.scales for part in parts])
    return GroupedWeight(torch.cat(codes), scales, offsets, bits)


def four_bits(weight: Tensor, group: int = GROUP) -> GroupedWeight:
    """Round to codes from -8 to 7 in groups of 32. Numbers that such codes stand for are kept."""
    return _rounded(weight, 4, group)


def mxfp4(weight: Tensor) -> GroupedWeight:
    """Round to MXFP4's numbers, in units of 1/2: codes up to 12, scales that are powers of 2.

    The exponent of a group is that of its largest number (OCP Microscaling Formats, 6.3).
    """
    codes, scales = [], []
    levels = torch.tensor(FP4, device=weight.device)
    middles = (levels[1:] + levels[:-1]) / 2
    for rows in torch.split(weight, max(1, _ROUNDED // weight.shape[1])):
        padded = torch.nn.functional.pad(rows.float(), (0, -rows.shape[1] % GROUP))
        values = padded.view(len(rows), -1, GROUP)
        exponents = torch.frexp(values.abs().amax(2, keepdim=True)).exponent - 3  # of 4.0: 2
        scale = torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents.clamp(-120, 64))
        found = levels[torch.bucketize((values / scale).abs(), middles)].copysign(values) * 2
        codes.append(found.to(torch.int8).view(len(rows), -1))
        scales.append(scale[:, :, 0] / 2)
    return GroupedWeight(torch.cat(codes), torch.cat(scales), None, 5)


FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The numbers of MXFP4's codes from 0 to 7; those of the next eight are negative."""


def _rounded(weight: Tensor, bits: int, group: int = GROUP) -> GroupedWeight:
    """Round as `Q4_0` and `Q8_0` do; of 4 bits each scale is then the best one for its codes."""
    codes, scales = [], []
    for rows in torch.split(weight, max(1, _ROUNDED // weight.shape[1])):
        padded = torch.nn.functional.pad(rows.float(), (0, -rows.shape[1] % group))
        values = padded.view(len(rows), -1, group)
        sizes = values.abs()
        if bits == 8:
            scale = (sizes.amax(2, keepdim=True) / 127).half().float()
            found = (values / torch.where(scale == 0, 1.0, scale)).round_().clamp_(-128, 127)
        else:
            scale = values.gather(2, sizes.argmax(2, keepdim=True)) / -8
            found = (values / torch.where(scale == 0, 1.0, scale)).round_().clamp_(-8, 7)
            squares = (found * found).sum(2, keepdim=True)
            best = (values * found).sum(2, keepdim=True) / torch.where(squares == 0, 1.0, squares)
            scale = best.half().float()
        codes.append(found.to(torch.int8).view(len(rows), -1))
        scales.append(scale[:, :, 0])
    return GroupedWeight(torch.cat(codes), torch.cat(scales), None, bits)


_ROUNDED = 1 << 22  # numbers that are rounded at a time


def plain_floats(kind: str, raw: Tensor) -> Tensor | None:
    """Decode rows uint8 [rows, bytes] of a type that torch has; None: the type is one of blocks."""
    return raw.view(_FLOATS[kind]) if kind in _FLOATS else None


def grouped(kind: str, raw: Tensor) -> GroupedWeight:
    """Unpack the blocks of a tensor. raw: uint8 [rows, bytes of a row]."""
    unpack, size = _BLOCKS[kind]
    codes, scales, offsets = unpack(raw.view(-1, size))
    rows = len(raw)
    return GroupedWeight(
        codes.to(torch.int8).reshape(rows, -1), scales.reshape(rows, -1),
        None if offsets is None else offsets.reshape(rows, -1), BITS[kind],
    )  # fmt: skip


_Parts = tuple[
    Tensor, Tensor, Tensor | None
]  # codes [blocks, numbers], scales and offsets [blocks, groups]


def _half(raw: Tensor) -> Tensor:
    """Convert float16 [n, 2 bytes] to float32 [n, 1]."""
    return raw.contiguous().view(torch.float16).float()


def _nibbles(raw: Tensor, run: int) -> Tensor:
    """Unpack of each `run` bytes the lower halves, then the upper ones."""
    parts = raw.reshape(len(raw), -1, 1, run)
    return torch.cat((parts & 15, parts >> 4), 2).reshape(len(raw), -1)


def _bits(raw: Tensor, run: int, wide: int) -> Tensor:
    """Unpack of each `run` bytes the lowest `wide` bits, then the next ones, .."""
    shifts = torch.arange(0, 8, wide, dtype=torch.uint8).view(1, 1, -1, 1)
    parts = raw.reshape(len(raw), -1, 1, run) >> shifts
    return (parts & ((1 << wide) - 1)).reshape(len(raw), -1)


def _fifth(raw: Tensor) -> Tensor:
    """Unpack a bit for each of 32 numbers, as the fifth bit of their codes."""
    shifts = torch.arange(8, dtype=torch.uint8)
    return ((raw[:, :, None] >> shifts) & 1).reshape(len(raw), 32) << 4


def _q4_0(raw: Tensor) -> _Parts:
    return _nibbles(raw[:, 2:], 16).to(torch.int8) - 8, _half(raw[:, :2]), None


def _q4_1(raw: Tensor) -> _Parts:
    return _nibbles(raw[:, 4:], 16), _half(raw[:, :2]), _half(raw[:, 2:4])


def _q5_0(raw: Tensor) -> _Parts:
    codes = _nibbles(raw[:, 6:], 16) | _fifth(raw[:, 2:6])
    return codes.to(torch.int8) - 16, _half(raw[:, :2]), None


def _q5_1(raw: Tensor) -> _Parts:
    codes = _nibbles(raw[:, 8:], 16) | _fifth(raw[:, 4:8])
    return codes, _half(raw[:, :2]), _half(raw[:, 2:4])


def _q8_0(raw: Tensor) -> _Parts:
    return raw[:, 2:].contiguous().view(torch.int8), _half(raw[:, :2]), None


def _k_scales(raw: Tensor) -> tuple[Tensor, Tensor]:
    """Unpack scales and offsets of eight groups, six bits each, in twelve bytes after two factors."""
    low, middle, high = torch.split(raw[:, 4:16].t().contiguous(), 4)  # long rows: [4, blocks]
    scales = torch.cat((low & 63, (high & 15) | ((low >> 2) & 48)))
    least = torch.cat((middle & 63, (high >> 4) | ((middle >> 2) & 48)))
    factor, offset = (_half(raw[:, at : at + 2]).view(1, -1) for at in (0, 2))
    return (factor * scales).t().contiguous(), (offset * least).neg_().t().contiguous()


def _q4_k(raw: Tensor) -> _Parts:
    return _nibbles(raw[:, 16:], 32), *_k_scales(raw)


def _q5_k(raw: Tensor) -> _Parts:
    codes = _nibbles(raw[:, 48:], 32) | (_bits(raw[:, 16:48], 32, 1) << 4)
    return codes, *_k_scales(raw)


def _q6_k(raw: Tensor) -> _Parts:
    codes = _nibbles(raw[:, :128], 64) | (_bits(raw[:, 128:192], 32, 2) << 4)
    scales = raw[:, 192:208].contiguous().view(torch.int8)
    return codes.to(torch.int8) - 32, _half(raw[:, 208:]) * scales, None


def _mxfp4(raw: Tensor) -> _Parts:
    twice = torch.tensor([2 * one for one in FP4], dtype=torch.int8)
    codes = torch.cat((twice, -twice))[_nibbles(raw[:, 1:], 16).int()]
    return codes, torch.ldexp(torch.ones(len(raw), 1), raw[:, :1].int() - 128), None


_BLOCKS: dict[str, tuple[Callable[[Tensor], _Parts], int]] = {
    "Q4_0": (_q4_0, 18),
    "Q4_1": (_q4_1, 20),
    "Q5_0": (_q5_0, 22),
    "Q5_1": (_q5_1, 24),
    "Q8_0": (_q8_0, 34),
    "Q4_K": (_q4_k, 144),
    "Q5_K": (_q5_k, 176),
    "Q6_K": (_q6_k, 210),
    "MXFP4": (_mxfp4, 17),
}
BITS = {"Q4_0": 4, "Q4_1": 4, "Q5_0": 5, "Q5_1": 5, "Q8_0": 8, "Q4_K": 4, "Q5_K": 5, "Q6_K": 6,
        "MXFP4": 5}  # fmt: skip
WITH_OFFSETS = ("Q4_1", "Q5_1", "Q4_K", "Q5_K")
