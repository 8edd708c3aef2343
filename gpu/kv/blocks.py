"""Blocks of KV in host memory: a slot holds the KV of up to `BLOCK` tokens, all layers in one piece.

Which tokens a slot holds is the cache actor's business; here a slot has a seal, a checksum of the bytes
and of the block's key (`host_memory.py`). A block that is torn, overwritten or damaged, or is another
one, is never copied to a page. This file does not know steps or streams.
"""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ramify.gpu.kv.host_memory import HostMemory
from ramify.gpu.kv.layout import KVPool
from ramify.protocol.cluster import BLOCK
from ramify.protocol.plan import FULL, STATE, WINDOW, MovedBlock


def block_bytes(pool: KVPool) -> int:
    """Count the bytes of a block, over all layers."""
    return BLOCK * sum(tensor[:, 0].numel() * tensor.itemsize for tensor in pool.memory)


def words(tensor: Tensor) -> Tensor:
    """View a tensor as int64, or as uint8 where its last axis has no whole words, for copies."""
    wide = tensor.shape[-1] * tensor.itemsize % 8 == 0
    return tensor.view(torch.int64 if wide else torch.uint8)


class HostBlocks:
    """Host memory of `count` slots for blocks of `pool`. Copies are over when a call returns.

    Memory of slots that are never used is never committed.
    """

    def __init__(self, pool: KVPool, count: int) -> None:
        self._pool, self._device = pool, pool.memory[0].device
        # [layers, slots, ...] by form
        self._memory = {
            FULL: [words(tensor) for tensor in pool.memory],
            WINDOW: [words(tensor) for tensor in pool.window_memory],
        }
        self._size = size = block_bytes(pool)
        self.host = HostMemory(count, size)
        self.bytes = torch.from_numpy(self.host.blocks)

    def save(self, blocks: Iterable[MovedBlock]) -> None:
        """Copy the pages of each block, or its part of a state, to its slot."""
        for block in blocks:
            own, at = self.bytes[block.slot], 0
            if block.form == STATE:
                for at, part in self._state(block):
                    own[at : at + len(part)] = part
            else:
                places = self._places(block.form, np.frombuffer(block.pages, dtype=np.int32))
                for tensor in self._memory[block.form]:
                    part = tensor.index_select(1, places).view(-1).view(torch.uint8)
                    own[at : at + len(part)] = part
                    at += len(part)
            self.host.seals[block.slot] = self._seal(block)

    def load(self, blocks: Iterable[MovedBlock]) -> list[int]:
        """Copy each block to its pages. Returns the slots of those that are not what was saved."""
        lost: list[int] = []
        for block in blocks:
            own = self.bytes[block.slot]
            if self.host.seals[block.slot] != self._seal(block):
                lost.append(block.slot)
            elif block.form == STATE:
                for at, part in self._state(block):
                    part.copy_(own[at : at + len(part)])
            else:
                self._fill(block, own)
        return lost

    def _fill(self, block: MovedBlock, own: Tensor) -> None:
        """Copy a sound block to its pages."""
        pages, at = np.frombuffer(block.pages, dtype=np.int32), 0
        places = self._places(block.form, pages)
        count = len(places)
        wanted = torch.from_numpy(np.repeat(pages >= 0, count // len(pages))).to(self._device)
        for tensor in self._memory[block.form]:
            shape = len(tensor), count, *tensor.shape[2:]
            size = count * tensor[:, 0].numel() * tensor.itemsize
            part = own[at : at + size].to(self._device).view(tensor.dtype).view(shape)
            tensor.index_copy_(1, places[wanted], part[:, wanted])
            at += size

    def _state(self, block: MovedBlock) -> list[tuple[int, Tensor]]:
        """Find where a part of a state lies in its block and in the pool."""
        assert self._pool.states is not None
        return self._pool.states.part(int.from_bytes(block.pages, "little"), block.part, self._size)

    def close(self) -> None:
        """Release the memory."""
        self.bytes = torch.empty(0, dtype=torch.uint8)
        self.host.close()

    def _places(self, form: int, pages: npt.NDArray[np.int32]) -> Tensor:
        """List the KV slots of pages int32[n], on the pool's device: int64[n * page size]."""
        size = self._pool.page_size if form == FULL else 1
        places = pages.astype(np.int64)[:, None] * size + np.arange(size)
        return torch.from_numpy(places.reshape(-1)).to(self._device)

    def _seal(self, block: MovedBlock) -> int:
        """Compute the seal that the block's slot must have."""
        return self.host.seal(block.key, self.host.blocks[block.slot])
