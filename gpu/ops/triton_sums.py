"""Sums over ranks of few rows in one launch, with the residual and the next norm (one-shot all-reduce).

Each program has a row. It writes its own rank's part into the memory of every other rank, rings a flag
there, waits for the flags of the others, and adds all parts in the order of the ranks. So every rank
gets the same bits, and a sum costs one way over NVLink. A row's parts lie in two places by turns: who
begins the next sum but one has got the flags of the next, which others ring behind the last they read.

A row counts its sums itself, in memory, so a CUDA graph that holds them can be replayed.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, import-untyped"

import torch
import triton
import triton.language as tl
from torch import Tensor

from ramify.gpu.ops.rmsnorm import RMSNorm
from ramify.gpu.programmatic_launch import overlap_options, wait
from ramify.gpu.ranks.peers import PeerRows


def sum_rows(x: Tensor, peers: PeerRows) -> Tensor:
    """x [T, hidden] of each rank: their sum. T is at most `peers.rows`."""
    output = torch.empty_like(x)
    _launch(x, peers, output, output, None)
    return output


def sum_add_norm(x: Tensor, peers: PeerRows, residual: Tensor, norm: RMSNorm | None) -> Tensor:
    """residual += the sum, in place; returns it, normalised if there is a norm."""
    normed = residual if norm is None else torch.empty_like(residual)
    _launch(x, peers, normed, residual, norm, add=True)
    return normed


def _launch(
    x: Tensor, peers: PeerRows, output: Tensor, residual: Tensor, norm: RMSNorm | None, add: bool = False
) -> None:
    tokens, hidden = x.shape
    block = triton.next_power_of_2(hidden)
    weight, eps = (residual, 0.0) if norm is None else (norm.weight, norm.eps)  # not read without one
    _sum[(tokens,)](
        x, peers.places, peers.counts, residual, weight, output, hidden, peers.rows, peers.flags, eps,
        BLOCK=block, RANK=peers.rank, RANKS=peers.ranks, ADD=add, NORM=norm is not None,
        num_warps=min(16, max(1, block // 512)), **overlap_options(x.device),
    )  # fmt: skip


@triton.jit
def _sum(
    x, places, counts, residual, weight, output, hidden, rows, flags, eps, BLOCK: tl.constexpr,
    RANK: tl.constexpr, RANKS: tl.constexpr, ADD: tl.constexpr, NORM: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    wait(OVERLAP)
    row = tl.program_id(0)
    start = row.to(tl.int64) * hidden
    columns = tl.arange(0, BLOCK)
    inside = columns < hidden
    own = tl.load(x + start + columns, mask=inside, other=0.0)
    count = tl.load(counts + row) + 1
    turn = (count & 1) * RANKS
    for peer in tl.static_range(RANKS):
        if peer != RANK:
            theirs = tl.multiple_of(tl.load(places + peer), 16).to(tl.pointer_type(x.dtype.element_ty))
            place = ((turn + RANK) * rows + row).to(tl.int64) * hidden
            tl.store(tl.multiple_of(theirs + place + columns, (16,)), own, mask=inside)
    tl.debug_barrier()
    for peer in tl.static_range(RANKS):
        if peer != RANK:
            bell = (tl.load(places + peer) + flags).to(tl.pointer_type(tl.int32))
            tl.atomic_xchg(bell + RANK * rows + row, count, sem="release", scope="sys")
    total = tl.zeros([BLOCK], dtype=tl.float32)
    mine = tl.multiple_of(tl.load(places + RANK), 16)
    parts = mine.to(tl.pointer_type(x.dtype.element_ty))
    bells = (mine + flags).to(tl.pointer_type(tl.int32))
    for source in tl.static_range(RANKS):
        if source == RANK:
            total += own.to(tl.float32)
        else:
            while tl.atomic_add(bells + source * rows + row, 0, sem="acquire", scope="sys") != count:
                pass
            tl.debug_barrier()
            place = ((turn + source) * rows + row).to(tl.int64) * hidden
            part = tl.load(
                tl.multiple_of(parts + place + columns, (16,)), mask=inside, other=0.0, volatile=True
            )
            total += part.to(tl.float32)
    tl.store(counts + row, count)
    if ADD:
        before = tl.load(residual + start + columns, mask=inside, other=0.0)
        total += before.to(tl.float32)
        tl.store(residual + start + columns, total.to(residual.dtype.element_ty), mask=inside)
        total = total.to(residual.dtype.element_ty).to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(total * total) / hidden + eps)
        gain = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
        total = total * scale * gain
    if NORM or not ADD:
        tl.store(output + start + columns, total.to(output.dtype.element_ty), mask=inside)
