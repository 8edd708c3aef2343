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
NAME_BYTES = 64  # of the minter's name: `protocol.credentials.NAME`
# digest (zero: free), expiry in engine seconds, name (filled up with zeros)
_RECORD = struct.Struct(f"<{DIGEST_BYTES}sd{NAME_BYTES}s")
_FREE = bytes(DIGEST_BYTES)


class Minted(Protocol):
    """A set of digests with expiries, and the names of those who minted them."""

    def add(self, digest: bytes, name: str, expiry: float, now: float) -> bool:
        """Remember a token. False if there is no room, even without those that have expired."""
        ...

    def take(self, digest: bytes, now: float) -> str | None:
        """Forget the token. Its minter if it was there and has not expired: at most once per `add`."""
        ...


class OwnMinted:
    """The tokens of one process."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._held: dict[bytes, tuple[float, str]] = {}  # expiry and minter, oldest first

    def add(self, digest: bytes, name: str, expiry: float, now: float) -> bool:
        for old in [old for old, (expiry, _) in self._held.items() if expiry <= now]:
            del self._held[old]
        if len(self._held) >= self._most:
            return False
        self._held[digest] = (expiry, name)
        return True

    def take(self, digest: bytes, now: float) -> str | None:
        expiry, name = self._held.pop(digest, (now, ""))
        return name if now < expiry else None


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

    def add(self, digest: bytes, name: str, expiry: float, now: float) -> bool:
        with self._locked():
            (last,) = struct.unpack_from("<Q", self._table, _RECORD.size * self._most)
            for slot in range(last, last + self._most):
                at = slot % self._most * _RECORD.size
                held, until, _ = _RECORD.unpack_from(self._table, at)
                if held == _FREE or until <= now:
                    _RECORD.pack_into(self._table, at, digest, expiry, name.encode())
                    struct.pack_into("<Q", self._table, _RECORD.size * self._most, slot + 1)
                    return True
            return False

    def take(self, digest: bytes, now: float) -> str | None:
        with self._locked():
            at = self._table.find(digest, 0, _RECORD.size * self._most)
            while at >= 0 and at % _RECORD.size:  # by chance across two records
                at = self._table.find(digest, at + 1, _RECORD.size * self._most)
            if at < 0:
                return None
            _, expiry, name = _RECORD.unpack_from(self._table, at)
            _RECORD.pack_into(self._table, at, _FREE, 0.0, b"")
            return bytes(name).rstrip(b"\0").decode() if now < float(expiry) else None

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
