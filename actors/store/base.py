"""The interface of stores. Calls block; one thread makes them, one after the other.

A session belongs to the server that took it last (`take`). That server gets a *fence*, a number that
only grows, and its writes carry it: a write with another fence than the store's changes nothing. So a
server that was away for a while, or lost the session to another one, cannot overwrite newer state.
Several servers may use one store if it is `shared`. The store knows each by its signs of life (`tend`).
A session of a live server is asked for before it is taken.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Literal, Protocol

import msgspec

from ramify.protocol.saved import HISTORY, Changes, SavedHistory, StoredSession

How = Literal["free", "ask", "force"]
Refusal = Literal["moved", "lost"]
GONE_SECONDS = 86_400  # for which a shared store remembers that a session was deleted
MOST_RECALLED = 1 << 12  # answers of one history
SECRET_BYTES = 32  # with which servers sign what clients keep for them

ASIDE = " (damaged "  # in the name of what was set aside, which no session's id has


class StoreError(Exception):
    """The store cannot be read or written now; the message says why and how to mend it."""


class StoreDamaged(StoreError):
    """An item is damaged: it cannot be read, now or later."""


class StoreStarting(StoreError):
    """The database is starting, and will answer soon."""


class Taken(msgspec.Struct, frozen=True):
    """A session that is this server's now. No fence and no items: the store has no such session."""

    fence: int
    items: Mapping[str, bytes]


def refusal(changes: Changes, found: tuple[int, int] | None, gone: int) -> Refusal | None:
    """Why changes are not written; None: they are. `found`: fence and count of what the store has of the
    session, if anything; `gone`: the fence under which it was deleted, 0: it was not.

    "moved": another server has taken it, or it was deleted. "lost": the store has lost what the changes
    follow, in a crash or by a change to a standby: the session is to be saved whole.
    """
    if found is None:
        if gone >= changes.fence:
            return "moved"
        return None if changes.whole else "lost"
    fence, count = found
    if fence > changes.fence:
        return "moved"
    if changes.whole:
        return None
    # A batch whose answer was lost is written again: the store may be ahead, and ends where it was.
    return None if fence == changes.fence and count >= changes.count - 1 else "lost"


class Store(Protocol):
    """Items of sessions, by session and key (see `protocol.saved`). Methods raise StoreError."""

    shared: bool  # whether several servers may have it at once
    connections: int  # made so far: what was written over an earlier one may be lost

    def write(self, batch: Sequence[Changes]) -> Mapping[int, Refusal]:
        """All of it or nothing, but for what `refusal` keeps out: returned by its place in `batch`.
        The rest is on the disk afterwards if any of it is `sync`.
        """
        ...

    def behind(self, known: Mapping[str, tuple[int, int]]) -> Collection[str]:
        """Sessions of which the store has lost what was written. `known`: fence and last count of each.

        Not those that other servers have taken since.
        """
        ...

    def set_aside(self, session: str) -> None:
        """Give the session's damaged items another name, so that it can be saved anew."""

    def take(self, session: str, how: How) -> Taken | None:
        """Make the session this server's, and read it.

        None: another live server has it, and keeps it (`how` "free") or was asked to save and release it
        ("ask"). "force" takes it from any server.
        """

    def release(self, session: str) -> None:
        """Record that this server does not have the session in memory."""

    def forget(self, session: str, fence: int) -> None:
        """Delete the session, which is over, if `fence` is the store's."""

    def head(self, session: str) -> bytes | None:
        """Its `HEAD`; None: it is not there, or has expired. It stays whose it is."""

    def read(self, session: str) -> Mapping[str, bytes]:
        """All its items; none if it is not there, or has expired. It stays whose it is."""
        ...

    def delete(self, sessions: Sequence[str]) -> None:
        """Delete sessions, whichever server has them."""

    def kept(self) -> Iterator[StoredSession]:
        """The sessions, the last used first."""
        ...

    def waiting(self) -> list[str]:
        """Sessions with pending ops and no live owner, most recent first; not those another server just
        asked for.
        """
        ...

    def sweep(self, *, older_than: float, most: int, now: float) -> int:
        """Forget what has expired or was last used before `older_than`; then, while all hold more than
        `most` bytes, the oldest of the owner that holds most (`retention`). None that a server has in
        memory. Returns how many.
        """
        ...

    def tend(self) -> list[str]:
        """Give a sign of life. Returns the sessions of this server that another one waits for.

        Called a few times a second if the store is `shared`.
        """
        ...

    def clock(self) -> float | None:
        """The time of the last sweep, as it was told; None: there was none."""

    def set_clock(self, now: float) -> None:
        """Set the time of the last sweep, in seconds since 1970."""

    def secret(self) -> bytes:
        """`SECRET_BYTES` at random, the same for all servers of this store as long as it lasts."""
        ...

    def rewrite(self) -> None:
        """Have its files written anew, so that nothing of what was deleted or replaced stays there."""

    def mark(self) -> bytes | None:
        """The bytes that the store was marked with, or None."""

    def set_mark(self, value: bytes, *, replace: bool) -> None:
        """Mark it. Without `replace` a mark that is there stays."""

    def check(self) -> list[str]:
        """Faults of the whole store, which is read for it; empty: it is sound."""
        ...

    def warnings(self) -> list[str]:
        """Settings that keep the store from keeping its promises."""
        ...

    def close(self) -> None:
        """Nothing is called afterwards."""


def saved_history(store: Store, asked: Sequence[bytes]) -> list[SavedHistory]:
    """See `Histories.keep`: of the first of these that is there, with all that it stands behind."""
    for first in asked:
        found: list[SavedHistory] = []
        before: bytes | None = first
        while before is not None and len(found) < MOST_RECALLED:
            items = store.read(f"{HISTORY}{before.hex()}")
            history = SavedHistory.of(items.get(HISTORY, b""))
            if history is None:
                break
            found.append(history)
            before = history.before
        if before is None:
            return found[::-1]
    return []
