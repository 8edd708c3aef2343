"""The shared parts of one run's states: the sender, the listener, and each other."""

from typing import TYPE_CHECKING

from ramify.clients.program.call_sites import place
from ramify.clients.program.steps import Sender
from ramify.clients.program.value import Listener

if TYPE_CHECKING:
    from ramify.clients.program.forks import Past
    from ramify.clients.program.state import AsyncState


class RunStates:
    """The states of one run. `tracing`: there is no model, and texts are holes."""

    def __init__(self, sender: Sender, listener: Listener | None, *, tracing: bool = False) -> None:
        self.sender = sender
        self.listener = listener
        self.tracing = tracing
        self.states: list[AsyncState] = []
        self.at: str | None = None  # where the program is, if it runs in a thread of its own

    def where(self) -> str:
        """Name the program's current place, as `at file.py:12`."""
        return self.at or place()

    def reads(self) -> None:
        """Send what was held back: the program is about to wait."""
        self.sender.barrier(self.where)


class Mark:
    """A place on a branch to go back to.

    `keeper`: a fork of it that stays there. Where ops do not come in frames, `position` instead, once it
    is known.
    """

    def __init__(self, state: "AsyncState", record: int, gaps: int, past: "Past | None") -> None:
        self.state = state
        self.record = record
        self.gaps = gaps
        self.past = past
        self.keeper: AsyncState | None = None
        self.position = 0
