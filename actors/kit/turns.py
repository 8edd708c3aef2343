"""How much a session does in one turn of the event loop, and whose turn it is.

A frame of 1 MiB, a file that is imported, or one op on a thousand branches may be much work. Whatever a
client can make long says what its next step costs before it is done. What is over the turn's budget
waits for the next turn, and others run in between. Costs are estimates: one is about a microsecond.

Only `Turns` knows the event loop, and nothing here knows what is done.
"""

import asyncio
from collections import deque
from collections.abc import Generator
from typing import TypeVar

TURN = 2000  # of work in a turn: a step that costs more is a turn of its own
OP = 40  # of any op, beside what it does
SOCKET = 4  # of telling a socket of something

T = TypeVar("T")
Steps = Generator[int, None, T]  # work in parts: each yields its cost, and goes on when there is room


def at_once(steps: Steps[T]) -> T:
    """Do all of it now. Returns what it returns."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result


class Work:
    """The work that is left of a turn. `most`: the budget."""

    __slots__ = ("left", "most")

    def __init__(self, most: int = TURN) -> None:
        self.most = most
        self.left = most

    @property
    def over(self) -> bool:
        """Whether the turn's budget is spent."""
        return self.left <= 0

    def renew(self) -> None:
        """A turn begins."""
        self.left = self.most

    def take(self, cost: int) -> bool:
        """Spend `cost`, if there is so much. The first step of a turn always has room."""
        if cost > self.left < self.most:
            return False
        self.left -= cost
        return True


class Turns:
    """All of an event loop that have more to do than fits into a turn of it.

    Each waits until all before it have had one: a turn of the loop does one session's share of such
    work. Budgets that were spent in the turn of another are renewed behind it.
    """

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._due = False
        self._spent: list[Work] = []  # in this turn of the loop

    def renew(self, work: Work) -> None:
        """Renew it when the next turn of the loop begins."""
        if not self._spent:
            asyncio.get_running_loop().call_soon(self._renew)
        self._spent.append(work)

    def _renew(self) -> None:
        for work in self._spent:
            work.renew()
        self._spent.clear()

    async def next(self) -> None:
        """Return in a later turn of the loop, when it is the caller's."""
        loop = asyncio.get_running_loop()
        mine: asyncio.Future[None] = loop.create_future()
        self._waiting.append(mine)
        if not self._due:
            loop.call_soon(self._wake)
            self._due = True  # last: who fails here must not leave all others waiting
        await mine

    def _wake(self) -> None:
        while self._waiting:
            first = self._waiting.popleft()
            if not first.done():  # else its session was cancelled
                first.set_result(None)
                break
        self._due = bool(self._waiting)
        if self._due:
            asyncio.get_running_loop().call_soon(self._wake)
