"""Matrix products in tiles, of any number of rows, whose weights may have 8 bits.

Codes are widened as they are read, or multiplied as they are: then rows are rounded to 8 bits, too,
with a scale for each, or for each of their groups. Torch's library multiplies codes with scales of whole
rows. Sums are in float32, in ascending steps of the inputs whatever the number of rows is.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, import-untyped, import-not-found"

import torch
import triton
import triton.language as tl
from torch import Tensor

from ramify.gpu.ops.linear.base import Linear
from ramify.gpu.programmatic_launch import launch_options, overlaps, wait
from ramify.gpu.triton_fp8 import narrowed, widened

Tile = tuple[int, int, int, int, int]
"""Rows, outputs, inputs, warps, stages."""

EXACT: Tile = (16, 32, 32, 4, 2)  # float32, which tensor cores do not do
_MANY: Tile = (128, 128, 128, 8, 3)
_WIDENED: Tile = (128, 128, 64, 8, 4)
_MULTIPLE = 16  # of sizes that the library takes


def many_rows(x: Tensor, linear: Linear) -> Tensor:
    """The product of many rows with weights that are codes: [T, inputs] -> [T, outputs]."""
    weight = linear.weight.operand
    assert weight.scales is not None
    if not overlaps(x.device) or x.dtype != torch.bfloat16:
        return product_in_tiles(linear, x, EXACT if x.dtype == torch.float32 else _WIDENED)
    grouped = weight.group < x.shape[1]
    if grouped or any(size % _MULTIPLE for size in weight.codes.shape):
        return product_in_tiles(linear, x, _MANY, rounds=grouped)
    codes, scales = rounded_rows(x, x.shape[1])
    y: Tensor = torch._scaled_mm(
        codes, weight.codes.t(), scales, weight.scales.view(1, -1), bias=linear.bias, out_dtype=x.dtype,
        use_fast_accum=True,
    )  # fmt: skip
    return y


def rounded_rows(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """x [T, inputs] as codes, and what each group is to be multiplied by, float32[T, groups]."""
    rows, inputs = x.shape
    groups = triton.cdiv(inputs, group)
    codes = torch.empty((rows, inputs), dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty((rows, groups), dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(group)
    _round_rows[(rows,)](
        x, codes, scales, inputs, groups, GROUP=group, BLOCK=block,
        GROUPS=triton.next_power_of_2(groups), OVERLAP=overlaps(x.device),
        num_warps=4 if inputs <= 4096 else 8, **launch_options(x.device),
    )  # fmt: skip
    return codes, scales


def product_in_tiles(linear: Linear, x: Tensor, tile: Tile, rounds: bool = False) -> Tensor:
    """y = x W^T + b: [T, inputs] -> [T, outputs]. `rounds`: rows become codes as the weights are."""
    weight = linear.weight.operand
    (outputs, inputs), rows = linear.weight.shape, len(x)
    y = x.new_empty((rows, outputs))
    height, width, depth, warps, stages = tile
    grouped = weight.scales is not None and weight.group < inputs
    if grouped and weight.group % depth:
        raise ValueError(f"groups of {weight.group} inputs cannot be tiled as {tile}")
    left, scales = rounded_rows(x, weight.group) if rounds else (x, None)
    grid = (triton.cdiv(rows, height) * triton.cdiv(outputs, width),)
    _product[grid](
        left, scales, weight.codes, weight.scales, linear.bias, y, rows, outputs, inputs,
        weight.scales.shape[1] if weight.scales is not None else 1, HEIGHT=height, WIDTH=width,
        DEPTH=depth, GROUP=weight.group if grouped else 0, BAND=8,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return y


@triton.jit
def _round_rows(
    x, codes, scales, inputs, groups, GROUP: tl.constexpr, BLOCK: tl.constexpr, GROUPS: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    wait(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    group, lane = tl.arange(0, GROUPS), tl.arange(0, BLOCK)
    column = group[:, None] * GROUP + lane[None, :]
    inside = (column < inputs) & (lane < GROUP)[None, :]
    values = tl.load(x + row * inputs + column, mask=inside, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(values), 1), 1e-12) / 448.0
    rounded = narrowed(values / scale[:, None])
    tl.store(codes + row * inputs + column, rounded, mask=inside)
    tl.store(scales + row * groups + group, scale, mask=group < groups)


@triton.jit(do_not_specialize=["rows"])  # any number of them comes without compiling again
def _product(
    x, x_scales, weight, scales, bias, y, rows, outputs, inputs, groups, HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr, BAND: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """x_scales, scales: of GROUP inputs each, 0: of whole rows; None: there are none."""
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
            part = tl.dot(a, b, input_precision=PRECISION) * own[None, :]
            if x_scales is not None:
                part *= tl.load(x_scales + line * groups + group, mask=line < rows, other=0.0)[:, None]
            total += part
        else:
            total = tl.dot(a, b, total, input_precision=PRECISION)
    if scales is not None and GROUP == 0:
        total *= tl.load(scales + column, mask=column < outputs, other=0.0)[None, :]
    if bias is not None:
        total += tl.load(bias + column, mask=column < outputs, other=0.0).to(tl.float32)[None, :]
    target = y + line[:, None].to(tl.int64) * outputs + column[None, :]
    tl.store(target, total.to(y.dtype.element_ty), mask=some_lines & some_columns)
