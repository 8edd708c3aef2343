"""Matrix products in tiles, of any number of rows, whose weights may have 8 bits.

Codes are widened as they are read. torch's library multiplies many rows: codes with a scale for each
output as they are, with rows rounded to 8 bits, too; other weights are widened first. Sums are in
float32, in ascending steps of the inputs whatever the number of rows is.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, import-untyped, import-not-found"

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from ramify.gpu.ops.linear.base import Linear, Operand
from ramify.gpu.programmatic_launch import overlap_options, overlaps, wait
from ramify.gpu.triton_fp8 import narrowed, scale_of, widened

Tile = tuple[int, int, int, int, int]
"""Rows, outputs, inputs, warps, stages."""

EXACT: Tile = (16, 32, 32, 4, 2)  # float32, which tensor cores do not do
_WIDENED: Tile = (128, 128, 64, 8, 4)
_MULTIPLE = 16  # of sizes that the library takes
_WIDENED_INPUTS = 4096  # that a program widens


def many_rows(x: Tensor, linear: Linear) -> Tensor:
    """Multiply many rows with weights that are codes: [T, inputs] -> [T, outputs]."""
    weight = linear.weight.operand
    assert weight.scales is not None
    if not overlaps(x.device) or x.dtype != torch.bfloat16:
        return product_in_tiles(linear, x, EXACT if x.dtype == torch.float32 else _WIDENED)
    grouped = weight.group < x.shape[1]
    if grouped or any(size % _MULTIPLE for size in weight.codes.shape):
        return F.linear(x, widened_weight(weight, x.dtype), linear.bias)
    codes, scales = rounded_rows(x)
    y: Tensor = torch._scaled_mm(
        codes, weight.codes.t(), scales, weight.scales.view(1, -1), bias=linear.bias, out_dtype=x.dtype,
        use_fast_accum=True,
    )  # fmt: skip
    return y


def rounded_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round x [T, inputs] to codes. Returns also the rows' scales, float32[T, 1]."""
    rows, inputs = x.shape
    codes = torch.empty((rows, inputs), dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty((rows, 1), dtype=torch.float32, device=x.device)
    _round_rows[(rows,)](
        x, codes, scales, inputs, BLOCK=triton.next_power_of_2(inputs),
        num_warps=4 if inputs <= 4096 else 8, **overlap_options(x.device),
    )  # fmt: skip
    return codes, scales


def widened_weight(weight: Operand, dtype: torch.dtype) -> Tensor:
    """Widen a weight to floats [outputs, inputs], in one launch."""
    assert weight.scales is not None
    outputs, inputs = weight.codes.shape
    floats = torch.empty((outputs, inputs), dtype=dtype, device=weight.codes.device)
    _widen[(outputs, triton.cdiv(inputs, _WIDENED_INPUTS))](
        weight.codes, weight.scales, floats, inputs, weight.scales.shape[1], GROUP=weight.group,
        BLOCK=_WIDENED_INPUTS, num_warps=4,
    )  # fmt: skip
    return floats


def product_in_tiles(linear: Linear, x: Tensor, tile: Tile) -> Tensor:
    """Compute y = x W^T + b: [T, inputs] -> [T, outputs]."""
    weight = linear.weight.operand
    (outputs, inputs), rows = linear.weight.shape, len(x)
    y = x.new_empty((rows, outputs))
    height, width, depth, warps, stages = tile
    grouped = weight.scales is not None and weight.group < inputs
    if grouped and weight.group % depth:
        raise ValueError(f"groups of {weight.group} inputs cannot be tiled as {tile}")
    grid = (triton.cdiv(rows, height) * triton.cdiv(outputs, width),)
    _product[grid](
        x, weight.codes, weight.scales, linear.bias, y, rows, outputs, inputs,
        weight.scales.shape[1] if weight.scales is not None else 1, HEIGHT=height, WIDTH=width,
        DEPTH=depth, GROUP=weight.group if grouped else 0, BAND=8,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return y


@triton.jit
def _round_rows(x, codes, scales, inputs, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    wait(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < inputs
    values = tl.load(x + row * inputs + column, mask=inside, other=0.0).to(tl.float32)
    scale = scale_of(tl.max(tl.abs(values)))
    tl.store(codes + row * inputs + column, narrowed(values / scale), mask=inside)
    tl.store(scales + row, scale)


@triton.jit
def _widen(codes, scales, floats, inputs, groups, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < inputs
    own = tl.load(scales + row * groups + column // GROUP, mask=inside, other=0.0)
    wide = tl.load(codes + row * inputs + column, mask=inside, other=0.0)
    kind = floats.dtype.element_ty
    tl.store(
        floats + row * inputs + column, (widened(wide, kind).to(tl.float32) * own).to(kind), mask=inside
    )


@triton.jit(do_not_specialize=["rows"])  # any number of them comes without compiling again
def _product(
    x, weight, scales, bias, y, rows, outputs, inputs, groups, HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr, BAND: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute a tile. scales: of GROUP inputs each, 0: of whole rows; None: there are none."""
    # tiles in bands of rows, so that those running at once share their weights and inputs in L2
    tall, wide = tl.cdiv(rows, HEIGHT), tl.cdiv(outputs, WIDTH)
    index = tl.program_id(0)
    band = index // (BAND * wide)
    height = tl.minimum(tall - band * BAND, BAND)
    line = (band * BAND + index % (BAND * wide) % height) * HEIGHT + tl.arange(0, HEIGHT)
    column = (index % (BAND * wide) // height) * WIDTH + tl.arange(0, WIDTH)
    step = tl.arange(0, DEPTH)
    some_lines, some_columns = line[:, None] < rows, column[None, :] < outputs
    left = x + line[:, None].to(tl.int64) * inputs + step[None, :]
    right = weight + column[None, :].to(tl.int64) * inputs + step[:, None]
    total = tl.zeros([HEIGHT, WIDTH], tl.float32)
    for start in range(0, inputs, DEPTH):
        inside = start + step < inputs
        a = tl.load(left + start, mask=some_lines & inside[None, :], other=0.0)
        b = tl.load(right + start, mask=some_columns & inside[:, None], other=0.0)
        b = widened(b, a.dtype)
        if GROUP:
            group = start // GROUP
            own = tl.load(
                scales + column.to(tl.int64) * groups + group, mask=column < outputs, other=0.0
            )
            total += tl.dot(a, b, input_precision=PRECISION) * own[None, :]
        else:
            total = tl.dot(a, b, total, input_precision=PRECISION)
    if scales is not None and GROUP == 0:
        total *= tl.load(scales + column, mask=column < outputs, other=0.0)[None, :]
    if bias is not None:
        total += tl.load(bias + column, mask=column < outputs, other=0.0).to(tl.float32)[None, :]
    target = y + line[:, None].to(tl.int64) * outputs + column[None, :]
    tl.store(target, total.to(y.dtype.element_ty), mask=some_lines & some_columns)
