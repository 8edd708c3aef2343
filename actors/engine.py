"""The engine: builds the actors, wires them, starts them in order, drains and stops them.

Start: the front (gateways and sessions, here or in processes of their own) listens first, so that
probes see the progress, then the executor loads, then cache, scheduler and sessions run, then
`ready`. Stop: no new sessions, `bye` to all, a grace time for generations that run, then the sockets,
the sessions, the scheduler, the cache, the executor.

A crash of the scheduler or the cache ends the engine with `EngineFailed`, after the requests have got
their end and the sockets were closed with 1012: nothing continues around KV that may be wrong. So does
the loss of an executor that no other one can replace (`keeper`).
"""

import itertools
import secrets
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import IO, Any

import anyio
import msgspec
from anyio.abc import TaskGroup

from ramify.actors.cache.cache import RadixCache
from ramify.actors.cluster.cluster import Cluster
from ramify.actors.cluster.metrics import ClusterMetrics
from ramify.actors.core import CoreActors
from ramify.actors.credentials import read_credentials
from ramify.actors.executor.handle import ExecutorHandle
from ramify.actors.executor.process_executor import ProcessExecutor
from ramify.actors.executor.spec import ExecutorSpec, ModelSpec
from ramify.actors.front.gateway_messages import MAX_WORKERS
from ramify.actors.front.interface import PROTOCOL_VERSION, CoreHost, Front, Naming, Progress, Runner
from ramify.actors.front.processes import ProcessFront
from ramify.actors.kit.clock import Clock, MonotonicClock, watch_loop
from ramify.actors.kit.collector import Collector
from ramify.actors.kit.files import allow_files
from ramify.actors.kit.log import get_log
from ramify.actors.kit.metrics import Metrics
from ramify.actors.kit.report import RankState, StoreHealth
from ramify.actors.layout import layout_of
from ramify.actors.local_front import LocalFront
from ramify.actors.store.base import StoreError
from ramify.actors.store.opening import claim_store, prepare
from ramify.protocol.config import EngineConfig
from ramify.protocol.errors import ConfigError, RamifyError
from ramify.protocol.plan import ExecutorInfo
from ramify.protocol.store_url import shown

FAILED_SECONDS = 5.0  # for sessions to say the ends of their requests; they may be behind

log = get_log(__name__)


class EngineFailed(Exception):
    """A core actor failed; the process must exit with a non-zero code."""


class EngineStatus:
    """What the gateway tells of the engine; see gateway.interfaces.Status."""

    def __init__(self, config: EngineConfig, epoch: str, metrics: Metrics) -> None:
        self.ready = False
        self.phase = "starting"
        self.fault: str | None = None
        self.executor: ExecutorInfo | None = None
        self._metrics = metrics
        server = config.server
        self._fixed: dict[str, Any] = {  # of the body of `GET /v1/info`
            "server": "ramify",
            "version": version("ramify"),  # reads files: 0.6 ms
            "protocol": [f"ramify.v{PROTOCOL_VERSION}+json", f"ramify.v{PROTOCOL_VERSION}+msgpack"],
            "epoch": epoch,
            "started": time.time(),
            "limits": config.limits.wire(),
            "sessions": {
                "persist": server.persist if server.store else "none",
                "days": server.store_days,
            },
            "mcp": sorted(server.mcp_servers),
        }
        self.replicas: Callable[[], list[dict[str, Any]]] | None = None
        self.ranks: Callable[[], list[RankState]] = list
        self._changed: Callable[[], None] = lambda: None
        metrics.store_changed = lambda: self._changed()

    @property
    def store(self) -> StoreHealth:
        """How the store is."""
        return self._metrics.store

    def watch(self, changed: Callable[[], None]) -> None:
        """`changed` is called after every change."""
        self._changed = changed

    def become(self, phase: str, *, ready: bool = False) -> None:
        """The engine is in another phase now."""
        self.phase, self.ready = phase, ready
        self._changed()

    def faulty(self, fault: str | None) -> None:
        """Something keeps a ready engine from making progress; None: no more."""
        self.fault = fault
        self._changed()

    @property
    def model(self) -> str:
        """The name under which a ready server serves its model."""
        assert self.executor is not None
        return self.executor.model

    def info(self) -> dict[str, Any]:
        """The body of `GET /v1/info`."""
        more: dict[str, Any] = {} if self.replicas is None else {"replicas": self.replicas()}
        if ranks := self.ranks():
            more["ranks"] = [msgspec.structs.asdict(each) for each in ranks]
        if canaries := self._metrics.canaries:
            more["kv_canary"] = dict(canaries)
        model = self.executor.told() if self.executor is not None else None
        return more | self._fixed | {"ready": self.ready, "phase": self.phase, "model": model}

    def load(self) -> dict[str, float]:
        """`pong.load`."""
        return {"queue": float(self._metrics.waiting), "kv": self._metrics.kv_in_use}


