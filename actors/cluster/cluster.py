"""The replicas of an engine: a `CoreHost` that has several cores instead of one.

Starts them or lets them join, has those leave that were told to, and watches over how many there are.
Their sessions are in `Cores`: here, or in gateway processes, which the replicas join as well.

This file does not know how replicas are started, nor what sessions say.
"""

import asyncio
import math
import secrets
import socket
from collections.abc import Callable
from functools import partial

import msgspec
from anyio.abc import TaskGroup, TaskStatus

from ramify.actors.cluster.cores import LOOK_SECONDS, Cores
from ramify.actors.cluster.local import threads
from ramify.actors.cluster.membership import ReplicaMember
from ramify.actors.cluster.metrics import ClusterMetrics, ReplicaGauges
from ramify.actors.cluster.replica_messages import (
    ENGINE,
    Dismiss,
    Draining,
    FromReplica,
    Hello,
    Leave,
    StartReplica,
    Up,
)
from ramify.actors.cluster.shift import machine
from ramify.actors.cluster.starting import Ends, JoinedReplicas, LocalReplicas
from ramify.actors.executor.spec import ExecutorSpec
from ramify.actors.front.interface import PROTOCOL_VERSION, Core, Guard, Progress
from ramify.actors.kit.clock import Clock
from ramify.actors.kit.fanout import Spread
from ramify.actors.kit.log import get_log
from ramify.actors.links.tcp import read_secret
from ramify.actors.processes.messages import Loading, MetricsText, NotStarted, StartFailed, decoder
from ramify.actors.processes.peer import Scrapes
from ramify.actors.routing.scaling import Scaling
from ramify.actors.routing.session_router import SessionRouter
from ramify.protocol.config import EngineConfig, ReplicasConfig, ServerConfig
from ramify.protocol.errors import ConfigError, RamifyError
from ramify.protocol.messages import SessionMessage
from ramify.protocol.plan import ExecutorInfo
from ramify.protocol.wire import ServerInfo

WITHOUT_SECONDS = 120.0  # with no replica at all, not even one that loads, once there were some
WITHOUT_ELSEWHERE = 900.0  # the same where machines have to come first
TOLD_SECONDS = 1.0  # until every gateway process knows that a replica leaves, and it has said so

log = get_log(__name__)


