"""The sessions of another process, as a core has them: what they tell its actors, what they are told.

What they say reaches the actors in order. Where a mailbox has no room it waits here, and their process
gets no credit for it meanwhile, so its sessions stop reading. Which sessions the cache has heard of is
remembered: what they hold is given back when their process goes without a word.

This file does not know how the process was started, nor who else is at the link.
"""

import contextlib
from collections.abc import Callable
from typing import Any

from ramify.actors.front.core_messages import FromCore, Said, ToSessions
from ramify.actors.kit.log import get_log
from ramify.actors.kit.mailbox import Address, FunctionAddress, MailboxClosed, MailboxFull
from ramify.actors.kit.relay import Relay
from ramify.actors.links.bundle import CannotEncode
from ramify.actors.links.link import Link
from ramify.actors.processes.peer import Peer
from ramify.protocol.messages import (
    AbandonSession,
    CancelSession,
    DropSessions,
    Lost,
    OpenBranch,
    Reopen,
    Submit,
    session_of,
)

log = get_log(__name__)


class RemoteSessions(Peer):
    """A front in another process. `take_one` brings a message to its actor, or raises MailboxFull.

    `live`: the sessions that the cache has heard of; `last`: the highest number of any; `heard`:
    requests that the scheduler has taken.
    """

    def __init__(self, take_one: Callable[[Any], None]) -> None:
        super().__init__()
        self.live: set[int] = set()
        self.last = 0
        self.heard = 0
        self._take_one = take_one
        self._said: Relay[Any] = Relay()
        self._said.connect(FunctionAddress(self._deliver))

    def attach(self, link: Link[Any, Any]) -> None:
        super().attach(link)
        self._told = self.bundle(ToSessions)

    # --- what they are told ----------------------------------------------------------------------

    def put(self, messages: list[tuple[int, FromCore]]) -> None:
        """Add what sessions are told to the next frame; `flush` sends it.

        What cannot be encoded ends its session, and nobody else notices.
        """
        try:
            try:
                self._told.put(messages)
            except CannotEncode as error:
                if len(messages) > 1:
                    for each in messages:
                        self.put([each])
                    return
                session = messages[0][0]
                log.exception("a session's message is lost", session=session)
                self._told.put([(session, Lost(str(error)))])
        except MailboxFull as error:
            self.hung(str(error))

    def flush(self) -> None:
        """Send the frame."""
        self._told.flush()

    # --- what they say ---------------------------------------------------------------------------

    def take(self, messages: list[Said]) -> None:
        """One frame. Its credit goes back when the actors have all of it."""
        for message in messages:
            self._said.tell(message)
        self._said.tell(None)

    def _deliver(self, message: Any) -> None:
        if message is None:
            self.consumed()
            return
        with contextlib.suppress(MailboxClosed):  # the core is going down
            self._take_one(message)
        match message:
            case OpenBranch(branch):
                session = session_of(branch)
                self.live.add(session)
                self.last = max(self.last, session)
            case DropSessions(sessions):
                self.live.difference_update(sessions)
            case Reopen(session):
                self.live.discard(session)
            case Submit():
                self.heard += 1

    def close(self) -> None:
        super().close()
        self._said.close()

    def release(self, core: Address[Any] | None, *last: Any) -> None:
        """The process has gone: tell the core what gives back what they held, then `last`.

        What waits is dropped. None: there is no core yet, and nothing is held.
        """
        self.close()
        if core is None:
            return
        ends: Relay[Any] = Relay()
        ends.connect(core)
        for session in self.live:
            ends.tell(CancelSession(session))
            ends.tell(AbandonSession(session))
        if self.live:
            ends.tell(DropSessions(sorted(self.live)))
        for message in last:
            ends.tell(message)
