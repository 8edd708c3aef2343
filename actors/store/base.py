"""What every store can do. Calls block; one thread makes them, one after the other.

A session belongs to the server that took it last (`take`). That server gets a *fence*, a number that
only grows, and its writes carry it: a write with another fence than the store's changes nothing. So one
that was away for a while, or that a client has left for another one, cannot write what it believed.
Several servers may have one store if it is `shared`. Each is known there by the signs of life that it
gives (`tend`), and a session of one that lives is asked for before it is taken.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Literal, Protocol

import msgspec

from ramify.protocol.saved import Changes, Kept

How = Literal["free", "ask", "force"]


class StoreError(Exception):
    """The store cannot be read or written now; the message says why and how to mend it."""


class StoreDamaged(StoreError):
    """What was asked for cannot be read, now or later."""


class Taken(msgspec.Struct, frozen=True):
    """A session that is this server's now. No fence and no items: the store has no such session."""

    fence: int
    items: Mapping[str, bytes]


class Store(Protocol):
    """Items of sessions, by session and key (see `protocol.saved`). Methods raise StoreError."""

    shared: bool  # whether several servers may have it at once

    def write(self, batch: Sequence[Changes]) -> Collection[int]:
        """All of it or nothing, but for changes with another fence than the store's: their places in
        `batch` are returned. The rest is on the disk afterwards if any of it is `sync`.
        """
        ...

    def take(self, session: str, how: How) -> Taken | None:
        """Make it this server's, and read it. None: another server that lives has it, and keeps it
        ("free") or was asked to save it and let it go ("ask"). "force" takes it from whoever has it.
        """
        ...

    def release(self, session: str) -> None:
        """This server does not have it in memory, whoever thought so."""
        ...

    def forget(self, session: str, fence: int) -> None:
        """It is over, if `fence` is the store's."""
        ...

    def head(self, session: str) -> bytes | None:
        """Its `HEAD`; None: it is not there, or has expired. It stays whose it is."""
        ...

    def read(self, session: str) -> Mapping[str, bytes]:
        """All its items; none if it is not there, or has expired. It stays whose it is."""
        ...

    def delete(self, sessions: Sequence[str]) -> None:
        """Forget them, whoever has them."""
        ...

    def kept(self) -> Iterator[Kept]:
        """The sessions, the last used first."""
        ...

    def waiting(self) -> list[str]:
        """Those in which ops wait or run, that no server has that lives and that none has asked for just
        now: one that was let go is for who asked. The last used first.
        """
        ...

    def sweep(self, *, older_than: float, most: int, now: float) -> int:
        """Forget what has expired or was last used before `older_than`, then the oldest while all hold
        more than `most` bytes; none that a server has in memory. Returns how many.
        """
        ...

    def tend(self) -> list[str]:
        """Give a sign of life. Returns the sessions of this server that another one waits for.

        Called a few times a second if the store is `shared`.
        """
        ...

    def mark(self) -> bytes | None:
        """What the store was marked with, if it was."""
        ...

    def set_mark(self, value: bytes, *, replace: bool) -> None:
        """Mark it. Without `replace` a mark that is there stays."""
        ...

    def check(self) -> list[str]:
        """What is wrong with it; nothing: it is sound. Reads all of it."""
        ...

    def warnings(self) -> list[str]:
        """What about its settings keeps it from doing what it promises."""
        ...

    def close(self) -> None:
        """Nothing is called afterwards."""
        ...
