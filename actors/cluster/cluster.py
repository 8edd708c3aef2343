"""The replicas of a front: a `CoreHost` that has several cores instead of one.

To sessions it is one address; `Bindings` says which replica a message goes to. A replica whose link
ends, or that says nothing for some seconds, is gone: its sessions move, each with all that the front
knows of it, and go on where they were (`SessionCore.change_core`). One that drains (its process was told
SIGTERM) gets no new sessions, and its sessions move as soon as nothing runs in them.

This file does not know how replicas are started, nor what sessions say.
"""

import asyncio
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import msgspec
from anyio.abc import TaskGroup, TaskStatus

from ramify.actors.cluster.bindings import Bindings
from ramify.actors.cluster.local import threads
from ramify.actors.cluster.membership import Membership, ReplicaMember
from ramify.actors.cluster.metrics import ClusterMetrics, ReplicaGauges
from ramify.actors.cluster.replica_messages import (
    LISTENER,
    Dismiss,
    Draining,
    Relayed,
    StartReplica,
    ToFront,
    ToGateways,
    Up,
)
from ramify.actors.cluster.shift import machine
from ramify.actors.cluster.starting import Ends, JoinedReplicas, LocalReplicas
from ramify.actors.core import PROTOCOL_VERSION, Progress
from ramify.actors.executor.spec import ExecutorSpec
from ramify.actors.front.core_messages import ForCore, FromCore, News, ToSessions
from ramify.actors.front.interface import Core, Guard
from ramify.actors.kit.clock import Clock
from ramify.actors.kit.fanout import Spread
from ramify.actors.kit.log import get_log
from ramify.actors.kit.report import Report
from ramify.actors.processes.messages import (
    Loading,
    MetricsText,
    NotStarted,
    StartFailed,
    decoder,
)
from ramify.actors.processes.peer import Scrapes
from ramify.actors.processes.silence import Silence
from ramify.actors.processes.supervisor import Deaths
from ramify.actors.routing.scaling import Scaling
from ramify.actors.routing.session_router import SessionRouter
from ramify.actors.watchdog import step_timeout
from ramify.protocol.cluster import KvEvents, ListenKv
from ramify.protocol.config import EngineConfig, ReplicasConfig, ServerConfig
from ramify.protocol.errors import RamifyError
from ramify.protocol.messages import ChangeCore, Lost, SessionMessage, Tokens
from ramify.protocol.plan import ExecutorInfo
from ramify.protocol.wire import ServerInfo

LOOK_SECONDS = 0.25
WITHOUT_SECONDS = 120.0  # with no replica at all, not even one that loads, once there were some
WITHOUT_ELSEWHERE = 900.0  # the same where machines have to come first
DEATHS, WITHIN_SECONDS = 8, 60.0  # replicas that died under one session while something of it ran
STALLED = 1 / 60  # of --step-timeout that no progress is made, once that is a fault: sessions leave

log = get_log(__name__)


