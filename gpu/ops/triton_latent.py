"""Triton kernels of latent attention beside attention itself: what is stored, and products by head.

Sums are in float32, in one order for a row whatever the batch is. The reference is `attention.latent`.
Knows neither models nor requests.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, import-untyped, import-not-found"

import torch
import triton
import triton.language as tl
from torch import Tensor

from ramify.gpu.attention.latent import LatentHeads
from ramify.gpu.kv.layout import LayerKV
from ramify.gpu.ops.rmsnorm import RMSNorm
from ramify.gpu.triton_fp8 import narrowed, scale_of

_FEW = 32  # rows: up to so many, a tile of 16 rows multiplies no padding that counts
_INPUTS = 64  # of one step of a sum
_OUTPUTS = 64


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
) -> Tensor:
    """Write each token's latent, normalised, and its turned part into `kv`; turn the queries' ends.

    queries [T, heads * (nope + turned)] and kept [T, rank + turned]: views whose last dimension is
    contiguous. cos_sin: each float32[positions, turned / 2]; growth float32[T]: what queries are
    multiplied by. Returns [T, heads, rank + turned], of which only the ends are filled.
    """
    count, rank, turned = len(heads.up), heads.rank, kv.tail
    q = queries.new_empty((len(queries), count, rank + turned))
    together = min(16, triton.next_power_of_2(count))
    _store[(len(queries), 1 + triton.cdiv(count, together))](
        queries, kept, q, kv.k, kv.k_scales, norm.weight, cos_sin[0], cos_sin[1], rows, positions,
        pages, growth,
        queries.stride(0), kept.stride(0), pages.shape[1], norm.eps, HEADS=count, NOPE=heads.nope,
        RANK=rank, HALF=turned // 2, TOGETHER=together, PAGE=kv.page_size, num_warps=4,
    )  # fmt: skip
    return q


def absorb(
    queries: Tensor, heads: LatentHeads, q: Tensor, growth: Tensor | None, invariant: bool
) -> None:
    """Fill the beginnings of q, as of `store_latents`, with what reads latents."""
    _product(
        queries, queries.stride(0), heads.nope + q.shape[2] - heads.rank, heads.nope,
        heads.up, heads.rank, 1, q, q.shape[2], heads.rank, growth, invariant,
    )  # fmt: skip


def open_latents(
    mixed: Tensor, heads: LatentHeads, invariant: bool, output: Tensor | None = None
) -> Tensor:
    """Mixed latents [T, heads * rank] -> outputs [T, heads * value]."""
    if output is None:
        output = mixed.new_empty((len(mixed), len(heads.up) * heads.value))
    _product(
        mixed, mixed.stride(0), heads.rank, heads.rank, heads.up[:, heads.nope :], 1, heads.rank,
        output, heads.value, heads.value, None, invariant,
    )  # fmt: skip
    return output


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
    """Each head's product. `row`, `head`: from one to the next in x; `width`: of a head of the output.

    `by_input`, `by_output`: from one to the next in a head's weights. `invariant`: one tile for all T.
    """
    tile = 16 if len(x) <= _FEW and not invariant else 64
    exact = x.dtype == torch.float32
    heads = len(weights)
    _by_head[(triton.cdiv(len(x), tile), heads, triton.cdiv(outputs, _OUTPUTS))](
        x, weights, output, growth, len(x), row, weights.stride(0), HEADS=heads, HEAD=head, WIDTH=width,
        INPUTS=inputs, OUTPUTS=outputs, BY_INPUT=by_input, BY_OUTPUT=by_output, TILE=tile,
        BLOCK_IN=min(_INPUTS, triton.next_power_of_2(inputs)), BLOCK_OUT=_OUTPUTS,
        PRECISION="ieee" if exact else "tf32", num_warps=4,
    )  # fmt: skip


@triton.jit
def _store(
    queries, kept, q, pool, scales, weight, cos, sin, rows, positions, pages, growth, q_stride,
    kept_stride,
    columns, eps, HEADS: tl.constexpr, NOPE: tl.constexpr, RANK: tl.constexpr, HALF: tl.constexpr,
    TOGETHER: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Program 0 of a token: what is kept. The others: the ends of so many heads' queries."""
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + token)
    half = tl.arange(0, HALF)
    c = tl.load(cos + position.to(tl.int64) * HALF + half)
    s = tl.load(sin + position.to(tl.int64) * HALF + half)
    if tl.program_id(1) == 0:
        row = tl.load(rows + token).to(tl.int64)
        page = tl.load(pages + row * columns + position // PAGE).to(tl.int64)
        slot = page * PAGE + position % PAGE
        target = pool + slot * (RANK + 2 * HALF)
        dims = tl.arange(0, RANK)
        latent = tl.load(kept + token * kept_stride + dims).to(tl.float32)
        scale = tl.rsqrt(tl.sum(latent * latent) / RANK + eps)
        latent = latent * scale * tl.load(weight + dims).to(tl.float32)
        source = kept + token * kept_stride + RANK + half
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
    else:
        heads = (tl.program_id(1) - 1) * TOGETHER + tl.arange(0, TOGETHER)[:, None]
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


@triton.jit(do_not_specialize=["count"])
def _by_head(
    x, weights, output, growth, count, x_row, w_head, HEADS: tl.constexpr, HEAD: tl.constexpr,
    WIDTH: tl.constexpr, INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, BY_INPUT: tl.constexpr,
    BY_OUTPUT: tl.constexpr, TILE: tl.constexpr, BLOCK_IN: tl.constexpr, BLOCK_OUT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    lines = (tl.program_id(0) * TILE + tl.arange(0, TILE)).to(tl.int64)
    columns = tl.program_id(2) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
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
