"""A replica: one core that computes for the sessions of fronts in other processes.

`serve` is the life of a link to an engine. Where the engine has its sessions in gateway processes, the
replica joins each of these as well. One that loses its engine forgets all sessions and keeps its model,
so that an engine that comes back need not wait for it.

Run as a program it is a replica on the engine's machine (see `processes.main`). At SIGTERM it drains:
its fronts take its sessions elsewhere, then the engine lets it go.
"""

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import Any

import anyio
from anyio.abc import TaskGroup
from msgspec import structs

from ramify.actors.cluster.replica_messages import (
    Dismiss,
    Draining,
    FromReplica,
    Hello,
    Leave,
    StartReplica,
    ToReplica,
    Up,
)
from ramify.actors.cluster.shift import Shift, machine
from ramify.actors.core import CoreActors
from ramify.actors.executor.spec import ModelSpec
from ramify.actors.front.core_messages import MAX_FRAME, FromCore, News, ToCore
from ramify.actors.front.gateway_messages import by_worker
from ramify.actors.front.interface import Core, unguarded
from ramify.actors.front.remote_sessions import RemoteSessions
from ramify.actors.kit.clock import Clock, MonotonicClock, watch_loop
from ramify.actors.kit.collector import Collector
from ramify.actors.kit.log import get_log
from ramify.actors.kit.mailbox import MailboxClosed, MailboxFull
from ramify.actors.kit.metrics import Metrics
from ramify.actors.kit.report import Report
from ramify.actors.layout import layout_of
from ramify.actors.links.handshake import Stranger
from ramify.actors.links.link import Link, open_link
from ramify.actors.links.tcp import knock
from ramify.actors.processes.main import GONE, NOT_STARTED, run
from ramify.actors.processes.messages import (
    AskMetrics,
    Loading,
    MetricsText,
    StartFailed,
    decoder,
    encoder,
)
from ramify.actors.processes.supervisor import BackOff
from ramify.protocol.cluster import KvEvents, ListenKv, UnlistenKv
from ramify.protocol.config import EngineConfig
from ramify.protocol.errors import RamifyError

REPORT_SECONDS = 0.1  # of load: what routers see may be so old; a step's tokens take it along
LOOK_SECONDS = 0.12  # between looks at whether to report without them
SIGN_SECONDS = 0.2  # between reports in which nothing has changed
MOST_NEWS = 4096  # messages of the cache that wait for a front

MEET_SECONDS, MOST_MEET_SECONDS = 0.1, 2.0  # pauses between attempts to join a gateway process

OpenLink = Callable[..., Awaitable[Link[FromReplica, ToReplica]]]
"""Makes a link: `open(decoder, encoder, on_message=, on_end=, max_frame=)`."""
Reach = Callable[[int, bytes | None], Awaitable[OpenLink]]
"""Connects to a port at the engine's address; with this secret, if one is given."""

log = get_log("ramify.actors.cluster.replica")


class OtherModel(RamifyError):
    """The front wants another model, or other settings, than this process has loaded: start it again."""


