"""Decode attention over pages in Triton for many sequences, whose keys are cut into equal shares.

One program for each sequence and KV head wastes time: the last wave of programs may be nearly empty,
and a long sequence keeps the others waiting. 140 equal sequences took a third longer than 132, which
fill an H200 exactly. Here as many programs are launched as run at once, whatever the batch. The
sequences' keys are laid end to end, and each program takes an equal share (stream-K, Osama et al. 2023;
lean attention, Sanovar et al. 2024). If several programs share a sequence, the last one to finish merges
their parts by their log-sum-exp. Sequences of nearly equal lengths are cut into equally many parts, so
that no share crosses from one to the next. Lengths are read on the device, so nothing is planned on the
host and a CUDA graph replays it at any length. The reference is `torch_attention`.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, import-untyped, import-not-found"

import torch
import triton
import triton.language as tl
from torch import Tensor

from ramify.gpu.attention.spec import AttentionShape, AttentionSpec
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
from ramify.gpu.devices import multiprocessors
from ramify.gpu.kv.layout import LayerKV
from ramify.gpu.programmatic_launch import launch_options, overlaps, wait

_RESIDENT = 6  # programs that one multiprocessor runs at once
_REGISTERS = 168  # of a thread at most, so that so many fit into its 65,536
_WIDE, _WIDE_RESIDENT = 256, 3  # the same of heads of more numbers, by four warps each
_TILE = 32 * 128  # keys times head size
_UNIT = tl.constexpr(16)  # keys: a share is a multiple of it
_LEAST = tl.constexpr(4)  # units: a smaller part of a sequence is left to the neighbour


def shares_for(device: torch.device, shape: AttentionShape, lines: int) -> int:
    """Count the shares for each KV head: as many as programs run at once.

    `shape`: the `tiled` one; a program takes up to `lines` lines of a row.
    """
    if device.type != "cuda":
        return 4
    resident = _RESIDENT if shape.head_dim <= _WIDE else _WIDE_RESIDENT
    if shape.value_dim is not None:
        warps, _ = _latent_options(_padded(shape.group * lines))
        resident = 2 if warps == 4 else 1
    return max(1, resident * multiprocessors(device) // shape.kv_heads)


def _padded(queries: int) -> int:
    return max(16, 1 << (queries - 1).bit_length())


def _latent_options(queries: int) -> tuple[int, int]:
    """Choose warps and registers of a thread, where each query keeps a sum as wide as a latent.

    As many as avoid spills; two programs run at once, or one.
    """
    return (4, 240) if queries <= 16 else (8, 255)


def block_for(sequences: int) -> int:
    """Choose how many lengths a program loads: a constant of the kernel."""
    return max(16, 1 << (sequences - 1).bit_length())


def balanced_attention(
    q: Tensor,
    output: Tensor,
    kv: LayerKV,
    rows: Tensor,
    positions: Tensor,
    pages: Tensor,
    spec: AttentionSpec,
    shares: int,
    arrived: Tensor,
    runs: Tensor | None = None,
    lines: int = 1,
) -> None:
    """Attend: q [B, heads, D] at positions int32[B] of rows int32[B] -> output [B, heads * D].

    pages int32[rows, columns]. `kv` holds the new keys and values, too. `shares`: see `shares_for`.
    `arrived` int32[>= B * kv_heads]: zeros before and after a launch, so launches that use them must
    follow each other on one stream. `runs`, `lines`: see `triton_decode`.
    """
    sequences, heads, _ = q.shape
    kv_heads, dim, tail = tile_sizes(q, kv)
    group = heads // kv_heads
    # a program leaves at most two: of the sequence in which its share begins, and of the last
    parts = torch.empty((2 * shares, lines * heads, dim), dtype=torch.float32, device=q.device)
    sums = torch.empty((2 * shares, lines * heads), dtype=torch.float32, device=q.device)
    exact = q.dtype == torch.float32
    scale, softcap = score_scale(spec)
    read = reading(q, kv, True)
    queries, keys = _padded(group * lines), min(64, max(16, (_TILE << (read == PAIRS.value)) // dim))
    warps, registers = 4 if exact or dim > _WIDE else 2, _REGISTERS
    if tail:
        keys, (warps, registers) = 32, _latent_options(queries)
    _attend[(shares, kv_heads)](
        q, kv.k, kv.v, kv.k_scales, kv.v_scales, rows, positions, pages, output, parts, sums, arrived,
        spec.sinks, runs, sequences, pages.shape[1], scale, HEADS=heads, KV_HEADS=kv_heads, GROUP=group,
        GROUP_PADDED=queries, DIM=dim, TAIL=tail, PAGE=kv.page_size,
        WINDOW=spec.window or 0, KEYS=keys, SHARES=shares,
        BLOCK=block_for(sequences), LINES=lines, PRECISION="ieee" if exact else "tf32", SOFTCAP=softcap,
        READING=read, OVERLAP=overlaps(q.device), num_warps=warps,
        num_stages=2 if tail else 3, maxnreg=registers, **launch_options(q.device),
    )  # fmt: skip


@triton.jit
def _cut(ends, total, at):
    """Move the beginning `at` of a share to a sequence's end, if one is near."""
    at = tl.minimum(at, total)
    before = at - tl.max(tl.where(ends <= at, ends, 0), 0)
    after = tl.min(tl.where(ends > at, ends, total), 0) - at
    near = tl.where(before < after, at - before, at + after)
    return tl.where((before < _LEAST) | (after < _LEAST), near, at)


