"""A matrix product whose rows depend on nothing but themselves, for the deterministic mode.

cuBLAS picks its algorithm by the number of rows, and with it the order in which it adds. Here each
output is one sum over the inputs, in ascending steps of the same tensor-core instruction, for any number
of rows. Tiles of several sizes serve few and many rows and give the same bits; tests compare them.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, import-untyped, import-not-found"

import torch
import triton
import triton.language as tl
from torch import Tensor

from ramify.gpu.ops.base import Activation
from ramify.gpu.ops.linear.base import Linear
from ramify.gpu.ops.rmsnorm import RMSNorm
from ramify.gpu.ops.tilings import AnyTiling
from ramify.gpu.ops.triton_layer import add_norm, gate_mul
from ramify.gpu.ops.triton_linear import Products, UnscaledRows

# Tiles of (rows, outputs, inputs, warps, stages), as measured on an H200: up to so many rows, for
# matrices of few and of many outputs.
_WIDE = 16384
_TILES = (
    (64, (64, 32, 128, 4, 5), (64, 64, 64, 4, 6)),
    (512, (128, 64, 64, 4, 5), (128, 128, 64, 8, 4)),
    (None, (256, 128, 64, 8, 3), (256, 128, 64, 8, 3)),
)
_EXACT = (16, 32, 32, 4, 2)  # float32, which tensor cores do not do


class InvariantProducts(Products):
    """A step's products. Tilings are ignored, because they depend on the batch."""

    follows_tilings = False

    def plain(self, x: UnscaledRows, linear: Linear, eps: float, tiling: AnyTiling | None) -> Tensor:
        return invariant_product(linear, x.values)

    def library(self, x: Tensor, linear: Linear) -> Tensor:
        return invariant_product(linear, x)

    def gated(
        self,
        x: UnscaledRows,
        linear: Linear,
        eps: float,
        tiling: AnyTiling | None,
        activation: Activation = "silu",
    ) -> Tensor:
        return gate_mul(invariant_product(linear, x.values), activation)

    def add(
        self, x: Tensor, linear: Linear, residual: Tensor, norm: RMSNorm, tiling: AnyTiling | None
    ) -> UnscaledRows:
        return UnscaledRows(add_norm(invariant_product(linear, x), residual, norm))

    def head(self, x: Tensor, linear: Linear, output: Tensor) -> None:
        output.copy_(invariant_product(linear, x))


def invariant_product(linear: Linear, x: Tensor) -> Tensor:
    """y = x W^T + b as `Linear` computes it: [T, inputs] -> [T, outputs]."""
    tile = _EXACT
    if x.dtype != torch.float32:
        tiles = next(tiles for most, *tiles in _TILES if most is None or len(x) <= most)
        tile = tiles[len(linear.tensor) >= _WIDE]
    return product_in_tiles(linear, x, tile)


def product_in_tiles(linear: Linear, x: Tensor, tile: tuple[int, int, int, int, int]) -> Tensor:
    """`tile`: as in _TILES."""
    weight = linear.tensor
    rows, (outputs, inputs) = len(x), weight.shape
    y = x.new_empty((rows, outputs))
    height, width, depth, warps, stages = tile
    grid = (triton.cdiv(rows, height) * triton.cdiv(outputs, width),)
    _product[grid](
        x, weight, linear.bias if linear.bias is not None else weight, y, rows, outputs, inputs,
        HEIGHT=height, WIDTH=width, DEPTH=depth, BAND=8, BIAS=linear.bias is not None,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return y


@triton.jit(do_not_specialize=["rows"])  # any number of them comes without compiling again
def _product(
    x, weight, bias, y, rows, outputs, inputs, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
    DEPTH: tl.constexpr, BAND: tl.constexpr, BIAS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
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
        total = tl.dot(a, b, total, input_precision=PRECISION)
    if BIAS:
        total += tl.load(bias + column, mask=column < outputs, other=0.0).to(tl.float32)[None, :]
    target = y + line[:, None].to(tl.int64) * outputs + column[None, :]
    tl.store(target, total.to(y.dtype.element_ty), mask=some_lines & some_columns)
