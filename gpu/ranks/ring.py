"""What rank 0 tells the other ranks: a ring in shared memory, written once whatever their number.

Each reader has a bell, an eventfd that counts the messages it has not taken. Who sleeps is woken by it,
which takes the system 50 us and more; so readers on GPUs look at the position of the writer for a while.
That is written behind the bells: who sees it finds its bell rung. The memory has no name: processes
inherit its descriptor, and it is gone with the last of them. This file does not know what messages mean.
"""

import mmap
import os
import platform
import select
import struct
import sys
import time
from types import TracebackType

import msgspec

from ramify.protocol.errors import ConfigError

RING_BYTES = 128 << 20  # untouched pages take no memory; a message takes half of it at most
_COUNTER, _LINE = struct.Struct("=Q"), 64  # counters lie in cache lines of their own
_POLL_SECONDS = 50e-6  # between looks at a ring that is full
SPIN_SECONDS = 0.01  # for which a reader looks before it sleeps: longer than most steps of decodes
_ORDERED = platform.machine() in ("x86_64", "AMD64")  # writes are seen in their order


class RankPlace(msgspec.Struct, frozen=True, array_like=True):
    """One of `ranks` processes, and the descriptors that it has inherited.

    `store`: a file in memory where ranks find each other; `bells`: of ranks 1, 2, ...
    """

    rank: int
    ranks: int
    store: int
    ring: int
    bells: list[int]

    @property
    def descriptors(self) -> tuple[int, ...]:
        return self.store, self.ring, *self.bells


class GroupMemory:
    """The descriptors of a group that is being started. Closed when all its processes have them."""

    def __init__(self, ranks: int) -> None:
        if sys.platform != "linux":
            raise ConfigError(f"--tensor-parallel {ranks} needs Linux: leave it out")
        self._own = [os.memfd_create(name) for name in ("ramify-ranks", "ramify-steps")]
        os.ftruncate(self._own[1], _LINE * ranks + RING_BYTES)
        self._own += [os.eventfd(0, os.EFD_SEMAPHORE | os.EFD_CLOEXEC) for _ in range(ranks - 1)]
        store, ring, *bells = self._own
        self.places = [RankPlace(rank, ranks, store, ring, bells) for rank in range(ranks)]

    def __enter__(self) -> "GroupMemory":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for descriptor in self._own:
            os.close(descriptor)


class StepRing:
    """Rank 0 writes, the others read. Positions count all bytes since the start, one for each rank."""

    def __init__(self, place: RankPlace, spins: bool = False) -> None:
        """Takes over the descriptors of ring and bells. `spins`: a core may be kept busy by waiting."""
        self._rank, self._readers = place.rank, range(1, place.ranks)
        self._data = _LINE * place.ranks
        self._memory = mmap.mmap(place.ring, self._data + RING_BYTES)
        os.close(place.ring)
        self._at = 0
        self._spins = SPIN_SECONDS if spins and _ORDERED else 0.0
        self._bells = place.bells
        for bell in place.bells:
            os.set_inheritable(bell, False)
        self._bell = select.poll()
        if place.rank:
            self._bell.register(place.bells[place.rank - 1], select.POLLIN)

    def put(self, message: bytes) -> None:
        """Write for all readers; waits while the ring is full. Raises ValueError for what never fits."""
        size = _COUNTER.size + len(message)
        if size > RING_BYTES // 2:
            raise ValueError(f"a message of {len(message)} bytes for a ring of {RING_BYTES}")
        while self._at + size - min(map(self._counted, self._readers)) > RING_BYTES:
            time.sleep(_POLL_SECONDS)
        self._write(_COUNTER.pack(len(message)))
        self._write(message)
        for bell in self._bells:
            os.eventfd_write(bell, 1)
        _COUNTER.pack_into(self._memory, 0, self._at)

    def take(self, timeout: float) -> bytes | None:
        """The next message; None after `timeout` seconds."""
        until = time.perf_counter() + self._spins
        while self._counted(0) <= self._at and time.perf_counter() < until:
            pass
        if not self._bell.poll(1000 * timeout):
            return None
        os.eventfd_read(self._bells[self._rank - 1])
        (size,) = _COUNTER.unpack(self._read(_COUNTER.size))
        message = self._read(size)
        _COUNTER.pack_into(self._memory, _LINE * self._rank, self._at)
        return message

    def close(self) -> None:
        """Again: no change."""
        if self._bells:
            self._memory.close()
            for bell in self._bells:
                os.close(bell)
            self._bells = []

    def _counted(self, rank: int) -> int:
        found: int = _COUNTER.unpack_from(self._memory, _LINE * rank)[0]
        return found

    def _write(self, part: bytes) -> None:
        first = self._at % RING_BYTES
        ahead = min(len(part), RING_BYTES - first)
        self._memory[self._data + first : self._data + first + ahead] = part[:ahead]
        self._memory[self._data : self._data + len(part) - ahead] = part[ahead:]
        self._at += len(part)

    def _read(self, size: int) -> bytes:
        first = self._at % RING_BYTES
        ahead = min(size, RING_BYTES - first)
        part = self._memory[self._data + first : self._data + first + ahead]
        self._at += size
        return part + self._memory[self._data : self._data + size - ahead]
