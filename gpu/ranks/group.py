"""Sums and gathers over the ranks of a group: gloo between CPUs, NCCL between GPUs.

Every rank calls the same functions in the same order. All get the same bits: a sum is made once and
passed on.
"""

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from ramify.gpu.ranks.ring import RankPlace, StepRing

dist: Any = torch.distributed  # which declares little of this
# Ranks that are loading wait for the slowest one. One that hangs is the watchdog's business
_PATIENCE = timedelta(days=1)


class Ranks:
    """This process among those that run one model. `ring`: what rank 0 tells of each step."""

    def __init__(self, place: RankPlace, device: torch.device) -> None:
        self.rank, self.count = place.rank, place.ranks
        self.ring = StepRing(place)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        store = dist.FileStore(f"/proc/self/fd/{place.store}", place.ranks)
        self._host: Any = dist.ProcessGroupGloo(
            dist.PrefixStore("host", store), place.rank, place.ranks, _PATIENCE
        )
        self._group, self.on_gpu = self._host, device.type == "cuda"
        if device.type == "cuda":
            os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # NVLink multicast
            options = dist.ProcessGroupNCCL.Options()
            self._group = dist.ProcessGroupNCCL(
                dist.PrefixStore("device", store), place.rank, place.ranks, options
            )

    def sum(self, x: Tensor) -> Tensor:
        """Over all ranks, in place."""
        self._group.allreduce([x]).wait()
        return x

    def from_first(self, x: Tensor) -> Tensor:
        """Rank 0's numbers, in place."""
        self._group.broadcast(x, 0).wait()
        return x

    def columns(self, x: Tensor, width: int) -> Tensor:
        """x [S, n] of each rank side by side: [S, width], what lies beyond left out."""
        rows = x.new_empty((self.count * len(x), x.shape[1]))
        self._group.allgather([list(rows.chunk(self.count))], [x.contiguous()]).wait()
        return rows.view(self.count, *x.shape).transpose(0, 1).reshape(len(x), -1)[:, :width]

    def least(self, values: list[int]) -> list[int]:
        """The least of each that any rank says."""
        found = torch.tensor(values)
        self._host.allreduce([found], dist.ReduceOp.MIN).wait()
        least: list[int] = found.tolist()
        return least

    def close(self) -> None:
        """Rank 0 ends the others: an empty message."""
        if not self.rank:
            self.ring.put(b"")
        self.ring.close()
