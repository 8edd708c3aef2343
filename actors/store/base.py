"""What every store can do. Calls block; one thread makes them, one after the other."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from ramify.protocol.saved import Changes, Kept


class StoreError(Exception):
    """The store cannot be read or written now; the message says why and how to mend it."""


class Store(Protocol):
    """Items of sessions, by session and key (see `protocol.saved`). Methods raise StoreError."""

    def write(self, batch: Sequence[Changes]) -> None:
        """All of it or nothing. It is on the disk afterwards if any of it is `sync`."""
        ...

    def read(self, session: str) -> Mapping[str, bytes]:
        """All items of a session; none if it is not there, or has expired."""
        ...

    def delete(self, sessions: Sequence[str]) -> None:
        """Forget them."""
        ...

    def kept(self) -> Iterator[Kept]:
        """The sessions, the last used first."""
        ...

    def sweep(self, *, older_than: float, most: int, now: float) -> int:
        """Forget what has expired or was last used before `older_than`, then the oldest while all hold
        more than `most` bytes; none that a server has in memory. Returns how many.
        """
        ...

    def close(self) -> None:
        """Nothing is called afterwards."""
        ...
