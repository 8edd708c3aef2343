"""A gateway worker: one process after the other runs it. How long a start may take.

This file does not know who starts processes, nor what they are told.
"""

import asyncio
import contextlib
import socket

import anyio
import msgspec
from anyio.abc import TaskStatus

from ramify.actors.front.gateway_messages import count_of
from ramify.actors.front.process import GatewayProcess
from ramify.actors.gateway.port.server import BACKLOG
from ramify.protocol.wire import ServerInfo

START_SECONDS = 30.0  # from its start until a process listens, and from `Serve` until it serves


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
            process.child.hung(f"it did not {what} within {START_SECONDS:g} s")
        return event.is_set()

    def left(self, process: GatewayProcess) -> None:
        """The process has ended."""
        self.process = None
        self.first = max(self.first, count_of(process.sessions.last) + 1)
        self.begun = self.begun or self.listening.is_set()

    def server(self, server: ServerInfo) -> ServerInfo:
        """Sessions of a process that replaced another one have an epoch of their own."""
        if self.incarnation == 1:
            return server
        epoch = f"{server.epoch}-{self.number}.{self.incarnation}"
        return msgspec.structs.replace(server, epoch=epoch)
