"""The replicas of a front: a `CoreHost` that has several cores instead of one.

To sessions it is one address; `Bindings` says which replica a message goes to. A replica whose link
ends, or that says nothing for some seconds, is gone: its sessions move, each with all that the front
knows of it, and go on where they were (`SessionCore.change_core`). One that drains (its process was told
SIGTERM) gets no new sessions, and its sessions move as soon as nothing runs in them.

This file does not know how replicas are started, nor what sessions say.
"""

import asyncio
import math
import secrets
from collections import deque
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import anyio
import msgspec
from anyio import TASK_STATUS_IGNORED
from anyio.abc import TaskGroup, TaskStatus

from ramify.actors.cluster.bindings import Bindings
from ramify.actors.cluster.local import LocalReplica, environment, gpus, room_beside, threads
from ramify.actors.cluster.member import Member
from ramify.actors.cluster.membership import Membership
from ramify.actors.cluster.metrics import ClusterMetrics, ReplicaGauges
from ramify.actors.cluster.ray_replicas import RayReplicas
from ramify.actors.cluster.replica_messages import (
    LISTENER,
    MAX_FRAME,
    Begin,
    Draining,
    ForCore,
    Leave,
    News,
    Relayed,
    Report,
    ToFront,
    ToGateways,
    Up,
)
from ramify.actors.cluster.shift import machine
from ramify.actors.core import PROTOCOL_VERSION, Progress
from ramify.actors.executor.spec import ExecutorSpec
from ramify.actors.front.gateway_messages import FromEngine, ToSessions
from ramify.actors.front.interface import Core, Guard
from ramify.actors.kit.clock import Clock
from ramify.actors.kit.fanout import Spread
from ramify.actors.kit.log import get_log
from ramify.actors.links.link import Link
from ramify.actors.links.tcp import JoinPort, read_secret, server_context
from ramify.actors.processes.back_off import BackOff
from ramify.actors.processes.messages import (
    AskMetrics,
    Loading,
    MetricsText,
    NotStarted,
    StartFailed,
    decoder,
    encoder,
)
from ramify.actors.processes.silence import Silence
from ramify.actors.routing.scaling import Scaling
from ramify.actors.routing.session_router import SessionRouter
from ramify.actors.watchdog import step_timeout
from ramify.protocol.cluster import KvEvents, ListenKv
from ramify.protocol.config import MOST_REPLICAS, EngineConfig, ReplicasConfig, ServerConfig
from ramify.protocol.errors import RamifyError
from ramify.protocol.messages import ChangeCore, Lost, SessionMessage, Tokens
from ramify.protocol.plan import ExecutorInfo
from ramify.protocol.wire import ServerInfo

