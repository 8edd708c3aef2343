"""The minted tokens that are neither used nor expired: of one process, or of several together.

Which process mints a token and which one a client then reaches is chance, and a token opens one
connection, wherever. So several processes share a table in memory (an anonymous file, inherited):
no message, no wait, and whoever takes a token out of it is the only one.

Each name may hold its part of the room, so that one that mints without end leaves the others theirs.

Pure but for that file: time is an argument. This file does not know what a token looks like, only
its digest.
"""

import fcntl
import mmap
import struct
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

DIGEST_BYTES = 32
NAME_BYTES = 64  # of the minter's name: `protocol.credentials.NAME`
# digest (zero: free), expiry in engine seconds, name (filled up with zeros)
_RECORD = struct.Struct(f"<{DIGEST_BYTES}sd{NAME_BYTES}s")
_FREE = bytes(DIGEST_BYTES)
_SPARSE = 2  # cells for each token, so that one is soon found
_LOOKED_AT = 4  # of a name's own tokens, for each that it mints: so those that were used are forgotten
_PROBES = 64  # cells that one token may have: with half of all free, that many are never taken


class Minted(Protocol):
    """A set of digests with expiries, and the names of those who minted them. All live equally long."""

    def add(self, digest: bytes, name: str, expiry: float, now: float, most: int) -> bool:
        """Remember a token. False if `name` holds `most` that can still be used, or there is no room.

        O(1), but for what has expired.
        """
        ...

    def take(self, digest: bytes, now: float) -> str | None:
        """Take the token out. Returns its minter, unless it has expired: once per `add`."""

    def holds(self, digest: bytes, now: float) -> bool:
        """Whether the token can still be taken."""
        ...


class OwnMinted:
    """The tokens of one process."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._held: dict[bytes, tuple[float, str]] = {}  # expiry and minter, oldest first
        self._count: Counter[str] = Counter()  # by minter

    def add(self, digest: bytes, name: str, expiry: float, now: float, most: int) -> bool:
        while self._held:
            oldest = next(iter(self._held))
            if self._held[oldest][0] > now:
                break
            self.take(oldest, now)
        if len(self._held) >= self._most or self._count[name] >= most:
            return False
        self._held[digest] = (expiry, name)
        self._count[name] += 1
        return True

    def take(self, digest: bytes, now: float) -> str | None:
        held = self._held.pop(digest, None)
        if held is None:
            return None
        expiry, name = held
        self._count[name] -= 1
        if not self._count[name]:
            del self._count[name]
        return name if now < expiry else None

    def holds(self, digest: bytes, now: float) -> bool:
        held = self._held.get(digest)
        return held is not None and now < held[0]


class SharedMinted:
    """The tokens of all processes that hold the file `fd`, of `table_bytes(most)` zeros at first.

    A hash table: a token stands in one of the cells behind the place that its digest says. A name's
    part is divided between the `processes`, each of which counts what it has minted itself.
    Record locks belong to a process and end with it, so one that dies leaves no lock behind.
    """

    def __init__(self, fd: int, most: int, processes: int = 1) -> None:
        self._fd = fd
        self._cells = most * _SPARSE
        self._processes = processes
        self._table = mmap.mmap(fd, table_bytes(most))
        self._mine: dict[str, deque[tuple[float, bytes, int]]] = {}  # expiry, digest, place; by minter

    def add(self, digest: bytes, name: str, expiry: float, now: float, most: int) -> bool:
        mine = self._mine.setdefault(name, deque())
        with self._locked():
            for _ in range(min(_LOOKED_AT, len(mine))):
                until, mints, place = entry = mine.popleft()
                if until > now and self._digest(place) == mints:  # nobody has used it
                    mine.append(entry)
            if len(mine) >= max(1, most // self._processes):
                return False
            for place in self._places(digest):
                held, until, _ = _RECORD.unpack_from(self._table, place)
                if held == _FREE or until <= now:
                    _RECORD.pack_into(self._table, place, digest, expiry, name.encode())
                    mine.append((expiry, digest, place))
                    return True
            return False

    def take(self, digest: bytes, now: float) -> str | None:
        with self._locked():
            for place in self._places(digest):
                if self._digest(place) == digest:
                    _, expiry, name = _RECORD.unpack_from(self._table, place)
                    _RECORD.pack_into(self._table, place, _FREE, 0.0, b"")
                    return bytes(name).rstrip(b"\0").decode() if now < float(expiry) else None
            return None

    def holds(self, digest: bytes, now: float) -> bool:
        with self._locked():
            for place in self._places(digest):
                if self._digest(place) == digest:
                    return now < float(_RECORD.unpack_from(self._table, place)[1])
            return False

    def close(self) -> None:
        """Unmap the table; the file stays open."""
        self._table.close()

    def _places(self, digest: bytes) -> Iterator[int]:
        """Find the cells of the table in which the token may be."""
        first = int.from_bytes(digest[:8])
        for i in range(min(_PROBES, self._cells)):
            yield (first + i) % self._cells * _RECORD.size

    def _digest(self, place: int) -> bytes:
        return self._table[place : place + DIGEST_BYTES]

    @contextmanager
    def _locked(self) -> Iterator[None]:
        fcntl.lockf(self._fd, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self._fd, fcntl.LOCK_UN)


def table_bytes(most: int) -> int:
    """The size in bytes of a shared table for `most` tokens."""
    return most * _SPARSE * _RECORD.size
