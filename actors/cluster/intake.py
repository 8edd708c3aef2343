"""What sessions elsewhere tell a core, in order, and what they leave behind when their front has gone.

It does not know links.
"""

import contextlib
from collections.abc import Callable

from ramify.actors.cluster.replica_messages import ForCore
from ramify.actors.cluster.shift import Shift
from ramify.actors.front.interface import Core
from ramify.actors.kit.mailbox import MailboxClosed
from ramify.actors.kit.relay import Relay
from ramify.protocol.cluster import UnlistenKv
from ramify.protocol.messages import (
    AbandonSession,
    CancelSession,
    DropSessions,
    OpenBranch,
    Reopen,
    Submit,
    session_of,
)

LISTENER = 1  # the front, to the cache


class Intake:
    """Of one front. Where the core has no room, messages wait; see `done`."""

    def __init__(self, core: Core, shift: Shift) -> None:
        self._core = core
        self._shift = shift
        self.heard = 0  # requests that the core has taken
        self._live: set[int] = set()  # sessions that the core has heard of
        self._relay: Relay[ForCore | Callable[[], None]] = Relay()
        self._relay.connect(self)

    def take(self, messages: list[ForCore], done: Callable[[], None]) -> None:
        """One frame. `done` is called when the core has all of it: only then the front gets a credit."""
        for message in messages:
            self._relay.tell(self._shift.inward(message))
        self._relay.tell(done)

    def tell(self, message: ForCore | Callable[[], None], /) -> None:
        """For the relay. Raises MailboxFull, and then nothing has happened."""
        if callable(message):
            message()
            return
        with contextlib.suppress(MailboxClosed):  # the core is going down
            self._core.tell(message)
        match message:
            case OpenBranch(branch):
                self._live.add(session_of(branch))
            case DropSessions(sessions):
                self._live.difference_update(sessions)
            case Reopen(session):
                self._live.discard(session)
            case Submit():
                self.heard += 1

    def release(self) -> None:
        """The front has gone: give back what its sessions held. What waits is dropped."""
        self._relay.close()
        last: Relay[ForCore] = Relay()
        last.connect(self._core)
        for session in self._live:
            last.tell(CancelSession(session))
            last.tell(AbandonSession(session))
        if self._live:
            last.tell(DropSessions(sorted(self._live)))
        last.tell(UnlistenKv(LISTENER))
        self._live.clear()
