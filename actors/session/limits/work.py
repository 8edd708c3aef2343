"""How much a session does in one turn of the event loop. Pure.

A frame of 1 MiB, a file that is imported, or one op on a thousand branches may be much work. Whatever a
client can make long says what its next step costs before it is done. What is over the turn's budget
waits for the next turn, and others run in between. Costs are estimates: one is about a microsecond.
"""

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
