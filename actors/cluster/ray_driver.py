"""The main program of a front's Ray driver. See `processes.main`.

Ray ends a process that is connected to a cluster whose head does not come back. Here that takes this
process along, not the front with its sockets, and the front starts another one (`ray_replicas.py`).
"""

import asyncio
import contextlib
import socket

import anyio

from ramify.actors.cluster.ray_actors import RayActors
from ramify.actors.cluster.ray_replicas import (
    Drive,
    EndDriver,
    FromDriver,
    Proven,
    Scale,
    Started,
    ToDriver,
)
from ramify.actors.kit.mailbox import MailboxClosed
from ramify.actors.links.link import Link, open_link
from ramify.actors.processes.main import NOT_STARTED, ParentGone, run
from ramify.actors.processes.messages import StartFailed, decoder, encoder
from ramify.protocol.errors import RamifyError


class RayDriver:
    """What a front's messages do to its actors."""

    def __init__(self) -> None:
        self.over = asyncio.Event()
        self._told = asyncio.Event()
        self._drive: Drive | None = None
        self._actors: RayActors | None = None
        self._link: Link[FromDriver, ToDriver] | None = None

    async def run(self, sock: socket.socket) -> int:
        """Until it is told to end, or the front has gone. Returns the exit code."""
        link: Link[FromDriver, ToDriver] = await open_link(
            "front", sock, decoder(ToDriver), encoder(), on_message=self._receive, on_end=self._end
        )
        self._link = link
        await self._told.wait()
        drive = self._drive
        if drive is None:
            raise ParentGone
        code = 0
        try:
            self._actors = actors = RayActors(drive)
            async with anyio.create_task_group() as group:
                await group.start(actors.run)
                self._tell(Started())
                await self.over.wait()
                group.cancel_scope.cancel()
        except* RamifyError as failed:
            self._tell(StartFailed.of(failed.exceptions[0]))
            code = NOT_STARTED
        link.close()
        await link.wait_closed()
        return code

    def _tell(self, message: FromDriver) -> None:
        assert self._link is not None
        with contextlib.suppress(MailboxClosed):  # the front has gone
            self._link.tell(message)

    def _receive(self, message: ToDriver) -> None:
        assert self._link is not None
        match message:
            case Drive():
                self._drive = message
                self._told.set()
            case Scale(count) if self._actors is not None:
                self._actors.scale(count)
            case Proven() if self._actors is not None:
                self._actors.proven = True
            case EndDriver():
                self.over.set()
        self._link.consumed()

    def _end(self, error: Exception | None) -> None:
        self.over.set()
        self._told.set()


async def _serve(sock: socket.socket) -> int:
    return await RayDriver().run(sock)


if __name__ == "__main__":
    run(_serve)
