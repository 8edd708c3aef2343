"""Extend attention over pages in Triton: runs of new tokens over a cached prefix and themselves.

FlashAttention-2 (Dao 2023) over a page table. A program takes a tile of one sequence's tokens with
all the query heads of one kv head, so keys are read once for them. Where a step has few tiles over
long prefixes, several programs share a tile's keys, as in flash-decoding (Dao et al. 2023), and a
second kernel merges their results. The host cuts the runs into items; all else is read on the
device. The reference is `torch_attention`.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, import-untyped, import-not-found"

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from ramify.gpu.attention.spec import AttentionSpec
from ramify.gpu.attention.triton_tile import (
    HALF,
    ask,
    begin_with_sinks,
    paged,
    reading,
    score_scale,
    take_keys,
    take_part,
    tile_sizes,
)
from ramify.gpu.kv.layout import LayerKV
from ramify.gpu.programmatic_launch import launch_options, overlaps, wait
from ramify.gpu.step.inputs import Plan
from ramify.gpu.step.rows import StepRows
from ramify.gpu.step.step_rows import Tokens, within

_TILE = 64  # query heads of one program
_KEYS = 64
_WARPS = 4
_STAGES = 3
_PROGRAMS = 264  # wanted at once: two a multiprocessor of a Hopper GPU
_LEAST_STRETCH = 256  # keys: less is not worth a program and a merge
ITEM_FIELDS = 7
_MERGE_FIELDS = 4


def extend_items(
    step: StepRows, heads: int, kv_heads: int, window: int | None = None, behind: Tokens | None = None
) -> Plan:
    """Plan the programs of a step, and the merges of their results.

    items int32[n, 7]: row, first query's index among the step's tokens, queries, position of the
    first, first and last (excluded) key, index of its part or -1 for a tile that has no other item.
    Those with the longest reach come first: they take longest.
    merges int32[m, 4]: first query's index, queries, first part, parts.
    `window`: how many positions back a token sees at most; None: all. `behind` [T]: how many tokens
    after itself each sees, inside of a picture; None: none.
    """
    size = _TILE * kv_heads // heads  # tokens in a tile
    rows, starts, counts = (part[: step.extends] for part in (step.rows, step.starts, step.counts))
    tiles = -(-counts // size)
    run = np.repeat(np.arange(len(rows)), tiles)
    offset = (np.arange(len(run)) - np.repeat(np.cumsum(tiles) - tiles, tiles)) * size
    queries = np.minimum(counts[run] - offset, size)
    position = starts[run] + offset
    first = (np.cumsum(counts) - counts)[run] + offset
    low = 0 * position if window is None else np.maximum(position - window + 1, 0)
    reach = position + queries - low  # keys that some query of the tile sees
    if behind is not None and len(run):
        line = within(counts)
        ends = np.repeat(starts, counts) + line + 1 + behind[: len(line)]
        reach = np.maximum.reduceat(ends, first) - low

    cuts = np.ones(len(run), dtype=np.int64)
    spare = _wanted(kv_heads) - len(run)
    if spare > 0:  # share the keys out so that the items are as many as wanted, at most
        share = max(_LEAST_STRETCH, -(-int(reach.sum()) // spare))
        cuts = -(-reach // share)
    stretch = -(-reach // (cuts * _KEYS)) * _KEYS
    cuts = -(-reach // stretch)
    tile = np.repeat(np.arange(len(run)), cuts)  # of each item
    start = (np.arange(len(tile)) - np.repeat(np.cumsum(cuts) - cuts, cuts)) * stretch[tile]
    stop = np.minimum(start + stretch[tile], reach[tile])
    start, stop = start + low[tile], stop + low[tile]
    split = cuts[tile] > 1
    part = np.where(split, np.cumsum(split) - 1, -1)
    items = np.stack(
        [rows[run[tile]], first[tile], queries[tile], position[tile], start, stop, part], axis=1
    )
    several = np.flatnonzero(cuts > 1)
    first_part = np.cumsum(cuts[several]) - cuts[several]
    merges = np.stack([first[several], queries[several], first_part, cuts[several]], axis=1)
    longest_first = np.argsort(start - stop, kind="stable")
    return {"items": items[longest_first].astype(np.int32), "merges": merges.astype(np.int32)}


def extend_room(tokens: int, runs: int, heads: int, kv_heads: int) -> Plan:
    """Make zeros as large as `extend_items` can need for so many tokens in so many runs.

    Zeros after a step's own items and merges are programs that end at once.
    """
    tiles = tokens // (_TILE * kv_heads // heads) + runs
    wanted = _wanted(kv_heads)
    items = np.zeros((max(tiles, wanted), ITEM_FIELDS), dtype=np.int32)
    merges = np.zeros((min(tiles, wanted), _MERGE_FIELDS), dtype=np.int32)
    return {"items": items, "merges": merges}


def _wanted(kv_heads: int) -> int:
    return max(1, _PROGRAMS // kv_heads)


def extend_attention(
    q: Tensor,
    output: Tensor,
    kv: LayerKV,
    items: Tensor,
    merges: Tensor,
    pages: Tensor,
    spec: AttentionSpec,
    behind: Tensor | None = None,
) -> None:
    """Attend: q [T, heads, D] -> output [T, heads * D], written at the queries of `items`.

    items int32[n, 7], merges int32[m, 4], behind int32[T]: see `extend_items`; pages int32[rows,
    columns]. `kv` holds the new keys and values, too.
    """
    assert behind is None or spec.sinks is None  # the kernel takes these in with a tile's own last key
    heads, (kv_heads, dim, tail) = q.shape[1], tile_sizes(q, kv)
    exact = q.dtype == torch.float32
    scale, softcap = score_scale(spec)
    # so that a tile's queries, keys and values fit into the 227 KiB of a Hopper's multiprocessor
    narrow = exact or dim > 256
    read = reading(q, kv)
    keys = _KEYS if dim <= 256 else 16 if exact else 32
    if read == HALF.value and dim <= 128:
        keys = 2 * _KEYS  # of half the bytes: 8 % faster on an H200
    # more items than are wanted leave no parts, and no merges none at all
    most = min(len(items), _wanted(kv_heads)) if len(merges) else 0
    parts = torch.empty((most, kv_heads, _TILE, dim), dtype=torch.float32, device=q.device)
    sums = torch.empty((most, kv_heads, _TILE), dtype=torch.float32, device=q.device)
    _extend[(len(items), kv_heads)](
        q, kv.k, kv.v, kv.k_scales, kv.v_scales, items, pages, output, parts, sums, spec.sinks, behind,
        pages.shape[1], scale, HEADS=heads, KV_HEADS=kv_heads, GROUP=heads // kv_heads,
        DIM=dim, TAIL=tail, PAGE=kv.page_size, WINDOW=spec.window or 0, TILE=_TILE, KEYS=keys,
        PRECISION="ieee" if exact else "tf32", SOFTCAP=softcap, READING=read,
        OVERLAP=overlaps(q.device), num_warps=8 if narrow else _WARPS,
        num_stages=2 if narrow else _STAGES, **launch_options(q.device),
    )  # fmt: skip
    if len(merges):
        lines = 16
        _merge[(len(merges), kv_heads, _TILE // lines)](
            parts, sums, merges, output, HEADS=heads, KV_HEADS=kv_heads, GROUP=heads // kv_heads,
            DIM=dim, TILE=_TILE, LINES=lines, OVERLAP=overlaps(q.device), num_warps=4,
            **launch_options(q.device),
        )  # fmt: skip


@triton.jit
def _extend(
    q, k_pool, v_pool, k_scales, v_scales, items, pages, output, parts, sums, sinks, behind, columns,
    scale, HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, TAIL: tl.constexpr,
    PAGE: tl.constexpr, WINDOW: tl.constexpr, TILE: tl.constexpr, KEYS: tl.constexpr,
    PRECISION: tl.constexpr, SOFTCAP: tl.constexpr, READING: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Run an item. scale, SOFTCAP: see `score_scale`. sinks: float32[heads] or None."""
    item = items + tl.program_id(0) * 7
    kv_head = tl.program_id(1)
    row = tl.load(item).to(tl.int64)
    first = tl.load(item + 1).to(tl.int64)
    count = tl.load(item + 2)
    position = tl.load(item + 3)
    start = tl.load(item + 4)
    stop = tl.load(item + 5)
    part = tl.load(item + 6)
    wait(OVERLAP)
    if count == 0:
        return

    lines = tl.arange(0, TILE)
    dims = tl.arange(0, DIM)
    real = lines < count * GROUP
    asked = (first + lines // GROUP) * HEADS + kv_head * GROUP + lines % GROUP
    places = asked[:, None] * DIM + dims[None, :]
    query, tail = ask(q, asked, dims, real, DIM, TAIL, READING)
    own = position + lines // GROUP
    reach = own
    if behind is not None:
        reach = own + tl.load(behind + first + lines // GROUP, mask=real, other=0)
    if WINDOW:
        start = tl.maximum(start, position - WINDOW + 1)
    top = tl.full([TILE], -float("inf"), tl.float32)
    total = tl.zeros([TILE], tl.float32)
    mixed = tl.zeros([TILE, DIM], tl.float32)
    if sinks is not None:
        head = kv_head * GROUP + lines % GROUP
        # taken in with the tile's last keys: the host knows where the first ones are, and it alone
        top, total = begin_with_sinks(sinks, head, real, position + count - stop)
    for begin in range(start, stop, KEYS):
        keys = begin + tl.arange(0, KEYS)
        there = keys < stop
        place = paged(pages, row, columns, keys, there, kv_head, KV_HEADS, DIM, TAIL, PAGE)
        seen = keys[None, :] <= reach[:, None]
        if WINDOW:
            seen = seen & (keys[None, :] > own[:, None] - WINDOW)
        top, total, mixed = take_keys(
            query, tail, k_pool, v_pool, k_scales, v_scales, place, dims, there, seen, scale, top,
            total, mixed, DIM, TAIL, PRECISION, SOFTCAP, READING,
        )  # fmt: skip
    total = tl.where(total > 0, total, 1.0)  # a query may have seen nothing
    mixed = mixed / total[:, None]
    if part < 0:
        tl.store(output + places, mixed.to(output.dtype.element_ty), mask=real[:, None])
    else:
        at = (part.to(tl.int64) * KV_HEADS + kv_head) * TILE + lines
        tl.store(parts + at[:, None] * DIM + dims[None, :], mixed, mask=real[:, None])
        tl.store(sums + at, top + tl.log2(total), mask=real)


@triton.jit
def _merge(
    parts, sums, merges, output, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    DIM: tl.constexpr, TILE: tl.constexpr, LINES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Merge the parts of some lines of a tile; a part without keys that a line sees has the sum -inf."""
    merge = merges + tl.program_id(0) * 4
    kv_head = tl.program_id(1)
    first = tl.load(merge).to(tl.int64)
    count = tl.load(merge + 1)
    part = tl.load(merge + 2).to(tl.int64)
    number = tl.load(merge + 3)
    wait(OVERLAP)
    if tl.program_id(2) * LINES >= count * GROUP:
        return

    lines = tl.program_id(2) * LINES + tl.arange(0, LINES)
    dims = tl.arange(0, DIM)
    real = lines < count * GROUP
    top = tl.full([LINES], -float("inf"), tl.float32)
    total = tl.zeros([LINES], tl.float32)
    mixed = tl.zeros([LINES, DIM], tl.float32)
    for index in range(number):
        at = ((part + index) * KV_HEADS + kv_head) * TILE + lines
        top, total, mixed = take_part(parts, sums, at, real, dims, top, total, mixed, DIM)
    mixed = mixed / total[:, None]
    token = first + lines // GROUP
    places = (token * HEADS + kv_head * GROUP + lines % GROUP)[:, None] * DIM + dims[None, :]
    tl.store(output + places, mixed.to(output.dtype.element_ty), mask=real[:, None])