class Cluster:
    """See the module's top. `routing`: another way to say where sessions go, for benchmarks."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        spec: ExecutorSpec | None,
        clock: Clock,
        metrics: ClusterMetrics,
        check_idle: bool,
        epoch: str,
        routing: SessionRouter | None = None,
    ) -> None:
        assert config.replicas is not None
        self._config = config
        self._settings: ReplicasConfig = config.replicas
        self._spec = spec
        self._clock = clock
        self._metrics = metrics
        self._check_idle = check_idle
        self._epoch = epoch
        settings = config.replicas
        self._scaling = None
        if settings.most is not None and settings.most > settings.count:
            self._scaling = Scaling(settings.count, settings.most, settings.ttft_s)
        self._routing = routing or SessionRouter(clock.now, scaling=self._scaling)
        self._decode = decoder(Tokens).decode
        self._bindings = Bindings(self._routing, self._send, self._must, self._answer)
        self._members = Membership(
            self._bindings, self._routing, self._move, self._successor, settings.drain_s
        )
        self._spread: Spread[SessionMessage] | None = None
        self._info: ExecutorInfo | None = None
        self._up = asyncio.Event()  # a replica has been ready
        self._stop = asyncio.Event()
        self._failure: RamifyError | None = None
        self._progress: Progress = lambda what, done: None
        self._faulty: Callable[[str | None], None] = lambda fault: None
        self._fault: str | None = None
        self._without = 0.0  # seconds with no replica
        self._deaths: dict[int, Deaths] = {}  # session -> when replicas died under it
        self._scrapes = Scrapes()
        decoding = decoder(ToGateways if config.gateways else ToFront)
        ends = Ends(self._begin, decoding, self._receive, self._gone, self.drain, self._up, self._stop)
        starter = LocalReplicas if settings.on == "processes" else JoinedReplicas
        self._starter = starter(config, self._members, ends)
        metrics.watch(self._gauges, self._ask)

    @property
    def info(self) -> ExecutorInfo:
        assert self._info is not None
        return self._info

    @property
    def pids(self) -> dict[int, int]:
        """The processes of the replicas that are ready."""
        return {member.number: member.pid for member in self._members.those("ready")}

    def describe(self) -> list[dict[str, object]]:
        """For `GET /v1/info`."""
        return [
            {
                "replica": member.number,
                "state": member.state,
                "host": member.host,
                "pid": member.pid,
                "sessions": self._bindings.count(member.number),
                "running": member.report.running,
                "waiting": member.report.waiting,
            }
            for member in self._members
        ]

    # --- CoreHost --------------------------------------------------------------------------------

    async def load(self, group: TaskGroup, guard: Guard, progress: Progress) -> None:
        """Return when the first replica is ready. Raises as `CoreHost.load`."""
        self._progress = progress
        settings = self._settings
        progress(f"starting {settings.count} replicas", 0.0)
        await self._starter.start(group, guard, lambda what: progress(what, 0.0))
        await self._up.wait()
        if self._failure is not None:
            raise self._failure
        self._progress = lambda what, done: None

    async def serve(
        self,
        group: TaskGroup,
        guard: Guard,
        spread: Spread[SessionMessage],
        epoch: str,
        faulty: Callable[[str | None], None],
    ) -> Core:
        self._spread = spread
        self._faulty = faulty
        await group.start(guard("replicas", self._watch))
        info = self.info
        server = ServerInfo(
            version=PROTOCOL_VERSION, epoch=epoch, model=info.model, context=info.context
        )
        to = self._bindings
        return Core(to, to, to, server, info.context, info.vocab_size)

    def stopping(self) -> None:
        """The engine stops: replicas that end are not replaced any more."""
        self._stop.set()

    async def close(self) -> None:
        self._stop.set()
        self._starter.close()

    # --- what replicas are told, and say ---------------------------------------------------------

    def _begin(self, number: int) -> StartReplica:
        model = self._config.model
        if self._settings.on == "processes":
            model = msgspec.structs.replace(model, threads=threads(self._config))
        config = msgspec.structs.replace(
            self._config, model=model, server=ServerConfig(), replicas=None, gateways=0
        )
        return StartReplica(
            number=number,
            config=config,
            spec=self._spec,
            epoch=self._epoch,
            now=self._clock.now(),
            machine=machine(),
            check_idle=self._check_idle,
        )

    def _receive(self, member: ReplicaMember, message: ToFront) -> None:
        member.silence.heard()
        match message:
            case ToSessions(messages) | Relayed(messages):
                self._told(member, messages)
            case Report():
                self._reported(member, message)
            case Up():
                self._joined(member, message)
            case Loading(what, done):
                if not self._up.is_set():
                    self._progress(f"replica {member.number}: {what}", done)
            case StartFailed():
                member.why = message.message
                if not self._up.is_set() and self._settings.on != "join":
                    self._failure = message.exception("a replica")
                    self._up.set()
            case News(events):
                self._heard(member, events)
            case Draining():
                self.drain(member.number)
            case MetricsText(ident, text):
                self._scrapes.answered(ident, text)
        member.consumed()

    def _told(self, member: ReplicaMember, messages: Sequence[tuple[int, bool, Any]]) -> None:
        """What its sessions are told: decoded, or as it came where they are in other processes."""
        spread, hears, number = self._spread, self._bindings.hears, member.number
        if spread is None:
            return
        for session, ends, message in messages:
            if hears(session, number):
                if ends:
                    self._bindings.finished(session, self._tokens(message).finished)
                spread.put(session, message)
        spread.start()

    def _tokens(self, message: Any) -> Tokens:
        tokens: Tokens = self._decode(message) if isinstance(message, msgspec.Raw) else message
        return tokens

    def _heard(self, member: ReplicaMember, events: list[KvEvents]) -> None:
        """Its cache has changed. If some of that is missing, it is asked for all."""
        if any(each.reset for each in events):
            member.asked = False
        if not self._routing.events(member.number, events) and not member.asked:
            member.asked = True
            member.must(ListenKv(LISTENER))

    def _reported(self, member: ReplicaMember, report: Report) -> None:
        member.hears(report, self._clock.now())
        if report.load is not None:
            self._routing.load(member.number, report.load)

    def _joined(self, member: ReplicaMember, up: Up) -> None:
        info = up.info
        known = self._info
        other = "" if known is None else _difference(info, known)
        if other:
            member.hung(f"{other}: start all with the same model, --dtype and --quantization")
            return
        self._info = known or info
        member.info, member.pid, member.host = info, up.pid, up.host
        member.silence = Silence(self._clock.now())
        self._members.up(member, self._clock.now())
        member.must(ListenKv(LISTENER))
        log.info(
            "a replica is ready",
            replica=member.number,
            pid=up.pid,
            host=up.host,
            device=info.device,
            pages=info.pages,
        )
        self._up.set()
        self._starter.prove()
        self._bindings.place()
        self._judge()

    def _gone(self, member: ReplicaMember) -> None:
        """Its link has ended: at once its sessions move. May be called again."""
        was = self._members.ended(member)
        if was in ("starting", "gone"):
            return
        if self._stop.is_set():
            return
        if not member.drained:
            self._metrics.deaths += 1
        ran = set() if member.drained else self._bindings.busy(member.number)
        sessions = self._bindings.gone(member.number)
        if sessions:
            log.warning("sessions move", replica=member.number, sessions=len(sessions))
        self._move(sessions, ran=ran)
        self._judge()

    # --- sessions that move ----------------------------------------------------------------------

    def _move(self, sessions: list[int], quietly: bool = False, *, ran: Collection[int] = ()) -> None:
        """Those first in which something runs. `ran`: those in which it did when their replica died."""
        spread = self._spread
        if spread is None:
            return
        now = self._clock.now()
        for session in sessions:
            if session in ran and self._deadly(session, now):
                spread.put(session, Lost(f"{DEATHS} replicas died with it"))
                continue
            self._metrics.moves += 1
            spread.put(session, ChangeCore(quietly))
        spread.start()

    def _deadly(self, session: int, now: float) -> bool:
        """Whether so many replicas have died under a session that it may be the cause."""
        deaths = self._deaths.setdefault(session, Deaths(DEATHS - 1, WITHIN_SECONDS))
        if len(self._deaths) > 1024:
            recent = now - WITHIN_SECONDS
            self._deaths = {s: d for s, d in self._deaths.items() if not d.times or d.times[-1] > recent}
        return deaths.too_many(now)

    def drain(self, number: int) -> None:
        """A replica is to leave; the last one that is ready when another one is, if one is to come."""
        if not self._stop.is_set():
            self._members.leave(number, self._clock.now())
            self._judge()

    def _successor(self, member: ReplicaMember, now: float) -> float | None:
        return self._starter.successor(member, now)

    # --- how many --------------------------------------------------------------------------------

    def _scale(self, now: float) -> None:
        """Start one, or have one leave, where there should be more or fewer."""
        if self._scaling is None or self._stop.is_set():
            return
        ready = self._members.those("ready")
        loads = [member.report.load for member in ready if member.report.load]
        leaving = len(self._members.those("draining"))
        coming = max(0, self._starter.wanted - len(loads) - leaving)  # one that has stalled among them
        wanted = self._scaling.wanted(loads, coming, now)
        if wanted > self._starter.wanted:
            log.info("more replicas", wanted=wanted, ttft_s=round(self._scaling.ttft(now), 3))
            self._starter.scale(wanted)
        elif wanted < self._starter.wanted and not leaving and not coming:
            log.info("fewer replicas", wanted=wanted)
            least = min(ready, key=lambda each: self._bindings.count(each.number))
            self._starter.retire(least.number)
            self._starter.scale(wanted)
            self.drain(least.number)

    # --- time ------------------------------------------------------------------------------------

    async def _watch(self, *, task_status: TaskStatus[None]) -> None:
        """Notice replicas that have hung, and that none is left."""
        task_status.started()
        for member in self._members:
            member.silence = Silence(self._clock.now())
        while True:
            now = self._clock.now()
            for member in self._members.those("ready", "stalled", "draining"):
                silent = member.silence.tick(now)
                if silent > self._settings.silence_s:
                    member.hung(f"it was silent for {silent:.1f} s")
            self._see_off(now)
            self._scale(now)
            self._bindings.place()
            self._judge()
            there = self._members.those("ready", "starting")
            self._without = 0.0 if there else self._without + LOOK_SECONDS
            most = WITHOUT_SECONDS if self._settings.on == "processes" else WITHOUT_ELSEWHERE
            if self._without > most:
                raise NotStarted(f"there was no replica for {most:g} s")
            await self._clock.sleep_until(now + LOOK_SECONDS)

    def _see_off(self, now: float) -> None:
        """Replicas that are to leave, and sessions that are to leave theirs."""
        for member in self._members.look(now):
            member.tell(Dismiss())
        if self._info is not None:
            patience = STALLED * step_timeout(self._config.step_timeout_s, self._info.device)
            self._members.relieve(now, patience)

    def _judge(self) -> None:
        """Ready as long as one replica is, and makes progress."""
        fault = self._members.fault
        if fault != self._fault:
            self._fault = fault
            self._faulty(fault)

    # --- addresses -------------------------------------------------------------------------------

    def _send(self, replica: int, message: ForCore) -> None:
        member = self._members.get(replica)
        assert member is not None
        member.send(message)

    def _must(self, replica: int, message: ForCore) -> None:
        member = self._members.get(replica)
        if member is not None:
            member.must(message)

    def _answer(self, session: int, message: FromCore) -> None:
        if self._spread is not None:
            self._spread.put(session, message)
            self._spread.start()

    # --- metrics ---------------------------------------------------------------------------------

    def _gauges(self) -> list[ReplicaGauges]:
        count = self._bindings.count
        return [
            ReplicaGauges(each.number, each.state, count(each.number), each.report)
            for each in self._members
        ]

    def _ask(self, told: Callable[[int, bytes], None]) -> int:
        ready = [member for member in self._members if member.info is not None]
        for member in ready:
            self._scrapes.ask(member.tell, partial(told, member.number))
        return len(ready)


_SAME = ("model", "parameters", "vocab_size", "context", "eos_token_ids", "dtype", "quantization")


def _difference(info: ExecutorInfo, known: ExecutorInfo) -> str:
    """What makes texts of two replicas different, in words; empty: nothing that they tell."""
    return ", ".join(
        f"its {name} is {mine!r}, the others' {theirs!r}"
        for name in _SAME
        if (mine := getattr(info, name)) != (theirs := getattr(known, name))
    )
