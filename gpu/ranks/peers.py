"""Memory of each GPU that the others write to, for sums in kernels of ours.

It holds parts of sums, [2, ranks - 1, rows, hidden], and after them flags, int32 [ranks - 1, rows]. The
kernels are those of `ops.triton_sums`.
"""

import os
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

# Bytes of a rank's part of one sum, measured on H200s: what two ranks sum in one shot, or more ranks in
# one and in two. Larger sums are made in pieces, or by NCCL
_MOST_OF_TWO = 64 << 20
_ONE_SHOT, _MOST = 512 << 10, 8 << 20
_PIECES_OF_TWO = 4  # of that size each, in which two ranks make larger sums
LEAST_HALVED = 8000  # tokens that two ranks sum in halves (`ops.triton_halves`): fewer were not measured
_MOST_HALVED, _BELLS = 128 << 20, 16  # bytes: of a rank's part, and of its bells


@dataclass(slots=True)
class PeerHalves:
    """Memory of two ranks for sums whose rows come in two halves, carried by copy engines.

    `theirs`, `mine` [2, rows, hidden]: places for the other rank's rows, by turns, in its memory and in
    this rank's. `their_bells`, `my_bells` int32[2, 2]: flags of a half in a place. `least`: rows from
    which on sums are halved. `made`: sums so far.
    """

    theirs: Tensor
    mine: Tensor
    their_bells: Tensor
    my_bells: Tensor
    least: int
    made: int = 0

    @property
    def rows(self) -> int:
        return self.mine.shape[1]


def halves_in(theirs: Tensor, mine: Tensor, hidden: int, dtype: torch.dtype) -> PeerHalves:
    """Lay out memory for halves. `theirs`, `mine` uint8: zeros, as many as `halves_room`."""
    there, here = (memory[:-_BELLS].view(dtype).view(2, -1, hidden) for memory in (theirs, mine))
    bells = [memory[-_BELLS:].view(torch.int32).view(2, 2) for memory in (theirs, mine)]
    return PeerHalves(there, here, bells[0], bells[1], LEAST_HALVED)


def halves_room(ranks: int, hidden: int, dtype: torch.dtype, tokens: int) -> int:
    """Compute the bytes for sums of so many tokens at most; 0: sums are not halved."""
    row = hidden * dtype.itemsize
    rows = min(tokens, _MOST_HALVED // row) if ranks == 2 else 0
    return 0 if rows < LEAST_HALVED else 2 * rows * row + _BELLS


@dataclass(slots=True)
class PeerRows:
    """Memory of all ranks. `places` int64[ranks]: its addresses; `flags`: where they begin, in bytes.

    `counts` int32[rows]: sums of each row so far. Sums of more than `one_shot` rows take two shots.
    `halves`: of two ranks that sum in halves, too. `held`: keeps the memory mapped.
    """

    rank: int
    ranks: int
    rows: int
    one_shot: int
    places: Tensor
    flags: int
    counts: Tensor
    halves: PeerHalves | None = None
    held: Any = field(default=None, repr=False)

    @property
    def most(self) -> int:
        """The rows of the largest sum that kernels make."""
        return self.rows * (_PIECES_OF_TWO if self.ranks == 2 else 1)


def room(ranks: int, hidden: int, dtype: torch.dtype, tokens: int) -> tuple[int, int, int]:
    """Compute the most rows of a sum, `tokens` at most; where flags begin; and all bytes."""
    row = hidden * dtype.itemsize
    rows = max(1, min(tokens, (_MOST_OF_TWO if ranks == 2 else _MOST) // row))
    flags = 2 * (ranks - 1) * rows * row
    return rows, flags, flags + 4 * (ranks - 1) * rows


def one_shot_rows(ranks: int, rows: int, hidden: int, dtype: torch.dtype) -> int:
    """Compute up to how many of `rows` a sum takes one shot."""
    return rows if ranks == 2 else min(rows, max(1, _ONE_SHOT // (hidden * dtype.itemsize)))


def meet(
    store: Any, group: str, rank: int, ranks: int, hidden: int, dtype: torch.dtype, tokens: int,
    device: torch.device,
) -> PeerRows:  # fmt: skip
    """Map the memory of all ranks, which all call this. Raises RuntimeError where they cannot.

    `group`: torch's name of a process group of theirs. Rows are a multiple of 16 bytes.
    """
    from torch._C._distributed_c10d import _SymmetricMemory

    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    memory: Any = _SymmetricMemory
    memory.set_group_info(group, rank, ranks, store)
    rows, flags, size = room(ranks, hidden, dtype, tokens)
    first = -(-size // 256) * 256  # byte of the halves' memory
    size, halves = first + halves_room(ranks, hidden, dtype, tokens), None
    own = memory.empty_strided_p2p((size,), (1,), torch.uint8, device, group)
    own.zero_()
    torch.cuda.synchronize(device)
    handle = memory.rendezvous(own)
    places = torch.tensor(handle.buffer_ptrs, dtype=torch.int64, device=device)
    counts = torch.zeros(rows, dtype=torch.int32, device=device)
    one_shot = one_shot_rows(ranks, rows, hidden, dtype)
    if size > first:
        theirs = handle.get_buffer(1 - rank, (size,), torch.uint8)
        halves = halves_in(theirs[first:], own[first:], hidden, dtype)
    return PeerRows(rank, ranks, rows, one_shot, places, flags, counts, halves, (own, handle))
