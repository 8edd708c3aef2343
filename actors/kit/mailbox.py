"""Mailboxes: how actors of one event loop exchange messages.

`tell` never awaits: it appends and wakes the reader, so a sender needs no task switch. The
reader drains everything that waits in one wake-up. A mailbox belongs to one loop and one reader;
another thread hands its message over with `loop.call_soon_threadsafe(mailbox.tell, message)`.
"""

import asyncio
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

from ramify.protocol.messages import Attach, Frame, Progress, Tokens

CAPACITY = 4096  # of a session's mailbox
FRAMES = CAPACITY * 3 // 4  # messages of which kind ever, beyond which frames are refused
FRAME_BYTES = 8 << 20  # of frames that wait, as they came over the sockets
_FROM_CLIENTS = Frame, Attach  # made once: `tell` is called for each message of a step

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


class SessionMailbox(Mailbox[T]):
    """A mailbox in which frames of clients leave room for what the engine says, bounded in bytes.

    `tell` raises MailboxFull for a frame or an `open` sooner than for the rest: its client sends it
    again. Tokens, notices and answers of the cache must arrive; they have the rest of the room to
    themselves.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name, CAPACITY)
        self._bytes = 0

    def tell(self, message: T, /) -> None:
        if not isinstance(message, _FROM_CLIENTS):
            super().tell(message)
            return
        size = message.size
        if len(self) >= FRAMES or (self._bytes and self._bytes + size > FRAME_BYTES):
            raise MailboxFull(f"{self.name}: {len(self)} messages, {self._bytes} bytes of frames wait")
        super().tell(message)
        self._bytes += size

    async def drain(self) -> list[T]:
        messages = await super().drain()
        self._bytes = 0
        return messages


def joined(messages: list[Any]) -> list[Any]:
    """Messages in order, where tokens that follow each other are one message."""
    if len(messages) == 1:
        return messages
    made: list[Any] = []
    progress: list[Progress] | None = None  # of the last one, while more may join it
    for message in messages:
        if type(message) is not Tokens:
            progress = None
            made.append(message)
            continue
        if progress is None:
            progress = list(message.progress)
            made.append(Tokens(progress, message.finished))
        else:
            progress += message.progress
            made[-1] = Tokens(progress, message.finished)
        if message.finished:
            progress = None
    return made


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
