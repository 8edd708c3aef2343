"""Extend attention over pages in Triton: runs of new tokens over a cached prefix and themselves.

FlashAttention-2 (Dao 2023) over a page table: each program takes a tile of one sequence's queries
and one head. The host cuts the runs into tiles; all else is read on the device. The reference is
`torch_sdpa`.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, import-untyped, import-not-found"

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor

from ramify.gpu.rows import StepRows

_TILE = 128  # queries of one program
_KEYS = 64
TILE_FIELDS = 4


def extend_tiles(step: StepRows) -> npt.NDArray[np.int32]:
    """int32[tiles, 4]: row, first query's index among the step's tokens, queries, its position.

    Tiles with the longest reach come first: they take longest.
    """
    tiles = []
    first = 0
    for row, start, count in zip(
        step.rows[: step.extends].tolist(),
        step.starts[: step.extends].tolist(),
        step.counts[: step.extends].tolist(),
        strict=True,
    ):
        for offset in range(0, count, _TILE):
            size = min(_TILE, count - offset)
            tiles.append((row, first + offset, size, start + offset))
        first += count
    tiles.sort(key=lambda tile: -(tile[3] + tile[2]))
    return np.array(tiles, dtype=np.int32).reshape(-1, TILE_FIELDS)


def most_tiles(tokens: int, runs: int) -> int:
    """The most tiles that runs of `tokens` in all can make."""
    return tokens // _TILE + runs


def extend_attention(
    q: Tensor,
    output: Tensor,
    pool: "tuple[Tensor, Tensor]",
    tiles: Tensor,
    pages: Tensor,
    page_size: int,
    window: int | None,
) -> None:
    """q [T, heads, D], output [T, heads * D], written at the queries that `tiles` names.

    tiles int32[n, 4] as of `extend_tiles`; pages int32[rows, columns]; pool: one layer's k and v,
    each [slots, kv_heads, D], the new ones included. A tile without queries costs next to nothing.
    """
    _, heads, dim = q.shape
    kv_heads = pool[0].shape[1]
    _extend[(len(tiles), heads)](
        q, pool[0], pool[1], tiles, pages, output, pages.shape[1],
        dim**-0.5 * 1.4426950408889634, HEADS=heads, KV_HEADS=kv_heads, DIM=dim, PAGE=page_size,
        WINDOW=window or 0, TILE=_TILE, KEYS=_KEYS,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=8 if q.dtype == torch.float32 else 4,
        num_stages=2 if q.dtype == torch.float32 else 3,
    )  # fmt: skip


@triton.jit
def _extend(
    q, k_pool, v_pool, tiles, pages, output, columns, scale, HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr,
    TILE: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """scale: of the scores, times log2(e), so that exp2 can be used throughout."""
    tile = tiles + tl.program_id(0) * 4
    head = tl.program_id(1)
    kv_head = head // (HEADS // KV_HEADS)
    row = tl.load(tile).to(tl.int64)
    first = tl.load(tile + 1).to(tl.int64)
    count = tl.load(tile + 2)
    position = tl.load(tile + 3)

    lines = tl.arange(0, TILE)
    dims = tl.arange(0, DIM)
    real = lines < count
    places = (first + lines)[:, None] * HEADS * DIM + head * DIM + dims[None, :]
    query = tl.load(q + places, mask=real[:, None], other=0.0)
    reach = position + lines
    low = 0
    if WINDOW:
        low = tl.maximum(position - WINDOW + 1, 0) // KEYS * KEYS
    end = position + count
    top = tl.full([TILE], -float("inf"), tl.float32)
    total = tl.zeros([TILE], tl.float32)
    mixed = tl.zeros([TILE, DIM], tl.float32)
    for begin in range(low, end, KEYS):
        keys = begin + tl.arange(0, KEYS)
        there = keys < end
        page = tl.load(pages + row * columns + keys // PAGE, mask=there, other=0).to(tl.int64)
        slot = page * PAGE + keys % PAGE
        place = (slot * KV_HEADS + kv_head)[:, None] * DIM + dims[None, :]
        k = tl.load(k_pool + place, mask=there[:, None], other=0.0)
        scores = tl.dot(query, tl.trans(k), input_precision=PRECISION) * scale
        seen = keys[None, :] <= reach[:, None]
        if WINDOW:
            seen = seen & (keys[None, :] > reach[:, None] - WINDOW)
        scores = tl.where(seen, scores, -float("inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        # a window may hide a whole tile of keys from a query
        base = tl.where(new_top == -float("inf"), 0.0, new_top)
        weights = tl.exp2(scores - base[:, None])
        fade = tl.exp2(top - base)
        total = total * fade + tl.sum(weights, 1)
        v = tl.load(v_pool + place, mask=there[:, None], other=0.0)
        mixed = mixed * fade[:, None]
        mixed += tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
        top = new_top
    mixed = mixed / tl.where(total > 0, total, 1.0)[:, None]  # lines past the run have seen nothing
    tl.store(output + places, mixed.to(output.dtype.element_ty), mask=real[:, None])
