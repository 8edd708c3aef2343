"""Addressees by number, and fan-out in slices: telling many without keeping the event loop to itself.

A step's tokens go to hundreds of sessions. If all are told at once, all of them run and write to their
sockets before the loop gets to the executor's next result, and the device waits. If only a few are told
in each turn of the loop, the next result overtakes the rest. Messages for an addressee that still waits
are told together, so a loop that is behind does less work per message.

This file does not know what is told.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from typing import Generic, Protocol, TypeVar

from ramify.actors.kit.mailbox import Addressee, MailboxClosed, MailboxFull

T = TypeVar("T")
T_contra = TypeVar("T_contra", contravariant=True)

WIDTH = 8  # addressees a turn: some 100 us of sessions and sockets
MOVED_MOST = 1024  # addressees of which it is remembered that they went on elsewhere


class Router(Generic[T]):
    """Addresses by number: how the scheduler, the cache and gateways reach sessions."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._addresses: dict[int, Addressee[T]] = {}
        self._moved: deque[int] = deque(maxlen=MOVED_MOST)

    def __contains__(self, key: int) -> bool:
        return key in self._addresses

    def __len__(self) -> int:
        return len(self._addresses)

    def add(self, key: int, address: Addressee[T]) -> None:
        if key in self._addresses:
            raise ValueError(f"{self.name}: {key} is registered already")
        self._addresses[key] = address

    def remove(self, key: int, *, moved: bool = False) -> None:
        """Forget the addressee. `moved`: it goes on elsewhere (see `has_moved`)."""
        self._addresses.pop(key, None)
        if moved:
            self._moved.append(key)

    def has_moved(self, key: int) -> bool:
        """Whether the addressee was removed as it went on elsewhere, and not long ago."""
        return key in self._moved

    def tell(self, key: int, message: T) -> bool:
        """Tell the addressee. False: there is none (any more), and the message is dropped."""
        address = self._addresses.get(key)
        if address is None:
            return False
        try:
            address.tell(message)
        except MailboxClosed:
            return False
        return True

    def tell_all(self, key: int, messages: list[T]) -> None:
        """Tell the addressee each message and take it off the list. Raises MailboxFull: the messages
        without room are still in the list.
        """
        address = self._addresses.get(key)
        if address is None:
            self.tell_none(key, messages)
            return
        try:
            address.tell_all(messages)
        except MailboxClosed:
            return

    def tell_none(self, key: int, messages: list[T]) -> None:
        """Handle messages for a number that nobody has here: they are dropped."""

    def leave(self, key: int, message: T) -> bool:
        """As `tell`, without waking the addressee: see `Addressee.leave`."""
        address = self._addresses.get(key)
        if address is None:
            return False
        try:
            address.leave(message)
        except MailboxClosed:
            return False
        return True


class Spread(Protocol[T_contra]):
    """Tells many addressees, in this process or others: `put`, then `start` for all."""

    def put(self, messages: Iterable[tuple[int, T_contra]], /) -> None:
        """Queue messages, each for the addressee of its number."""

    def start(self) -> None:
        """Send what was put, without blocking the event loop."""

    def flush(self) -> None:
        """Send everything now."""


class FanOut(Generic[T]):
    """A `Spread` to the addressees of a router; to each in order.

    An addressee whose mailbox is full gets the rest in a later turn. `emptied` is called whenever
    nothing waits any more.
    """

    def __init__(
        self,
        router: Router[T],
        width: int = WIDTH,
        emptied: Callable[[], None] | None = None,
    ) -> None:
        self._router = router
        self._width = width
        self._emptied = emptied
        self._waiting: dict[int, list[T]] = {}
        self._order: deque[int] = deque()
        self._turn: asyncio.Handle | None = None

    def __len__(self) -> int:
        """Addressees that wait for their turn."""
        return len(self._order)

    def put(self, messages: Iterable[tuple[int, T]], /) -> None:
        """Queue messages; `start` sends. One whose addressee is gone by then is dropped."""
        waiting, order = self._waiting, self._order
        for key, message in messages:
            if key in waiting:
                waiting[key].append(message)
            else:
                waiting[key] = [message]
                order.append(key)

    def start(self) -> None:
        """Send to the first few now, unless some were sent in this turn, the rest in later turns."""
        if self._turn is None:
            self._run()

    def flush(self) -> None:
        """Send everything now."""
        if self._turn is not None:
            self._turn.cancel()
            self._turn = None
        self._send(len(self._order))

    def _run(self) -> None:
        self._turn = None
        self._send(min(self._width, len(self._order)))
        if self._order:
            self._turn = asyncio.get_running_loop().call_soon(self._run)

    def _send(self, count: int) -> None:
        tell_all, waiting, order = self._router.tell_all, self._waiting, self._order
        for _ in range(count):
            key = order.popleft()
            messages = waiting.pop(key)
            try:
                tell_all(key, messages)
            except MailboxFull:  # once it has worked off what it has
                waiting[key] = messages
                order.append(key)
        if not order and self._emptied is not None:
            self._emptied()
