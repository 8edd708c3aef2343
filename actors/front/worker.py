"""A gateway worker, and the process that runs it: its start, its link, its end; another one follows.

A process inherits the sockets to accept on and the table of minted tokens. This file does not know when
processes are started, nor what the messages do.
"""

import asyncio
import contextlib
import socket
from collections.abc import Callable
from functools import partial
from typing import Any

import anyio
import msgspec
from anyio.abc import TaskStatus

from ramify.actors.front.core_messages import MAX_FRAME, Said
from ramify.actors.front.gateway_messages import (
    Forwarded,
    FromEngine,
    StartGateway,
    ToEngine,
    count_of,
)
from ramify.actors.front.remote_sessions import RemoteSessions
from ramify.actors.gateway.port.server import BACKLOG
from ramify.actors.kit.mailbox import MailboxFull
from ramify.actors.links.link import Link
from ramify.actors.processes.child_process import ChildProcess
from ramify.actors.processes.messages import decoder, encoder
from ramify.protocol.wire import ServerInfo

PROGRAM = "ramify.actors.gateway_program"

START_SECONDS = 30.0  # from its start until a process listens, and from `Serve` until it serves


class GatewayProcess(RemoteSessions):
    """A started process, and the sessions that live there."""

    child: ChildProcess[FromEngine, ToEngine]  # from `start` on

    def __init__(self, worker: int, tell: Callable[["GatewayProcess", Said], None]) -> None:
        super().__init__(partial(tell, self))
        self.worker = worker

    @classmethod
    async def start(
        cls,
        start: StartGateway,
        receive: Callable[["GatewayProcess", ToEngine], None],
        tell: Callable[["GatewayProcess", Said], None],
    ) -> "GatewayProcess":
        """Start a process and tell it `start`. Its messages go to `receive`, one call each.

        `tell`: where those of its sessions go. See `RemoteSessions`.
        """
        self = cls(start.worker, tell)
        inherited = (*start.listeners, start.minted, start.working, start.door)
        self.child = await ChildProcess.start(
            f"gateway {start.worker}",
            PROGRAM,
            decoder(ToEngine),
            encoder(),
            partial(receive, self),
            inherit=[fd for fd in inherited if fd is not None],
            max_frame=MAX_FRAME,
        )
        self.ends = self.child.kill
        self.attach(self.child.link)
        self.tell(start)
        return self

    def attach(self, link: Link[Any, Any]) -> None:
        super().attach(link)
        self._forwarded = self.bundle(Forwarded)

    def forward(self, body: bytes) -> None:
        """Hand on what another process tells this one. May wait, as what sessions are told may."""
        try:
            self._forwarded.tell(body)
        except MailboxFull as error:
            self.hung(str(error))

    async def ended(self) -> str:
        """Wait until the process has ended and all that it sent has been received: says why."""
        try:
            code = await self.child.ended()
            return self.why or self.child.explain(code)
        finally:
            self.close()


class Worker:
    """Events are of the process that runs now. `failure`: why it could not start, in its own words."""

    def __init__(self, number: int, listeners: list[socket.socket], first: int) -> None:
        self.number = number
        self.listeners = listeners
        self.incarnation = 0
        self.first = first  # what its sessions are counted from
        self.process: GatewayProcess | None = None  # while one runs
        self.listening = asyncio.Event()
        self.serving = asyncio.Event()
        self.ready = asyncio.Event()
        self.failure: Exception | None = None
        self.ended = asyncio.Event()  # no other one follows
        self.shut = False  # takes no connections, for its process has hung
        self.begun = False  # one of its processes has listened

    def stop_accepting(self) -> None:
        """Take no more connections: the kernel gives new ones to the other processes.

        The process shares the sockets, so this takes effect there too. Connections that wait on them are
        reset, so that their clients try again at once. A process that comes back listens again
        (`gateway.server.Listener`).
        """
        self.shut = True
        for sock in self.listeners:
            with contextlib.suppress(OSError):  # it does not listen
                sock.shutdown(socket.SHUT_RDWR)

    def accept_again(self) -> None:
        """Let connections wait for the next process."""
        self.shut = False
        for sock in self.listeners:
            sock.listen(BACKLOG)

    def clear(self) -> None:
        """Another process is about to start."""
        for event in (self.listening, self.serving, self.ready):
            event.clear()

    async def announce(self, task_status: TaskStatus[None]) -> None:
        """Once the first process listens, the worker counts as started."""
        if not self.begun:
            await self.listening.wait()
            task_status.started()

    async def listens(self, process: GatewayProcess) -> bool:
        """Wait until the process listens. False if it does not, and then it is killed."""
        return await self._does("listen", self.listening, process)

    async def serves(self, process: GatewayProcess) -> bool:
        """Wait until the process, which has been told to, opens sessions; as `listens`."""
        return await self._does("serve", self.serving, process)

    async def _does(self, what: str, event: asyncio.Event, process: GatewayProcess) -> bool:
        with anyio.move_on_after(START_SECONDS):
            await event.wait()
        if not event.is_set():
            process.hung(f"it did not {what} within {START_SECONDS:g} s")
        return event.is_set()

    def left(self, process: GatewayProcess) -> None:
        """The process has ended."""
        self.process = None
        self.first = max(self.first, count_of(process.last) + 1)
        self.begun = self.begun or self.listening.is_set()

    def server(self, server: ServerInfo) -> ServerInfo:
        """Sessions of a process that replaced another one have an epoch of their own."""
        if self.incarnation == 1:
            return server
        epoch = f"{server.epoch}-{self.number}.{self.incarnation}"
        return msgspec.structs.replace(server, epoch=epoch)
