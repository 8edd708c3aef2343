"""Host memory for blocks of KV, which an executor and its core share: slots of equal size.

The executor moves blocks between its pages and the slots (`blocks.py`, `cuda_blocks.py`). A thread of
the core reads slots to give blocks to a disk or another replica, and fills slots with what comes from
there. No lock stands between them: a slot has a *seal*, a checksum of its bytes and of the key that
names them. Whoever reads a slot takes the bytes only if the seal fits the key that it came for. So a
slot that is not written yet, or was written again, is never taken for the block that was meant.

Ranks that hold a model together have such memory each, with their part of every block.

Does not know torch, streams, or who asks.
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
    """Odd numbers, so that no change of one word of `size` bytes keeps the sum. int64[size // 8]"""
    with np.errstate(over="ignore"):
        weights: Words = (np.arange(1, size // 8 + 1, dtype=np.int64) * np.int64(FACTOR)) | 1
    return weights


def key_part(key: bytes) -> int:
    """What a key of 16 bytes adds to its block's seal, as an int64."""
    first, second = (int.from_bytes(part, "little") for part in (key[:8], key[8:16]))
    return _int64(first + second * FACTOR)


def _int64(number: int) -> int:
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


class HostMemory:
    """`count` slots of `size` bytes, a multiple of 8. `path`: what another process opens.

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
        """Let go of it, as soon as nothing else refers to the memory. Again: no change."""
        self._close()
        self.memory = np.zeros(0, dtype=np.uint8)
        self.seals, self.blocks = np.zeros(0, dtype=np.int64), self.memory.reshape(0, self.size)

    def described(self, info: ExecutorInfo, whole: bool = True) -> ExecutorInfo:
        """`info` of the executor that made it. Not `whole`: of one rank, see `of_ranks`."""
        where = {"host_memory" if whole else "rank_memory": self.path}
        return structs.replace(info, block_bytes=self.size, **where)

    def told(self, slot: int) -> int:
        """The seal that a slot has, whatever is in it."""
        return int(self.seals[slot])

    def seal(self, key: bytes, block: Bytes) -> int:
        """The seal of a block's bytes under `key`."""
        return _int64(int(np.dot(block.view(np.int64), self._weights)) + key_part(key))

    def copy(self, slot: int, key: bytes, into: Bytes) -> int | None:
        """Copy block `key`; its seal. None: the slot does not hold it, or not yet."""
        seal = self.told(slot)
        np.copyto(into, self.blocks[slot])
        return seal if seal == self.seal(key, into) else None

    def read(self, slot: int, key: bytes) -> tuple[int, bytes] | None:
        """As `copy`: the seal and the bytes."""
        data = np.empty(self.size, dtype=np.uint8)
        seal = self.copy(slot, key, data)
        return None if seal is None else (seal, data.tobytes())

    def write(self, slot: int, key: bytes, seal: int, data: bytes | Bytes) -> bool:
        """Put a block into a slot that nobody else writes; False: `data` is not what was sealed."""
        block = np.frombuffer(data, dtype=np.uint8)
        if len(block) != self.size or seal != self.seal(key, block):
            return False
        np.copyto(self.blocks[slot], block)
        self.seals[slot] = seal
        return True


class RankMemory:
    """The host memories of ranks that hold a model together, as one. A slot of it is theirs with that
    number: a block is the parts that they have, one behind the other, and is there if all parts are.
    """

    def __init__(self, count: int, size: int, paths: list[str]) -> None:
        """Open those at `paths`, by rank; `size`: of all parts. Raises OSError."""
        self.count, self.size = count, size
        self._ranks = [HostMemory(count, size // len(paths), path) for path in paths]

    def close(self) -> None:
        for rank in self._ranks:
            rank.close()

    def told(self, slot: int) -> int:
        """The seal that a slot has, whatever is in it."""
        return _joined(rank.told(slot) for rank in self._ranks)

    def seal(self, key: bytes, block: Bytes) -> int:
        """The seal of a block's bytes under `key`."""
        parts = zip(self._ranks, self._parts(block), strict=True)
        return _joined(rank.seal(key, part) for rank, part in parts)

    def copy(self, slot: int, key: bytes, into: Bytes) -> int | None:
        """Copy block `key`; its seal. None: some slot does not hold its part, or not yet."""
        parts = zip(self._ranks, self._parts(into), strict=True)
        seals = [rank.copy(slot, key, part) for rank, part in parts]
        return _joined(seal for seal in seals if seal is not None) if None not in seals else None

    def write(self, slot: int, key: bytes, seal: int, data: Bytes) -> bool:
        """Put a block into slots that nobody else writes; False: `data` is not what was sealed."""
        if len(data) != self.size or seal != self.seal(key, data):
            return False
        parts = zip(self._ranks, self._parts(data), strict=True)
        return all(rank.write(slot, key, rank.seal(key, part), part) for rank, part in parts)

    def _parts(self, block: Bytes) -> Bytes:
        """[ranks, bytes]"""
        return block.reshape(len(self._ranks), -1)


def _joined(seals: Iterable[int]) -> int:
    """One seal of those of parts: none may change, or change place. An int64."""
    return functools.reduce(lambda joined, seal: _int64(joined * FACTOR + seal), seals, 0)


def of_ranks(infos: Sequence[ExecutorInfo]) -> ExecutorInfo:
    """Rank 0's, which tells where all ranks have their parts of blocks."""
    paths = [info.rank_memory for info in infos if info.rank_memory]
    return structs.replace(infos[0], host_memory=os.pathsep.join(paths)) if paths else infos[0]


def whole_block(info: ExecutorInfo) -> int:
    """Bytes of a block, of all ranks."""
    return info.block_bytes * (info.host_memory.count(os.pathsep) + 1)


def shared_memory(count: int, size: int, path: str) -> HostMemory | RankMemory:
    """What an executor made (`ExecutorInfo.host_memory`), blocks of `size` bytes. Raises OSError."""
    paths = path.split(os.pathsep)
    return RankMemory(count, size, paths) if len(paths) > 1 else HostMemory(count, size, path)