class Replica:
    """The core of this process, once an engine has said which. A `Spread` to the sessions of its fronts,
    and an `Address` for what their routers want to know.

    `reach(port)` connects to a gateway process at the engine's address.
    """

    def __init__(
        self,
        *,
        name: str = "",
        adapt: Callable[[EngineConfig], EngineConfig] = lambda config: config,
        reach: Reach | None = None,
    ) -> None:
        self.metrics = Metrics()
        self._name = name
        self._adapt = adapt
        self._reach = reach
        self._clock: Clock = MonotonicClock()
        self._core: CoreActors | None = None
        self._addresses: Core | None = None
        self._begun: StartReplica | None = None
        self._fault: str | None = None
        self._engine: _Front | None = None
        self._fronts: dict[int, _Front] = {}  # by number: those whose sessions may be here
        self._told: list[_Front] = []  # since the last `start`
        self._looked = 0.0  # when it was last looked at what there is to report

    async def serve(self, group: TaskGroup, open_link: OpenLink) -> bool:
        """Serve one engine, until it goes. True if it said that nothing more is wanted.

        Raises OtherModel, and what the core raises.
        """
        engine = _Front()
        try:
            await engine.open(open_link)
            begin = await engine.begun
            if not isinstance(begin, StartReplica):
                raise MailboxClosed("this is a gateway process")
            try:
                await self._begin(group, begin, engine)
            except RamifyError as error:
                engine.tell(StartFailed.of(error))
                raise
            self._engine = engine
            async with anyio.create_task_group() as fronts:
                for port in begin.ports:
                    fronts.start_soon(self._meet, begin, port)
                await self._attend(engine, begin.hello, begin.number)
                fronts.cancel_scope.cancel()
            return engine.dismissed
        except MailboxClosed:
            return engine.dismissed
        finally:
            self._engine = None
            await engine.leave()

    def drain(self) -> bool:
        """The process was told to end: ask the engine to take its sessions. False: none is there."""
        if self._engine is None:
            return False
        self._engine.tell(Draining())
        return self._engine.there

    async def close(self) -> None:
        """Leave nothing behind."""
        if self._core is not None:
            await self._core.close()

    async def _begin(self, group: TaskGroup, begin: StartReplica, engine: "_Front") -> None:
        if self._begun is not None:
            if (begin.config, begin.spec) != (self._begun.config, self._begun.spec):
                raise OtherModel("the front wants other settings than this replica was started with")
            return
        self._begun = begin
        config = self._adapt(begin.config)
        self._core = core = CoreActors(
            config,
            layout_of(config),
            spec=begin.spec if begin.spec is not None else ModelSpec(config.model),
            clock=self._clock,
            metrics=self.metrics,
            routers=self,
        )
        await core.load(group, unguarded, lambda what, done: engine.tell(Loading(what, done)))
        self._addresses = await core.serve(group, unguarded, self, begin.epoch, self._faulty)
        group.start_soon(watch_loop, self._clock, self.metrics.loop_lag)
        group.start_soon(self._report_from_time_to_time)

    def _faulty(self, fault: str | None) -> None:
        self._fault = fault

    # --- fronts ----------------------------------------------------------------------------------

    async def _meet(self, begin: StartReplica, port: int) -> None:
        """Serve the gateway processes that wait at this port, one after the other."""
        assert self._reach is not None
        pauses = BackOff(MEET_SECONDS, MOST_MEET_SECONDS)
        while True:
            front = _Front()
            try:
                await front.open(await self._reach(port, begin.secret))
                hello = await front.begun
                if isinstance(hello, Hello):
                    pauses.succeeded()
                    await self._attend(front, hello, begin.number)
            except (OSError, TimeoutError, Stranger, MailboxClosed) as error:
                log.debug("no gateway process", port=port, reason=str(error))
            finally:
                await front.leave()
            await anyio.sleep(pauses.failed())

    async def _attend(self, front: "_Front", hello: Hello, number: int) -> None:
        """Serve a front until it goes, or has dismissed this replica."""
        assert self._core is not None
        assert self._addresses is not None
        shift = Shift.between(machine(), self._clock.now(), hello.machine, hello.now)
        front.serve(hello.front, self._addresses, shift, self)
        self._fronts[hello.front] = front  # not before: the core may still speak of earlier sessions
        front.tell(Up(number, self._core.info, os.getpid(), socket.gethostname(), self._name))
        try:
            with anyio.CancelScope() as scope:
                front.on_end(scope.cancel)
                self._report()
                await anyio.sleep_forever()
        finally:
            if self._fronts.get(hello.front) is front:
                del self._fronts[hello.front]

    def _report(self) -> None:
        """Tell each front how this replica is, if that has changed or it has heard nothing for long."""
        assert self._core is not None
        self._looked = now = self._clock.now()
        sessions = sum(len(front.live) for front in self._fronts.values())
        for front in self._fronts.values():
            load = self._core.load_now(front.heard)
            front.reported(self.metrics.report(self._fault, load, sessions), now)

    async def _report_from_time_to_time(self) -> None:
        """Report where no step does."""
        while True:
            await self._clock.sleep_until(self._looked + LOOK_SECONDS)
            if self._clock.now() >= self._looked + LOOK_SECONDS:
                self._report()

    def let_go(self) -> None:
        """The engine wants this replica to leave: its other fronts are asked to take their sessions."""
        for front in self._fronts.values():
            if front is not self._engine:
                front.tell(Draining())

    # --- Spread ----------------------------------------------------------------------------------

    def put(self, messages: Iterable[tuple[int, Any]], /) -> None:
        for worker, told in by_worker(messages).items():
            front = self._fronts.get(worker)
            if front is not None:
                front.put(told)
                self._told.append(front)

    def start(self) -> None:
        while self._told:
            self._told.pop().flush()
        if self._clock.now() >= self._looked + REPORT_SECONDS:
            self._report()

    def flush(self) -> None:
        self.start()

    # --- Address ---------------------------------------------------------------------------------

    def tell(self, message: KvEvents, /) -> None:
        """The cache has changed."""
        for front in self._fronts.values():
            if front.listener and message.listener in (0, front.listener):
                front.news(message)