@triton.jit(do_not_specialize=["sequences"])
def _attend(
    q, k_pool, v_pool, k_scales, v_scales, rows, positions, pages, output, parts, sums, arrived, sinks,
    runs, sequences, columns, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PADDED: tl.constexpr,
    DIM: tl.constexpr, TAIL: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr, KEYS: tl.constexpr,
    SHARES: tl.constexpr, BLOCK: tl.constexpr, LINES: tl.constexpr, PRECISION: tl.constexpr,
    SOFTCAP: tl.constexpr, READING: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Attend to a share. scale, SOFTCAP: see `score_scale`. sinks: float32[heads] or None."""
    program = tl.program_id(0)
    kv_head = tl.program_id(1)
    index = tl.arange(0, BLOCK)
    lengths = tl.load(positions + index, mask=index < sequences, other=-1) + 1
    if WINDOW:
        lengths = tl.minimum(lengths, WINDOW)
    own_runs = sequences
    if runs is not None:
        taken = tl.load(runs + index, mask=index < sequences, other=0)
        lengths = tl.where(taken > 0, lengths + taken - 1, 0)
        before = tl.cumsum((taken > 0).to(tl.int32), 0)  # runs up to each sequence
        own_runs = tl.maximum(tl.max(before, 0), 1)
    units = tl.cdiv(lengths, _UNIT)
    ends = tl.cumsum(units, 0)  # of the sequences
    total = tl.max(ends, 0)
    each = SHARES // own_runs  # shares for every sequence, if they are alike
    alike = (each > 0) & (tl.max(units, 0) * own_runs * 8 <= total * 9)
    if alike:
        sequence = tl.minimum(program // each, own_runs - 1)
        ordinal = sequence  # among the runs
        if runs is not None:
            sequence = tl.sum((before <= sequence).to(tl.int32), 0)
        first = tl.max(tl.where(index < sequence, ends, 0), 0)
        own = tl.sum(tl.where(index == sequence, units, 0), 0)
        share = tl.maximum(tl.cdiv(own, each), _LEAST)
        begin = first + tl.minimum((program - ordinal * each) * share, own)
        until = tl.minimum(begin + share, first + own)
        after = sequence + 1
    else:
        ordinal = 0
        share = tl.maximum(tl.cdiv(total, SHARES), _LEAST)
        begin = _cut(ends, total, program * share)
        until = _cut(ends, total, program * share + share)
        sequence = tl.sum((ends <= begin).to(tl.int32), 0)
        after = tl.sum((ends < until).to(tl.int32), 0) + 1
        first = tl.max(tl.where(ends <= begin, ends, 0), 0)
    wait(OVERLAP)
    if begin >= until:
        return

    members = tl.arange(0, GROUP_PADDED)
    dims = tl.arange(0, DIM)
    real = members < GROUP
    head = kv_head * GROUP + members
    if runs is not None:  # those of a line follow the heads of the line before it
        head = members // GROUP * HEADS + kv_head * GROUP + members % GROUP
    for line in range(sequence, after):
        row = tl.load(rows + line).to(tl.int64)
        length = tl.load(positions + line) + 1
        low = 0
        if WINDOW:
            low = tl.maximum(length - WINDOW, 0)
        if runs is not None:
            lines = tl.load(runs + line)
            real = members < GROUP * lines
            reach = tl.load(positions + line + members // GROUP, mask=real, other=0)
            length = tl.where(lines > 0, length + lines - 1, low)
        last = first + tl.cdiv(length - low, _UNIT)
        start = low + (tl.maximum(begin, first) - first) * _UNIT
        stop = tl.minimum(low + (tl.minimum(until, last) - first) * _UNIT, length)
        target = (line * HEADS + head)[:, None] * DIM + dims[None, :]
        query, tail = ask(q, line * HEADS + head, dims, real, DIM, TAIL, READING)
        top = tl.full([GROUP_PADDED], -float("inf"), tl.float32)
        weight = tl.zeros([GROUP_PADDED], tl.float32)
        mixed = tl.zeros([GROUP_PADDED, DIM], tl.float32)
        if sinks is not None:
            top, weight = begin_with_sinks(sinks, head % HEADS, real, tl.maximum(begin - first, 0))
        mixed = apart(mixed, GROUP_PADDED, DIM, READING)
        for tile in range(start, stop, KEYS):
            keys = tile + tl.arange(0, KEYS)
            there = keys < stop
            place = paged(pages, row, columns, keys, there, kv_head, KV_HEADS, DIM, TAIL, PAGE)
            seen = there[None, :]
            if runs is not None:
                seen = seen & (keys[None, :] <= reach[:, None])
                if WINDOW:
                    seen = seen & (keys[None, :] > reach[:, None] - WINDOW)
            top, weight, mixed = take_keys(
                query, tail, k_pool, v_pool, k_scales, v_scales, place, dims, there, seen, scale, top,
                weight, mixed, DIM, TAIL, PRECISION, SOFTCAP, READING,
            )  # fmt: skip
        mixed = together(mixed, GROUP_PADDED, DIM, READING)
        done = (begin <= first) & (last <= until)
        if not done:
            part = (program * 2 + (begin <= first).to(tl.int32)) * (LINES * HEADS) + head
            if runs is not None:  # a query may have seen none of these keys, or be none
                weight = tl.where(weight > 0, weight, 1.0)
            mixed = mixed / weight[:, None]
            tl.store(parts + part[:, None] * DIM + dims[None, :], mixed, mask=real[:, None])
            tl.store(sums + part, top + tl.log2(weight), mask=real)
            tl.debug_barrier()  # all stores of the program are before its arrival
            if alike:
                second = ordinal * each + 1
                count = tl.cdiv(last - first, share)
            else:
                second = tl.cdiv(first + _LEAST, share)  # the first program whose share begins within
                count = (last - _LEAST) // share - second + 2
            counter = arrived + line * KV_HEADS + kv_head
            done = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == count - 1
            if done:  # the parts are taken in their order, not in that of their arrival
                tl.store(counter, 0)
                top = tl.full([GROUP_PADDED], -float("inf"), tl.float32)
                weight = tl.zeros([GROUP_PADDED], tl.float32)
                mixed = tl.zeros([GROUP_PADDED, DIM], tl.float32)
                for number in range(count):
                    at = ((second + number - 1) * 2 + (number == 0)) * (LINES * HEADS) + head
                    top, weight, mixed = take_part(parts, sums, at, real, dims, top, weight, mixed, DIM)
        if done:
            if runs is not None:
                weight = tl.where(real, weight, 1.0)
            mixed = mixed / weight[:, None]
            tl.store(output + target, mixed.to(output.dtype.element_ty), mask=real[:, None])
        first = last
