"""Decode attention over pages in Triton: one query a sequence, its keys split over programs.

Flash-decoding (Dao et al. 2023): each program attends to a stretch of one sequence's keys for all
query heads that share them, and a second kernel merges the stretches by their log-sum-exp. It
reads page tables and lengths on the device, so nothing is planned on the host and a CUDA graph
replays it at any length. The reference is `torch_attention`.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, import-untyped, import-not-found"

import torch
import triton
import triton.language as tl
from torch import Tensor

from ramify.gpu.attention.spec import AttentionSpec
from ramify.gpu.attention.triton_shared import TILE, Parts
from ramify.gpu.attention.triton_tile import (
    PAIRS,
    apart,
    ask,
    begin_with_sinks,
    paged,
    reading,
    score_scale,
    take_keys,
    take_part,
    tile_sizes,
    together,
)
from ramify.gpu.kv.layout import LayerKV
from ramify.gpu.programmatic_launch import launch_options, overlaps, wait

_PROGRAMS = 528  # wanted at once: four a multiprocessor of a Hopper GPU
_MOST_SPLITS = 64
_KEYS = 64  # in one tile
_CROWDED = 1024  # programs
_WIDE = 256  # numbers of a head
_MERGED = 128  # numbers of a head that a program merges: more do not fit into its registers
_FEW = 8  # sequences: with more, programs that start early lose more than they gain (docs/log/gpu.md)


def splits_for(sequences: int, kv_heads: int) -> int:
    """Choose how many programs share a sequence's keys: a power of two, from the batch size alone."""
    wanted = max(1, min(_MOST_SPLITS, _PROGRAMS // (sequences * kv_heads)))
    return 1 << (wanted.bit_length() - 1)


def variant_for(sequences: int, kv_heads: int) -> tuple[bool, bool]:
    """Tell whether programs are many, and whether sequences are few: constants follow from these."""
    return sequences * kv_heads >= _CROWDED, sequences <= _FEW


def decode_attention(
    q: Tensor,
    kv: LayerKV,
    rows: Tensor,
    positions: Tensor,
    pages: Tensor,
    spec: AttentionSpec,
    splits: int,
    parts: Parts | None = None,
    output: Tensor | None = None,
    runs: Tensor | None = None,
    lines: int = 1,
) -> Tensor:
    """Attend: q [B, heads, D] at positions int32[B] of rows int32[B]; pages int32[rows, columns].

    `kv` holds the new keys and values, too. `splits`: see `splits_for`. `parts`: the results of
    `shared_attention` over the keys that lines share; then only a line's own keys are read here. `runs`
    int32[B]: how many lines the program of each line takes, that line and the next ones, which are of
    the same row at the next positions: at most `lines`, a constant of the kernel; 0: another line's
    program takes it. None: each line has its own. Returns `output` [B, heads * D], a new one if None.
    """
    sequences, heads, _ = q.shape
    kv_heads, dim, tail = tile_sizes(q, kv)
    group = heads // kv_heads
    if output is None:
        output = q.new_empty((sequences, heads * dim))
    if splits == 1:
        partial, sums = output, output
    else:
        partial = torch.empty((sequences, heads, splits, dim), dtype=torch.float32, device=q.device)
        sums = torch.empty((sequences, heads, splits), dtype=torch.float32, device=q.device)
    exact = q.dtype == torch.float32
    scale, softcap = score_scale(spec)
    crowded, few = variant_for(sequences, kv_heads)
    queries = max(16, triton.next_power_of_2(group * lines))
    read = reading(q, kv, True)
    keys, stages, warps = _tiles(dim, tail, queries, crowded and read != PAIRS.value, exact)
    stages += read == PAIRS.value  # half the bytes
    overlap = few and overlaps(q.device)
    options = launch_options(q.device) if overlap else {}
    own, shared, shared_sums = rows, sums, sums  # not read
    if parts is not None:
        own, shared, shared_sums = parts.own, parts.outputs, parts.sums
    _decode[(sequences, kv_heads, splits)](
        q, kv.k, kv.v, kv.k_scales, kv.v_scales, rows, positions, pages, partial, sums, own, shared,
        shared_sums,
        spec.sinks, runs, pages.shape[1], scale, HEADS=heads, KV_HEADS=kv_heads, GROUP=group,
        GROUP_PADDED=queries, DIM=dim, TAIL=tail,
        PAGE=kv.page_size, WINDOW=spec.window or 0, SPLITS=splits, KEYS=keys,
        PRECISION="ieee" if exact else "tf32", SOFTCAP=softcap, READING=read,
        SHARED=parts is not None, TILE=TILE, OVERLAP=overlap, num_warps=warps,
        num_stages=stages, **options,
    )  # fmt: skip
    if splits > 1:
        block = dim if dim <= _MERGED else _MERGED // 2
        _merge[(sequences, heads, dim // block)](
            partial, sums, output, HEADS=heads, DIM=dim, BLOCK=block, SPLITS=splits, OVERLAP=overlap,
            num_warps=2, **options,
        )  # fmt: skip
    return output


def _tiles(dim: int, tail: int, queries: int, crowded: bool, exact: bool) -> tuple[int, int, int]:
    """Choose the keys of a tile, the tiles in flight, and warps.

    Measured on an H200 (docs/log/gpu.md): few programs want larger tiles, many want more of them.
    """
    if tail:  # a query's sum is as wide as a latent
        return 32, 3, 4 if queries <= 16 else 8
    if exact:
        return _KEYS, 3, 4
    if dim >= _WIDE:  # two warps spill, and of tiles of 64 keys one program runs at once
        return 32, 3, 4
    keys, stages = (32, 4) if crowded else (_KEYS, 3)
    return keys, stages, 2


@triton.jit
def _decode(
    q, k_pool, v_pool, k_scales, v_scales, rows, positions, pages, partial, sums, own, shared,
    shared_sums, sinks, runs, columns, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PADDED: tl.constexpr,
    DIM: tl.constexpr, TAIL: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr,
    SPLITS: tl.constexpr,
    KEYS: tl.constexpr, PRECISION: tl.constexpr, SOFTCAP: tl.constexpr, READING: tl.constexpr,
    SHARED: tl.constexpr, TILE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Attend to a stretch. scale, SOFTCAP: see `score_scale`. sinks: float32[heads] or None."""
    sequence = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    row = tl.load(rows + sequence).to(tl.int64)
    length = tl.load(positions + sequence) + 1
    low = 0
    if WINDOW:
        low = tl.maximum(length - WINDOW, 0)
    lines = 1
    if runs is not None:
        lines = tl.load(runs + sequence)
        length += lines - 1
    stretches = 0
    if SHARED:
        low = tl.load(own + sequence * 4)
        stretches = tl.load(own + sequence * 4 + 1)
    share = tl.cdiv(tl.cdiv(length - low, SPLITS), KEYS) * KEYS
    start = low + split * share
    stop = tl.minimum(start + share, length)
    wait(OVERLAP)

    members = tl.arange(0, GROUP_PADDED)
    dims = tl.arange(0, DIM)
    real = members < GROUP
    head = kv_head * GROUP + members
    if runs is not None:
        if lines == 0:
            return
        real = members < GROUP * lines
        reach = tl.load(positions + sequence + members // GROUP, mask=real, other=0)
        # of the lines behind, too: those of a line follow each other in memory
        head = members // GROUP * HEADS + kv_head * GROUP + members % GROUP
    query, tail = ask(q, sequence * HEADS + head, dims, real, DIM, TAIL, READING)
    top = tl.full([GROUP_PADDED], -float("inf"), tl.float32)
    total = tl.zeros([GROUP_PADDED], tl.float32)
    mixed = tl.zeros([GROUP_PADDED, DIM], tl.float32)
    if sinks is not None:
        top, total = begin_with_sinks(sinks, head % HEADS, real, split)
    if SHARED:
        item = tl.load(own + sequence * 4 + 2).to(tl.int64)
        at = tl.load(own + sequence * 4 + 3) * GROUP + members
        for stretch in range(split, stretches, SPLITS):
            place = ((item + stretch) * KV_HEADS + kv_head) * TILE + at
            top, total, mixed = take_part(shared, shared_sums, place, real, dims, top, total, mixed, DIM)
    mixed = apart(mixed, GROUP_PADDED, DIM, READING)
    for begin in range(start, stop, KEYS):
        keys = begin + tl.arange(0, KEYS)
        there = keys < stop
        place = paged(pages, row, columns, keys, there, kv_head, KV_HEADS, DIM, TAIL, PAGE)
        seen = there[None, :]
        if runs is not None:
            seen = seen & (keys[None, :] <= reach[:, None])
            if WINDOW:
                seen = seen & (keys[None, :] > reach[:, None] - WINDOW)
        top, total, mixed = take_keys(
            query, tail, k_pool, v_pool, k_scales, v_scales, place, dims, there, seen, scale, top,
            total, mixed, DIM, TAIL, PRECISION, SOFTCAP, READING,
        )  # fmt: skip
    mixed = together(mixed, GROUP_PADDED, DIM, READING)
    if SPLITS == 1:
        target = partial + sequence * HEADS * DIM + head[:, None] * DIM + dims[None, :]
        if runs is not None:
            total = tl.where(real, total, 1.0)
        mixed = (mixed / total[:, None]).to(partial.dtype.element_ty)
        tl.store(target, mixed, mask=real[:, None])
    else:
        at = (sequence * HEADS + head) * SPLITS + split
        if (start < stop) | (split < stretches):
            if runs is not None:  # a query may have seen none of these keys, or be none
                total = tl.where(total > 0, total, 1.0)
            mixed = mixed / total[:, None]
            tl.store(partial + at[:, None] * DIM + dims[None, :], mixed, mask=real[:, None])
            tl.store(sums + at, top + tl.log2(total), mask=real)
        else:
            tl.store(sums + at, top, mask=real)


@triton.jit
def _merge(
    partial, sums, output, HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
    SPLITS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Merge the stretches of some of a head; an empty one has the sum -inf and unwritten outputs."""
    wait(OVERLAP)
    at = tl.program_id(0).to(tl.int64) * HEADS + tl.program_id(1)
    splits = tl.arange(0, SPLITS)
    dims = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    lse = tl.load(sums + at * SPLITS + splits)
    weights = tl.exp2(lse - tl.max(lse, 0))
    parts = tl.load(
        partial + (at * SPLITS + splits)[:, None] * DIM + dims[None, :],
        mask=(lse > -float("inf"))[:, None],
        other=0.0,
    )
    mixed = tl.sum(parts * weights[:, None], 0) / tl.sum(weights, 0)
    tl.store(output + at * DIM + dims, mixed.to(output.dtype.element_ty))
