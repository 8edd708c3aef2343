"""One gateway process, seen from the core: its start, its link, its end.

The process is `python -m ramify.actors.front.child`, started fresh. It inherits its end of a socket
pair, the sockets to accept on, the table of minted tokens, and the reading end of a pipe that tells
it of the engine's end. Nothing is left in the file system.

It does not know what the messages do.
"""

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Callable

import anyio

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
from ramify.actors.kit.batch import CannotEncode
from ramify.actors.kit.bundle import Bundle
from ramify.actors.kit.link import Link, open_link
from ramify.actors.kit.log import get_log
from ramify.actors.kit.mailbox import MailboxClosed, MailboxFull
from ramify.actors.kit.silence import Silence
from ramify.protocol.messages import Lost

CHILD = "ramify.actors.front.child"
PARTING_SECONDS = 1.0  # between the end of the link and the end of the process

log = get_log(__name__)


class GatewayProcess:
    """A started process.

    `live`: the sessions that it has told the cache of; `first`: the count that no session of its
    has had. `silence`: since it last sent something; its owner keeps it.
    """

    _link: Link[FromCore, ToCore]  # this and the bundles: from `start` on
    _sessions: Bundle[tuple[int, FromEngine]]
    _relayed: Bundle[bytes]

    def __init__(self, start: Start, process: asyncio.subprocess.Process, lifeline: int) -> None:
        self.worker = start.worker
        self.live: set[int] = set()
        self.first = start.first
        self._process = process
        self._lifeline = lifeline
        self._loop = asyncio.get_running_loop()
        self._broken: Exception | None = None
        self.silence = Silence(0.0)
        self._hung: str | None = None

    @classmethod
    async def start(
        cls, start: Start, receive: Callable[["GatewayProcess", ToCore], None]
    ) -> "GatewayProcess":
        """Start a process and tell it `start`. Its messages go to `receive`, one call each."""
        ours, theirs = socket.socketpair()
        lifeline, held = os.pipe()
        try:
            with theirs:
                inherited = [theirs.fileno(), lifeline, *start.listeners]
                if start.minted is not None:
                    inherited.append(start.minted)
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-P", "-m", CHILD, str(theirs.fileno()), str(lifeline)),
                    stdin=asyncio.subprocess.DEVNULL,
                    pass_fds=inherited,
                    start_new_session=True,  # Ctrl-C reaches the engine only, which then stops it
                )
        except BaseException:
            ours.close()
            os.close(held)
            raise
        finally:
            os.close(lifeline)
        self = cls(start, process, held)
        codec = encoder()
        try:
            self._link = link = await open_link(
                f"gateway {start.worker}",
                ours,
                to_core(),
                codec,
                on_message=lambda message: receive(self, message),
                on_end=self._ended,
                max_frame=MAX_FRAME,
            )
        except BaseException:
            self.kill()
            os.close(held)
            raise
        self._sessions = Bundle(link, ToSessions, codec)
        self._relayed = Bundle(link, Forwarded, codec)
        self.tell(start)
        return self

    @property
    def pid(self) -> int:
        """The process' id."""
        return self._process.pid

    def tell(self, message: FromCore, /) -> None:
        """Send `message`, after all else that was given here unless the process is far behind.

        One that takes nothing is killed.
        """
        try:
            self._sessions.flush()
            self._relayed.flush()
            self._link.tell(message)
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
        self._link.consumed()

    def hung(self, why: str) -> None:
        """It does not read or does not speak: end it."""
        if self._hung is None:
            self._hung = why
            self.kill()

    def kill(self) -> None:
        """End the process now."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def ended(self) -> str:
        """Wait until the process has ended and all that it sent has been received: says why."""
        try:
            code = await self._process.wait()
            with anyio.move_on_after(PARTING_SECONDS):
                await self._link.wait_closed()
        finally:  # cancelled: no process and no socket stays
            self.kill()
            with anyio.CancelScope(shield=True):
                await self._process.wait()
                self._link.abort()
                await self._link.wait_closed()
            self._sessions.close()
            self._relayed.close()
            os.close(self._lifeline)
        return self._explain(code)

    def _ended(self, error: Exception | None) -> None:
        self._broken = error
        self._loop.call_later(PARTING_SECONDS, self.kill)

    def _explain(self, code: int) -> str:
        if self._hung is not None:
            return f"its process {self.pid} hung and was killed: {self._hung}"
        if code < 0:
            with contextlib.suppress(ValueError):
                return f"its process {self.pid} was killed by {signal.Signals(-code).name}"
        broken = f" ({self._broken})" if self._broken is not None else ""
        return f"its process {self.pid} ended with exit code {code}{broken}; see its log"
