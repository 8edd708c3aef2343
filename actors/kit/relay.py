"""A relay: hands messages to an address that may come later or be full for a while.

Results of an executor must not be lost because the scheduler's mailbox is full of submissions at
that moment, and the executor starts before the scheduler has a mailbox. What a relay can hold is
bounded by its source: steps in flight, or the credits of a link.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from ramify.actors.kit.mailbox import Address, MailboxClosed, MailboxFull

T = TypeVar("T")

RETRY_SECONDS = 0.001


class Relay(Generic[T]):
    """Delivers in order. `delivered` is called after each message that the address took.

    What follows is dropped once the address is closed: its actor has stopped.
    """

    def __init__(self, delivered: Callable[[], None] | None = None) -> None:
        self._delivered = delivered
        self._loop = asyncio.get_running_loop()
        self._address: Address[T] | None = None
        self._held: deque[T] = deque()
        self._retry: asyncio.TimerHandle | None = None
        self._closed = False

    def __len__(self) -> int:
        """Messages that the address has not taken yet."""
        return len(self._held)

    def connect(self, address: Address[T]) -> None:
        """Deliver what is held, and everything from now on, to `address`."""
        if self._address is not None:
            raise ValueError("this relay is connected already")
        self._address = address
        self._deliver()

    def tell(self, message: T, /) -> None:
        """Deliver `message`, or hold it. Never raises; nothing happens once closed."""
        if self._closed:
            return
        self._held.append(message)
        if self._retry is None:
            self._deliver()

    def close(self) -> None:
        """Forget what is held."""
        self._closed = True
        self._held.clear()
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None

    def _deliver(self) -> None:
        self._retry = None
        address = self._address
        while self._held and address is not None:
            try:
                address.tell(self._held[0])
            except MailboxFull:
                self._retry = self._loop.call_later(RETRY_SECONDS, self._deliver)
                return
            except MailboxClosed:
                self.close()
                return
            self._held.popleft()
            if self._delivered is not None:
                self._delivered()
