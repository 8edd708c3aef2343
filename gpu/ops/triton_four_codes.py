"""The decoding of words of 4-bit codes (`linear.four_bits`) in Triton's kernels.

A word has four inputs of a unit, 32 apart: a tile of words becomes four tiles of neighbouring inputs.
Called from kernels only; runs on a CPU with TRITON_INTERPRET=1, where shifts and floats stand for the
instructions of the GPU.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, import-untyped, import-not-found"

import torch
import triton
import triton.language as tl

from ramify.gpu.ops.linear.base import Weight
from ramify.gpu.ops.linear.four_bits import UNIT, FourBitWeight
from ramify.gpu.programmatic_launch import overlaps

WORDS = tl.constexpr(UNIT // 4)  # of a unit
_INPUTS = tl.constexpr(UNIT)


def has_instructions(weight: FourBitWeight, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether codes are widened by the GPU's instructions, which give only bfloat16 for MXFP4."""
    types = (torch.bfloat16,) if weight.is_mxfp4 else (torch.bfloat16, torch.float16)
    return dtype in types and overlaps(device)


def zero_kind(weight: FourBitWeight) -> int:
    """Return the kernels' ZERO."""
    return ("none", "integers", "floats").index(weight.zero_kind)


def packing(weight: Weight, dtype: torch.dtype) -> int:
    """Return PACKED of `row_sums` and `tile_sums`, which encodes the form; 0: it is another form."""
    if not isinstance(weight, FourBitWeight):
        return 0
    per, units = max(1, UNIT // weight.group), max(1, weight.group // UNIT)
    asm = has_instructions(weight, dtype, weight.codes.device)
    return 1 | asm << 1 | weight.is_mxfp4 << 2 | zero_kind(weight) << 3 | per << 5 | units << 8


# Four pairs of bfloat16 or float16 of a pair of words. Integers come out as 128 or 1024 more, MXFP4's
# numbers 2^-126 times as large: their bits are an exponent's last two and a fraction's first.
_INTEGERS = tl.constexpr(
    """{
.reg .b32 t;
lop3.b32 $0, $4, 0x000F000F, MAGIC, 0xEA;
shr.u32 t, $4, 4;
lop3.b32 $1, t, 0x000F000F, MAGIC, 0xEA;
shr.u32 t, $4, 8;
lop3.b32 $2, t, 0x000F000F, MAGIC, 0xEA;
shr.u32 t, $4, 12;
lop3.b32 $3, t, 0x000F000F, MAGIC, 0xEA;
}""".replace("MAGIC", "0x43004300")
)
_INTEGERS_16 = tl.constexpr(_INTEGERS.value.replace("0x43004300", "0x64006400"))
_FLOATS = tl.constexpr("""{
.reg .b32 s, t;
shl.b32 s, $4, 12;
and.b32 s, s, 0x80008000;
shl.b32 t, $4, 6;
lop3.b32 $0, t, 0x01C001C0, s, 0xEA;
shl.b32 s, $4, 8;
and.b32 s, s, 0x80008000;
shl.b32 t, $4, 2;
lop3.b32 $1, t, 0x01C001C0, s, 0xEA;
shl.b32 s, $4, 4;
and.b32 s, s, 0x80008000;
shr.u32 t, $4, 2;
lop3.b32 $2, t, 0x01C001C0, s, 0xEA;
and.b32 s, $4, 0x80008000;
shr.u32 t, $4, 6;
lop3.b32 $3, t, 0x01C001C0, s, 0xEA;
}""")


@triton.jit
def codes_of(words, KIND: tl.constexpr, FP4: tl.constexpr, ASM: tl.constexpr):
    """Widen words to four tiles: integers plus `_offset`, or MXFP4's numbers; of type KIND if ASM."""
    if ASM and tl.float16 == KIND:
        a, b, c, d = tl.inline_asm_elementwise(
            _INTEGERS_16, "=r,=r,=r,=r,r", [words],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    elif ASM:
        a, b, c, d = tl.inline_asm_elementwise(
            _FLOATS if FP4 else _INTEGERS, "=r,=r,=r,=r,r", [words],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        a, b = _number(words, 0, FP4), _number(words, 4, FP4)
        c, d = _number(words, 8, FP4), _number(words, 12, FP4)
    return a, b, c, d


@triton.jit
def _number(words, SHIFT: tl.constexpr, FP4: tl.constexpr):
    code = (words.to(tl.int32) >> SHIFT) & 15
    if FP4:
        size = code & 7
        ones = 2 + (size & 1)
        twice = tl.where(size < 2, size, ones << tl.maximum((size >> 1) - 1, 0))
        number = tl.where(code > 7, -twice, twice).to(tl.float32) * 0.5
    else:
        number = code.to(tl.float32)
    return number


@triton.jit
def _offset(KIND: tl.constexpr, ASM: tl.constexpr):
    """Return what `codes_of` adds to integers."""
    if not ASM:
        offset = 0.0
    elif tl.float16 == KIND:
        offset = 1024.0
    else:
        offset = 128.0
    return offset


@triton.jit
def group_of(scales, zeros, at, ZERO: tl.constexpr):
    """Load scale, and zero if there is one, of a group of each row."""
    scale = tl.load(scales + at)
    zero = scale
    if ZERO != 0:
        zero = tl.load(zeros + at)
    return scale, zero


@triton.jit
def factors(
    scale, zero, KIND: tl.constexpr, FP4: tl.constexpr, ZERO: tl.constexpr, ASM: tl.constexpr,
    SCALES: tl.constexpr,
):  # fmt: skip
    """Compute what is subtracted from a row's codes, their scale, and what is added then.

    MXFP4's scales of codes that are scaled lack a factor: see `missing`.
    """
    if not FP4:
        factor = scale.to(tl.float32)
    elif ASM and SCALES:
        factor = ((scale.to(tl.int32) + 62) << 23).to(tl.float32, bitcast=True)
    else:
        factor = (scale.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    taken = tl.zeros_like(factor) + _offset(KIND, ASM)
    more = tl.zeros_like(factor)
    if ZERO == 1:
        taken += zero.to(tl.float32)
    else:
        taken += 8.0
    if ZERO == 2:
        more = zero.to(tl.float32)
    return taken, factor, more


@triton.jit
def missing(FP4: tl.constexpr, ASM: tl.constexpr, SCALES: tl.constexpr):
    """Return the factor of sums at the end: 2^(126 - 62), as codes are 2^-126 times too small."""
    factor = 1.0
    if FP4 and ASM and SCALES:
        factor = 18446744073709551616.0
    return factor


@triton.jit
def weights_of(codes, taken, factor, more, KIND: tl.constexpr, FP4: tl.constexpr, ZERO: tl.constexpr,
             ASM: tl.constexpr, SCALES: tl.constexpr):  # fmt: skip
    """Compute the numbers of codes [outputs, inputs]; without SCALES, except for the factor."""
    if not FP4:
        codes = codes - taken.to(codes.dtype)[:, None]
    if SCALES:
        codes = codes * factor.to(codes.dtype)[:, None]
        if ZERO == 2:
            codes = codes + more.to(codes.dtype)[:, None]
    elif FP4 and ASM:
        codes = codes * 85070591730234615865843651857942052864.0  # 2^126
    return codes.to(KIND)


@triton.jit
def _unit(
    scales, zeros, row, unit, total, PER: tl.constexpr, UNITS: tl.constexpr, ZERO: tl.constexpr
):  # fmt: skip
    """Load scales, then zeros, of the groups of each 32 inputs of a unit, of rows int64[R]."""
    at = row + (row * 0 + (unit * PER if PER > 1 else unit // UNITS)) * total
    scale0, zero0 = group_of(scales, zeros, at, ZERO)
    scale1, scale2, scale3 = scale0, scale0, scale0
    zero1, zero2, zero3 = zero0, zero0, zero0
    if PER > 1:
        scale2, zero2 = group_of(scales, zeros, at + (row * 0 + PER // 2) * total, ZERO)
        scale3, zero3 = scale2, zero2
    if PER == 4:
        scale1, zero1 = group_of(scales, zeros, at + total, ZERO)
        scale3, zero3 = group_of(scales, zeros, at + (row * 0 + 3) * total, ZERO)
    return scale0, scale1, scale2, scale3, zero0, zero1, zero2, zero3


@triton.jit
def _added(
    sums, codes, x, column, inputs, scale, zero, KIND: tl.constexpr, FP4: tl.constexpr,
    ZERO: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Add codes times x at `column` [32] to sums [R, 32]."""
    value = tl.load(x + column, mask=column < inputs, other=0.0).to(tl.float32)[None, :]
    taken, factor, more = factors(scale, zero, KIND, FP4, ZERO, ASM, False)
    numbers = weights_of(codes, taken, factor, more, KIND, FP4, 0, ASM, False).to(tl.float32)
    if ZERO == 2:
        numbers = numbers * factor[:, None] + more[:, None]
        total = sums + numbers * value
    else:
        total = sums + numbers * value * factor[:, None]
    return total


@triton.jit
def row_sums(
    x, inputs, codes, scales, zeros, row, total, STAGES: tl.constexpr, PACKED: tl.constexpr
):  # fmt: skip
    """Multiply rows `row` int64[R], of `total`, with x [inputs] of one token: float32[R]."""
    KIND: tl.constexpr = tl.bfloat16 if x.dtype.element_ty == tl.float32 else x.dtype.element_ty
    ASM: tl.constexpr = PACKED >> 1 & 1
    FP4: tl.constexpr = PACKED >> 2 & 1
    ZERO: tl.constexpr = PACKED >> 3 & 3
    PER: tl.constexpr = PACKED >> 5 & 7
    UNITS: tl.constexpr = PACKED >> 8
    step = tl.arange(0, WORDS)
    sums = tl.zeros([row.shape[0], WORDS], tl.float32)
    s0, s1, s2, s3, z0, z1, z2, z3 = _unit(scales, zeros, row, 0, total, PER, UNITS, ZERO)
    units = tl.cdiv(inputs, _INPUTS)
    for unit in tl.range(0, units, num_stages=STAGES):
        words = tl.load(codes + (row + (row * 0 + unit) * total)[:, None] * WORDS + step[None, :])
        # a step ahead: nothing else hides how long they take to come
        after = tl.minimum(unit + 1, units - 1)
        n0, n1, n2, n3, y0, y1, y2, y3 = _unit(scales, zeros, row, after, total, PER, UNITS, ZERO)
        a, b, c, d = codes_of(words, KIND, FP4, ASM)
        column = unit * _INPUTS + step
        sums = _added(sums, a, x, column, inputs, s0, z0, KIND, FP4, ZERO, ASM)
        sums = _added(sums, b, x, column + WORDS, inputs, s1, z1, KIND, FP4, ZERO, ASM)
        sums = _added(sums, c, x, column + 2 * WORDS, inputs, s2, z2, KIND, FP4, ZERO, ASM)
        sums = _added(sums, d, x, column + 3 * WORDS, inputs, s3, z3, KIND, FP4, ZERO, ASM)
        s0, s1, s2, s3, z0, z1, z2, z3 = n0, n1, n2, n3, y0, y1, y2, y3
    return tl.sum(sums, 1)


@triton.jit
def _multiplied(
    sums, codes, x_at, there, column, inputs, scale, zero, KIND: tl.constexpr, FP4: tl.constexpr,
    ZERO: tl.constexpr, ASM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add codes [R, 32] times x of tokens at x_at [1, T], at `column` [32], to sums [R, T]."""
    known = (column < inputs)[:, None] & there[None, :]
    values = tl.load(x_at + column[:, None], mask=known, other=0.0)
    taken, factor, more = factors(scale, zero, KIND, FP4, ZERO, ASM, True)
    w = weights_of(codes, taken, factor, more, KIND, FP4, ZERO, ASM, True)
    return tl.dot(w, values, sums, input_precision=PRECISION)


@triton.jit
def tile_sums(
    x_at, there, inputs, codes, scales, zeros, row, total, PRECISION: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """Multiply rows `row` int64[R], of `total`, with tokens `there` at x_at [1, T]: float32[R, T]."""
    KIND: tl.constexpr = x_at.dtype.element_ty
    ASM: tl.constexpr = PACKED >> 1 & 1
    FP4: tl.constexpr = PACKED >> 2 & 1
    ZERO: tl.constexpr = PACKED >> 3 & 3
    PER: tl.constexpr = PACKED >> 5 & 7
    UNITS: tl.constexpr = PACKED >> 8
    step = tl.arange(0, WORDS)
    sums = tl.zeros([row.shape[0], there.shape[0]], tl.float32)
    s0, s1, s2, s3, z0, z1, z2, z3 = _unit(scales, zeros, row, 0, total, PER, UNITS, ZERO)
    units = tl.cdiv(inputs, _INPUTS)
    for unit in range(units):
        words = tl.load(codes + (row + (row * 0 + unit) * total)[:, None] * WORDS + step[None, :])
        after = tl.minimum(unit + 1, units - 1)
        n0, n1, n2, n3, y0, y1, y2, y3 = _unit(scales, zeros, row, after, total, PER, UNITS, ZERO)
        a, b, c, d = codes_of(words, KIND, FP4, ASM)
        at = unit * _INPUTS + step
        sums = _multiplied(sums, a, x_at, there, at, inputs, s0, z0, KIND, FP4, ZERO, ASM, PRECISION)
        at += WORDS
        sums = _multiplied(sums, b, x_at, there, at, inputs, s1, z1, KIND, FP4, ZERO, ASM, PRECISION)
        at += WORDS
        sums = _multiplied(sums, c, x_at, there, at, inputs, s2, z2, KIND, FP4, ZERO, ASM, PRECISION)
        at += WORDS
        sums = _multiplied(sums, d, x_at, there, at, inputs, s3, z3, KIND, FP4, ZERO, ASM, PRECISION)
        s0, s1, s2, s3, z0, z1, z2, z3 = n0, n1, n2, n3, y0, y1, y2, y3
    return sums * missing(FP4, ASM, True)
