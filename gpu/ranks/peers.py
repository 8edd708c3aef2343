"""Memory of each GPU that the others write to, for sums in kernels of ours.

It holds parts of sums, [2, ranks - 1, rows, hidden], and behind them flags, int32 [ranks - 1, rows].
Which kernel writes what is `ops.triton_sums`.
"""

import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Bytes of a rank's part of one sum, measured on H200s: what two ranks sum in one shot, or more ranks in
# one and in two. Larger sums are made in pieces, or by NCCL
_MOST_OF_TWO = 64 << 20
_ONE_SHOT, _MOST = 512 << 10, 8 << 20
_PIECES_OF_TWO = 4  # of that size each, in which two ranks make larger sums


@dataclass(slots=True)
class PeerRows:
    """`places` int64[ranks]: addresses of all ranks' memory; `flags`: where they begin, in bytes.

    `counts` int32[rows]: sums of each row so far. Sums of more than `one_shot` rows take two shots.
    `held`: what keeps the memory.
    """

    rank: int
    ranks: int
    rows: int
    one_shot: int
    places: Tensor
    flags: int
    counts: Tensor
    held: Any = None

    @property
    def most(self) -> int:
        """Rows of the largest sum that kernels make."""
        return self.rows * (_PIECES_OF_TWO if self.ranks == 2 else 1)


def room(ranks: int, hidden: int, dtype: torch.dtype, tokens: int) -> tuple[int, int, int]:
    """Rows of a sum, of `tokens` at most; where flags begin, and bytes of all."""
    row = hidden * dtype.itemsize
    rows = max(1, min(tokens, (_MOST_OF_TWO if ranks == 2 else _MOST) // row))
    flags = 2 * (ranks - 1) * rows * row
    return rows, flags, flags + 4 * (ranks - 1) * rows


def one_shot_rows(ranks: int, rows: int, hidden: int, dtype: torch.dtype) -> int:
    """Up to how many of `rows` a sum takes one shot."""
    return rows if ranks == 2 else min(rows, max(1, _ONE_SHOT // (hidden * dtype.itemsize)))


def meet(
    store: Any, group: str, rank: int, ranks: int, hidden: int, dtype: torch.dtype, tokens: int,
    device: torch.device,
) -> PeerRows:  # fmt: skip
    """Map the memory of all ranks, which all call it. Raises RuntimeError where they cannot.

    `group`: torch's name of a process group of theirs. Rows are a multiple of 16 bytes.
    """
    from torch._C._distributed_c10d import _SymmetricMemory

    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    memory: Any = _SymmetricMemory
    memory.set_group_info(group, rank, ranks, store)
    rows, flags, size = room(ranks, hidden, dtype, tokens)
    own = memory.empty_strided_p2p((size,), (1,), torch.uint8, device, group)
    own.zero_()
    torch.cuda.synchronize(device)
    handle = memory.rendezvous(own)
    places = torch.tensor(handle.buffer_ptrs, dtype=torch.int64, device=device)
    counts = torch.zeros(rows, dtype=torch.int32, device=device)
    one_shot = one_shot_rows(ranks, rows, hidden, dtype)
    return PeerRows(rank, ranks, rows, one_shot, places, flags, counts, (own, handle))
