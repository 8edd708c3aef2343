"""The main program of a gateway process. See `processes.main`.

Its core is the engine at the other end of the link, or replicas, which join here.
When the engine has gone, clients are told to come back (1012) and the process ends.
"""

import asyncio
import socket
from typing import TYPE_CHECKING, Any

import anyio

from ramify.actors.front.core_messages import MAX_FRAME, Forward, Said, ToCore, ToSessions
from ramify.actors.front.gateway_messages import (
    Accept,
    Announced,
    Bar,
    Drain,
    EndGateway,
    EngineState,
    Forwarded,
    FromEngine,
    Listening,
    Load,
    Peers,
    Serve,
    Serving,
    StartGateway,
    ToEngine,
    naming,
)
from ramify.actors.front.interface import Core, unguarded
from ramify.actors.front.peer_router import PeerRouter
from ramify.actors.front.remote import RemoteMetrics, RemoteStatus
from ramify.actors.gateway.port.access.auth import MINTED_MAX
from ramify.actors.gateway.port.access.minted import SharedMinted
from ramify.actors.kit.clock import MonotonicClock, watch_loop
from ramify.actors.kit.collector import Collector
from ramify.actors.kit.log import get_log
from ramify.actors.kit.mailbox import LimitedAddress, Mailbox, MailboxClosed
from ramify.actors.kit.working import Working
from ramify.actors.links.bundle import MOST, Bundle
from ramify.actors.links.link import Link, open_link
from ramify.actors.local_front import LocalFront
from ramify.actors.processes.main import GONE, NOT_STARTED, ParentGone, run
from ramify.actors.processes.messages import MetricsText, StartFailed, decoder, encoder
from ramify.protocol.errors import RamifyError

if TYPE_CHECKING:
    from ramify.actors.cluster.cores import GatewayCores

PARTING_SECONDS = 1.0  # for closing handshakes when the engine has gone
SESSIONS = MOST // 4  # messages that wait for the core, where what clients cause has to wait

log = get_log("ramify.actors.front")


