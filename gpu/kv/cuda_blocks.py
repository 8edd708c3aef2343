"""Blocks of KV of a GPU, in pinned host memory, copied on a stream beside the steps.

A step gathers the blocks that it saves in a chunk of device memory, and computes their seals there. So
their pages are free at once, while the copy engine brings the chunk to the host on a stream of its own.
Blocks are loaded on that stream, too: copied to a chunk, checked and written to their pages while the
step runs. Whether they are intact is known with the step's result. Until then no step reads these pages,
and the next step waits for the load before it writes any page.
"""

# mypy: disable-error-code="no-untyped-call"

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ramify.gpu.kv.blocks import HostBlocks, block_bytes
from ramify.gpu.kv.host_memory import FACTOR, HostMemory, key_part
from ramify.gpu.kv.layout import KVPool
from ramify.gpu.kv.triton_blocks import move_blocks, slot_words
from ramify.protocol.cluster import BLOCK
from ramify.protocol.errors import ModelError
from ramify.protocol.plan import FULL, STATE, WINDOW, MovedBlock

# Waits for the copies. Returns the slots of damaged blocks, and the microseconds that copies took
# beside the step
Loaded = Callable[[], tuple[list[int], int]]
_CHUNK_BYTES = 64 << 20  # of blocks that are gathered at once


class _Chunk:
    """A buffer between the pool and the host. `used`: its last reader or writer is over."""

    def __init__(self, blocks: int, size: int, device: torch.device) -> None:
        self.bytes = torch.empty((blocks, size), dtype=torch.uint8, device=device)
        self.seals = torch.empty(blocks, dtype=torch.int64, device=device)
        self.used = torch.cuda.Event()


