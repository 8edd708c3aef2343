"""Matrix products with weights of 4 bits in Triton: they are read as they are, and widened in registers.

A tile of words (`linear.four_bits`) is shifted and masked into four tiles of neighbouring inputs, which
go from registers into the tensor cores. Scales multiply the sums of few tokens, else the weights. What
stands before and after a product is in the same launch, as in `triton_linear`. Imported only where
Triton is used; runs on a CPU with TRITON_INTERPRET=1, where shifts and floats stand for the instructions
of the GPU.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, import-untyped, import-not-found"

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from ramify.gpu.ops.linear.base import Linear
from ramify.gpu.ops.linear.four_bits import UNIT, FourBitWeight
from ramify.gpu.ops.tilings import FourBitTiling
from ramify.gpu.ops.triton_layer import gather, load_squares, opened
from ramify.gpu.programmatic_launch import overlap_options, overlaps, wait

STORE, ADD, GATED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
_WORDS = tl.constexpr(UNIT // 4)
_PROGRAMS = 264  # two for each multiprocessor
_MOST_SPLITS = 8
MOST_TILES = 8192  # of one launch that splits its inputs


def four_bit_product(
    epilogue: Any,
    x: Tensor,
    linear: Linear,
    output: Tensor,
    tiling: FourBitTiling,
    arrived: Tensor | None,
    squares: Tensor | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
    gain: Tensor | None = None,
    squares_out: Tensor | None = None,
    gelu: bool = False,
) -> None:
    """output [T, outputs], of a gated product half as many. The rest as for `triton_linear`."""
    weight, bias = linear.weight, linear.bias
    assert isinstance(weight, FourBitWeight)
    tokens, (units, rows, _) = len(x), weight.codes.shape
    tiles = triton.cdiv(rows, tiling.outputs)
    programs = tiles * triton.cdiv(tokens, tiling.tokens)
    splits = tiling.splits
    if not splits:
        splits = 1
        while 2 * splits * programs <= _PROGRAMS and splits < min(_MOST_SPLITS, units):
            splits *= 2
    partial = output
    if splits > 1:
        if programs > MOST_TILES:
            raise ValueError(f"{programs} tiles are too many for {tiling}: give one split")
        partial = torch.empty((splits, tokens, rows), dtype=torch.float32, device=x.device)
    parts = 1 if squares is None else squares.shape[1]
    _product[(programs, splits)](
        x, weight.codes, weight.scales, weight.zeros, bias, squares, residual, gain, output, squares_out,
        partial, arrived, tokens, rows, weight.inputs, units, parts, eps, EPILOGUE=epilogue, GELU=gelu,
        SCALED=squares is not None, BIAS=bias is not None, SPLITS=splits, TOKENS=tiling.tokens,
        OUTPUTS=tiling.outputs, PARTS=triton.next_power_of_2(parts), PER=max(1, UNIT // weight.group),
        UNITS=max(1, weight.group // UNIT), WHOLE=weight.inputs % UNIT == 0, FP4=weight.is_mxfp4,
        ZERO=("none", "integers", "floats").index(weight.zero_kind),
        ASM=_has_instructions(weight, x.dtype, x.device), EXACT=x.dtype == torch.float32,
        FEWEST=tiling.sums,
        num_warps=tiling.warps, num_stages=tiling.stages, **overlap_options(x.device),
    )  # fmt: skip


def widened_product(x: Tensor, linear: Linear) -> Tensor:
    """By torch's library, with weights that are widened first: [T, inputs] -> [T, outputs]."""
    assert isinstance(linear.weight, FourBitWeight)
    return F.linear(x, widened(linear.weight, x.dtype), linear.bias)


