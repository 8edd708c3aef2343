"""Blocks of KV of a GPU, in pinned host memory: what `blocks.py` does, beside the steps.

A step gathers what it saves into a chunk of device memory, and takes its seals there. So its pages
are free at once, while the copy engine brings the chunk to the host on a stream of its own. What is
loaded comes the other way: the copy begins as soon as its plan is launched, while the step before it
still runs. Then the step compares the seals and writes the pages. Whether they are what was saved is
known with the step's result; until then nobody reads these pages.
"""

# mypy: disable-error-code="no-untyped-call"

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ramify.gpu.kv.blocks import HostBlocks, block_bytes, words
from ramify.gpu.kv.host_memory import HostMemory, key_part, seal_weights
from ramify.gpu.kv.layout import KVPool
from ramify.protocol.errors import ModelError
from ramify.protocol.plan import MovedBlock

_CHUNK_BYTES = 64 << 20  # of blocks that are gathered at once


class _Chunk:
    """Blocks between the pool and the host. `used`: what read or wrote it last is over."""

    def __init__(self, blocks: int, size: int, device: torch.device) -> None:
        self.bytes = torch.empty((blocks, size), dtype=torch.uint8, device=device)
        self.seals = torch.empty(blocks, dtype=torch.int64, device=device)
        self.used = torch.cuda.Event()


class CudaBlocks:
    """`count` slots for blocks of `pool`."""

    def __init__(self, pool: KVPool, count: int) -> None:
        device = pool.memory[0].device
        self._page_size, self._padding, self._device = pool.page_size, pool.padding_slot, device
        self._memory = [words(tensor) for tensor in pool.memory]  # [layers, slots, ...]
        size = block_bytes(pool)
        self.host = HostMemory(count, size)
        self.bytes = torch.from_numpy(self.host.blocks)
        self._seals = torch.from_numpy(self.host.seals)
        self._pointer, nbytes = self.host.memory.ctypes.data, self.host.memory.nbytes
        self._runtime: Any = torch.cuda.cudart()
        failed = self._runtime.cudaHostRegister(self._pointer, nbytes, 0)
        if int(failed):
            raise ModelError(
                f"--kv-host: {nbytes} bytes cannot be pinned (CUDA says {failed}); give less"
            )
        self._weights = torch.from_numpy(seal_weights(size)).to(device)
        self._room = max(1, min(32, _CHUNK_BYTES // size))
        self._chunks = [_Chunk(self._room, size, device) for _ in range(4)]
        self._next = 0
        self._steps = torch.cuda.current_stream(device)
        self._copies = torch.cuda.Stream(device)
        self._ready = torch.cuda.Event()

    def save(self, blocks: Sequence[MovedBlock]) -> None:
        """Copy the pages of each block to its slot."""
        for at in range(0, len(blocks), self._room):
            self._save(blocks[at : at + self._room])

    def load(self, blocks: Sequence[MovedBlock]) -> Callable[[], list[int]]:
        """Copy each block to its pages, and check it. Returns what tells, once the step is over, the
        slots of those that are not what was saved.
        """
        found = [self._load(blocks[at : at + self._room]) for at in range(0, len(blocks), self._room)]
        right = torch.cat(found)
        told = torch.empty(len(right), dtype=torch.bool, pin_memory=True)
        told.copy_(right, non_blocking=True)
        slots = [block.slot for block in blocks]

        def lost() -> list[int]:
            return [slot for slot, whole in zip(slots, told.tolist(), strict=True) if not whole]

        return lost

    def close(self) -> None:
        """Let go of the host's memory. No copy is under way."""
        self._runtime.cudaHostUnregister(self._pointer)
        self.bytes = self._seals = torch.empty(0)
        self.host.close()

    def _save(self, blocks: Sequence[MovedBlock]) -> None:
        chunk, count = self._take(), len(blocks)
        self._steps.wait_event(chunk.used)
        places, own, at = self._places(blocks), chunk.bytes[:count], 0
        for tensor in self._memory:
            part = tensor.index_select(1, places).unflatten(1, (count, -1)).transpose(0, 1)
            size = part[0].numel() * part.itemsize
            own[:, at : at + size].view(part.dtype).view(part.shape).copy_(part)
            at += size
        chunk.seals[:count] = self._sealed(blocks, own)
        self._ready.record(self._steps)
        self._copies.wait_event(self._ready)
        with torch.cuda.stream(self._copies):
            for block, part, seal in zip(blocks, own, chunk.seals[:count], strict=True):
                self.bytes[block.slot].copy_(part, non_blocking=True)
                self._seals[block.slot].copy_(seal, non_blocking=True)
        chunk.used.record(self._copies)

    def _load(self, blocks: Sequence[MovedBlock]) -> Tensor:
        """bool[n]: which of them are what was saved."""
        chunk, count = self._take(), len(blocks)
        self._copies.wait_event(chunk.used)
        own, at = chunk.bytes[:count], 0
        with torch.cuda.stream(self._copies):
            for block, part, seal in zip(blocks, own, chunk.seals[:count], strict=True):
                part.copy_(self.bytes[block.slot], non_blocking=True)
                seal.copy_(self._seals[block.slot], non_blocking=True)
        self._ready.record(self._copies)
        places = self._places(blocks)
        self._steps.wait_event(self._ready)
        right = self._sealed(blocks, own) == chunk.seals[:count]
        for tensor in self._memory:
            shape = count, len(tensor), len(places) // count, *tensor.shape[2:]
            size = tensor[:, 0].numel() * tensor.itemsize * shape[2]
            part = own[:, at : at + size].view(tensor.dtype).view(shape)
            tensor.index_copy_(1, places, part.transpose(0, 1).flatten(1, 2))
            at += size
        chunk.used.record(self._steps)
        return right

    def _take(self) -> _Chunk:
        self._next = (self._next + 1) % len(self._chunks)
        return self._chunks[self._next]

    def _places(self, blocks: Sequence[MovedBlock]) -> Tensor:
        """The slots of the pool's tensors; the padding's for pages that are not loaded."""
        size = self._page_size
        pages = np.frombuffer(b"".join(block.pages for block in blocks), dtype=np.int32)
        places = pages.astype(np.int64)[:, None] * size + np.arange(size)
        places[pages < 0] = self._padding
        return torch.from_numpy(places.reshape(-1)).to(self._device, non_blocking=True)

    def _sealed(self, blocks: Sequence[MovedBlock], own: Tensor) -> Tensor:
        """int64[n]: the seals of these bytes under the blocks' keys."""
        keys = torch.tensor([key_part(block.key) for block in blocks])
        sums = torch.stack([(each.view(torch.int64) * self._weights).sum() for each in own])
        return sums + keys.to(self._device, non_blocking=True)


class HostMoves:
    """The same where the pool is the host's, as in Triton's interpreter."""

    def __init__(self, pool: KVPool, count: int) -> None:
        self._blocks = HostBlocks(pool, count)
        self.host = self._blocks.host

    def save(self, blocks: Sequence[MovedBlock]) -> None:
        self._blocks.save(blocks)

    def load(self, blocks: Sequence[MovedBlock]) -> Callable[[], list[int]]:
        lost = self._blocks.load(blocks)
        return lambda: lost

    def close(self) -> None:
        self._blocks.close()


def device_blocks(pool: KVPool, count: int) -> CudaBlocks | HostMoves:
    """What moves blocks of `pool`."""
    cuda = pool.memory[0].device.type == "cuda"
    return CudaBlocks(pool, count) if cuda else HostMoves(pool, count)
