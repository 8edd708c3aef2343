"""Whose bytes are parsed next: a slice of each socket in turn, and so much in a turn of the loop.

What one read brings can be expensive: 256 KiB of empty fragments are 43,000 frames. Parsed at once,
they stop everybody else for a quarter of a second, and more of them wait already. So a socket gets a
slice, then the next socket does, and when the turn's work is done the loop looks after everything
else first. What sends little is parsed as it is read, without a wait behind those who send much, but not
more of it in a turn of the loop either.

This file does not know what parsing is.
"""

import asyncio
from collections import deque
from typing import Protocol

SLICE = 4 << 10  # bytes that a socket parses before it is another one's turn
PLAIN_SLICE = 64 << 10  # of a body that is only gathered
FRAME_WORK = 128  # what a frame costs beside its bytes, in bytes: 5 us, at 40 ns a byte of JSON
TURN_WORK = 64 << 10  # bytes' worth in a turn of the loop: 2 ms


class Source(Protocol):
    """A socket with bytes that nobody has parsed."""

    def advance(self) -> int:
        """Parse a slice. Returns the work that it was; puts itself back if more is left."""
        ...


class Pump:
    """The sockets of one gateway that have something to parse."""

    def __init__(self) -> None:
        self._waiting: deque[Source] = deque()
        self._due: asyncio.Handle | None = None
        self._direct = 0  # work of this turn that did not wait

    @property
    def room(self) -> bool:
        """Whether a little may be parsed without waiting here."""
        return self._direct < TURN_WORK

    def direct(self, work: int) -> None:
        """Count what was parsed without waiting here."""
        if not self._direct:
            asyncio.get_running_loop().call_soon(self._turned)
        self._direct += work

    def _turned(self) -> None:
        self._direct = 0

    def add(self, source: Source) -> None:
        """Add a source that has something to parse and is not here yet."""
        self._waiting.append(source)
        if self._due is None:
            self._due = asyncio.get_running_loop().call_soon(self._run)

    def _run(self) -> None:
        work = 0
        while self._waiting and work < TURN_WORK:
            work += self._waiting.popleft().advance()
        again = bool(self._waiting)
        self._due = asyncio.get_running_loop().call_soon(self._run) if again else None
