"""Mailboxes: how actors of one event loop exchange messages.

`tell` never awaits: it appends and wakes the reader, so a sender needs no task switch. The
reader drains everything that waits in one wake-up. A mailbox belongs to one loop and one reader;
another thread hands its message over with `loop.call_soon_threadsafe(mailbox.tell, message)`.
"""

import asyncio
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

T = TypeVar("T")
T_contra = TypeVar("T_contra", contravariant=True)


class MailboxFull(Exception):
    """The reader is too far behind. What that means is documented where the mailbox is made."""


class MailboxClosed(Exception):
    """The actor has stopped."""


class Address(Protocol[T_contra]):
    """A place to send an actor messages: a local mailbox, or a link to another process."""

    def tell(self, message: T_contra, /) -> None:
        """Queue the message. Raises MailboxFull or MailboxClosed; never blocks."""


class Addressee(Address[T], Protocol[T]):
    """An actor of this event loop: its mailbox, or itself where it handles some messages at once."""

    def tell_all(self, messages: list[T], /) -> None:
        """Tell each, in order, and take it off the list. Raises as `tell`; the rest is still there."""

    def leave(self, message: T, /) -> None:
        """As `tell`, without waking the actor: it gets the message together with the next one."""


class Mailbox(Generic[T]):
    """A bounded FIFO queue with one reader."""

    def __init__(self, name: str, capacity: int) -> None:
        self.name = name
        self.capacity = capacity
        self._items: list[T] = []
        self._waiter: asyncio.Future[None] | None = None
        self._closed = False

    def __len__(self) -> int:
        return len(self._items)

    @property
    def awaited(self) -> bool:
        """Whether the reader waits in `drain`, and nothing is there for it."""
        waiter = self._waiter
        return waiter is not None and not self._items and not waiter.done()

    def leave(self, message: T, /) -> None:
        """As `tell`, without waking the reader: it gets the message together with the next one."""
        if self._closed:
            raise MailboxClosed(self.name)
        if len(self._items) >= self.capacity:
            raise MailboxFull(f"{self.name}: {self.capacity} messages wait")
        self._items.append(message)

    def tell(self, message: T, /) -> None:
        if self._closed:
            raise MailboxClosed(self.name)
        if len(self._items) >= self.capacity:
            raise MailboxFull(f"{self.name}: {self.capacity} messages wait")
        self._items.append(message)
        waiter = self._waiter
        if waiter is not None:
            self._waiter = None
            if not waiter.done():
                waiter.set_result(None)

    def tell_all(self, messages: list[T], /) -> None:
        """Tell each, in order, and take it off the list. Raises as `tell`; the rest is still there."""
        tell_each(self.tell, messages)

    async def drain(self) -> list[T]:
        """All messages that wait, in order; waits until there is at least one.

        Raises MailboxClosed once the mailbox is closed and empty.
        """
        while not self._items:
            if self._closed:
                raise MailboxClosed(self.name)
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        items, self._items = self._items, []
        return items

    def drain_nowait(self) -> list[T]:
        """All messages that wait now, possibly none."""
        items, self._items = self._items, []
        return items

    def drain_with(self, message: T) -> list[T]:
        """All messages that wait now, then `message`: for a reader that is told in its own turn.

        The mailbox need not have room for `message`. Raises MailboxClosed.
        """
        if self._closed:
            raise MailboxClosed(self.name)
        items, self._items = self._items, []
        items.append(message)
        return items

    def close(self) -> None:
        """Take no more messages; the reader gets the waiting ones, then MailboxClosed."""
        self._closed = True
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


def tell_each(tell: Callable[[T], object], messages: list[T]) -> None:
    """Tell each message, in order, and take it off the list. Raises as `tell`; the rest stays."""
    while messages:
        tell(messages[0])
        del messages[0]


class CountedAddress(Protocol[T_contra]):
    """An address that knows how many messages wait in it: a mailbox, or a bundle."""

    def tell(self, message: T_contra, /) -> None: ...
    def __len__(self) -> int: ...


class LimitedAddress(Generic[T]):
    """An address with a limit below that of the queue behind it, for messages that clients cause.

    The rest of the queue is for the core actors, so clients cannot fill it for them.
    """

    def __init__(self, queue: CountedAddress[T], most: int) -> None:
        self._queue = queue
        self._most = most

    def tell(self, message: T, /) -> None:
        """As the mailbox's. Raises MailboxFull when `most` messages wait."""
        if len(self._queue) >= self._most:
            raise MailboxFull(f"{self._most} messages wait")
        self._queue.tell(message)


class FunctionAddress(Generic[T]):
    """An address that is a function."""

    def __init__(self, tell: Callable[[T], None]) -> None:
        self.tell = tell
