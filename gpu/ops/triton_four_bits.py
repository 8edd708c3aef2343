"""Matrix products with weights of 4 bits in Triton, which are widened in registers.

A tile of words (`linear.four_bits`) is shifted and masked into four tiles of neighbouring inputs, which
go from registers into the tensor cores. Scales multiply the sums of few tokens, else the weights. The
operations before and after a product are in the same launch, as in `triton_linear`. Imported only where
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
from ramify.gpu.ops.triton_four_codes import (
    WORDS,
    codes_of,
    factors,
    group_of,
    has_instructions,
    missing,
    weights_of,
    zero_kind,
)
from ramify.gpu.ops.triton_layer import gather, load_squares, opened
from ramify.gpu.programmatic_launch import overlap_options, wait

STORE, ADD, GATED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
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
    """Write output [T, outputs], of a gated product half as many. The rest as for `triton_linear`."""
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
        ZERO=zero_kind(weight),
        ASM=has_instructions(weight, x.dtype, x.device), EXACT=x.dtype == torch.float32,
        FEWEST=tiling.sums,
        num_warps=tiling.warps, num_stages=tiling.stages, **overlap_options(x.device),
    )  # fmt: skip


def widened_product(x: Tensor, linear: Linear) -> Tensor:
    """Multiply by torch's library, after widening the weight: [T, inputs] -> [T, outputs]."""
    assert isinstance(linear.weight, FourBitWeight)
    return F.linear(x, widened(linear.weight, x.dtype), linear.bias)


