"""One gateway process, seen from the core: its start, its link, its end.

The process is `python -m ramify.actors.front.child`, started fresh. It inherits its end of a socket
pair, the sockets to accept on, the table of minted tokens, and the reading end of a pipe that tells
it of the engine's end. Nothing is left in the file system.

It does not know what the messages do.
"""

import os
from collections.abc import Callable

from ramify.actors.front.wire import (
    MAX_FRAME,
    Forwarded,
    FromCore,
    FromEngine,
    Start,
    ToCore,
    ToSessions,
    encoder,
    to_core,
)
from ramify.actors.kit.log import get_log
from ramify.actors.kit.mailbox import MailboxClosed, MailboxFull
from ramify.actors.links.bundle import Bundle, CannotEncode
from ramify.actors.processes.child_process import ChildProcess
from ramify.actors.processes.silence import Silence
from ramify.protocol.messages import Lost

CHILD = "ramify.actors.front.child"

log = get_log(__name__)


class GatewayProcess:
    """A started process.

    `live`: the sessions that it has told the cache of; `first`: a count that none of its sessions
    has had. `silence`: since it last sent something; its owner keeps it.
    """

    _child: ChildProcess[FromCore, ToCore]  # this and the bundles: from `start` on
    _sessions: Bundle[tuple[int, FromEngine]]
    _relayed: Bundle[bytes]

    def __init__(self, start: Start, lifeline: int) -> None:
        self.worker = start.worker
        self.live: set[int] = set()
        self.first = start.first
        self._lifeline = lifeline
        self.silence = Silence(0.0)
        self._hung: str | None = None

    @classmethod
    async def start(
        cls, start: Start, receive: Callable[["GatewayProcess", ToCore], None]
    ) -> "GatewayProcess":
        """Start a process and tell it `start`. Its messages go to `receive`, one call each."""
        lifeline, held = os.pipe()
        self = cls(start, held)
        codec = encoder()
        try:
            self._child = await ChildProcess.start(
                f"gateway {start.worker}",
                CHILD,
                to_core(),
                codec,
                lambda message: receive(self, message),
                arguments=[str(lifeline)],
                inherit=[
                    fd
                    for fd in (lifeline, *start.listeners, start.minted, start.working)
                    if fd is not None
                ],
                max_frame=MAX_FRAME,
            )
        except BaseException:
            os.close(held)
            raise
        finally:
            os.close(lifeline)
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
        if self._hung is None:
            self._hung = why
            self.kill()

    @property
    def has_hung(self) -> bool:
        """Whether it was ended for that."""
        return self._hung is not None

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
            os.close(self._lifeline)
        if self._hung is not None:
            return f"its process {self.pid} hung and was killed: {self._hung}"
        return self._child.explain(code)
