"""Triton kernels of latent attention, without attention itself: stores, and products by head.

Sums are in float32, in one order for a row whatever the batch is. The reference is `attention.latent`.
This file knows neither models nor requests.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, import-untyped, import-not-found"

import torch
import triton
import triton.language as tl
from torch import Tensor

from ramify.gpu.attention.latent import LatentHeads
from ramify.gpu.kv.layout import LayerKV
from ramify.gpu.ops.rmsnorm import RMSNorm
from ramify.gpu.programmatic_launch import overlap_options, wait, wait_first
from ramify.gpu.triton_fp8 import narrowed, scale_of

_FEW = 32  # rows: up to so many, a tile of 16 rows multiplies no padding that counts
_INPUTS = 64  # of one step of a sum; of few rows twice as many
_OUTPUTS = 64  # of one program
_PROGRAMS = 128  # about the multiprocessors: with fewer, a program has fewer outputs of few rows


def store_latents(
    queries: Tensor,
    kept: Tensor,
    heads: LatentHeads,
    norm: RMSNorm,
    cos_sin: tuple[Tensor, Tensor],
    rows: Tensor,
    positions: Tensor,
    pages: Tensor,
    kv: LayerKV,
    growth: Tensor | None,
    absorbed: bool | None = None,
) -> Tensor:
    """Write each token's latent, normalised, and its rotated part into `kv`; rotate the queries' ends.

    queries [T, heads * (nope + turned)] and kept [T, rank + turned]: views whose last dimension is
    contiguous. cos_sin: each float32[positions, turned / 2]; growth float32[T]: factors of queries.
    Returns [T, heads, rank + turned]. `absorbed`: not None: the same launch fills the beginnings, too,
    as `absorb` does; the value is its `invariant`. None: only the ends are filled.
    """
    tokens, count, rank, turned = len(queries), len(heads.up), heads.rank, kv.tail
    q = queries.new_empty((tokens, count, rank + turned))
    together = min(16, triton.next_power_of_2(count))
    programs, sizes = 0, _Sizes(queries, heads.up, 0, True)  # not read without a product
    if absorbed is not None:
        sizes = _Sizes(queries, heads.up, rank, absorbed)
        programs = sizes.programs
    _store[(programs + tokens * (1 + triton.cdiv(count, together)),)](
        queries, kept, q, kv.k, kv.k_scales, norm.weight, cos_sin[0], cos_sin[1], rows, positions,
        pages, growth, heads.up, programs, tokens, queries.stride(0), kept.stride(0), pages.shape[1],
        norm.eps, heads.up.stride(0), HEADS=count, NOPE=heads.nope, RANK=rank, HALF=turned // 2,
        TOGETHER=together, PAGE=kv.page_size, ABSORB=absorbed is not None,
        **sizes.of_kernel(heads.nope), num_warps=4, **overlap_options(queries.device),
    )  # fmt: skip
    return q


def absorb(
    queries: Tensor, heads: LatentHeads, q: Tensor, growth: Tensor | None, invariant: bool
) -> None:
    """Fill the beginnings of q, the result of `store_latents`, with absorbed queries."""
    _product(
        queries, queries.stride(0), heads.nope + q.shape[2] - heads.rank, heads.nope,
        heads.up, heads.rank, 1, q, q.shape[2], heads.rank, growth, invariant,
    )  # fmt: skip


def open_latents(
    mixed: Tensor, heads: LatentHeads, invariant: bool, output: Tensor | None = None
) -> Tensor:
    """Multiply mixed latents [T, heads * rank] to outputs [T, heads * value]."""
    if output is None:
        output = mixed.new_empty((len(mixed), len(heads.up) * heads.value))
    _product(
        mixed, mixed.stride(0), heads.rank, heads.rank, heads.up[:, heads.nope :], 1, heads.rank,
        output, heads.value, heads.value, None, invariant,
    )  # fmt: skip
    return output


class _Sizes:
    """The tiles of the products of all heads. `invariant`: one tile for all numbers of rows."""

    def __init__(self, x: Tensor, weights: Tensor, outputs: int, invariant: bool) -> None:
        few, heads, block = len(x) <= _FEW and not invariant, len(weights), _OUTPUTS
        while few and block > 16 and heads * triton.cdiv(outputs, block) < _PROGRAMS:
            block //= 2
        self._few, self._exact, self._block = few, x.dtype == torch.float32, block
        self._tile = 16 if few else 64
        self.programs = triton.cdiv(len(x), self._tile) * heads * triton.cdiv(outputs, block)

    def of_kernel(self, inputs: int) -> dict[str, int | str]:
        return {
            "TILE": self._tile, "BLOCK_OUT": self._block,
            "BLOCK_IN": min(_INPUTS * (1 + self._few), triton.next_power_of_2(inputs)),
            "PRECISION": "ieee" if self._exact else "tf32",
        }  # fmt: skip


def _product(
    x: Tensor,
    row: int,
    head: int,
    inputs: int,
    weights: Tensor,
    by_input: int,
    by_output: int,
    output: Tensor,
    width: int,
    outputs: int,
    growth: Tensor | None,
    invariant: bool,
) -> None:
    """Compute each head's product. `row`, `head`: strides of x; `width`: of a head of the output.

    `by_input`, `by_output`: strides of a head's weights.
    """
    sizes = _Sizes(x, weights, outputs, invariant)
    _by_head[(sizes.programs,)](
        x, weights, output, growth, len(x), row, weights.stride(0), HEADS=len(weights), HEAD=head,
        WIDTH=width, INPUTS=inputs, OUTPUTS=outputs, BY_INPUT=by_input, BY_OUTPUT=by_output,
        **sizes.of_kernel(inputs), num_warps=4, **overlap_options(x.device),
    )  # fmt: skip


@triton.jit(do_not_specialize=["products", "tokens"])
def _store(
    queries, kept, q, pool, scales, weight, cos, sin, rows, positions, pages, growth, up, products,
    tokens, q_stride, kept_stride, columns, eps, up_stride, HEADS: tl.constexpr, NOPE: tl.constexpr,
    RANK: tl.constexpr, HALF: tl.constexpr, TOGETHER: tl.constexpr, PAGE: tl.constexpr,
    ABSORB: tl.constexpr, TILE: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr,
    PRECISION: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Store latents. The first `products` programs absorb; of those of each token the first takes what
    is stored, the others the ends of TOGETHER heads' queries.
    """
    wait_first(OVERLAP)  # attention comes next
    index = tl.program_id(0)
    if index >= products:
        PARTS: tl.constexpr = 1 + (HEADS + TOGETHER - 1) // TOGETHER
        token = ((index - products) // PARTS).to(tl.int64)
        part = (index - products) % PARTS
        position = tl.load(positions + token)
        half = tl.arange(0, HALF)
        c = tl.load(cos + position.to(tl.int64) * HALF + half)
        s = tl.load(sin + position.to(tl.int64) * HALF + half)
        if part == 0:
            row = tl.load(rows + token).to(tl.int64)
            page = tl.load(pages + row * columns + position // PAGE).to(tl.int64)
            slot = page * PAGE + position % PAGE
            _keep(
                kept + token * kept_stride, pool, scales, slot, weight, eps, c, s, half, RANK, HALF
            )  # fmt: skip
        else:
            heads = (part - 1) * TOGETHER + tl.arange(0, TOGETHER)[:, None]
            real = heads < HEADS
            ends = queries + token * q_stride + heads * (NOPE + 2 * HALF) + NOPE + half[None, :]
            lows = tl.load(ends, mask=real, other=0.0).to(tl.float32)
            highs = tl.load(ends + HALF, mask=real, other=0.0).to(tl.float32)
            if growth is not None:
                factor = tl.load(growth + token)
                lows = lows * factor
                highs = highs * factor
            turned_lows = lows * c[None, :] - highs * s[None, :]
            turned_highs = highs * c[None, :] + lows * s[None, :]
            turned = q + (token * HEADS + heads) * (RANK + 2 * HALF) + RANK + half[None, :]
            tl.store(turned, turned_lows.to(q.dtype.element_ty), mask=real)
            tl.store(turned + HALF, turned_highs.to(q.dtype.element_ty), mask=real)
    elif ABSORB:
        _head_product(
            index, queries, up, q, growth, tokens, q_stride, up_stride, HEADS, NOPE + 2 * HALF,
            RANK + 2 * HALF, NOPE, RANK, RANK, 1, TILE, BLOCK_IN, BLOCK_OUT, PRECISION,
        )  # fmt: skip


@triton.jit
def _keep(
    kept, pool, scales, slot, weight, eps, c, s, half, RANK: tl.constexpr, HALF: tl.constexpr
):  # fmt: skip
    """Write a token's latent, normalised, and its rotated part; as codes, if there are scales."""
    target = pool + slot * (RANK + 2 * HALF)
    dims = tl.arange(0, RANK)
    latent = tl.load(kept + dims).to(tl.float32)
    scale = tl.rsqrt(tl.sum(latent * latent) / RANK + eps)
    latent = latent * scale * tl.load(weight + dims).to(tl.float32)
    source = kept + RANK + half
    low = tl.load(source).to(tl.float32)
    high = tl.load(source + HALF).to(tl.float32)
    turned_low, turned_high = low * c - high * s, high * c + low * s
    if scales is not None:
        largest = tl.maximum(tl.max(tl.abs(turned_low)), tl.max(tl.abs(turned_high)))
        scale = scale_of(tl.maximum(largest, tl.max(tl.abs(latent))))
        tl.store(scales + slot, scale)
        latent = narrowed(latent / scale)
        turned_low, turned_high = narrowed(turned_low / scale), narrowed(turned_high / scale)
    tl.store(target + dims, latent.to(pool.dtype.element_ty))
    tl.store(target + RANK + half, turned_low.to(pool.dtype.element_ty))
    tl.store(target + RANK + HALF + half, turned_high.to(pool.dtype.element_ty))


@triton.jit(do_not_specialize=["count"])
def _by_head(
    x, weights, output, growth, count, x_row, w_head, HEADS: tl.constexpr, HEAD: tl.constexpr,
    WIDTH: tl.constexpr, INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, BY_INPUT: tl.constexpr,
    BY_OUTPUT: tl.constexpr, TILE: tl.constexpr, BLOCK_IN: tl.constexpr, BLOCK_OUT: tl.constexpr,
    PRECISION: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    wait(OVERLAP)
    _head_product(
        tl.program_id(0), x, weights, output, growth, count, x_row, w_head, HEADS, HEAD, WIDTH, INPUTS,
        OUTPUTS, BY_INPUT, BY_OUTPUT, TILE, BLOCK_IN, BLOCK_OUT, PRECISION,
    )  # fmt: skip


@triton.jit
def _head_product(
    index, x, weights, output, growth, count, x_row, w_head, HEADS: tl.constexpr, HEAD: tl.constexpr,
    WIDTH: tl.constexpr, INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, BY_INPUT: tl.constexpr,
    BY_OUTPUT: tl.constexpr, TILE: tl.constexpr, BLOCK_IN: tl.constexpr, BLOCK_OUT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute a tile of a head's product; neighbours take the same weights for other rows."""
    tiles = tl.cdiv(count, TILE)
    head = (index // tiles % HEADS).to(tl.int64)
    lines = (index % tiles * TILE + tl.arange(0, TILE)).to(tl.int64)
    columns = index // tiles // HEADS * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    real = lines < count
    inside = columns < OUTPUTS
    total = tl.zeros([TILE, BLOCK_OUT], tl.float32)
    for begin in range(0, INPUTS, BLOCK_IN):
        inputs = begin + tl.arange(0, BLOCK_IN)
        there = inputs < INPUTS
        a = tl.load(
            x + lines[:, None] * x_row + head * HEAD + inputs[None, :],
            mask=real[:, None] & there[None, :], other=0.0,
        )  # fmt: skip
        w = tl.load(
            weights + head * w_head + inputs[:, None] * BY_INPUT + columns[None, :] * BY_OUTPUT,
            mask=there[:, None] & inside[None, :], other=0.0,
        )  # fmt: skip
        total = tl.dot(a, w, total, input_precision=PRECISION)
    if growth is not None:
        total = total * tl.load(growth + lines, mask=real, other=0.0)[:, None]
    target = output + (lines[:, None] * HEADS + head) * WIDTH + columns[None, :]
    tl.store(target, total.to(output.dtype.element_ty), mask=real[:, None] & inside[None, :])
