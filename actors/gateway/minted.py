"""The minted tokens that are neither used nor expired: of one process, or of several together.

Which process mints a token and which one a client then reaches is chance, and a token opens one
connection, wherever. So several processes share a table in memory (an anonymous file, inherited):
no message, no wait, and whoever takes a token out of it is the only one.

Pure but for that file: time is an argument. This file does not know what a token looks like, only
its digest.
"""

import fcntl
import mmap
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

DIGEST_BYTES = 32
_RECORD = struct.Struct(f"<{DIGEST_BYTES}sd")  # digest (zero: free), expiry in engine seconds
_FREE = bytes(DIGEST_BYTES)


class Minted(Protocol):
    """A set of digests with expiries."""

    def add(self, digest: bytes, expiry: float, now: float) -> bool:
        """Remember a token. False if there is no room, even without those that have expired."""
        ...

    def take(self, digest: bytes, now: float) -> bool:
        """Forget the token. True if it was there and has not expired: at most once per `add`."""
        ...


class OwnMinted:
    """The tokens of one process."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._expiry: dict[bytes, float] = {}  # oldest first

    def add(self, digest: bytes, expiry: float, now: float) -> bool:
        for old in [old for old, expiry in self._expiry.items() if expiry <= now]:
            del self._expiry[old]
        if len(self._expiry) >= self._most:
            return False
        self._expiry[digest] = expiry
        return True

    def take(self, digest: bytes, now: float) -> bool:
        expiry = self._expiry.pop(digest, None)
        return expiry is not None and now < expiry


class SharedMinted:
    """The tokens of all processes that hold the file `fd`, of `table_bytes(most)` zeros at first.

    A ring: as all tokens live equally long, the slot after the last one is free or has the oldest
    that is left; behind that one some may be free.
    Record locks belong to a process and end with it, so one that dies leaves no lock behind.
    """

    def __init__(self, fd: int, most: int) -> None:
        self._fd = fd
        self._most = most
        self._table = mmap.mmap(fd, table_bytes(most))

    def add(self, digest: bytes, expiry: float, now: float) -> bool:
        with self._locked():
            (last,) = struct.unpack_from("<Q", self._table, _RECORD.size * self._most)
            for slot in range(last, last + self._most):
                at = slot % self._most * _RECORD.size
                held, until = _RECORD.unpack_from(self._table, at)
                if held == _FREE or until <= now:
                    _RECORD.pack_into(self._table, at, digest, expiry)
                    struct.pack_into("<Q", self._table, _RECORD.size * self._most, slot + 1)
                    return True
            return False

    def take(self, digest: bytes, now: float) -> bool:
        with self._locked():
            at = self._table.find(digest, 0, _RECORD.size * self._most)
            while at >= 0 and at % _RECORD.size:  # by chance across two records
                at = self._table.find(digest, at + 1, _RECORD.size * self._most)
            if at < 0:
                return False
            _, expiry = _RECORD.unpack_from(self._table, at)
            _RECORD.pack_into(self._table, at, _FREE, 0.0)
            return now < float(expiry)

    def close(self) -> None:
        """Unmap the table; the file stays open."""
        self._table.close()

    @contextmanager
    def _locked(self) -> Iterator[None]:
        fcntl.lockf(self._fd, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self._fd, fcntl.LOCK_UN)


def table_bytes(most: int) -> int:
    """The size of a shared table for `most` tokens: the records, and the ring's position."""
    return most * _RECORD.size + 8
