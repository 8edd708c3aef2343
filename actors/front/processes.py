"""Gateways in processes of their own: starts, connects and replaces them.

The core's loop does per step: one frame to each process, with the tokens of all its sessions, and
what its sessions send back, one frame per turn of that process' loop. Sockets, codecs, detokenizing
and sessions cost it nothing, so they cannot delay a plan.

A process that dies takes its sessions along: their requests are cancelled, their branches are dropped,
its peers hear of it, and another one takes its place. Connections in the backlog of its listening
socket stay there, because the engine holds that socket too. Processes that keep dying end the engine.

This file does not know sockets of clients, nor what is in a message between two processes.
"""

import asyncio
import os
import secrets
import socket
from collections.abc import Iterable
from functools import partial
from typing import Any

import anyio
import msgspec
from anyio.abc import TaskGroup, TaskStatus

from ramify.actors.front.core_messages import Forward, Said, ToCore
from ramify.actors.front.gateway_messages import (
    Accept,
    Announced,
    Bar,
    Drain,
    EndGateway,
    EngineState,
    FromEngine,
    Listening,
    Load,
    Peers,
    Serve,
    Serving,
    StartGateway,
    ToEngine,
    by_worker,
)
from ramify.actors.front.interface import Core, Guard
from ramify.actors.front.worker import GatewayProcess, Worker
from ramify.actors.gateway.port.access.auth import MINTED_MAX
from ramify.actors.gateway.port.access.minted import table_bytes
from ramify.actors.gateway.port.interfaces import Status as EngineStatus
from ramify.actors.gateway.port.server import bind_shared
from ramify.actors.kit.clock import Clock
from ramify.actors.kit.fanout import Spread
from ramify.actors.kit.log import get_log
from ramify.actors.kit.metrics import Metrics
from ramify.actors.kit.report import Report
from ramify.actors.kit.working import Working, working_file
from ramify.actors.processes.messages import AskMetrics, MetricsText, NotStarted, StartFailed
from ramify.actors.processes.silence import Silence
from ramify.actors.processes.supervisor import Attempts, Deaths, Ended, Policy, keep
from ramify.protocol.config import SESSIONS_BYTES_LEAST, EngineConfig
from ramify.protocol.credentials import Credential
from ramify.protocol.messages import SessionMessage

LOAD_SECONDS = 0.25  # how often processes hear of the engine's load
STATE_SECONDS = 1.0  # ... and of what else /v1/info tells, replicas above all, where it has changed
DEATHS, WITHIN_SECONDS = 3, 60.0  # more deaths than these end the engine
DEAF_SECONDS = 4.0  # a process reports its lag every 0.25 s: one that is silent gets no connections
HUNG_SECONDS = 30.0  # and is killed
BARRED = 1024  # sessions on which a process hung, that are remembered
LEAVE_SECONDS = 7.0  # beyond the grace time: closing handshakes, and the end of the process

log = get_log(__name__)


