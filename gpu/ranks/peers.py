"""Memory of each GPU that the others write to, for sums of few rows.

It holds parts of sums, [2, ranks, rows, hidden], and behind them flags, int32 [ranks, rows]. Which
kernel writes what is `ops.triton_sums`.
"""

import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_BYTES = 512 << 10  # of a rank's part of one sum: larger ones are NCCL's


@dataclass(slots=True)
class PeerRows:
    """`places` int64[ranks]: addresses of all ranks' memory; `flags`: where they begin, in bytes.

    `counts` int32[rows]: sums of each row so far. `held`: what keeps the memory.
    """

    rank: int
    ranks: int
    rows: int
    places: Tensor
    flags: int
    counts: Tensor
    held: Any = None


def room(ranks: int, hidden: int, dtype: torch.dtype) -> tuple[int, int, int]:
    """Rows of a sum, where flags begin, and bytes of all."""
    rows = max(1, _BYTES // (hidden * dtype.itemsize))
    flags = 2 * ranks * rows * hidden * dtype.itemsize
    return rows, flags, flags + 4 * ranks * rows


def meet(
    store: Any, group: str, rank: int, ranks: int, hidden: int, dtype: torch.dtype, device: torch.device
) -> PeerRows:
    """Map the memory of all ranks, which all call it. Raises RuntimeError where they cannot.

    `group`: torch's name of a process group of theirs. Rows are a multiple of 16 bytes.
    """
    from torch._C._distributed_c10d import _SymmetricMemory

    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    memory: Any = _SymmetricMemory
    memory.set_group_info(group, rank, ranks, store)
    rows, flags, size = room(ranks, hidden, dtype)
    own = memory.empty_strided_p2p((size,), (1,), torch.uint8, device, group)
    own.zero_()
    torch.cuda.synchronize(device)
    handle = memory.rendezvous(own)
    places = torch.tensor(handle.buffer_ptrs, dtype=torch.int64, device=device)
    counts = torch.zeros(rows, dtype=torch.int32, device=device)
    return PeerRows(rank, ranks, rows, places, flags, counts, (own, handle))