class GatewayProgram:
    """A gateway, its sessions, and the link to the core."""

    def __init__(self) -> None:
        self._control: Mailbox[Serve | Drain | EndGateway] = Mailbox("control", 16)
        self._started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._link: Link[ToEngine, FromEngine] | None = None
        self._encoder = encoder()
        self._batches = 0  # of ToSessions that the sessions have not all taken

    async def run(self, sock: socket.socket) -> int:
        """Serve the engine at the other end until it is done. Returns the exit code."""
        self._link = link = await open_link(
            "core",
            sock,
            decoder(FromEngine),
            self._encoder,
            on_message=self._receive,
            on_end=self._ended,
            max_frame=MAX_FRAME,
        )
        await self._started
        try:
            return await self._serve(link)
        finally:
            self._collector.end()
            with anyio.move_on_after(PARTING_SECONDS, shield=True):
                if not link.closed:
                    await self._core.sent()  # the ends of sessions, to the cache and to peers
            link.close()
            with anyio.move_on_after(PARTING_SECONDS, shield=True):
                await link.wait_closed()

    def _build(self, start: StartGateway) -> None:
        assert self._link is not None
        self._core: Bundle[Said] = Bundle(self._link, ToCore, self._encoder)
        self._sessions: LimitedAddress[Said] = LimitedAddress(self._core, SESSIONS)
        self._clock = MonotonicClock()
        self._collector = Collector(self._clock)
        self._status = RemoteStatus()
        self._metrics = RemoteMetrics(self._core)
        self._router = PeerRouter(
            start.worker,
            lambda worker, body: self._core.tell(Forward(worker, body)),
            start.config.limits.ops_per_frame,
            self._told,
            behind=lambda: len(self._core) >= SESSIONS,
            workers=start.config.gateways or 0 if start.config.server.store is not None else 0,
        )
        self._front = LocalFront(
            start.config,
            self._status,
            self._metrics,
            self._clock,
            mailboxes=self._router,
            naming=naming(start.worker, start.incarnation, start.first, start.config.gateways or 0),
            listeners=[socket.socket(fileno=fd) for fd in start.listeners],
            credentials=start.credentials,
            minted=_minted(start),
            working=Working(start.working, start.worker) if start.working is not None else None,
            secret=start.signing,
        )
        self._cores: GatewayCores | None = None
        if start.door is not None:
            from ramify.actors.cluster import cores  # other processes do without the router

            self._cores = cores.GatewayCores(start.config, start.worker, start.secret, self._clock)
            self._metrics.cores = self._cores.news
        self._door = start.door
        for session in start.barred:
            self._front.bar(session)

    async def _serve(self, link: Link[ToEngine, FromEngine]) -> int:
        async with anyio.create_task_group() as group:
            await self._front.listen(group, unguarded)
            group.start_soon(watch_loop, self._clock, self._metrics.loop_lag)
            if self._cores is not None:
                await self._cores.listen(socket.socket(fileno=self._door))
                await group.start(self._cores.run, self._front.spread)
            try:
                link.tell(Listening())
                await self._front.load()
                while True:
                    for message in await self._control.drain():
                        match message:
                            case Serve(server, context, vocab, pictures):
                                to = self._sessions if self._cores is None else self._cores.bindings
                                core = Core(to, to, to, server, context, vocab, pictures)
                                await self._front.serve(group, unguarded, core)
                                link.tell(Serving())
                                self._collector.begin()
                            case Drain(reason, grace):
                                self._front.begin_drain(reason, grace)
                            case EndGateway(grace, failed):
                                await self._front.drain(grace, failed=failed)
                                return _leave(group, 0)
            except RamifyError as error:
                link.tell(StartFailed.of(error))
                return _leave(group, NOT_STARTED)
            except MailboxClosed:
                log.warning("the engine has gone")
                await self._front.drain(PARTING_SECONDS, failed=True)
                return _leave(group, GONE)
        raise AssertionError("the group ends with the process")

    # --- from the core ---------------------------------------------------------------------------

    def _receive(self, message: FromEngine) -> None:
        assert self._link is not None
        match message:
            case ToSessions(batch):
                self._batches += 1  # its credit goes back when the sessions have taken it
                self._router.fan_out.put(batch)
                self._router.fan_out.start()
                return
            case Forwarded(bodies):
                for body in bodies:
                    self._router.receive(body)
            case Load(load, elsewhere):
                self._status.now = load
                self._front.gateway.told(elsewhere)
            case Accept(credentials):
                self._front.accept(credentials)
            case Bar(session):
                self._front.bar(session)
            case EngineState():
                self._status.become(message)
                if message.ready:
                    self._link.tell(Announced())
            case Peers(workers):
                self._router.peers(set(workers))
            case MetricsText(ident, text):
                self._metrics.scrapes.answered(ident, text)
            case StartGateway():
                self._build(message)
                self._started.set_result(None)
            case _:
                self._control.tell(message)
        self._link.consumed()

    def _told(self) -> None:
        if self._batches and self._link is not None and not self._link.closed:
            count, self._batches = self._batches, 0
            self._link.consumed(count)

    def _ended(self, error: Exception | None) -> None:
        if error is not None:
            log.error("the engine cannot be understood", reason=str(error))
        if not self._started.done():
            self._started.set_exception(ParentGone())
        self._control.close()


def _minted(start: StartGateway) -> SharedMinted | None:
    """The table of single-use tokens, where several processes have sockets."""
    if start.minted is None:
        return None
    return SharedMinted(start.minted, MINTED_MAX, start.config.gateways or 1)


def _leave(group: Any, code: int) -> int:
    group.cancel_scope.cancel()
    return code


async def _serve(sock: socket.socket) -> int:
    return await GatewayProgram().run(sock)


if __name__ == "__main__":
    run(_serve)