class ProcessFront:
    """N gateway processes. A `Front`, and its `Spread`. `first`: what sessions are counted from.

    `doors`: a socket for each, where replicas join it that know `secret`; none: the engine is the core.
    """

    def __init__(
        self,
        config: EngineConfig,
        count: int,
        status: EngineStatus,
        metrics: Metrics,
        clock: Clock,
        credentials: list[Credential],
        first: int = 1,
        secret: bytes = b"",
    ) -> None:
        self.doors: list[socket.socket] = []
        self._secret = secret
        self._signing = secrets.token_bytes(32)  # until the store, if there is one, has its own
        self._config = config
        self._share = share(config, count)
        self._count = count
        self._first = first
        self._status = status
        self._metrics = metrics
        self._clock = clock
        self.workers: list[Worker] = []
        self._up: dict[int, GatewayProcess] = {}  # those that serve, by their worker's number
        self._core: Core | None = None  # from `serve` on
        self._serve = asyncio.Event()
        self._stop = asyncio.Event()
        self._deaths = Deaths(DEATHS, WITHIN_SECONDS)
        self._minted: int | None = None
        self._working = working_file(count)
        self._barred: list[str] = []  # sessions on which a process hung
        self._told: dict[int, Load] = {}  # by the worker's number
        self._told_state: EngineState | None = None
        self._state_due = 0.0
        self._credentials = credentials

    @property
    def spread(self) -> Spread[SessionMessage]:
        return self

    @property
    def pids(self) -> list[int]:
        """The ids of the processes that run, by worker."""
        return [worker.process.child.pid for worker in self.workers if worker.process is not None]

    # --- Front -----------------------------------------------------------------------------------

    async def listen(self, group: TaskGroup, guard: Guard) -> int:
        bound = bind_shared(self._config.server, self._count)
        self.workers = [Worker(number, sockets, self._first) for number, sockets in enumerate(bound)]
        if self._count > 1:
            self._minted = os.memfd_create("ramify-minted")
            os.truncate(self._minted, table_bytes(MINTED_MAX))
        async with anyio.create_task_group() as starting:
            for worker in self.workers:
                run = guard(f"gateway process {worker.number}", partial(self._keep, worker))
                starting.start_soon(group.start, run)
        port: int = bound[0][0].getsockname()[1]
        return port

    async def load(self) -> None:
        """The processes do, while the model loads."""

    async def serve(self, group: TaskGroup, guard: Guard, core: Core) -> None:
        self._core = core
        self._serve.set()
        for worker in self.workers:
            await worker.serving.wait()
        await group.start(guard("gateways", self._watch))

    async def announced(self) -> None:
        for worker in self.workers:
            await worker.ready.wait()

    def accept(self, credentials: list[Credential]) -> None:
        self._credentials = credentials
        self._tell_all(Accept(credentials))

    def begin_drain(self, reason: str, grace: float) -> None:
        self._stop.set()
        self._close_listeners()
        self._tell_all(Drain(reason, grace))

    async def drain(self, grace: float, *, failed: bool = False) -> None:
        self._stop.set()
        self._close_listeners()
        self._tell_all(EndGateway(grace, failed))
        with anyio.move_on_after(grace + LEAVE_SECONDS):
            for worker in self.workers:
                await worker.ended.wait()

    async def close(self) -> None:
        self._close_listeners()
        for worker in self.workers:
            if worker.process is not None:
                worker.process.child.kill()
        if self._working >= 0:
            os.close(self._working)
            self._working = -1
        if self._minted is not None:
            os.close(self._minted)
            self._minted = None

    def status_changed(self) -> None:
        """The engine's state has changed."""
        self._told_state = self._state()
        self._tell_all(self._told_state)

    # --- Spread ----------------------------------------------------------------------------------

    def put(self, messages: Iterable[tuple[int, Any]], /) -> None:
        for worker, told in by_worker(messages).items():
            process = self._up.get(worker)
            if process is not None:
                process.put(told)

    def start(self) -> None:
        for process in self._up.values():
            process.flush()

    def flush(self) -> None:
        self.start()

    # --- the life of a worker ----------------------------------------------------------------------

    async def _keep(self, worker: Worker, *, task_status: TaskStatus[None]) -> None:
        """One process after the other, until the engine stops."""
        attempts = Attempts(f"gateway {worker.number}", Policy(trials=1))
        run = partial(self._run, worker, task_status)
        try:
            await keep(run, attempts, stop=self._stop, proven=lambda: worker.begun)
        finally:
            worker.ended.set()

    async def _run(self, worker: Worker, task_status: TaskStatus[None]) -> Ended:
        process, why = await self._start(worker), ""
        async with anyio.create_task_group() as watching:
            watching.start_soon(self._bring_up, worker, process)
            watching.start_soon(worker.announce, task_status)
            why = await process.ended()
            watching.cancel_scope.cancel()
        self._ended(worker, process, why)
        return Ended(why, worker.serving.is_set())

    async def _start(self, worker: Worker) -> GatewayProcess:
        worker.clear()
        door = self.doors[worker.number].fileno() if self.doors else None
        if door is not None:  # replicas may still hold sessions of the process before
            worker.first = 1 + secrets.randbits(22)
        start = StartGateway(
            config=self._share,
            worker=worker.number,
            incarnation=worker.incarnation,
            first=worker.first,
            listeners=[sock.fileno() for sock in worker.listeners],
            minted=self._minted,
            credentials=self._credentials,
            working=self._working,
            barred=self._barred,
            door=door,
            secret=self._secret,
            signing=self._signing,
        )
        Working(self._working, worker.number).off()
        process = await GatewayProcess.start(start, partial(self._receive, worker), self._take)
        worker.incarnation += 1
        worker.process = process
        process.tell(self._state())
        if self._stop.is_set():  # it came too late to be told
            process.child.kill()
        log.info("gateway process started", gateway=worker.number, pid=process.child.pid)
        return process

    async def _bring_up(self, worker: Worker, process: GatewayProcess) -> None:
        """Once the core and the process are ready, sessions can be opened there."""
        if not await worker.listens(process):
            return
        await self._serve.wait()
        core = self._core
        assert core is not None
        process.tell(Serve(worker.server(core.server), core.context, core.vocab, core.pictures))
        process.tell(Load(self._status.load()))
        self._told.pop(worker.number, None)
        process.silence = Silence(self._clock.now())
        self._up[worker.number] = process  # its sessions may be told from now on
        if await worker.serves(process):
            self._tell_all(Peers(sorted(self._up)))

    def _ended(self, worker: Worker, process: GatewayProcess, why: str) -> None:
        """A process has ended: in order, or to be replaced. Raises if there is no use in that."""
        worker.left(process)
        if worker.shut and not self._stop.is_set():
            worker.accept_again()
        self._up.pop(worker.number, None)
        self._metrics.gateway_ended(worker.number)
        process.release(self._core)
        if self._stop.is_set():
            return
        if worker.failure is None:
            sessions = len(process.live)
            log.error("a gateway process failed", gateway=worker.number, reason=why, sessions=sessions)
        else:
            raise worker.failure
        if process.why and self._bar(worker.number):
            self._tell_all(Peers(sorted(self._up)))
            return
        if worker.begun and self._deaths.too_many(self._clock.now()):
            raise NotStarted(f"{DEATHS + 1} gateway processes failed in a minute; last: {why}")
        self._tell_all(Peers(sorted(self._up)))

    def _bar(self, number: int) -> bool:
        """A process has hung: the session that it worked on, if any, ends with it.

        It is not taken up again, and does not count for the engine's end: else one client could have it.
        """
        session = Working(self._working, number).session
        if session is None:
            return False
        log.error(
            "a session kept its gateway process from working: it is over, and not taken up again",
            gateway=number,
            session=session,
        )
        self._barred = [*self._barred, session][-BARRED:]
        self._tell_all(Bar(session))
        return True

    # --- messages --------------------------------------------------------------------------------

    def _receive(self, worker: Worker, process: GatewayProcess, message: ToEngine) -> None:
        process.silence.heard()
        if worker.shut:  # it has come back, and listens again
            worker.shut = False
            log.info("a gateway process goes on", gateway=worker.number)
        match message:
            case ToCore(messages):
                process.take(messages)
                return
            case Listening():
                worker.listening.set()
            case Serving():
                worker.serving.set()
            case Announced():
                worker.ready.set()
            case StartFailed():
                worker.failure = message.exception(f"gateway {worker.number}")
        process.consumed()

    def _take(self, process: GatewayProcess, message: Said) -> None:
        """What a process says for others. Raises MailboxFull, and then nothing has happened."""
        match message:
            case Forward(worker, body):
                peer = self._up.get(worker)
                if peer is not None:
                    peer.forward(body)
            case Report():
                self._metrics.gateway(process.worker, message)
            case AskMetrics(ident):
                self._metrics.scrape(lambda text: process.tell(MetricsText(ident, text)))
            case _:
                assert self._core is not None, "sessions exist only once the core serves"
                self._core.tell(message)

    async def _watch(self, *, task_status: TaskStatus[None]) -> None:
        """Tell the processes of the load, and kill one that has hung."""
        task_status.started()
        while True:
            now = self._clock.now()
            self._tell_state(now)
            load = self._status.load()
            for worker in self.workers:
                process = self._up.get(worker.number)
                if process is None:
                    continue
                silent = process.silence.tick(now)
                if silent > HUNG_SECONDS:
                    process.hung("it was silent for too long")
                elif silent > DEAF_SECONDS and not worker.shut:
                    worker.stop_accepting()
                    log.warning("a gateway process is silent: no new connections", gateway=worker.number)
                news = Load(load, self._metrics.sockets_elsewhere(worker.number))
                if news != self._told.get(worker.number):
                    self._told[worker.number] = news
                    process.tell(news)
            await self._clock.sleep_until(now + LOAD_SECONDS)

    def _tell_state(self, now: float) -> None:
        """Replicas come, go and work without a change of the engine's own state."""
        if now >= self._state_due:
            self._state_due = now + STATE_SECONDS
            if self._state() != self._told_state:
                self.status_changed()

    def _state(self) -> EngineState:
        status = self._status
        return EngineState(status.ready, status.phase, status.info(), status.fault, status.store)

    def _tell_all(self, message: FromEngine) -> None:
        for worker in self.workers:
            if worker.process is not None:
                worker.process.tell(message)

    def _close_listeners(self) -> None:
        for worker in self.workers:
            for sock in worker.listeners:
                sock.close()
            worker.listeners.clear()


def share(config: EngineConfig, count: int) -> EngineConfig:
    """What each of `count` processes may let in of what the server and a credential may have.

    The kernel spreads connections evenly, and a number that all change would cost a message for each
    change. So one process may refuse a client while another has room; no number is ever passed.
    """

    def part(most: int) -> int:
        return -(-most // count)

    server, limits = config.server, config.limits
    return msgspec.structs.replace(
        config,
        gateways=count,
        server=msgspec.structs.replace(
            server,
            max_sessions=part(server.max_sessions),
            sessions_bytes=max(part(server.sessions_bytes), SESSIONS_BYTES_LEAST),
        ),
        limits=msgspec.structs.replace(
            limits,
            client_sessions=part(limits.client_sessions),
            client_bytes=part(limits.client_bytes),
            histories=part(limits.histories),
            history_bytes=part(limits.history_bytes),
        ),
    )