class CudaBlocks:
    """Pinned host memory of `count` slots for blocks of `pool`. Raises ModelError if it cannot be."""

    def __init__(self, pool: KVPool, count: int) -> None:
        device = pool.memory[0].device
        self._pool, self._device = pool, device
        self._memory = {
            FULL: [slot_words(tensor) for tensor in pool.memory],
            WINDOW: [slot_words(tensor) for tensor in pool.window_memory],
        }
        self._size = size = block_bytes(pool)
        window = sum(tensor[:, 0].numel() * tensor.itemsize for tensor in pool.window_memory)
        # pages of a block: shorter ones are filled up with the padding's, so that all are alike
        self._pages = {FULL: BLOCK // pool.page_size, WINDOW: size // window if window else 0}
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
        self._room = max(1, min(32, _CHUNK_BYTES // size))
        self._chunks = [_Chunk(self._room, size, device) for _ in range(4)]
        self._next = 0
        self._steps = torch.cuda.current_stream(device)
        self._copies = torch.cuda.Stream(device)
        self._ready = torch.cuda.Event()
        self._loading: torch.cuda.Event | None = None

    def begin(self) -> None:
        """Let the next step wait for the last one's loads: a page may be another request's by then."""
        if self._loading is not None:
            self._steps.wait_event(self._loading)
            self._loading = None

    def save(self, blocks: Sequence[MovedBlock]) -> None:
        """Copy the pages of each block to its slot."""
        for at in range(0, len(blocks), self._room):
            self._save(blocks[at : at + self._room])

    def load(self, blocks: Sequence[MovedBlock]) -> Loaded:
        """Copy each block to its pages beside the step, and check it."""
        self._ready.record(self._steps)
        self._copies.wait_event(self._ready)  # earlier users of these pages have run
        told = torch.empty(len(blocks), dtype=torch.bool, pin_memory=True)
        with torch.cuda.stream(self._copies):
            begin, loaded = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record(self._copies)
            parts = range(0, len(blocks), self._room)
            right = torch.cat([self._load(blocks[at : at + self._room]) for at in parts])
            told.copy_(right, non_blocking=True)
            loaded.record(self._copies)
        self._loading = loaded
        slots = [block.slot for block in blocks]

        def lost() -> tuple[list[int], int]:
            loaded.synchronize()
            wrong = [slot for slot, whole in zip(slots, told.tolist(), strict=True) if not whole]
            return wrong, int(1e3 * begin.elapsed_time(loaded))

        return lost

    def close(self) -> None:
        """Unpin and release the host memory. No copy may be under way."""
        self._runtime.cudaHostUnregister(self._pointer)
        self.bytes = self._seals = torch.empty(0)
        self.host.close()

    def _save(self, blocks: Sequence[MovedBlock]) -> None:
        chunk, count = self._take(), len(blocks)
        self._steps.wait_event(chunk.used)
        own, seals = chunk.bytes[:count], chunk.seals[:count]
        seals.copy_(self._keys(blocks))
        self._move(blocks, own, seals, save=True)
        self._ready.record(self._steps)
        self._copies.wait_event(self._ready)
        with torch.cuda.stream(self._copies):
            for block, part, seal in zip(blocks, own, seals, strict=True):
                self.bytes[block.slot].copy_(part, non_blocking=True)
                self._seals[block.slot].copy_(seal, non_blocking=True)
        chunk.used.record(self._copies)

    def _load(self, blocks: Sequence[MovedBlock]) -> Tensor:
        """Load blocks. Returns which of them are intact: bool[n] on the device."""
        chunk, count = self._take(), len(blocks)
        self._copies.wait_event(chunk.used)
        own, seals = chunk.bytes[:count], chunk.seals[:count]
        for block, part, seal in zip(blocks, own, seals, strict=True):
            part.copy_(self.bytes[block.slot], non_blocking=True)
            seal.copy_(self._seals[block.slot], non_blocking=True)
        sums = self._keys(blocks)
        self._move(blocks, own, sums, save=False)
        right = sums == seals
        chunk.used.record(self._copies)
        return right

    def _take(self) -> _Chunk:
        self._next = (self._next + 1) % len(self._chunks)
        return self._chunks[self._next]

    def _move(self, blocks: Sequence[MovedBlock], own: Tensor, seals: Tensor, *, save: bool) -> None:
        """Copy blocks from the pool to `own` uint8[n, bytes], or back; add their sums to `seals` [n]."""
        first = 0
        for at in range(1, len(blocks) + 1):
            form = blocks[first].form
            if at < len(blocks) and blocks[at].form == form:
                continue
            some, words, sums = blocks[first:at], own[first:at].view(torch.int64), seals[first:at]
            if form == STATE:
                self._move_states(some, words, sums, save=save)
            else:
                move_blocks(self._memory[form], self._places(form, some), words, sums, save=save)
            first = at

    def _move_states(
        self, blocks: Sequence[MovedBlock], own: Tensor, seals: Tensor, *, save: bool
    ) -> None:
        """Copy blocks that are parts of states, as `_move`. `own`: int64[n, words]."""
        assert self._pool.states is not None
        if save:
            own.zero_()  # behind a state's last part
        rows = own.view(torch.uint8)
        for block, row in zip(blocks, rows, strict=True):
            slot = int.from_bytes(block.pages, "little")
            for at, part in self._pool.states.part(slot, block.part, self._size):
                there = row[at : at + len(part)]
                if save:
                    there.copy_(part)
                else:
                    part.copy_(there)
        order = torch.arange(1, own.shape[1] + 1, device=self._device)
        seals += (own * (order * FACTOR | 1)).sum(1)

    def _places(self, form: int, blocks: Sequence[MovedBlock]) -> Tensor:
        """List the KV slots of each block, equally many: int64[n * slots of a block].

        The padding slot stands for pages that a block does not have, or that are not loaded.
        """
        size = self._pool.page_size if form == FULL else 1
        pages = np.full((len(blocks), self._pages[form]), -1, dtype=np.int32)
        for row, block in zip(pages, blocks, strict=True):
            found = np.frombuffer(block.pages, dtype=np.int32)
            row[: len(found)] = found
        flat = pages.reshape(-1)
        places = flat.astype(np.int64)[:, None] * size + np.arange(size)
        places[flat < 0] = self._memory[form][0].shape[1] - 1
        return torch.from_numpy(places.reshape(-1)).to(self._device, non_blocking=True)

    def _keys(self, blocks: Sequence[MovedBlock]) -> Tensor:
        """Compute what the blocks' keys add to their seals: int64[n]."""
        keys = torch.tensor([key_part(block.key) for block in blocks])
        return keys.to(self._device, non_blocking=True)


class HostMoves:
    """`CudaBlocks` for a pool on the CPU, as in Triton's interpreter."""

    def __init__(self, pool: KVPool, count: int) -> None:
        self._blocks = HostBlocks(pool, count)
        self.host = self._blocks.host

    def begin(self) -> None:
        """Do nothing: no copy is under way between calls."""

    def save(self, blocks: Sequence[MovedBlock]) -> None:
        self._blocks.save(blocks)

    def load(self, blocks: Sequence[MovedBlock]) -> Loaded:
        lost = self._blocks.load(blocks)
        return lambda: (lost, 0)

    def close(self) -> None:
        self._blocks.close()


def device_blocks(pool: KVPool, count: int) -> CudaBlocks | HostMoves:
    """Make the host memory for blocks of `pool`."""
    cuda = pool.memory[0].device.type == "cuda"
    return CudaBlocks(pool, count) if cuda else HostMoves(pool, count)