class Engine:
    """A running engine. Made by `running_engine`."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        spec: ExecutorSpec,
        begun: ProcessExecutor | None = None,
    ) -> None:
        self.config = config
        self.clock: Clock = MonotonicClock()
        self.metrics = Metrics() if config.replicas is None else ClusterMetrics()
        self.epoch = f"e_{secrets.token_hex(4)}"
        self.status = EngineStatus(config, self.epoch, self.metrics)
        self.port = 0
        self.layout = layout_of(config)
        self.core: CoreHost
        if isinstance(self.metrics, ClusterMetrics):
            cluster = Cluster(
                config,
                spec=spec,
                clock=self.clock,
                metrics=self.metrics,
                epoch=self.epoch,
                gateways=self.layout.gateways,
            )
            self.status.replicas = cluster.describe
            self.core = cluster
        else:
            self.core = CoreActors(
                config,
                self.layout,
                spec=spec,
                clock=self.clock,
                metrics=self.metrics,
                begun=begun,
            )
            self.status.ranks = self.core.ranks
        self._claimed: IO[bytes] | None = None  # the store's lock
        credentials = read_credentials(config.server)
        if credentials:
            log.info("tokens are needed", names=len({one.name for one in credentials}))
        self.front: Front
        # Replicas that outlive a front must not take its next one's sessions for the old ones.
        first = 1 if config.replicas is None else 1 + secrets.randbits(22)
        apart = 1 if config.replicas is None else MAX_WORKERS  # a number names its front: 0
        if self.layout.gateways:
            count = self.layout.gateways
            secret = self.core.secret if isinstance(self.core, Cluster) else b""
            front = ProcessFront(
                config, count, self.status, self.metrics, self.clock, credentials, first, secret
            )
            self.status.watch(front.status_changed)
            self.front = front
        else:
            self.front = LocalFront(
                config,
                self.status,
                self.metrics,
                self.clock,
                naming=Naming(sessions=itertools.count(first * apart, apart)),
                credentials=credentials,
            )

    @property
    def cache(self) -> RadixCache | None:
        """Of a core in this process."""
        return self.core.cache if isinstance(self.core, CoreActors) else None

    @property
    def executor(self) -> ExecutorHandle | None:
        """Of a core in this process."""
        return self.core.executor if isinstance(self.core, CoreActors) else None

    @property
    def url(self) -> str:
        """Of the WebSocket endpoint."""
        host = self.config.server.host
        host = "127.0.0.1" if host in ("0.0.0.0", "") else "[::1]" if host == "::" else host
        return f"ws://{f'[{host}]' if ':' in host and host[0] != '[' else host}:{self.port}/v1/ws"

    # --- start ---------------------------------------------------------------------------------

    async def listen(self, group: TaskGroup) -> None:
        """Open the port; upgrades get 503 until `load` is done. Raises ConfigError."""
        if self.config.server.store is not None:
            await anyio.to_thread.run_sync(self._claim, self.config.server.store)
        log.info("placing the gateways", **self.layout.told("gateways"))
        if isinstance(self.core, Cluster) and isinstance(self.front, ProcessFront):
            self.front.doors = self.core.open_doors()
        self.port = await self.front.listen(group, self._core)

    def _claim(self, place: str) -> None:
        """Have the store to ourselves, if it is a file. Raises ConfigError."""
        try:
            self._claimed = claim_store(place)
            for warning in prepare(place, self.config.server.store_key_file):
                log.warning("the store may lose what was saved", reason=warning)
        except StoreError as error:
            raise ConfigError(str(error)) from error
        log.info("sessions are saved", store=shown(place))

    async def load(self, group: TaskGroup, progress: Progress) -> None:
        """Load tokenizer and model. Raises ModelError, ConfigError, NotStarted."""

        def report(what: str, done: float) -> None:
            self.status.become(f"{what} {done:.0%}")
            progress(what, done)

        report("reading the tokenizer", 0.0)
        async with anyio.create_task_group() as tokenizer:  # the model is loaded meanwhile
            tokenizer.start_soon(self.front.load)
            await self.core.load(group, self._core, report)

    async def serve(self, group: TaskGroup) -> None:
        """Start the remaining actors, then be ready."""
        core = await self.core.serve(group, self._core, self.front.spread, self.epoch, self._faulty)
        info = self.core.info
        await self.front.serve(group, self._core, core)
        group.start_soon(watch_loop, self.clock, self.metrics.loop_lag)
        self.status.executor = info
        self.status.become("ready", ready=True)
        await self.front.announced()
        log.info(
            "ready",
            url=self.url,
            model=info.model,
            device=info.device,
            dtype=info.dtype,
            attention=info.attention,
            attention_reason=info.attention_reason,
            quantization=info.quantization,
            quantization_reason=info.quantization_reason,
            drafter=info.drafter or "none",
            pages=info.pages,
        )
        if info.pictures_reason:
            log.warning("pictures are not served", why=info.pictures_reason)

    def _faulty(self, fault: str | None) -> None:
        self.status.executor = self.core.info  # another executor may have another pool
        self.status.faulty(fault)

    def _core(self, name: str, run: Runner) -> Runner:
        """An actor whose failure is the engine's."""

        async def guarded(*, task_status: Any) -> None:
            try:
                await run(task_status=task_status)
            except Exception as error:
                if self.status.ready:
                    known = isinstance(error, RamifyError)  # said whole by its message
                    log.error("a core actor failed", actor=name, reason=str(error), exc_info=not known)
                    self.status.become("failed")
                    await self._abort()
                elif isinstance(error, RamifyError | OSError):  # what the user can mend
                    raise
                raise EngineFailed(f"the {name} failed: {error}") from error

        return guarded

    async def _abort(self) -> None:
        """Let the ends of requests reach their sockets, then close them with 1012."""
        with anyio.CancelScope(shield=True):
            await self.front.drain(FAILED_SECONDS, failed=True)

    def reload(self) -> None:
        """Read the files of tokens again. What is wrong with them changes nothing, and is logged."""
        try:
            credentials = read_credentials(self.config.server)
        except ConfigError as error:
            log.error("the old tokens stay", reason=error.message)
            return
        self.front.accept(credentials)
        log.info("tokens were read again", names=len({one.name for one in credentials}))

    # --- stop ------------------------------------------------------------------------------------

    async def drain(self) -> None:
        """`bye`, then wait for running generations, at most the grace time."""
        grace = self.config.server.grace_s
        if isinstance(self.core, Cluster):
            self.core.stopping()
        self.status.become("draining")
        self.front.begin_drain("the server is stopping", grace)
        deadline = self.clock.now() + grace
        while self.metrics.running and self.clock.now() < deadline:
            await self.clock.sleep_until(self.clock.now() + 0.05)
        await self.front.drain(min(grace, 2.0))

    async def close(self) -> None:
        """Stop what is not in the task group: the executor, gateway processes."""
        await self.front.close()
        if self._claimed is not None:
            self._claimed.close()
        await self.core.close()


