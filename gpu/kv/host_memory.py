"""Host memory for blocks of KV, which an executor and its core share: slots of equal size.

The executor moves blocks between its pages and the slots (`blocks.py`, `cuda_blocks.py`). A thread of
the core reads slots to give blocks to a disk or another replica, and fills slots with what comes from
there. No lock stands between them: a slot has a *seal*, a checksum of its bytes and of the key that
names them. A reader takes a slot's bytes only if the seal fits the key that it asks for. So a slot that
is not written yet, or was written again, is never mistaken for the wanted block.

Ranks that hold a model together have such memory each, with their part of every block.

This file does not know torch or streams.
"""

import functools
import mmap
import os
import tempfile
import weakref
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
from msgspec import structs

from ramify.protocol.plan import ExecutorInfo

Words = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]

FACTOR = 0x9E3779B97F4A7C15 - (1 << 64)  # odd
RECORD = 64  # bytes that a disk keeps of each block, beside it
_PAGE = 4096


def seal_weights(size: int) -> Words:
    """Make the weights of a block's words: int64[size // 8], odd, so that no change of one word keeps
    the weighted sum.
    """
    with np.errstate(over="ignore"):
        weights: Words = (np.arange(1, size // 8 + 1, dtype=np.int64) * np.int64(FACTOR)) | 1
    return weights


def key_part(key: bytes) -> int:
    """Compute what a key of 16 bytes adds to its block's seal, as an int64."""
    first, second = (int.from_bytes(part, "little") for part in (key[:8], key[8:16]))
    return _int64(first + second * FACTOR)


def _int64(number: int) -> int:
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


class HostMemory:
    """Shared memory of `count` slots of `size` bytes, a multiple of 8. `path`: another process opens it.

    `blocks` [count, size] and `seals` [count] are the memory itself. Slots never used take none.
    """

    def __init__(self, count: int, size: int, path: str = "") -> None:
        """Make slots, or open those at `path`. Raises OSError."""
        self.count, self.size = count, size
        start = -(-8 * count // _PAGE) * _PAGE
        length = max(_PAGE, start + count * size)
        if path:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        elif hasattr(os, "memfd_create"):
            descriptor = os.memfd_create("ramify-kv", os.MFD_CLOEXEC)
        else:
            descriptor, name = tempfile.mkstemp()
            os.unlink(name)
        self._close = weakref.finalize(self, os.close, descriptor)
        if not path:
            os.ftruncate(descriptor, length)
        elif os.fstat(descriptor).st_size != length:
            raise OSError(f"{path} does not hold {count} blocks of {size} bytes")
        self.path = path or f"/proc/{os.getpid()}/fd/{descriptor}"
        self.memory: Bytes = np.frombuffer(mmap.mmap(descriptor, length), dtype=np.uint8)
        self.seals: Words = self.memory[: 8 * count].view(np.int64)
        self.blocks: Bytes = self.memory[start : start + count * size].reshape(count, size)
        self._weights = seal_weights(size)

    def close(self) -> None:
        """Release the memory, as soon as nothing else refers to it. Idempotent."""
        self._close()
        self.memory = np.zeros(0, dtype=np.uint8)
        self.seals, self.blocks = np.zeros(0, dtype=np.int64), self.memory.reshape(0, self.size)

    def described(self, info: ExecutorInfo, whole: bool = True) -> ExecutorInfo:
        """Return an executor's `info` with this memory. Not `whole`: of one rank, see `of_ranks`."""
        where = {"host_memory" if whole else "rank_memory": self.path}
        return structs.replace(info, block_bytes=self.size, **where)

    def told(self, slot: int) -> int:
        """Read the seal of a slot, whether it fits or not."""
        return int(self.seals[slot])

    def seal(self, key: bytes, block: Bytes) -> int:
        """Compute the seal of a block's bytes under `key`."""
        return _int64(int(np.dot(block.view(np.int64), self._weights)) + key_part(key))

    def copy(self, slot: int, key: bytes, into: Bytes) -> int | None:
        """Copy block `key`. Returns its seal; None: the slot does not hold it, or not yet."""
        seal = self.told(slot)
        np.copyto(into, self.blocks[slot])
        return seal if seal == self.seal(key, into) else None

    def read(self, slot: int, key: bytes) -> tuple[int, bytes] | None:
        """Read block `key`: its seal and its bytes; None as of `copy`."""
        data = np.empty(self.size, dtype=np.uint8)
        seal = self.copy(slot, key, data)
        return None if seal is None else (seal, data.tobytes())

    def write(self, slot: int, key: bytes, seal: int, data: bytes | Bytes) -> bool:
        """Put a block into a slot that has no other writer; False: `data` does not fit `seal`."""
        block = np.frombuffer(data, dtype=np.uint8)
        if len(block) != self.size or seal != self.seal(key, block):
            return False
        np.copyto(self.blocks[slot], block)
        self.seals[slot] = seal
        return True


class RankMemory:
    """The host memories of ranks that hold a model together, as one. A slot is the ranks' slots of that
    number: a block is their parts, one after another, and is there if all parts are.
    """

    def __init__(self, count: int, size: int, paths: list[str]) -> None:
        """Open the memories at `paths`, by rank; `size`: of all parts. Raises OSError."""
        self.count, self.size = count, size
        self._ranks = [HostMemory(count, size // len(paths), path) for path in paths]

    def close(self) -> None:
        for rank in self._ranks:
            rank.close()

    def told(self, slot: int) -> int:
        """Read the seal of a slot, whether it fits or not."""
        return _joined(rank.told(slot) for rank in self._ranks)

    def seal(self, key: bytes, block: Bytes) -> int:
        """Compute the seal of a block's bytes under `key`."""
        parts = zip(self._ranks, self._parts(block), strict=True)
        return _joined(rank.seal(key, part) for rank, part in parts)

    def copy(self, slot: int, key: bytes, into: Bytes) -> int | None:
        """Copy block `key`. Returns its seal; None: some slot does not hold its part, or not yet."""
        parts = zip(self._ranks, self._parts(into), strict=True)
        seals = [rank.copy(slot, key, part) for rank, part in parts]
        return _joined(seal for seal in seals if seal is not None) if None not in seals else None

    def write(self, slot: int, key: bytes, seal: int, data: Bytes) -> bool:
        """Put a block into slots that have no other writer; False: `data` does not fit `seal`."""
        if len(data) != self.size or seal != self.seal(key, data):
            return False
        parts = zip(self._ranks, self._parts(data), strict=True)
        return all(rank.write(slot, key, rank.seal(key, part), part) for rank, part in parts)

    def _parts(self, block: Bytes) -> Bytes:
        """Cut a block into the ranks' parts: [ranks, bytes]."""
        return block.reshape(len(self._ranks), -1)


def _joined(seals: Iterable[int]) -> int:
    """Join the seals of parts, in order, into one int64."""
    return functools.reduce(lambda joined, seal: _int64(joined * FACTOR + seal), seals, 0)


def of_ranks(infos: Sequence[ExecutorInfo]) -> ExecutorInfo:
    """Return rank 0's info, with the paths of all ranks' memories."""
    paths = [info.rank_memory for info in infos if info.rank_memory]
    return structs.replace(infos[0], host_memory=os.pathsep.join(paths)) if paths else infos[0]


def whole_block(info: ExecutorInfo) -> int:
    """Count the bytes of a block, of all ranks."""
    return info.block_bytes * (info.host_memory.count(os.pathsep) + 1)


def shared_memory(count: int, size: int, path: str) -> HostMemory | RankMemory:
    """Open `ExecutorInfo.host_memory`, with blocks of `size` bytes. Raises OSError."""
    paths = path.split(os.pathsep)
    return RankMemory(count, size, paths) if len(paths) > 1 else HostMemory(count, size, path)
