"""The ring in shared memory by which rank 0 sends messages to all other ranks at once.

A message goes through it in parts. The first words of the memory are each rank's: how far it has come,
in bytes and in messages, and whether it sleeps. Readers on GPUs poll the writer's position for a while,
which takes no system call, and then sleep until their bell, an eventfd, is rung. The
memory has its pages from the start, so that no message waits for them. It has no name: processes inherit
its descriptor, and it is gone with the last of them. This file does not know what messages mean.
"""

import mmap
import os
import platform
import select
import sys
import threading
import time
from types import TracebackType

import msgspec

from ramify.protocol.errors import ConfigError

RING_BYTES, PART_BYTES = 4 << 20, 1 << 20
MOST_BYTES = 64 << 20  # of a message
_LINE = 64  # bytes: counters of ranks lie in cache lines of their own
_WORDS = _LINE // 8
_POSITION, _MESSAGES, _SLEEPS = range(3)  # words of a line
_POLL_SECONDS = 50e-6  # between looks at a ring that is full
SPIN_SECONDS = 0.01  # for which a reader looks before it sleeps: longer than most steps of decodes
DOZE_SECONDS = 0.02  # should the bell not be heard, as neither process waits for the other's writes
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
        each = os.EFD_CLOEXEC | (0 if _ORDERED else os.EFD_SEMAPHORE)
        self._own += [os.eventfd(0, each) for _ in range(ranks - 1)]
        store, ring, *bells = self._own
        self.places = [RankPlace(rank, ranks, store, ring, bells) for rank in range(ranks)]

    def __enter__(self) -> "GroupMemory":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for descriptor in self._own:
            os.close(descriptor)

    def counters(self) -> "GroupCounters":
        """Return the group's counters, which outlive this."""
        return GroupCounters(self.places[0])


class GroupCounters:
    """The progress of ranks, for the process that watches them."""

    def __init__(self, place: RankPlace) -> None:
        self._words = memoryview(mmap.mmap(place.ring, _LINE * place.ranks)).cast("Q")

    def messages(self) -> list[int]:
        """Read by rank how many messages rank 0 has sent, and each other rank has taken."""
        found: list[int] = self._words[_MESSAGES::_WORDS].tolist()
        return found

    def close(self) -> None:
        self._words.release()


class StepRing:
    """The ring: rank 0 writes, the others read. Positions count all bytes since the start."""

    def __init__(self, place: RankPlace, spins: bool = False) -> None:
        """Take over the descriptors of ring and bells. `spins`: waiting may keep a core busy."""
        self._rank, self._others = place.rank, range(1, place.ranks)
        head, flags = _LINE * place.ranks, mmap.MAP_SHARED | mmap.MAP_POPULATE
        self._memory = memoryview(mmap.mmap(place.ring, head + RING_BYTES, flags))
        os.close(place.ring)
        self._words, self._data = self._memory[:head].cast("Q"), self._memory[head:]
        self._at = self._count = 0
        self._spins = SPIN_SECONDS if spins and _ORDERED else 0.0
        self._fence = threading.Lock()  # taking it orders writes before later reads
        self._bells = place.bells
        for bell in place.bells:
            os.set_inheritable(bell, False)
        self._bell = select.poll()
        if place.rank:
            self._bell.register(place.bells[place.rank - 1], select.POLLIN)
            self._words[place.rank * _WORDS + _SLEEPS] = int(not _ORDERED)

    def put(self, message: bytes) -> None:
        """Write for all readers; waits while the ring is full. Raises ValueError for what never fits."""
        if len(message) > MOST_BYTES:
            raise ValueError(f"a message of {len(message)} bytes is longer than {MOST_BYTES}")
        self._count += 1
        self._words[_MESSAGES] = self._count
        if len(message) <= PART_BYTES:
            self._write(len(message).to_bytes(8, "little") + message)
            return
        self._write(len(message).to_bytes(8, "little"))
        for at in range(0, len(message), PART_BYTES):
            self._write(message[at : at + PART_BYTES])

    def take(self, timeout: float) -> bytes | None:
        """Read the next message; None after `timeout` seconds."""
        until = time.perf_counter() + self._spins
        words, at = self._words, self._at
        while words[_POSITION] <= at and time.perf_counter() < until:
            pass
        if not self._arrived(timeout):
            return None
        size = int.from_bytes(self._read(8), "little")
        if size <= PART_BYTES:
            message = self._read(size)
        else:
            self._words[self._rank * _WORDS + _POSITION] = self._at
            message = b"".join(self._part(size - at) for at in range(0, size, PART_BYTES))
        line = self._rank * _WORDS
        self._count += 1
        self._words[line + _MESSAGES] = self._count
        self._words[line + _POSITION] = self._at
        return message

    def close(self) -> None:
        """Release the memory and the descriptors. Idempotent."""
        if self._bells:
            for memory in (self._words, self._data, self._memory):
                memory.release()
            for bell in self._bells:
                os.close(bell)
            self._bells = []

    def _part(self, left: int) -> bytes:
        """Read the next part of a message of which `left` bytes are to come."""
        while not self._arrived(DOZE_SECONDS):
            pass
        part = self._read(min(left, PART_BYTES))
        self._words[self._rank * _WORDS + _POSITION] = self._at
        return part

    def _arrived(self, timeout: float) -> bool:
        """Sleep until there is something to read, or `timeout` seconds. Returns whether there is."""
        words, sleeps = self._words, self._rank * _WORDS + _SLEEPS
        if not _ORDERED:  # a bell is rung for each part: a reader that hears it sees all earlier writes
            if not self._bell.poll(1000 * timeout):
                return False
            os.eventfd_read(self._bells[self._rank - 1])
            return True
        if words[_POSITION] > self._at:
            return True
        until = time.perf_counter() + timeout
        words[sleeps] = 1
        with self._fence:
            pass
        while words[_POSITION] <= self._at and (left := until - time.perf_counter()) > 0:
            if self._bell.poll(1000 * min(left, DOZE_SECONDS)):
                os.eventfd_read(self._bells[self._rank - 1])
        words[sleeps] = 0
        return words[_POSITION] > self._at

    def _write(self, part: bytes) -> None:
        words, end = self._words, self._at + len(part)
        while end - min(words[rank * _WORDS + _POSITION] for rank in self._others) > RING_BYTES:
            time.sleep(_POLL_SECONDS)
        first = self._at % RING_BYTES
        ahead = RING_BYTES - first
        if len(part) <= ahead:
            self._data[first : first + len(part)] = part
        else:
            self._data[first:], self._data[: len(part) - ahead] = part[:ahead], part[ahead:]
        words[_POSITION] = self._at = end
        with self._fence:
            pass
        for rank in self._others:
            if words[rank * _WORDS + _SLEEPS]:
                os.eventfd_write(self._bells[rank - 1], 1)

    def _read(self, size: int) -> bytes:
        first = self._at % RING_BYTES
        self._at += size
        if first + size <= RING_BYTES:
            return bytes(self._data[first : first + size])
        return bytes(self._data[first:]) + bytes(self._data[: first + size - RING_BYTES])
