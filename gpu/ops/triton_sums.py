"""Sums over ranks in one launch, with the residual and the next norm: each program has a row.

One shot: it writes its rank's part into the memory of every other rank, sets a flag there, waits for
the flags of the others, and adds all parts in the order of the ranks. So every rank gets the same bits,
and a sum costs one way over NVLink. Two shots: the parts of a row go to one rank, which adds them and
gives the sum to the others. Of R ranks each sends 2 (R - 1) / R of its rows then instead of R - 1, and
waits twice. Two ranks send as much either way, so they have one shot at all sizes.

A row's parts lie in two places by turns: a rank that begins the next sum but one has got the flags of
the next sum, which the others set after their last read. A flag counts sums, and may be one ahead of the
awaited number. A row counts its sums itself, in memory, so a CUDA graph that holds them can be replayed.
Programs begin in the order of their rows, on all ranks: so no row that is waited for is kept from
beginning by the programs that wait.
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
    """Sum x [T, hidden] of all ranks. T is at most `peers.most`."""
    output = torch.empty_like(x)
    _launch(x, peers, output, output, None)
    return output


def sum_add_norm(x: Tensor, peers: PeerRows, residual: Tensor, norm: RMSNorm | None) -> Tensor:
    """Add the sum to residual, in place. Returns that, normalised if there is a norm."""
    normed = residual if norm is None else torch.empty_like(residual)
    _launch(x, peers, normed, residual, norm, add=True)
    return normed


def _launch(
    x: Tensor, peers: PeerRows, output: Tensor, residual: Tensor, norm: RMSNorm | None, add: bool = False
) -> None:
    for at in range(0, len(x), peers.rows):  # as many as there is memory for
        rows = slice(at, at + peers.rows)
        _launch_rows(x[rows], peers, output[rows], residual[rows], norm, add)


def _launch_rows(
    x: Tensor, peers: PeerRows, output: Tensor, residual: Tensor, norm: RMSNorm | None, add: bool
) -> None:
    tokens, hidden = x.shape
    block = triton.next_power_of_2(hidden)
    weight, eps = (residual, 0.0) if norm is None else (norm.weight, norm.eps)  # not read without one
    _sum[(tokens,)](
        x, peers.places, peers.counts, residual, weight, output, hidden, peers.rows, peers.flags, eps,
        BLOCK=block, RANK=peers.rank, RANKS=peers.ranks, TWO_SHOTS=tokens > peers.one_shot, ADD=add,
        NORM=norm is not None, num_warps=min(16, max(1, block // 512)), **overlap_options(x.device),
    )  # fmt: skip


@triton.jit
def _sum(
    x, places, counts, residual, weight, output, hidden, rows, flags, eps, BLOCK: tl.constexpr,
    RANK: tl.constexpr, RANKS: tl.constexpr, TWO_SHOTS: tl.constexpr, ADD: tl.constexpr,
    NORM: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    wait(OVERLAP)
    row = tl.program_id(0)
    start = row.to(tl.int64) * hidden
    columns = tl.arange(0, BLOCK)
    inside = columns < hidden
    own = tl.load(x + start + columns, mask=inside, other=0.0)
    count = tl.load(counts + row) + 1
    total = tl.zeros([BLOCK], dtype=tl.float32)
    if TWO_SHOTS:
        adds = row % RANKS
        if adds != RANK:
            _give(own, adds, places, flags, rows, hidden, count, RANK, RANKS)
            total += _get(own, adds, places, flags, rows, hidden, count, RANK, RANKS)
        else:
            for source in tl.static_range(RANKS):
                if source == RANK:
                    total += own.to(tl.float32)
                else:
                    total += _get(own, source, places, flags, rows, hidden, count, RANK, RANKS)
            rounded = total.to(own.dtype)
            total = rounded.to(tl.float32)
            for peer in tl.static_range(RANKS):
                if peer != RANK:
                    _give(rounded, peer, places, flags, rows, hidden, count, RANK, RANKS)
    else:
        for peer in tl.static_range(RANKS):
            if peer != RANK:
                _give(own, peer, places, flags, rows, hidden, count, RANK, RANKS)
        for source in tl.static_range(RANKS):
            if source == RANK:
                total += own.to(tl.float32)
            else:
                total += _get(own, source, places, flags, rows, hidden, count, RANK, RANKS)
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


@triton.jit
def _give(values, peer, places, flags, rows, hidden, count, RANK: tl.constexpr, RANKS: tl.constexpr):
    """Write `values` into the memory of `peer`, where it looks for this rank's, and set the flag."""
    row, columns = tl.program_id(0), tl.arange(0, values.shape[0])
    source = (RANK - peer + RANKS - 1) % RANKS
    theirs = tl.multiple_of(tl.load(places + peer), 16)
    place = (((count & 1) * (RANKS - 1) + source) * rows + row).to(tl.int64) * hidden
    parts = theirs.to(tl.pointer_type(values.dtype))
    tl.store(tl.multiple_of(parts + place + columns, (16,)), values, mask=columns < hidden)
    tl.debug_barrier()
    bells = (theirs + flags).to(tl.pointer_type(tl.int32))
    tl.atomic_xchg(bells + source * rows + row, count, sem="release", scope="sys")


@triton.jit
def _get(like, peer, places, flags, rows, hidden, count, RANK: tl.constexpr, RANKS: tl.constexpr):
    """Wait for the values that `peer` writes into this rank's memory: float32."""
    row, columns = tl.program_id(0), tl.arange(0, like.shape[0])
    source = (peer - RANK + RANKS - 1) % RANKS
    mine = tl.multiple_of(tl.load(places + RANK), 16)
    bells = (mine + flags).to(tl.pointer_type(tl.int32))
    while tl.atomic_add(bells + source * rows + row, 0, sem="acquire", scope="sys") - count < 0:
        pass
    tl.debug_barrier()
    place = (((count & 1) * (RANKS - 1) + source) * rows + row).to(tl.int64) * hidden
    parts = tl.multiple_of(mine.to(tl.pointer_type(like.dtype)) + place + columns, (16,))
    part = tl.load(parts, mask=columns < hidden, other=0.0, volatile=True)
    return part.to(tl.float32)
