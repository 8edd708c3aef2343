"""The front's side of replicas on Ray: a driver, a process of its own that has Ray start the actors.

Ray ends a process whose cluster's head has gone for good, and with it the actors. So no part of Ray is
in the front: its sockets and sessions stay, and a new driver looks for the cluster until it is there.

This file does not know Ray.
"""

import asyncio
from collections.abc import Callable
from functools import partial

import anyio
import msgspec
from anyio.abc import TaskStatus

from ramify.actors.kit.log import get_log
from ramify.actors.processes.child_process import ChildProcess
from ramify.actors.processes.messages import ProcessMessage, StartFailed, decoder, encoder
from ramify.actors.processes.supervisor import Attempts, Ended, Policy, keep
from ramify.protocol.config import ReplicasConfig
from ramify.protocol.errors import RamifyError

PROGRAM = "ramify.actors.cluster.ray_driver"
BACK_OFF_SECONDS, LONG_SECONDS = 1.0, 60.0  # the first pause; a driver that ran so long was no failure
PARTING_SECONDS = 10.0  # for Ray to end its actors

log = get_log("ramify.actors.cluster.ray")


# --- to the driver, and from it -----------------------------------------------------------------


class Drive(ProcessMessage, frozen=True):
    """Have so many actors. `host`, `port`, `secret`, `pem`: where they join. `device`: the model's.

    `proven`: a replica has been ready, so actors that fail are tried for ever. `ranks`: of a replica.
    """

    settings: ReplicasConfig
    host: str
    port: int
    secret: bytes
    pem: str | None
    device: str
    count: int
    proven: bool = False
    ranks: int = 1


class Scale(ProcessMessage, frozen=True):
    """Have so many from now on."""

    count: int


class Proven(ProcessMessage, frozen=True):
    """A replica has been ready."""


class EndDriver(ProcessMessage, frozen=True):
    """Nothing more is wanted: end the actors, then the process."""


class Started(ProcessMessage, frozen=True):
    """Ray is there, and has been asked for the actors. Else `StartFailed`."""


ToDriver = Drive | Scale | Proven | EndDriver
FromDriver = Started | StartFailed

# --- the front's side ----------------------------------------------------------------------------


class RayReplicas:
    """As many actors as `drive` says, or `scale`.

    `again` is called when a driver has taken the place of another one: Ray has forgotten earlier actors,
    and they may live: their processes outlive their nodes' Ray.
    """

    def __init__(self, drive: Drive, again: Callable[[], None]) -> None:
        self._now = drive
        self._again = again
        self._child: ChildProcess[ToDriver, FromDriver] | None = None
        self._failure: RamifyError | None = None
        self._started = False  # by the driver that runs
        self._news = asyncio.Event()  # it is, or that driver has ended

    def scale(self, count: int) -> None:
        """Have so many from now on. Fewer: the front dismisses some."""
        self._now = msgspec.structs.replace(self._now, count=count)
        self._tell(Scale(count))

    def prove(self) -> None:
        """A replica has been ready: what fails from now on may pass."""
        if not self._now.proven:
            self._now = msgspec.structs.replace(self._now, proven=True)
            self._tell(Proven())

    async def run(self, *, task_status: TaskStatus[None]) -> None:
        """One driver after the other, until cancelled. The first may raise ConfigError, NotStarted."""
        told = False

        def started() -> None:
            nonlocal told
            if told:
                log.info("Ray is there again")
                self._again()
                return
            told = True
            task_status.started()

        policy = Policy(trials=1, attempts=None, first=BACK_OFF_SECONDS, steady=LONG_SECONDS)
        attempts = Attempts("the Ray driver", policy)
        await keep(partial(self._drive, started), attempts, proven=lambda: self._now.proven)

    async def _drive(self, started: Callable[[], None]) -> Ended:
        """Start a driver; return why it has ended. Cancelled, it is told to end."""
        self._failure, self._started, self._news = None, False, asyncio.Event()
        child: ChildProcess[ToDriver, FromDriver] = await ChildProcess.start(
            "Ray", PROGRAM, decoder(FromDriver), encoder(), self._receive, on_end=self._news.set
        )
        self._child = child
        self._tell(self._now)
        try:
            await self._news.wait()
            if self._started:
                started()
            await child.link.wait_closed()
        finally:
            why = ""
            with anyio.CancelScope(shield=True):
                self._tell(EndDriver())
                with anyio.move_on_after(PARTING_SECONDS):
                    await child.link.wait_closed()
                if not child.link.closed:
                    child.kill()
                why = child.explain(await child.ended())
                self._child = None
        if self._failure is not None:
            if not self._now.proven:
                raise self._failure
            why = str(self._failure)
        log.error("Ray's driver has ended: its replicas end, too", reason=why)
        return Ended(why, self._started)

    def _receive(self, message: FromDriver) -> None:
        match message:
            case Started():
                self._started = True
                self._news.set()
            case StartFailed():
                self._failure = message.exception("Ray")
        if self._child is not None:
            self._child.link.consumed()

    def _tell(self, message: ToDriver) -> None:
        if self._child is not None and not self._child.link.closed:
            self._child.link.tell(message)
