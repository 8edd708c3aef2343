"""A matrix product whose rows depend on themselves alone, for the deterministic mode.

cuBLAS picks its algorithm by the number of rows, and with it the order in which it adds. Here each
output is one sum over the inputs, in ascending steps of the same tensor-core instruction, for any number
of rows. Tiles of several sizes serve few and many rows and give the same bits; tests compare them.
"""

from dataclasses import replace

import torch
from torch import Tensor

from ramify.gpu.ops.base import Activation
from ramify.gpu.ops.linear.base import Linear
from ramify.gpu.ops.linear.four_bits import FourBitWeight
from ramify.gpu.ops.rmsnorm import RMSNorm
from ramify.gpu.ops.tilings import FOUR_BITS_INVARIANT, AnyTiling
from ramify.gpu.ops.triton_four_bits import STORE, four_bit_product
from ramify.gpu.ops.triton_layer import add_norm, gate_mul
from ramify.gpu.ops.triton_linear import Products, UnscaledRows
from ramify.gpu.ops.triton_tiles import EXACT, product_in_tiles

# Tiles of (rows, outputs, inputs, warps, stages), as measured on an H200: up to so many rows, for
# matrices of few and of many outputs.
_WIDE = 16384
_TILES = (
    (64, (64, 32, 128, 4, 5), (64, 64, 64, 4, 6)),
    (512, (128, 64, 64, 4, 5), (128, 128, 64, 8, 4)),
    (None, (256, 128, 64, 8, 3), (256, 128, 64, 8, 3)),
)


class InvariantProducts(Products):
    """Launcher of a step's products. Tilings are ignored, because they depend on the batch."""

    follows_tilings = False

    def plain(
        self,
        x: UnscaledRows,
        linear: Linear,
        eps: float,
        tiling: AnyTiling | None,
        output: Tensor | None = None,
    ) -> Tensor:
        return self._by_library(x.values, linear, output)

    def library(self, x: Tensor, linear: Linear) -> Tensor:
        return invariant_product(linear, x)

    def gated(
        self,
        x: UnscaledRows,
        linear: Linear,
        eps: float,
        tiling: AnyTiling | None,
        activation: Activation = "silu",
        output: Tensor | None = None,
    ) -> Tensor:
        return gate_mul(invariant_product(linear, x.values), activation, output)

    def add(
        self, x: Tensor, linear: Linear, residual: Tensor, norm: RMSNorm, tiling: AnyTiling | None
    ) -> UnscaledRows:
        return UnscaledRows(add_norm(invariant_product(linear, x), residual, norm))

    def head(self, x: Tensor, linear: Linear, output: Tensor) -> None:
        output.copy_(invariant_product(linear, x))


def invariant_product(linear: Linear, x: Tensor) -> Tensor:
    """Compute y = x W^T + b as `Linear` does: [T, inputs] -> [T, outputs]."""
    if isinstance(linear.weight, FourBitWeight):
        output = x.new_empty((len(x), linear.weight.shape[0]))
        exact = x.dtype == torch.float32
        tiling = replace(FOUR_BITS_INVARIANT, tokens=16, outputs=32) if exact else FOUR_BITS_INVARIANT
        four_bit_product(STORE, x, linear, output, tiling, None)
        return output
    tile = EXACT
    if x.dtype != torch.float32:
        tiles = next(tiles for most, *tiles in _TILES if most is None or len(x) <= most)
        tile = tiles[linear.weight.shape[0] >= _WIDE]
    return product_in_tiles(linear, x, tile)
