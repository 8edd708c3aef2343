"""A replica: one core that computes for the sessions of a front in another process.

`serve` is the life of a link to a front. A replica that loses its front forgets its sessions and keeps
its model, so that a front that comes back need not wait for it.

Run as a program it is a replica on the front's machine (see `processes.main`). At SIGTERM it drains: the
front takes its sessions elsewhere, then lets it go.
"""

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import anyio
from anyio.abc import TaskGroup

from ramify.actors.cluster.replica_messages import (
    LISTENER,
    Dismiss,
    Draining,
    FromFront,
    StartReplica,
    ToFront,
    Up,
)
from ramify.actors.cluster.shift import Shift, machine
from ramify.actors.core import CoreActors
from ramify.actors.executor.spec import ModelSpec
from ramify.actors.front.core_messages import MAX_FRAME, News, ToCore
from ramify.actors.front.interface import Core, unguarded
from ramify.actors.front.remote_sessions import RemoteSessions
from ramify.actors.kit.clock import Clock, MonotonicClock
from ramify.actors.kit.collector import Collector
from ramify.actors.kit.lag import watch_loop
from ramify.actors.kit.log import get_log
from ramify.actors.kit.mailbox import MailboxClosed, MailboxFull
from ramify.actors.kit.metrics import Metrics
from ramify.actors.layout import layout_of
from ramify.actors.links.link import Link, open_link
from ramify.actors.processes.main import GONE, NOT_STARTED, run
from ramify.actors.processes.messages import (
    AskMetrics,
    Loading,
    MetricsText,
    StartFailed,
    decoder,
    encoder,
)
from ramify.protocol.cluster import KvEvents, UnlistenKv
from ramify.protocol.config import EngineConfig
from ramify.protocol.errors import RamifyError
from ramify.protocol.messages import SessionMessage

REPORT_SECONDS = 0.1  # of load: what routers see may be so old
MOST_NEWS = 4096  # messages of the cache that wait for a front

OpenLink = Callable[..., Awaitable[Link[ToFront, FromFront]]]
"""Makes a link: `open(decoder, encoder, on_message=, on_end=, max_frame=)`."""

log = get_log("ramify.actors.cluster.replica")


class OtherModel(RamifyError):
    """The front wants another model, or other settings, than this process has loaded: start it again."""


class Replica:
    """The core of this process, once a front has said which. A `Spread` to that front's sessions, and
    an `Address` for what its router wants to know.
    """

    def __init__(
        self,
        *,
        name: str = "",
        adapt: Callable[[EngineConfig], EngineConfig] = lambda config: config,
    ) -> None:
        self.metrics = Metrics()
        self._name = name
        self._adapt = adapt
        self._clock: Clock = MonotonicClock()
        self._core: CoreActors | None = None
        self._addresses: Core | None = None
        self._begun: StartReplica | None = None
        self._fault: str | None = None
        self._front: _FrontLink | None = None

    async def serve(self, group: TaskGroup, open_link: OpenLink) -> bool:
        """Serve one front, until it goes. True if it said that nothing more is wanted.

        Raises OtherModel, and what the core raises.
        """
        front = _FrontLink()
        try:
            await front.open(open_link)
            begin = await front.begin
            try:
                await self._begin(group, begin, front)
            except RamifyError as error:
                front.tell(StartFailed.of(error))
                raise
            assert self._core is not None
            assert self._addresses is not None
            shift = Shift.between(machine(), self._clock.now(), begin.machine, begin.now)
            front.serve(self._addresses, shift, self.metrics)
            self._front = front  # not before: the core may still speak of the last one's sessions
            front.tell(Up(self._core.info, os.getpid(), socket.gethostname(), self._name))
            await self._report(front)
            return front.dismissed
        except MailboxClosed:
            return front.dismissed
        finally:
            self._front = None
            await front.leave()

    def drain(self) -> bool:
        """The process was told to end: ask the front to take its sessions. False: none is there."""
        if self._front is None or self._addresses is None:
            return False
        self._front.tell(Draining())
        return self._front.there

    async def close(self) -> None:
        """Leave nothing behind."""
        if self._core is not None:
            await self._core.close()

    async def _begin(self, group: TaskGroup, begin: StartReplica, front: "_FrontLink") -> None:
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
            check_idle=begin.check_idle,
            routers=self,
        )
        await core.load(group, unguarded, front.loading)
        self._addresses = await core.serve(group, unguarded, self, begin.epoch, self._faulty)
        group.start_soon(watch_loop, self._clock, self.metrics)

    def _faulty(self, fault: str | None) -> None:
        self._fault = fault

    async def _report(self, front: "_FrontLink") -> None:
        """Until the front has gone."""
        assert self._core is not None
        with anyio.CancelScope() as scope:
            front.on_end(scope.cancel)
            while True:
                front.tell(self.metrics.report(self._fault, self._core.load_now(front.heard)))
                await self._clock.sleep_until(self._clock.now() + REPORT_SECONDS)

    # --- Spread ----------------------------------------------------------------------------------

    def put(self, key: int, message: SessionMessage) -> None:
        if self._front is not None:
            self._front.put(key, message)

    def start(self) -> None:
        if self._front is not None:
            self._front.flush()

    def flush(self) -> None:
        self.start()

    # --- Address ---------------------------------------------------------------------------------

    def tell(self, message: KvEvents, /) -> None:
        """The cache has changed."""
        if self._front is not None:
            self._front.news(message)