class _Front(RemoteSessions):
    """One front, its sessions, and what they hold here. `begun`: what it said first."""

    def __init__(self) -> None:
        super().__init__(self._inward)
        self.begun: asyncio.Future[StartReplica | Hello] = asyncio.get_running_loop().create_future()
        self.dismissed = False
        self.listener = 0  # to the cache; 0: it has no router
        self._number = 0
        self._core: Core | None = None  # these once the core serves
        self._shift = Shift(0.0)
        self._replica: Replica | None = None
        self._ended: Callable[[], None] = lambda: None
        self._reported: tuple[Report, float] | None = None  # the last one, and when

    async def open(self, open_link: OpenLink) -> None:
        link = await open_link(
            decoder(ToReplica),
            encoder(),
            on_message=self._receive,
            on_end=self._end,
            max_frame=MAX_FRAME,
        )
        self.attach(link)
        self._events = self.bundle(News, MOST_NEWS)

    def serve(self, number: int, core: Core, shift: Shift, replica: Replica) -> None:
        self._number, self._core, self._shift, self._replica = number, core, shift, replica

    def on_end(self, ended: Callable[[], None]) -> None:
        """`ended` is called when the link has ended, or the replica is dismissed."""
        self._ended = ended
        if not self.there or self.dismissed:
            ended()

    def put(self, messages: list[tuple[int, FromCore]]) -> None:
        shift = self._shift
        super().put([(s, shift.outward(m)) for s, m in messages] if shift.ahead else messages)

    def reported(self, report: Report, now: float) -> None:
        """Tell it the report, unless it has heard the same a moment ago."""
        if self._reported is not None:
            last, when = self._reported
            if now < when + SIGN_SECONDS and report == structs.replace(last, lag=report.lag):
                return
        self._reported = report, now
        self.tell(report)

    def news(self, events: KvEvents) -> None:
        with contextlib.suppress(MailboxFull):  # a gap is noticed, and a snapshot asked for
            self._events.tell(events)

    async def leave(self) -> None:
        """End the link; its sessions are forgotten."""
        self.release(self._core, *([UnlistenKv(self.listener)] if self.listener else []))
        if self._link is not None:
            with anyio.move_on_after(1.0, shield=True):
                await self._link.wait_closed()

    def hung(self, why: str) -> None:
        log.warning("the front takes nothing", reason=why)
        super().hung(why)

    def _inward(self, said: Any) -> None:
        assert self._core is not None
        if isinstance(said, ListenKv):  # each front has a number of its own to the cache
            said = ListenKv(self._number + said.listener)
            self.listener = said.listener
        self._core.tell(self._shift.inward(said))

    def _receive(self, message: ToReplica) -> None:
        match message:
            case ToCore(messages):
                if self._core is not None:
                    self.take(messages)
                    return
            case AskMetrics(ident):
                if self._replica is not None:
                    self._replica.metrics.scrape(lambda text: self.tell(MetricsText(ident, text)))
            case Leave():
                if self._replica is not None:
                    self._replica.let_go()
            case StartReplica() | Hello():
                if not self.begun.done():
                    self.begun.set_result(message)
            case Dismiss():
                self.dismissed = True
                self._ended()
        self.consumed()

    def _end(self, error: Exception | None) -> None:
        if error is not None:
            log.warning("the link to the front broke", reason=str(error))
        if not self.begun.done():
            self.begun.set_exception(MailboxClosed("the front has gone"))
        self._ended()


async def _reach(port: int, secret: bytes | None) -> OpenLink:
    assert secret is not None, "the engine has one, on its own machine"
    return await knock("127.0.0.1", port, secret)


async def _serve(sock: socket.socket) -> int:
    replica = Replica(reach=_reach)
    Collector(MonotonicClock()).begin()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, replica.drain)
    code = NOT_STARTED
    try:
        async with anyio.create_task_group() as group:
            code = 0 if await replica.serve(group, partial(open_link, "front", sock)) else GONE
            group.cancel_scope.cancel()
    except* RamifyError:
        pass  # the front knows why
    finally:
        with anyio.CancelScope(shield=True):
            await replica.close()
    return code


if __name__ == "__main__":
    run(_serve)