@asynccontextmanager
async def running_engine(
    config: EngineConfig,
    *,
    spec: ExecutorSpec | None = None,
    progress: Progress = lambda what, done: None,
    begun: ProcessExecutor | None = None,
) -> AsyncIterator[Engine]:
    """A ready engine. `spec`: another executor than the configured model (its tokenizer still
    comes from `config.model.path`). `begun`: of `process_executor.loading`.

    Raises ConfigError and ModelError for what the user can mend, EngineFailed for a crash.
    """
    engine = Engine(
        config,
        spec=spec if spec is not None else ModelSpec(config.model),
        begun=begun,
    )
    try:
        async with anyio.create_task_group() as group:
            await engine.listen(group)
            await engine.load(group, progress)
            await engine.serve(group)
            yield engine
            await engine.drain()
            group.cancel_scope.cancel()
    except BaseExceptionGroup as group_error:
        raise _single(group_error) from group_error
    finally:
        await engine.close()


def _single(error: BaseExceptionGroup[BaseException]) -> BaseException:
    """The one that matters: a task group wraps what its tasks raise."""
    matched, _ = error.split(EngineFailed)
    found: BaseException = matched if matched is not None else error
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    return found


async def serve(
    config: EngineConfig, *, progress: Progress | None = None, begun: ProcessExecutor | None = None
) -> None:
    """Serve until SIGINT or SIGTERM, then drain. A second signal stops at once.

    `begun`: of `process_executor.loading`.
    """
    report = progress if progress is not None else lambda what, done: None
    allow_files(config.server.max_sockets)
    async with running_engine(config, progress=report, begun=begun) as engine:
        Collector(engine.clock).begin()  # the process ends with it
        server = config.server
        files = server.token_file is not None or server.credentials_file is not None
        again = (signal.SIGHUP,) if files else ()  # else a terminal that closes ends its server
        replaces = config.replicas is not None and config.replicas.on != "join"
        anew = (signal.SIGUSR1,) if replaces else ()
        with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM, *again, *anew) as signals:
            report(f"ready at {engine.url}", 1.0)  # now: who reads it may send a signal at once
            async for number in signals:
                if number in again:
                    engine.reload()
                elif isinstance(engine.core, Cluster) and number in anew:
                    engine.core.replace_all()
                else:
                    break
        log.info("stopping")
        grace = config.server.grace_s
        if engine.metrics.running:  # else there is nothing to wait for
            report(f"stopping: running answers get up to {grace:g} s; Ctrl-C again stops at once", 1.0)
