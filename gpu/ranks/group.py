"""Sums and gathers over the ranks of a group: gloo between CPUs, NCCL between GPUs.

Every rank calls the same functions in the same order. All get the same bits: a sum is made once and
passed on.
"""

import logging
import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed.distributed_c10d
from torch import Tensor

from ramify.gpu.ranks.peers import PeerRows, meet
from ramify.gpu.ranks.ring import RankPlace, StepRing

_LOG = logging.getLogger("ramify.gpu.ranks")
dist: Any = torch.distributed  # which declares little of this
# Ranks that are loading wait for the slowest one. One that hangs is the watchdog's business
_PATIENCE = timedelta(days=1)


class RankSums:
    """Sums that wait for no other rank, for rehearsing steps, which each rank does in its own time."""

    def __init__(self, rank: int, count: int) -> None:
        self.rank, self.count = rank, count
        self.peers: PeerRows | None = None  # for sums in kernels of ours: see `Ranks.meet`

    def sum(self, x: Tensor) -> Tensor:
        """Sum over all ranks, in place."""
        return x

    def from_first(self, x: Tensor) -> Tensor:
        """Replace x by that of rank 0, in place."""
        return x

    def columns(self, x: Tensor, width: int) -> Tensor:
        """Gather x [S, n] of all ranks side by side: [S, width], cut off there."""
        return x.repeat(1, self.count)[:, :width]


class Ranks(RankSums):
    """This process among those that run one model. `ring`: carries rank 0's steps."""

    def __init__(self, place: RankPlace, device: torch.device, spins: bool | None = None) -> None:
        """`spins`: see `StepRing`; None: on GPUs."""
        super().__init__(place.rank, place.ranks)
        self.ring = StepRing(place, device.type == "cuda" if spins is None else spins)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        store = dist.FileStore(f"/proc/self/fd/{place.store}", place.ranks)
        self._store, self._device = store, device
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
            self.sum(torch.zeros(1, device=device))  # its buffers are there before memory is measured

    def sum(self, x: Tensor) -> Tensor:
        _settle(self._group.allreduce([x], self._now(dist.AllreduceOptions())))
        return x

    def from_first(self, x: Tensor) -> Tensor:
        _settle(self._group.broadcast([x], self._now(dist.BroadcastOptions())))
        return x

    def columns(self, x: Tensor, width: int) -> Tensor:
        rows = x.new_empty((self.count * len(x), x.shape[1]))
        options = self._now(dist.distributed_c10d.AllgatherOptions())
        _settle(self._group.allgather([list(rows.chunk(self.count))], [x.contiguous()], options))
        return rows.view(self.count, *x.shape).transpose(0, 1).reshape(len(x), -1)[:, :width]

    def meet(self, hidden: int, dtype: torch.dtype, tokens: int) -> None:
        """Share memory of GPUs for sums of [tokens, hidden] and less; all ranks call it.

        Where one of them cannot, which is logged, the library makes all sums.
        """
        if self._device.type != "cuda" or hidden * dtype.itemsize % 16:
            return
        peers = None
        try:
            # torch shares memory in process groups of its own making alone
            world = dist.PrefixStore("world", self._store)
            dist.init_process_group("gloo", store=world, rank=self.rank, world_size=self.count)
            name, store = dist.group.WORLD.group_name, dist.PrefixStore("peers", self._store)
            peers = meet(store, name, self.rank, self.count, hidden, dtype, tokens, self._device)
        except RuntimeError as error:
            _LOG.warning("GPUs share no memory, so NCCL makes all sums, which is slower: %s", error)
        if self.least([peers is not None])[0]:
            self.peers = peers

    def least(self, values: list[int]) -> list[int]:
        """Take the least of each value over all ranks."""
        found = torch.tensor(values)
        self._host.allreduce([found], dist.ReduceOp.MIN).wait()
        least: list[int] = found.tolist()
        return least

    def _now(self, options: Any) -> Any:
        """Put the work of `options` on the step's stream, on GPUs, so that a CUDA graph can hold it."""
        options.asyncOp = not self.on_gpu
        return options

    def close(self) -> None:
        """Leave the group; rank 0 ends the others by an empty message."""
        if not self.rank:
            self.ring.put(b"")
        self.ring.close()


def _settle(work: Any) -> None:
    if work is not None:
        work.wait()