class _FrontLink(RemoteSessions):
    """One front, its sessions, and what they hold here."""

    def __init__(self) -> None:
        super().__init__(self._inward)
        self.begin: asyncio.Future[StartReplica] = asyncio.get_running_loop().create_future()
        self.dismissed = False
        self._core: Core | None = None  # these once the core serves
        self._shift = Shift(0.0)
        self._metrics: Metrics | None = None
        self._ended: Callable[[], None] = lambda: None

    async def open(self, open_link: OpenLink) -> None:
        link = await open_link(
            decoder(FromFront),
            encoder(),
            on_message=self._receive,
            on_end=self._end,
            max_frame=MAX_FRAME,
        )
        self.attach(link)
        self._events = self.bundle(News, MOST_NEWS)

    def serve(self, core: Core, shift: Shift, metrics: Metrics) -> None:
        self._core, self._shift, self._metrics = core, shift, metrics

    def on_end(self, ended: Callable[[], None]) -> None:
        """`ended` is called when the link has ended, or the replica is dismissed."""
        self._ended = ended
        if not self.there or self.dismissed:
            ended()

    def loading(self, what: str, done: float) -> None:
        """A front that goes meanwhile changes nothing: the next one finds the model loaded."""
        self.tell(Loading(what, done))

    def put(self, session: int, message: SessionMessage) -> None:
        super().put(session, self._shift.outward(message))

    def news(self, events: KvEvents) -> None:
        with contextlib.suppress(MailboxFull):  # a gap is noticed, and a snapshot asked for
            self._events.tell(events)

    async def leave(self) -> None:
        """End the link; its sessions are forgotten."""
        self.release(self._core, UnlistenKv(LISTENER))
        if self._link is not None:
            with anyio.move_on_after(1.0, shield=True):
                await self._link.wait_closed()

    def hung(self, why: str) -> None:
        log.warning("the front takes nothing", reason=why)
        super().hung(why)

    def _inward(self, said: Any) -> None:
        assert self._core is not None
        self._core.tell(self._shift.inward(said))

    def _receive(self, message: FromFront) -> None:
        match message:
            case ToCore(messages):
                if self._core is not None:
                    self.take(messages)
                    return
            case AskMetrics(ident):
                if self._metrics is not None:
                    self._metrics.scrape(lambda text: self.tell(MetricsText(ident, text)))
            case StartReplica():
                if not self.begin.done():
                    self.begin.set_result(message)
            case Dismiss():
                self.dismissed = True
                self._ended()
        self.consumed()

    def _end(self, error: Exception | None) -> None:
        if error is not None:
            log.warning("the link to the front broke", reason=str(error))
        if not self.begin.done():
            self.begin.set_exception(MailboxClosed("the front has gone"))
        self._ended()


async def _serve(sock: socket.socket) -> int:
    replica = Replica()
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
