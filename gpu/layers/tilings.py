"""Which matrix products of a decode step our Triton kernel takes, and how it is cut up for them.

A table of measurements (docs/log.md), not a search: a product goes to the kernel where that was
the faster one in a CUDA graph on an H200, with the kernels that it replaces counted in. Everything
else stays with torch's library: float32 and float16, sizes that the tiles do not divide, more
tokens than `MOST_TOKENS`, GPUs before Hopper.
"""

from dataclasses import dataclass, replace

import torch

MOST_TOKENS = 64  # beyond, cuBLAS is faster by more than the fusion saves
_OUTPUTS = 64  # rows of a weight tile: what one tensor core product takes at least
_PROGRAMS = 128  # about the multiprocessors; with fewer tiles their inputs are split


@dataclass(frozen=True, slots=True)
class Tiling:
    """What one program computes, and how many share the columns of one tile."""

    tokens: int
    outputs: int
    inputs: int  # of one step of the loop
    splits: int = 1  # programs that share a tile's inputs
    stages: int = 4
    warps: int = 4
    swap: bool = True  # multiply W x^T, so that the weights take the 64 rows of the tensor cores
    prefetch: int = 256  # inputs of each weight row to ask for ahead of the kernel before


@dataclass(frozen=True, slots=True)
class LayerTilings:
    """Of a layer's four products; None: torch's library."""

    qkv: Tiling | None = None
    output: Tiling | None = None
    gate_up: Tiling | None = None
    down: Tiling | None = None


@dataclass(frozen=True, slots=True)
class LayerSizes:
    """What decides: the products' sizes, and whether the kernel may run at all."""

    hidden: int
    attention: int  # width of the attention's output
    qkv: int
    intermediate: int
    dtype: torch.dtype
    overlaps: bool  # programmatic dependent launch, which comes with the tensor cores it needs


def tilings_for(tokens: int, sizes: LayerSizes) -> LayerTilings:
    """What each product of a step of `tokens` runs on."""
    if not sizes.overlaps or sizes.dtype != torch.bfloat16 or tokens > MOST_TOKENS:
        return LayerTilings()
    if any(size % 128 for size in (sizes.hidden, sizes.attention, sizes.qkv, sizes.intermediate)):
        return LayerTilings()
    large = sizes.hidden * sizes.intermediate >= 1 << 25  # more than a few microseconds of reading
    rows = 16 if tokens <= 16 else 32 if tokens <= 32 or not large else 64
    tiles = -(-sizes.hidden // _OUTPUTS) * -(-tokens // rows)
    splits = max(1, min(8, _PROGRAMS // tiles))
    if rows == 64:
        own = Tiling(rows, _OUTPUTS, 256, stages=3)
        gated = Tiling(rows, _OUTPUTS, 64, stages=5, prefetch=0)
    else:
        own = Tiling(rows, _OUTPUTS, 128, stages=6)
        gated = Tiling(16 if rows == 16 else 32 if tokens <= 32 else 64, _OUTPUTS, 128)
    shared = replace(own, splits=1 << (splits.bit_length() - 1))
    return LayerTilings(own, shared, gated, shared)
