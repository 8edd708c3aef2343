"""The sessions of another process, as a core has them: what they tell its actors, what they are told.

What they say reaches the actors in order. Where a mailbox has no room it waits here, and their process
gets no credit for it meanwhile, so its sessions stop reading. Which sessions the cache has heard of is
remembered: what they hold is given back when their process goes without a word.

This file does not know how the process was started, nor who else is at the link.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import msgspec

from ramify.actors.front.gateway_messages import FromEngine, ToSessions
from ramify.actors.kit.log import get_log
from ramify.actors.kit.mailbox import Address, MailboxClosed, MailboxFull
from ramify.actors.kit.relay import Relay
from ramify.actors.links.bundle import Bundle, CannotEncode, Frames
from ramify.protocol.messages import (
    AbandonSession,
    CancelSession,
    DropSessions,
    Lost,
    OpenBranch,
    Reopen,
    Submit,
    Tokens,
    session_of,
)

log = get_log(__name__)


class RemoteSessions:
    """Those at the other end of `link`.

    `tell` brings a message of theirs to its actor; MailboxFull: nothing has happened. `hung(why)` is
    called when the process takes nothing any more. `live`: the sessions that the cache has heard of;
    `last`: the highest number of any; `heard`: requests that the scheduler has taken.
    """

    def __init__(
        self,
        link: Frames,
        encoder: msgspec.msgpack.Encoder,
        tell: Callable[[Any], None],
        hung: Callable[[str], None],
    ) -> None:
        self.live: set[int] = set()
        self.last = 0
        self.heard = 0
        self._tell = tell
        self._hung = hung
        self._told: Bundle[tuple[int, bool, FromEngine]] = Bundle(link, ToSessions, encoder)
        self._said: Relay[Any] = Relay()
        self._said.connect(self)

    # --- what they are told ----------------------------------------------------------------------

    def put(self, session: int, message: FromEngine) -> None:
        """Add what a session is told to the next frame; `flush` sends it.

        What cannot be encoded ends its session, and nobody else notices.
        """
        ends = isinstance(message, Tokens) and bool(message.finished)
        try:
            try:
                self._told.put((session, ends, message))
            except CannotEncode as error:
                log.exception("a session's message is lost", session=session)
                self._told.put((session, False, Lost(str(error))))
        except MailboxFull as error:
            self._hung(str(error))

    def flush(self) -> None:
        """Send the frame."""
        self._told.flush()

    # --- what they say ---------------------------------------------------------------------------

    def take(self, messages: list[Any], done: Callable[[], None]) -> None:
        """One frame. `done` is called when the actors have all of it: its credit goes back then."""
        for message in messages:
            self._said.tell(message)
        self._said.tell(done)

    def tell(self, message: Any, /) -> None:
        """For the relay. Raises MailboxFull, and then nothing has happened."""
        if callable(message):
            message()
            return
        with contextlib.suppress(MailboxClosed):  # the core is going down
            self._tell(message)
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
        """Forget what waits, in both directions."""
        self._told.close()
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