def _has_instructions(weight: FourBitWeight, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether `_codes` widens by the GPU's instructions, of which MXFP4's give bfloat16 only."""
    types = (torch.bfloat16,) if weight.is_mxfp4 else (torch.bfloat16, torch.float16)
    return dtype in types and overlaps(device)


def widened(weight: FourBitWeight, dtype: torch.dtype) -> Tensor:
    """[outputs, inputs], in one launch."""
    units, rows, _ = weight.codes.shape
    output = torch.empty((rows, weight.inputs), dtype=dtype, device=weight.codes.device)
    _widen[(triton.cdiv(rows, 64), units)](
        weight.codes, weight.scales, weight.zeros, output, rows, weight.inputs,
        PER=max(1, UNIT // weight.group), UNITS=max(1, weight.group // UNIT), FP4=weight.is_mxfp4,
        ZERO=("none", "integers", "floats").index(weight.zero_kind), ROWS=64,
        ASM=_has_instructions(weight, dtype, output.device), num_warps=4,
        **overlap_options(output.device),
    )  # fmt: skip
    return output


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
def _codes(words, KIND: tl.constexpr, FP4: tl.constexpr, ASM: tl.constexpr):
    """Four tiles of numbers: integers and what `_offset` says, or MXFP4's; of the type KIND if ASM."""
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
    """What an integer of `_codes` is too large by."""
    if not ASM:
        offset = 0.0
    elif tl.float16 == KIND:
        offset = 1024.0
    else:
        offset = 128.0
    return offset


@triton.jit
def _group(scales, zeros, at, ZERO: tl.constexpr):
    """What memory has of a group of each row: its scale, and its zero if there is one."""
    scale = tl.load(scales + at)
    zero = scale
    if ZERO != 0:
        zero = tl.load(zeros + at)
    return scale, zero


@triton.jit
def _factors(
    scale, zero, KIND: tl.constexpr, FP4: tl.constexpr, ZERO: tl.constexpr, ASM: tl.constexpr,
    SCALES: tl.constexpr,
):  # fmt: skip
    """Of each row of a `_group`: what is taken off a code, the scale, and what is added then.

    MXFP4's for codes that are scaled lack a factor: see `_missing`.
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
def _missing(FP4: tl.constexpr, ASM: tl.constexpr, SCALES: tl.constexpr):
    """What sums are multiplied by at the end: 2^(126 - 62), as codes are 2^-126 times too small."""
    factor = 1.0
    if FP4 and ASM and SCALES:
        factor = 18446744073709551616.0
    return factor


@triton.jit
def _weights(codes, taken, factor, more, KIND: tl.constexpr, FP4: tl.constexpr, ZERO: tl.constexpr,
             ASM: tl.constexpr, SCALES: tl.constexpr):  # fmt: skip
    """What codes [outputs, inputs] stand for; without SCALES but for the factor."""
    if not FP4:
        codes = codes - taken.to(codes.dtype)[:, None]
    if SCALES:
        codes = codes * factor.to(codes.dtype)[:, None]
        if ZERO == 2:
            codes = codes + more.to(codes.dtype)[:, None]
    elif FP4 and ASM:
        codes = codes * 85070591730234615865843651857942052864.0  # 2^126
    return codes.to(KIND)


@triton.jit(do_not_specialize=["tokens"])
def _product(
    x, codes, scales, zeros, bias, squares, residual, gain, output, squares_out, partial, arrived,
    tokens, rows, inputs, units, parts, eps,
    EPILOGUE: tl.constexpr, GELU: tl.constexpr, SCALED: tl.constexpr, BIAS: tl.constexpr,
    SPLITS: tl.constexpr, TOKENS: tl.constexpr, OUTPUTS: tl.constexpr, PARTS: tl.constexpr,
    PER: tl.constexpr, UNITS: tl.constexpr, WHOLE: tl.constexpr, FP4: tl.constexpr,
    ZERO: tl.constexpr, ASM: tl.constexpr, EXACT: tl.constexpr, FEWEST: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """PER: groups of a unit, or UNITS: units of a group. rows: of the weight."""
    KIND: tl.constexpr = x.dtype.element_ty
    SCALES: tl.constexpr = ZERO == 2 or TOKENS > FEWEST  # weights are scaled, not sums
    PRECISION: tl.constexpr = "ieee" if EXACT else "tf32"
    WIDTH: tl.constexpr = OUTPUTS // 2 if EPILOGUE == GATED else OUTPUTS
    outputs = rows // 2 if EPILOGUE == GATED else rows
    blocks = tl.cdiv(tokens, TOKENS)
    block = tl.program_id(0) % blocks  # neighbours read the same weights
    tile = tl.program_id(0) // blocks
    share = tl.cdiv(units, SPLITS)
    first = tl.program_id(1) * share
    stop = tl.minimum(first + share, units)
    token = block * TOKENS + tl.arange(0, TOKENS)
    there = token < tokens
    column = tile * WIDTH + tl.arange(0, WIDTH)
    turn = tl.arange(0, OUTPUTS)
    if EPILOGUE == GATED:
        row = tl.minimum(tile * WIDTH + turn // 2, outputs - 1) + turn % 2 * outputs
    else:
        row = tl.minimum(tile * OUTPUTS + turn, outputs - 1)
    step = tl.arange(0, _WORDS)
    w_at = codes + (first * rows.to(tl.int64) + row)[:, None] * _WORDS + step[None, :]
    # scales are loaded a step ahead: nothing else hides how long they take to come
    at = (first * PER if PER > 1 else first // UNITS) * rows + row
    scale0, zero0 = _group(scales, zeros, at, ZERO)
    scale1, zero1, scale2, zero2, scale3, zero3 = scale0, zero0, scale0, zero0, scale0, zero0
    if PER > 1:
        scale2, zero2 = _group(scales, zeros, at + (PER // 2) * rows, ZERO)
    if PER == 4:
        scale1, zero1 = _group(scales, zeros, at + rows, ZERO)
        scale3, zero3 = _group(scales, zeros, at + 3 * rows, ZERO)
    wait(OVERLAP)

    x_at = x + token.to(tl.int64)[None, :] * inputs + (first * 4 * _WORDS + step)[:, None]
    left = inputs - first * 4 * _WORDS - step  # inputs from here on
    acc = tl.zeros([OUTPUTS, TOKENS], tl.float32)
    for unit in range(first, stop):
        words = tl.load(w_at)
        a, b, c, d = _codes(words, KIND, FP4, ASM)
        if WHOLE:
            inside = there[None, :]
            x0 = tl.load(x_at, mask=inside, other=0.0)
            x1 = tl.load(x_at + _WORDS, mask=inside, other=0.0)
            x2 = tl.load(x_at + 2 * _WORDS, mask=inside, other=0.0)
            x3 = tl.load(x_at + 3 * _WORDS, mask=inside, other=0.0)
        else:
            x0 = tl.load(x_at, mask=there[None, :] & (left > 0)[:, None], other=0.0)
            x1 = tl.load(x_at + _WORDS, mask=there[None, :] & (left > _WORDS)[:, None], other=0.0)
            x2 = tl.load(
                x_at + 2 * _WORDS, mask=there[None, :] & (left > 2 * _WORDS)[:, None], other=0.0
            )
            x3 = tl.load(
                x_at + 3 * _WORDS, mask=there[None, :] & (left > 3 * _WORDS)[:, None], other=0.0
            )
            left -= 4 * _WORDS
        after = tl.minimum(unit + 1, units - 1)
        at = (after * PER if PER > 1 else after // UNITS) * rows + row
        next0, then0 = _group(scales, zeros, at, ZERO)
        if PER > 1:
            next2, then2 = _group(scales, zeros, at + (PER // 2) * rows, ZERO)
        if PER == 4:
            next1, then1 = _group(scales, zeros, at + rows, ZERO)
            next3, then3 = _group(scales, zeros, at + 3 * rows, ZERO)
        taken, factor, more = _factors(scale0, zero0, KIND, FP4, ZERO, ASM, SCALES)
        if SCALES:
            a = _weights(a, taken, factor, more, KIND, FP4, ZERO, ASM, True)
            acc = tl.dot(a, x0, acc, input_precision=PRECISION)
            if PER == 4:
                taken, factor, more = _factors(scale1, zero1, KIND, FP4, ZERO, ASM, True)
            b = _weights(b, taken, factor, more, KIND, FP4, ZERO, ASM, True)
            acc = tl.dot(b, x1, acc, input_precision=PRECISION)
            if PER > 1:
                taken, factor, more = _factors(scale2, zero2, KIND, FP4, ZERO, ASM, True)
            c = _weights(c, taken, factor, more, KIND, FP4, ZERO, ASM, True)
            acc = tl.dot(c, x2, acc, input_precision=PRECISION)
            if PER == 4:
                taken, factor, more = _factors(scale3, zero3, KIND, FP4, ZERO, ASM, True)
            d = _weights(d, taken, factor, more, KIND, FP4, ZERO, ASM, True)
            acc = tl.dot(d, x3, acc, input_precision=PRECISION)
        else:
            a = _weights(a, taken, factor, more, KIND, FP4, ZERO, ASM, False)
            sums = tl.dot(a, x0, input_precision=PRECISION)
            if PER == 4:
                acc += sums * factor[:, None]
                sums = tl.zeros_like(acc)
                taken, factor, more = _factors(scale1, zero1, KIND, FP4, ZERO, ASM, False)
            b = _weights(b, taken, factor, more, KIND, FP4, ZERO, ASM, False)
            sums = tl.dot(b, x1, sums, input_precision=PRECISION)
            if PER > 1:
                acc += sums * factor[:, None]
                sums = tl.zeros_like(acc)
                taken, factor, more = _factors(scale2, zero2, KIND, FP4, ZERO, ASM, False)
            c = _weights(c, taken, factor, more, KIND, FP4, ZERO, ASM, False)
            sums = tl.dot(c, x2, sums, input_precision=PRECISION)
            if PER == 4:
                acc += sums * factor[:, None]
                sums = tl.zeros_like(acc)
                taken, factor, more = _factors(scale3, zero3, KIND, FP4, ZERO, ASM, False)
            d = _weights(d, taken, factor, more, KIND, FP4, ZERO, ASM, False)
            acc += tl.dot(d, x3, sums, input_precision=PRECISION) * factor[:, None]
        scale0, zero0 = next0, then0
        if PER > 1:
            scale2, zero2 = next2, then2
        if PER == 4:
            scale1, zero1, scale3, zero3 = next1, then1, next3, then3
        w_at += rows * _WORDS
        x_at += 4 * _WORDS
    acc = tl.trans(acc * _missing(FP4, ASM, SCALES))

    last = True
    if SPLITS > 1:
        spot = token.to(tl.int64)[:, None] * rows + (tile * OUTPUTS + turn)[None, :]
        real = there[:, None] & (tile * OUTPUTS + turn < rows)[None, :]
        acc, last = gather(acc, partial, spot, real, arrived, tokens, rows, SPLITS)
    if last:
        inside = there[:, None] & (column < outputs)[None, :]
        place = token.to(tl.int64)[:, None] * outputs + column[None, :]
        y = acc
        if SCALED:
            sums = load_squares(squares, token, tokens, parts, PARTS)
            y *= tl.rsqrt(tl.sum(sums, 1) / inputs + eps)[:, None]
        if BIAS:
            y += tl.load(bias + row).to(tl.float32)[None, :]
        if EPILOGUE == GATED:
            gate, up = tl.split(tl.reshape(y, (TOKENS, WIDTH, 2)))
            tl.store(output + place, (opened(gate, GELU) * up).to(KIND), mask=inside)
        elif EPILOGUE == ADD:
            before = tl.load(residual + place, mask=inside, other=0.0)
            rounded = (y + before.to(tl.float32)).to(KIND)
            tl.store(residual + place, rounded, mask=inside)
            wide = tl.where(inside, rounded.to(tl.float32), 0.0)
            gains = tl.load(gain + column, mask=column < outputs, other=0.0).to(tl.float32)
            tl.store(output + place, (wide * gains[None, :]).to(KIND), mask=inside)
            tl.store(
                squares_out + token * tl.cdiv(outputs, OUTPUTS) + tile,
                tl.sum(wide * wide, 1),
                mask=there,
            )
        else:
            tl.store(output + place, y.to(KIND), mask=inside)


@triton.jit
def _widen(
    codes, scales, zeros, output, rows, inputs, PER: tl.constexpr, UNITS: tl.constexpr,
    FP4: tl.constexpr, ZERO: tl.constexpr, ROWS: tl.constexpr, ASM: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Some rows of a unit."""
    KIND: tl.constexpr = output.dtype.element_ty
    wait(OVERLAP)
    unit, line = tl.program_id(1), tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    known, step = line < rows, tl.arange(0, _WORDS)
    group = unit * PER if PER > 1 else unit // UNITS
    w_at = codes + (unit * rows.to(tl.int64) + line)[:, None] * _WORDS + step[None, :]
    four = _codes(tl.load(w_at, mask=known[:, None], other=0), KIND, FP4, ASM)
    for place in tl.static_range(4):
        at = (group + place * PER // 4) * rows + tl.minimum(line, rows - 1)
        scale, zero = _group(scales, zeros, at, ZERO)
        taken, factor, more = _factors(scale, zero, KIND, FP4, ZERO, ASM, False)
        wide = _weights(four[place], taken, factor, more, KIND, FP4, 0, ASM, False).to(tl.float32)
        wide = wide * factor[:, None] + more[:, None]
        column = (unit * 4 + place) * _WORDS + step
        tl.store(
            output + line.to(tl.int64)[:, None] * inputs + column[None, :], wide.to(KIND),
            mask=known[:, None] & (column < inputs)[None, :],
        )  # fmt: skip
