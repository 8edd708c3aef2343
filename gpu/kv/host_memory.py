"""Host memory for blocks of KV, which an executor and its core share: slots of equal size.

The executor moves blocks between its pages and the slots (`blocks.py`, `cuda_blocks.py`). A thread of
the core reads slots to give blocks to a disk or another replica, and fills slots with what comes from
there. No lock stands between them: a slot has a *seal*, a checksum of its bytes and of the key that
names them. Whoever reads a slot takes the bytes only if the seal fits the key that it came for. So a
slot that is not written yet, or was written again, is never taken for the block that was meant.

Does not know torch, streams, or who asks.
"""

import mmap
import os
import tempfile
import weakref

import numpy as np
import numpy.typing as npt
from msgspec import structs

from ramify.protocol.plan import ExecutorInfo

Words = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]

FACTOR = 0x9E3779B97F4A7C15 - (1 << 64)  # odd
_PAGE = 4096


def seal_weights(size: int) -> Words:
    """Odd numbers, so that no change of one word of `size` bytes keeps the sum. int64[size // 8]"""
    with np.errstate(over="ignore"):
        weights: Words = (np.arange(1, size // 8 + 1, dtype=np.int64) * np.int64(FACTOR)) | 1
    return weights


def key_part(key: bytes) -> int:
    """What a key of 16 bytes adds to its block's seal, as an int64."""
    first, second = (int.from_bytes(part, "little") for part in (key[:8], key[8:16]))
    total = (first + second * FACTOR) % (1 << 64)
    return total - (1 << 64) if total >> 63 else total


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
        """`info` of the executor that made it. `whole`: other processes may take its blocks."""
        return structs.replace(info, host_memory=self.path if whole else "", block_bytes=self.size)

    def seal(self, key: bytes, block: Bytes) -> int:
        """The seal of a block's bytes under `key`."""
        total = int(np.dot(block.view(np.int64), self._weights)) + key_part(key)
        return (total + (1 << 63)) % (1 << 64) - (1 << 63)

    def copy(self, slot: int, key: bytes, into: Bytes) -> int | None:
        """Copy block `key`; its seal. None: the slot does not hold it, or not yet."""
        seal = int(self.seals[slot])
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