def widened(weight: FourBitWeight, dtype: torch.dtype) -> Tensor:
    """Widen a weight to [outputs, inputs], in one launch."""
    units, rows, _ = weight.codes.shape
    output = torch.empty((rows, weight.inputs), dtype=dtype, device=weight.codes.device)
    _widen[(triton.cdiv(rows, 64), units)](
        weight.codes, weight.scales, weight.zeros, output, rows, weight.inputs,
        PER=max(1, UNIT // weight.group), UNITS=max(1, weight.group // UNIT), FP4=weight.is_mxfp4,
        ZERO=zero_kind(weight), ROWS=64,
        ASM=has_instructions(weight, dtype, output.device), num_warps=4,
        **overlap_options(output.device),
    )  # fmt: skip
    return output


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
    """Compute a tile of the product. PER: groups a unit, or UNITS: units a group. rows: the weight's."""
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
    step = tl.arange(0, WORDS)
    w_at = codes + (first * rows.to(tl.int64) + row)[:, None] * WORDS + step[None, :]
    # scales are loaded a step ahead: nothing else hides how long they take to come
    at = (first * PER if PER > 1 else first // UNITS) * rows + row
    scale0, zero0 = group_of(scales, zeros, at, ZERO)
    scale1, zero1, scale2, zero2, scale3, zero3 = scale0, zero0, scale0, zero0, scale0, zero0
    if PER > 1:
        scale2, zero2 = group_of(scales, zeros, at + (PER // 2) * rows, ZERO)
    if PER == 4:
        scale1, zero1 = group_of(scales, zeros, at + rows, ZERO)
        scale3, zero3 = group_of(scales, zeros, at + 3 * rows, ZERO)
    wait(OVERLAP)

    x_at = x + token.to(tl.int64)[None, :] * inputs + (first * 4 * WORDS + step)[:, None]
    left = inputs - first * 4 * WORDS - step  # inputs from here on
    acc = tl.zeros([OUTPUTS, TOKENS], tl.float32)
    for unit in range(first, stop):
        words = tl.load(w_at)
        a, b, c, d = codes_of(words, KIND, FP4, ASM)
        if WHOLE:
            inside = there[None, :]
            x0 = tl.load(x_at, mask=inside, other=0.0)
            x1 = tl.load(x_at + WORDS, mask=inside, other=0.0)
            x2 = tl.load(x_at + 2 * WORDS, mask=inside, other=0.0)
            x3 = tl.load(x_at + 3 * WORDS, mask=inside, other=0.0)
        else:
            x0 = tl.load(x_at, mask=there[None, :] & (left > 0)[:, None], other=0.0)
            x1 = tl.load(x_at + WORDS, mask=there[None, :] & (left > WORDS)[:, None], other=0.0)
            x2 = tl.load(x_at + 2 * WORDS, mask=there[None, :] & (left > 2 * WORDS)[:, None], other=0.0)
            x3 = tl.load(x_at + 3 * WORDS, mask=there[None, :] & (left > 3 * WORDS)[:, None], other=0.0)
            left -= 4 * WORDS
        after = tl.minimum(unit + 1, units - 1)
        at = (after * PER if PER > 1 else after // UNITS) * rows + row
        next0, then0 = group_of(scales, zeros, at, ZERO)
        if PER > 1:
            next2, then2 = group_of(scales, zeros, at + (PER // 2) * rows, ZERO)
        if PER == 4:
            next1, then1 = group_of(scales, zeros, at + rows, ZERO)
            next3, then3 = group_of(scales, zeros, at + 3 * rows, ZERO)
        taken, factor, more = factors(scale0, zero0, KIND, FP4, ZERO, ASM, SCALES)
        if SCALES:
            a = weights_of(a, taken, factor, more, KIND, FP4, ZERO, ASM, True)
            acc = tl.dot(a, x0, acc, input_precision=PRECISION)
            if PER == 4:
                taken, factor, more = factors(scale1, zero1, KIND, FP4, ZERO, ASM, True)
            b = weights_of(b, taken, factor, more, KIND, FP4, ZERO, ASM, True)
            acc = tl.dot(b, x1, acc, input_precision=PRECISION)
            if PER > 1:
                taken, factor, more = factors(scale2, zero2, KIND, FP4, ZERO, ASM, True)
            c = weights_of(c, taken, factor, more, KIND, FP4, ZERO, ASM, True)
            acc = tl.dot(c, x2, acc, input_precision=PRECISION)
            if PER == 4:
                taken, factor, more = factors(scale3, zero3, KIND, FP4, ZERO, ASM, True)
            d = weights_of(d, taken, factor, more, KIND, FP4, ZERO, ASM, True)
            acc = tl.dot(d, x3, acc, input_precision=PRECISION)
        else:
            a = weights_of(a, taken, factor, more, KIND, FP4, ZERO, ASM, False)
            sums = tl.dot(a, x0, input_precision=PRECISION)
            if PER == 4:
                acc += sums * factor[:, None]
                sums = tl.zeros_like(acc)
                taken, factor, more = factors(scale1, zero1, KIND, FP4, ZERO, ASM, False)
            b = weights_of(b, taken, factor, more, KIND, FP4, ZERO, ASM, False)
            sums = tl.dot(b, x1, sums, input_precision=PRECISION)
            if PER > 1:
                acc += sums * factor[:, None]
                sums = tl.zeros_like(acc)
                taken, factor, more = factors(scale2, zero2, KIND, FP4, ZERO, ASM, False)
            c = weights_of(c, taken, factor, more, KIND, FP4, ZERO, ASM, False)
            sums = tl.dot(c, x2, sums, input_precision=PRECISION)
            if PER == 4:
                acc += sums * factor[:, None]
                sums = tl.zeros_like(acc)
                taken, factor, more = factors(scale3, zero3, KIND, FP4, ZERO, ASM, False)
            d = weights_of(d, taken, factor, more, KIND, FP4, ZERO, ASM, False)
            acc += tl.dot(d, x3, sums, input_precision=PRECISION) * factor[:, None]
        scale0, zero0 = next0, then0
        if PER > 1:
            scale2, zero2 = next2, then2
        if PER == 4:
            scale1, zero1, scale3, zero3 = next1, then1, next3, then3
        w_at += rows * WORDS
        x_at += 4 * WORDS
    acc = tl.trans(acc * missing(FP4, ASM, SCALES))

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
    """Widen some rows of a unit."""
    KIND: tl.constexpr = output.dtype.element_ty
    wait(OVERLAP)
    unit, line = tl.program_id(1), tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    known, step = line < rows, tl.arange(0, WORDS)
    group = unit * PER if PER > 1 else unit // UNITS
    w_at = codes + (unit * rows.to(tl.int64) + line)[:, None] * WORDS + step[None, :]
    four = codes_of(tl.load(w_at, mask=known[:, None], other=0), KIND, FP4, ASM)
    for place in tl.static_range(4):
        at = (group + place * PER // 4) * rows + tl.minimum(line, rows - 1)
        scale, zero = group_of(scales, zeros, at, ZERO)
        taken, factor, more = factors(scale, zero, KIND, FP4, ZERO, ASM, False)
        wide = weights_of(four[place], taken, factor, more, KIND, FP4, 0, ASM, False).to(tl.float32)
        wide = wide * factor[:, None] + more[:, None]
        column = (unit * 4 + place) * WORDS + step
        tl.store(
            output + line.to(tl.int64)[:, None] * inputs + column[None, :], wide.to(KIND),
            mask=known[:, None] & (column < inputs)[None, :],
        )  # fmt: skip
