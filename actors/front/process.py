"""One gateway process, seen from the core: its start, its link, its end.

It inherits the sockets to accept on and the table of minted tokens.

This file does not know what the messages do.
"""

from collections.abc import Callable
from functools import partial

from ramify.actors.front.gateway_messages import (
    MAX_FRAME,
    CoreMessage,
    Forwarded,
    FromCore,
    StartGateway,
    ToCore,
)
from ramify.actors.front.remote_sessions import RemoteSessions
from ramify.actors.kit.log import get_log
from ramify.actors.kit.mailbox import MailboxClosed, MailboxFull
from ramify.actors.links.bundle import Bundle
from ramify.actors.processes.child_process import ChildProcess
from ramify.actors.processes.messages import decoder, encoder
from ramify.actors.processes.silence import Silence

PROGRAM = "ramify.actors.front.gateway_program"

log = get_log(__name__)


class GatewayProcess:
    """A started process. `sessions`: those that live there. `silence`: since it last sent something; its
    owner keeps it.
    """

    sessions: RemoteSessions  # these from `start` on
    child: ChildProcess[FromCore, ToCore]
    _relayed: Bundle[bytes]

    def __init__(self, start: StartGateway) -> None:
        self.worker = start.worker
        self.silence = Silence(0.0)

    @classmethod
    async def start(
        cls,
        start: StartGateway,
        receive: Callable[["GatewayProcess", ToCore], None],
        tell: Callable[["GatewayProcess", CoreMessage], None],
    ) -> "GatewayProcess":
        """Start a process and tell it `start`. Its messages go to `receive`, one call each.

        `tell`: where those of its sessions go. See `RemoteSessions`.
        """
        self = cls(start)
        codec = encoder()
        inherited = (*start.listeners, start.minted, start.working)
        self.child = await ChildProcess.start(
            f"gateway {start.worker}",
            PROGRAM,
            decoder(ToCore),
            codec,
            lambda message: receive(self, message),
            inherit=[fd for fd in inherited if fd is not None],
            max_frame=MAX_FRAME,
        )
        link = self.child.link
        self.sessions = RemoteSessions(link, codec, partial(tell, self), self.child.hung)
        self._relayed = Bundle(link, Forwarded, codec)
        self.tell(start)
        return self

    def tell(self, message: FromCore, /) -> None:
        """Send `message` after all that was put or forwarded before, unless the process is far behind.

        A process that takes nothing is killed.
        """
        try:
            self.sessions.flush()
            self._relayed.flush()
            self.child.link.tell(message)
        except MailboxFull as error:
            self.child.hung(str(error))
        except MailboxClosed:
            pass  # its end is under way

    def forward(self, body: bytes) -> None:
        """Hand on what another process tells this one. May wait, as what sessions are told may."""
        try:
            self._relayed.tell(body)
        except MailboxFull as error:
            self.child.hung(str(error))

    async def ended(self) -> str:
        """Wait until the process has ended and all that it sent has been received: says why."""
        try:
            return self.child.explain(await self.child.ended())
        finally:
            self.sessions.close()
            self._relayed.close()
