"""One gateway process, seen from the core: its start, its link, its end.

It inherits the sockets to accept on and the table of minted tokens.

This file does not know what the messages do.
"""

from collections.abc import Callable

from ramify.actors.front.gateway_messages import (
    MAX_FRAME,
    Forwarded,
    FromCore,
    FromEngine,
    Start,
    ToCore,
    ToSessions,
)
from ramify.actors.kit.log import get_log
from ramify.actors.kit.mailbox import MailboxClosed, MailboxFull
from ramify.actors.links.bundle import Bundle, CannotEncode
from ramify.actors.processes.child_process import ChildProcess
from ramify.actors.processes.messages import decoder, encoder
from ramify.actors.processes.silence import Silence
from ramify.protocol.messages import Lost

PROGRAM = "ramify.actors.front.gateway_program"

log = get_log(__name__)


class GatewayProcess:
    """A started process.

    `live`: the sessions that it has told the cache of; `first`: a count that none of its sessions
    has had. `silence`: since it last sent something; its owner keeps it.
    """

    _child: ChildProcess[FromCore, ToCore]  # this and the bundles: from `start` on
    _sessions: Bundle[tuple[int, FromEngine]]
    _relayed: Bundle[bytes]

    def __init__(self, start: Start) -> None:
        self.worker = start.worker
        self.live: set[int] = set()
        self.first = start.first
        self.silence = Silence(0.0)

    @classmethod
    async def start(
        cls, start: Start, receive: Callable[["GatewayProcess", ToCore], None]
    ) -> "GatewayProcess":
        """Start a process and tell it `start`. Its messages go to `receive`, one call each."""
        self = cls(start)
        codec = encoder()
        inherited = (*start.listeners, start.minted, start.working)
        self._child = await ChildProcess.start(
            f"gateway {start.worker}",
            PROGRAM,
            decoder(ToCore),
            codec,
            lambda message: receive(self, message),
            inherit=[fd for fd in inherited if fd is not None],
            max_frame=MAX_FRAME,
        )
        link = self._child.link
        self._sessions = Bundle(link, ToSessions, codec)
        self._relayed = Bundle(link, Forwarded, codec)
        self.tell(start)
        return self

    @property
    def pid(self) -> int:
        """The process' id."""
        return self._child.pid

    def tell(self, message: FromCore, /) -> None:
        """Send `message` after all that was put or forwarded before, unless the process is far behind.

        A process that takes nothing is killed.
        """
        try:
            self._sessions.flush()
            self._relayed.flush()
            self._child.link.tell(message)
        except MailboxFull as error:
            self.hung(str(error))
        except MailboxClosed:
            pass  # its end is under way

    def put(self, session: int, message: FromEngine) -> None:
        """Add what a session is told to the next frame; `flush` sends it.

        What cannot be encoded ends its session, and nobody else notices.
        """
        try:
            try:
                self._sessions.put((session, message))
            except CannotEncode as error:
                log.exception("a session's message is lost", gateway=self.worker, session=session)
                self._sessions.put((session, Lost(str(error))))
        except MailboxFull as error:
            self.hung(str(error))

    def flush(self) -> None:
        """Send the frame."""
        self._sessions.flush()

    def forward(self, body: bytes) -> None:
        """Hand on what another process tells this one. May wait, as what sessions are told may."""
        try:
            self._relayed.tell(body)
        except MailboxFull as error:
            self.hung(str(error))

    def consumed(self) -> None:
        """A message of the process has been dealt with."""
        self._child.link.consumed()

    def hung(self, why: str) -> None:
        """It does not read or does not speak: end it."""
        self._child.hung(why)

    @property
    def has_hung(self) -> bool:
        """Whether it was ended for that."""
        return self._child.has_hung

    def kill(self) -> None:
        """End the process now."""
        self._child.kill()

    async def ended(self) -> str:
        """Wait until the process has ended and all that it sent has been received: says why."""
        try:
            code = await self._child.ended()
        finally:
            self._sessions.close()
            self._relayed.close()
        return self._child.explain(code)
