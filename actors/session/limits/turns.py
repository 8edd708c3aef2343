"""Takes turns: all sessions of a process that have more to do than fits into a turn of the loop.

Each waits until all before it have had one: a turn of the loop does one session's share of such work,
however many sessions want to. Everything else runs in between. Budgets that were spent in the turn of
another are renewed behind it. This file does not know what is done.
"""

import asyncio
from collections import deque

from ramify.actors.session.limits.work import Work


class Turns:
    """One for each event loop."""

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
            self._due = True
            loop.call_soon(self._wake)
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