LOOK_SECONDS = 0.25
ATTEMPTS, BACK_OFF_SECONDS = 4, 0.5  # starts in a row that fail; the pause doubles
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
        self._wanted = settings.count
        self._scaling = None
        if settings.most is not None and settings.most > settings.count:
            self._scaling = Scaling(settings.count, settings.most, settings.ttft_s)
        self._routing = routing or SessionRouter(clock.now, scaling=self._scaling)
        self._group: TaskGroup | None = None
        self._guard: Guard = lambda name, run: run
        self._decode = decoder(Tokens).decode
        self._decoder = decoder(ToGateways if config.gateways else ToFront)
        self._bindings = Bindings(self._routing, self._send, self._must, self._answer)
        self._members = Membership(
            self._bindings, self._routing, self._leave, self._successor, settings.drain_s
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
        self._deaths: dict[int, deque[float]] = {}  # session -> when replicas died under it
        self._asked: dict[int, Callable[[int, bytes], None]] = {}
        self._scrapes = 0
        self._port: JoinPort | None = None
        self._ray: RayReplicas | None = None
        self._retired: set[int] = set()  # replicas that are not started again
        metrics.watch(self._gauges, self._ask)

    @property
    def info(self) -> ExecutorInfo:
        assert self._info is not None
        return self._info

    @property
    def pids(self) -> dict[int, int]:
        """The processes of the replicas that are ready."""
        return {member.number: member.pid for member in self._members.those("ready")}

    def replica_of(self, session: int) -> int | None:
        """Where a session is."""
        return self._bindings.of(session)

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
        self._group, self._guard = group, guard
        settings = self._settings
        progress(f"starting {settings.count} replicas", 0.0)
        if settings.on == "processes":
            found = gpus(self._config)
            if 0 < len(found) < max(settings.count, settings.most or 0):
                log.warning(
                    "replicas share GPUs: give --kv-fraction or --kv-tokens, so that their caches fit",
                    gpus=len(found),
                )
            for number in range(settings.count):
                await group.start(guard(f"replica {number}", partial(self._keep, number)))
        else:
            await self._let_join(group, guard)
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
        for member in self._members:  # processes of ours have ended with their tasks
            if self._settings.on == "ray":  # if Ray is gone, nobody else tells it
                member.tell(Leave())
            if self._settings.on != "processes":
                member.part()
        if self._port is not None:
            self._port.close()

    # --- joining ---------------------------------------------------------------------------------

    async def _let_join(self, group: TaskGroup, guard: Guard) -> None:
        """Open the port where replicas join, and have Ray start them, where it is to."""
        settings = self._settings
        file = settings.secret_file
        secret = secrets.token_hex(32).encode() if file is None else read_secret(file)
        tls = None
        if settings.tls_cert is not None and settings.tls_key is not None:
            tls = server_context(settings.tls_cert, settings.tls_key)
        self._port = JoinPort(secret, self._joins)
        number = await self._port.listen(settings.listen, settings.listen_port, tls)
        host = settings.advertise or settings.listen
        log.info("replicas join here", host=host, port=number, tls=tls is not None)
        self._progress(f"waiting for replicas at {host}:{number}", 0.0)
        if settings.on == "ray":
            pem = settings.tls_cert.read_text() if settings.tls_cert is not None else None
            device = self._config.model.device
            self._ray = RayReplicas(settings, host, number, secret, pem, device, self._orphaned)
            await group.start(guard("Ray", self._ray.run))

    def _joins(self, open_link: Callable[..., Link[Any, ToFront]], peer: str) -> None:
        """Somebody who knows the secret. Raises ConnectionError: there is no place for it."""
        if len(self._members) >= MOST_REPLICAS:
            log.error("too many replicas: one is sent away", most=MOST_REPLICAS, host=peer)
            raise ConnectionRefusedError
        number = next(self._members.free())
        member = Member(number, lambda: None)
        member.host = peer
        link = open_link(
            f"replica {number}",
            self._decoder,
            encoder(),
            on_message=partial(self._receive, member),
            on_end=partial(self._link_ended, member),
            max_frame=MAX_FRAME,
        )
        self._members.add(member)
        member.attach(link, self._begin(number))
        log.info("a replica joins", replica=number, host=peer)

    def _orphaned(self) -> None:
        """A new Ray driver has as many started as are wanted: Ray knows nothing of those that are there.

        They leave: on a CPU the last one when a new one is ready, on GPUs at once, as those need them.
        """
        there = self._members.those("ready", "stalled")
        if there and self.info.device == "cpu":
            self._members.stay(there.pop())
        for member in there:
            self.drain(member.number)

    def _link_ended(self, member: Member, error: Exception | None) -> None:
        if not self._stop.is_set() and not member.drained:
            reason = member.why or (str(error) if error is not None else "its link has ended")
            log.error("a replica has ended", replica=member.number, reason=reason)
        self._gone(member)

    # --- starting --------------------------------------------------------------------------------

    async def _keep(self, number: int, *, task_status: TaskStatus[None]) -> None:
        """One process after the other is replica `number`."""
        task_status.started()
        pauses = BackOff(BACK_OFF_SECONDS)
        variables = environment(number, self._config)
        while not self._stop.is_set() and number not in self._retired:
            replica = LocalReplica(number)
            self._members.add(replica.member)
            try:
                why = await replica.run(
                    self._begin(number), self._decoder, self._receive, self._gone, variables
                )
            except OSError as error:
                why = str(error)
            served = replica.member.info is not None
            self._gone(replica.member)
            if self._stop.is_set():
                return
            if replica.member.drained:
                log.info("a replica has left", replica=number, again=number not in self._retired)
                continue
            log.error("a replica has ended", replica=number, reason=why)
            if served:
                pauses.succeeded()
                continue
            pause = pauses.failed()
            if pauses.failures >= ATTEMPTS and not self._up.is_set():
                raise NotStarted(f"replica {number} could not be started {ATTEMPTS} times: {why}")
            with anyio.move_on_after(pause):
                await self._stop.wait()

    def _begin(self, number: int) -> Begin:
        model = self._config.model
        if self._settings.on == "processes":
            model = msgspec.structs.replace(model, threads=threads(self._config))
        config = msgspec.structs.replace(
            self._config, model=model, server=ServerConfig(), replicas=None, gateways=0
        )
        return Begin(
            number=number,
            config=config,
            spec=self._spec,
            epoch=self._epoch,
            now=self._clock.now(),
            machine=machine(),
            check_idle=self._check_idle,
        )

    # --- what replicas say -----------------------------------------------------------------------

    def _receive(self, member: Member, message: ToFront) -> None:
        member.silence.heard()
        match message:
            case ToSessions(messages) | Relayed(messages):
                self._told(member, messages)
            case Report():
                self._reported(member, message)
            case Up():
                self._joined(member, message)
            case Loading(what, done):
                member.progress = what, done
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
                told = self._asked.get(ident)
                if told is not None:
                    told(member.number, text)
        member.consumed()

    def _told(self, member: Member, messages: Sequence[tuple[int, bool, Any]]) -> None:
        """What its sessions are told: decoded, or as it came where they are in other processes."""
        spread, hears, number = self._spread, self._bindings.hears, member.number
        if spread is None:
            return
        for session, ends, message in messages:
            if hears(session, number):
                if ends:
                    tokens = self._decode(message) if isinstance(message, msgspec.Raw) else message
                    self._bindings.finished(session, tokens.finished)
                spread.put(session, message)
        spread.start()

    def _heard(self, member: Member, events: list[KvEvents]) -> None:
        """Its cache has changed. If some of that is missing, it is asked for all."""
        if any(each.reset for each in events):
            member.asked = False
        if not self._routing.events(member.number, events) and not member.asked:
            member.asked = True
            member.must(ListenKv(LISTENER))

    def _reported(self, member: Member, report: Report) -> None:
        member.hears(report, self._clock.now())
        if report.load is not None:
            self._routing.load(member.number, report.load)

    def _joined(self, member: Member, up: Up) -> None:
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
        if self._ray is not None:
            self._ray.prove()
        self._bindings.place()
        self._judge()

    def _gone(self, member: Member) -> None:
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

    def _move(self, sessions: list[int], *, ran: Collection[int] = (), quietly: bool = False) -> None:
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
        deaths = self._deaths.setdefault(session, deque(maxlen=DEATHS))
        deaths.append(now)
        if len(self._deaths) > 1024:
            recent = now - WITHIN_SECONDS
            self._deaths = {s: d for s, d in self._deaths.items() if d[-1] > recent}
        return len(deaths) == DEATHS and now - deaths[0] < WITHIN_SECONDS

    def _leave(self, sessions: list[int], quietly: bool) -> None:
        self._move(sessions, quietly=quietly)

    def drain(self, number: int) -> None:
        """A replica is to leave; the last one that is ready when another one is, if one is to come."""
        if not self._stop.is_set():
            self._members.leave(number, self._clock.now())
            self._judge()

    def _successor(self, member: Member, now: float) -> float | None:
        """Until when the last replica serves on: another one is ready then, where one is to come.

        Where none is, it leaves now: who comes waits for the next one, and that comes the sooner.
        """
        if self._settings.on != "processes":  # who ends it does not wait for ever, either
            return now + self._settings.drain_s if self._members.those("starting") else None
        if self._wanted == 1:
            if not room_beside(self._config, next(self._members.free()), member.number, member.pid):
                return None
            self._retired.add(member.number)
            self._grow(1)
        log.info("a replica is to leave, and serves until another one is ready", replica=member.number)
        return math.inf

    # --- how many --------------------------------------------------------------------------------

    def _scale(self, now: float) -> None:
        """Start one, or have one leave, where there should be more or fewer."""
        if self._scaling is None or self._stop.is_set():
            return
        ready = self._members.those("ready")
        loads = [member.report.load for member in ready if member.report.load]
        leaving = len(self._members.those("draining"))
        coming = max(0, self._wanted - len(loads) - leaving)  # one that has stalled among them
        wanted = self._scaling.wanted(loads, coming, now)
        if wanted > self._wanted:
            log.info("more replicas", wanted=wanted, ttft_s=round(self._scaling.ttft(now), 3))
            self._grow(wanted)
        elif wanted < self._wanted and not leaving and not coming:
            log.info("fewer replicas", wanted=wanted)
            least = min(ready, key=lambda each: self._bindings.count(each.number))
            self._wanted = wanted
            self._retired.add(least.number)
            if self._ray is not None:
                self._ray.scale(wanted)
            self.drain(least.number)

    def _grow(self, wanted: int) -> None:
        self._wanted = wanted
        if self._ray is not None:
            self._ray.scale(wanted)
            return
        kept = {member.number for member in self._members} - self._retired
        free = self._members.free()
        while len(kept) < wanted and self._group is not None:
            number = next(free)
            self._retired.discard(number)
            kept.add(number)
            run = self._guard(f"replica {number}", partial(self._keep, number))
            self._members.add(Member(number, lambda: None))  # its place is taken at once
            self._group.start_soon(partial(run, task_status=TASK_STATUS_IGNORED))

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
            member.tell(Leave())
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

    def _answer(self, session: int, message: FromEngine) -> None:
        if self._spread is not None:
            self._spread.put(session, message)
            self._spread.start()

    # --- metrics ---------------------------------------------------------------------------------

    def _gauges(self) -> list[ReplicaGauges]:
        found = []
        for member in self._members:
            gauges = ReplicaGauges(member.number, member.state, self._bindings.count(member.number))
            report = member.report
            gauges.running, gauges.waiting = report.running, report.waiting
            gauges.kv = report.free, report.evictable, report.referenced
            found.append(gauges)
        return found

    def _ask(self, told: Callable[[int, bytes], None]) -> int:
        ready = [member for member in self._members if member.info is not None]
        self._scrapes += 1
        self._asked = {ident: who for ident, who in self._asked.items() if ident > self._scrapes - 16}
        self._asked[self._scrapes] = told
        for member in ready:
            member.tell(AskMetrics(self._scrapes))
        return len(ready)


_SAME = ("model", "parameters", "vocab_size", "context", "eos_token_ids", "dtype", "quantization")


def _difference(info: ExecutorInfo, known: ExecutorInfo) -> str:
    """What makes texts of two replicas different, in words; empty: nothing that they tell."""
    return ", ".join(
        f"its {name} is {mine!r}, the others' {theirs!r}"
        for name in _SAME
        if (mine := getattr(info, name)) != (theirs := getattr(known, name))
    )
