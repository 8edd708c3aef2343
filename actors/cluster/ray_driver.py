"""The main program of a front's Ray driver: `python -m ...cluster.ray_driver FD LIFELINE`.

Ray ends a process that is connected to a cluster whose head does not come back. Here that takes this
process along, not the front with its sockets, and the front starts another one (`ray_replicas.py`).

FD is a connected Unix stream socket, inherited from the front; LIFELINE as in `child.py`. Signals of a
terminal are the front's. Exit codes: 0 ended as told, or the front has gone; 1 a bug; 2 it said why.
"""

import asyncio
import contextlib
import os
import signal
import socket
import sys

import anyio

from ramify.actors.cluster.member import NoReplicas
from ramify.actors.cluster.ray_actors import RayActors
from ramify.actors.cluster.ray_wire import (
    Drive,
    End,
    Failed,
    FromDriver,
    FromFront,
    Proven,
    Scale,
    Started,
    encoder,
    from_front,
)
from ramify.actors.kit.console import configure_process
from ramify.actors.kit.log import get_log
from ramify.actors.kit.mailbox import MailboxClosed
from ramify.actors.links.link import Link, open_link
from ramify.actors.processes.lifeline import watch
from ramify.protocol.errors import ConfigError, RamifyError

log = get_log("ramify.actors.cluster.ray")


class Driver:
    """What a front's messages do to its actors."""

    def __init__(self) -> None:
        self.over = asyncio.Event()
        self._told = asyncio.Event()
        self._drive: Drive | None = None
        self._actors: RayActors | None = None
        self._link: Link[FromDriver, FromFront] | None = None

    async def run(self, sock: socket.socket) -> int:
        """Until it is told to end, or the front has gone. Returns the exit code."""
        link: Link[FromDriver, FromFront] = await open_link(
            "front", sock, from_front(), encoder(), on_message=self._receive, on_end=self._end
        )
        self._link = link
        await self._told.wait()
        drive = self._drive
        if drive is None:
            return 0
        if drive.log is not None:
            configure_process(drive.log)
        code = 0
        try:
            self._actors = actors = RayActors(
                drive.settings, drive.host, drive.port, drive.secret, drive.pem, drive.device
            )
            actors.scale(drive.count)
            actors.proven = drive.proven
            async with anyio.create_task_group() as group:
                await group.start(actors.run)
                self._tell(Started())
                await self.over.wait()
                group.cancel_scope.cancel()
        except* RamifyError as failed:
            error = failed.exceptions[0]
            assert isinstance(error, (ConfigError, NoReplicas))
            self._tell(Failed(str(error), mendable=isinstance(error, ConfigError)))
            code = 2
        link.close()
        await link.wait_closed()
        return code

    def _tell(self, message: FromDriver) -> None:
        assert self._link is not None
        with contextlib.suppress(MailboxClosed):  # the front has gone
            self._link.tell(message)

    def _receive(self, message: FromFront) -> None:
        assert self._link is not None
        match message:
            case Drive():
                self._drive = message
                self._told.set()
            case Scale(count) if self._actors is not None:
                self._actors.scale(count)
            case Proven() if self._actors is not None:
                self._actors.proven = True
            case End():
                self.over.set()
        self._link.consumed()

    def _end(self, error: Exception | None) -> None:
        self.over.set()
        self._told.set()


def main(fd: int, lifeline: int) -> int:
    """Run a driver. Returns the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    os.set_inheritable(fd, False)
    watch(lifeline)

    async def drive() -> int:
        return await Driver().run(socket.socket(fileno=fd))

    try:
        return asyncio.run(drive())
    except Exception:
        log.exception("the Ray driver failed")
        return 1


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