class Cluster:
    """See the module's top.

    `gateways`: so many gateway processes have the sessions; 0: they are in this one. `members`: the
    replicas; `cores`: their sessions; `starter`: what has them come, and tells of each by `ends`.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        spec: ExecutorSpec | None,
        clock: Clock,
        metrics: ClusterMetrics,
        epoch: str,
        gateways: int = 0,
    ) -> None:
        assert config.replicas is not None
        self._config = config
        self._settings: ReplicasConfig = config.replicas
        self._spec = spec
        self._clock = clock
        self._metrics = metrics
        self._epoch = epoch
        self._gateways = gateways
        self._doors: list[socket.socket] = []  # where replicas join gateway processes
        settings = config.replicas
        self._scaling = None
        if settings.most is not None and settings.most > settings.count:
            self._scaling = Scaling(settings.count, settings.most, settings.ttft_s)
        routing = SessionRouter(clock.now, late=self._first_token, prefill=settings.prefill)
        self.cores = Cores(
            config, routing, clock, lambda *who: self.starter.successor(*who), listens=not gateways
        )
        self.members = self.cores.members
        self._up = asyncio.Event()  # a replica has been ready
        self._stop = asyncio.Event()
        self._failure: RamifyError | None = None
        self._progress: Progress = lambda what, done: None
        self._faulty: Callable[[str | None], None] = lambda fault: None
        self._fault: str | None = None
        self._without = 0.0  # seconds with no replica
        self._old: list[ReplicaMember] = []  # that are to be replaced
        self._scrapes = Scrapes()
        self._secret: bytes | None = None
        decoding = decoder(FromReplica)
        self.ends = Ends(
            self._begin, decoding, self._receive, self._gone, self.drain, self._up, self._stop
        )
        starter = LocalReplicas if settings.on == "processes" else JoinedReplicas
        self.starter = starter(config, self.members, self.ends)
        metrics.watch(self._gauges, self._ask, self._first_token, lambda: self.cores.moves)

    @property
    def info(self) -> ExecutorInfo:
        assert self.cores.info is not None
        return self.cores.info

    @property
    def pids(self) -> dict[int, int]:
        """The processes of the replicas that are ready."""
        return {member.number: member.pid for member in self.members.those("ready")}

    @property
    def secret(self) -> bytes:
        """By which replicas join. Raises ConfigError."""
        if self._secret is None:
            file = self._settings.secret_file
            self._secret = secrets.token_hex(32).encode() if file is None else read_secret(file)
        return self._secret

    def describe(self) -> list[dict[str, object]]:
        """For `GET /v1/info`."""
        return [
            {
                "replica": member.number,
                "state": member.state,
                "role": self._role(member.number),
                "host": member.host,
                "pid": member.pid,
                "sessions": self._count(member),
                "leaving": self.cores.bindings.leaving(member.number),
                "running": member.report.running,
                "waiting": member.report.waiting,
            }
            for member in self.members
        ]

    def _role(self, number: int) -> str:
        if not self._settings.prefill:
            return "both"
        return "prefill" if number < self._settings.prefill else "decode"

    def _count(self, member: ReplicaMember) -> int:
        """How many sessions are there: as it says, if they are in gateway processes."""
        return member.report.sessions if self._gateways else self.cores.bindings.count(member.number)

    # --- CoreHost --------------------------------------------------------------------------------

    def open_doors(self) -> list[socket.socket]:
        """A socket for each gateway process, at which replicas join it. Raises ConfigError."""
        settings = self._settings
        host = "127.0.0.1" if settings.on == "processes" else settings.listen
        for number in range(self._gateways):
            port = settings.listen_port + 1 + number if settings.listen_port else 0
            try:
                family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
                self._doors.append(socket.create_server((host, port), family=family))
            except (OSError, OverflowError) as error:
                raise ConfigError(
                    f"gateway process {number} cannot take replicas at {host}:{port}: {error}"
                ) from error
        return self._doors

    async def load(self, group: TaskGroup, guard: Guard, progress: Progress) -> None:
        """Return when the first replica is ready. Raises as `CoreHost.load`."""
        self._progress = progress
        if count := self._settings.count:
            progress(f"starting {count} replica{'s' * (count > 1)}", 0.0)
        await self.starter.start(group, guard, lambda what: progress(what, 0.0), self.secret)
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
        self.cores.begin(spread)
        self._faulty = faulty
        await group.start(guard("replicas", self._watch))
        info = self.info
        server = ServerInfo(
            version=PROTOCOL_VERSION, epoch=epoch, model=info.model, context=info.context
        )
        to = self.cores.bindings
        return Core(to, to, to, server, info.context, info.vocab_size, info.pictures)

    def stopping(self) -> None:
        """The engine stops: replicas that end are not replaced any more."""
        self._stop.set()

    async def close(self) -> None:
        self._stop.set()
        self.starter.close()
        for door in self._doors:
            door.close()

    # --- what replicas are told, and say ---------------------------------------------------------

    def _begin(self, number: int) -> StartReplica:
        model = self._config.model
        if self._settings.on == "processes":
            most = self._settings.most or self._settings.count
            model = msgspec.structs.replace(model, threads=threads(self._config), beside=most)
        config = msgspec.structs.replace(
            self._config, model=model, server=ServerConfig(), replicas=None, gateways=0
        )
        return StartReplica(
            number=number,
            config=config,
            spec=self._spec,
            epoch=self._epoch,
            hello=Hello(ENGINE if self._gateways else 0, self._clock.now(), machine()),
            ports=[door.getsockname()[1] for door in self._doors],
            secret=self.secret if self._settings.on == "processes" else None,
        )

    def _receive(self, member: ReplicaMember, message: FromReplica) -> None:
        member.silence.heard()
        match message:
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
            case Draining():
                self.drain(member.number)
            case MetricsText(ident, text):
                self._scrapes.answered(ident, text)
            case _:
                self.cores.receive(member, message)
        member.consumed()

    def _joined(self, member: ReplicaMember, up: Up) -> None:
        if not self.cores.joined(member, up):
            return
        log.info(
            "a replica is ready",
            replica=member.number,
            pid=up.pid,
            host=up.host,
            device=up.info.device,
            pages=up.info.pages,
        )
        self._up.set()
        self.starter.prove()
        self._judge()

    def _gone(self, member: ReplicaMember) -> None:
        """Its link has ended. May be called again."""
        if not self.cores.gone(member) or self._stop.is_set():
            return
        if not member.drained:
            self._metrics.deaths += 1
        self._judge()

    def drain(self, number: int) -> None:
        """A replica is to leave; the last one that is ready when another one is, if one is to come."""
        if not self._stop.is_set():
            self.members.leave(number, self._clock.now())
            self._judge()

    def replace_all(self) -> None:
        """Have all replicas leave, one after the other, each when the one before has its successor."""
        self._old = self.members.those("ready", "stalled")
        log.info("all replicas are replaced, one after the other", replicas=len(self._old))

    def _replace(self) -> None:
        """The next one of those that are to be replaced leaves, if all others serve."""
        self._old = [member for member in self._old if member.state in ("ready", "stalled")]
        busy = self.members.those("starting", "draining")
        there = self.members.those("ready", "stalled")
        if not self._old or busy or len(there) < self.starter.wanted or any(m.leaves for m in there):
            return
        self.drain(self._old[0].number)

    # --- how many --------------------------------------------------------------------------------

    def _first_token(self, seconds: float) -> None:
        """A first token was so late."""
        if self._scaling is not None:
            self._scaling.first_token(seconds, self._clock.now())

    def _scale(self, now: float) -> None:
        """Start one, or have one leave, where there should be more or fewer."""
        if self._scaling is None or self._stop.is_set():
            return
        ready = self.members.those("ready")
        loads = [member.report.load for member in ready if member.report.load]
        leaving = len(self.members.those("draining"))
        coming = max(0, self.starter.wanted - len(loads) - leaving)  # one that has stalled among them
        wanted = self._scaling.wanted(loads, coming, now)
        if wanted > self.starter.wanted:
            log.info("more replicas", wanted=wanted, ttft_s=round(self._scaling.ttft(now), 3))
            self.starter.scale(wanted)
        elif wanted < self.starter.wanted and not leaving and not coming:
            log.info("fewer replicas", wanted=wanted)
            least = min(ready, key=self._count)
            self.starter.retire(least.number)
            self.starter.scale(wanted)
            self.drain(least.number)

    # --- time ------------------------------------------------------------------------------------

    async def _watch(self, *, task_status: TaskStatus[None]) -> None:
        """Notice that none is left, or that there should be more or fewer."""
        task_status.started()
        while True:
            now = self._clock.now()
            self.look(now)
            await self._clock.sleep_until(now + LOOK_SECONDS)

    def look(self, now: float) -> None:
        """What is due each `LOOK_SECONDS`. Raises NotStarted: there was no replica for too long."""
        self._see_off(now)
        self._scale(now)
        self._judge()
        there = self.members.those("ready", "starting")
        self._without = 0.0 if there else self._without + LOOK_SECONDS
        most = WITHOUT_SECONDS if self._settings.on == "processes" else WITHOUT_ELSEWHERE
        if self._without > most:
            raise NotStarted(f"there was no replica for {most:g} s")

    def _see_off(self, now: float) -> None:
        """Dismiss replicas that are to leave once their sessions have; the next one may, too."""
        done = self.cores.look(now)
        if self._gateways:
            done = self._left(now)
        for member in done:
            member.tell(Dismiss())
        self._replace()

    def _left(self, now: float) -> list[ReplicaMember]:
        """Those whose sessions have left gateway processes, as they say themselves."""
        done = []
        for member in self.members.those("draining"):
            if member.told is None:
                member.told = now
                member.tell(Leave())
            elif now - member.told >= TOLD_SECONDS and not member.report.sessions:
                member.told = math.inf
                done.append(member)
        return done

    def _judge(self) -> None:
        """Ready as long as one replica is, and makes progress."""
        fault = self.members.fault
        if fault != self._fault:
            self._fault = fault
            self._faulty(fault)

    # --- metrics ---------------------------------------------------------------------------------

    def _gauges(self) -> list[ReplicaGauges]:
        return [
            ReplicaGauges(each.number, each.state, self._count(each), each.report)
            for each in self.members
        ]

    def _ask(self, told: Callable[[int, bytes], None]) -> int:
        ready = [member for member in self.members if member.info is not None]
        for member in ready:
            self._scrapes.ask(member.tell, partial(told, member.number))
        return len(ready)
