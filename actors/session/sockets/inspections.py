"""Asks the cache how many tokens of a branch are resident, and passes on the answers. Pure."""

from collections.abc import Callable

from ramify.actors.session.branches.branch import Branch
from ramify.actors.session.branches.state import SessionState
from ramify.protocol.messages import Inspect, Inspected

Then = Callable[[list[int]], None]
UNKNOWN = -1  # tokens of a branch that are resident


class Inspections:
    """The questions that have no answer yet."""

    def __init__(self, state: SessionState) -> None:
        self._state = state
        self._waiting: dict[int, tuple[list[int], Then]] = {}  # branch handles

    def ask(self, branches: list[Branch], then: Then) -> None:
        """`then` gets the resident tokens of each branch, UNKNOWN if nobody can tell."""
        ident = self._state.next_id()
        handles = [branch.handle for branch in branches]
        self._waiting[ident] = (handles, then)
        self._state.out.cache.append(Inspect(self._state.number, ident, handles))

    def answered(self, message: Inspected) -> None:
        """The cache's answer."""
        waiting = self._waiting.pop(message.id, None)
        if waiting is not None:
            waiting[1](message.resident)

    def give_up(self) -> None:
        """The cache is gone: answer all with UNKNOWN."""
        while self._waiting:  # those who are answered may ask
            handles, then = self._waiting.pop(next(iter(self._waiting)))
            then([UNKNOWN] * len(handles))

    def ask_again(self) -> None:
        """Another cache has the branches now."""
        for ident, (handles, _) in self._waiting.items():
            self._state.out.cache.append(Inspect(self._state.number, ident, handles))
