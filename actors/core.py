"""The core of an engine: scheduler, cache, grammar and the way to the executor, on one event loop.

In the engine's process, or as a replica in one of its own (`cluster/`). This file does not know
sessions, nor where they live.
"""

import sys
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec

import anyio
from anyio.abc import TaskGroup

from ramify.actors.cache.actor import CacheActor
from ramify.actors.cache.cache import CacheShares, RadixCache
from ramify.actors.cache.canaries import Canaries
from ramify.actors.cache.on_disk import OnDisk
from ramify.actors.cache.stored_snapshots import snapshot_part
from ramify.actors.cache.windows import windows_of
from ramify.actors.executor.actor import start_executor
from ramify.actors.executor.copier import KvCopier
from ramify.actors.executor.handle import ExecutorHandle
from ramify.actors.executor.process_executor import ProcessExecutor
from ramify.actors.executor.spec import ExecutorSpec, ModelSpec
from ramify.actors.front.interface import PROTOCOL_VERSION, Core, Guard, Progress
from ramify.actors.grammar.actor import GrammarActor, counts_of
from ramify.actors.grammar.pool import CompilePool, PoolLimits
from ramify.actors.grammar.vocabulary import ReadAhead, read_elsewhere, read_here
from ramify.actors.keeper import ExecutorKeeper
from ramify.actors.kit.clock import Clock
from ramify.actors.kit.fanout import Spread
from ramify.actors.kit.log import get_log
from ramify.actors.kit.mailbox import Address, LimitedAddress, Mailbox
from ramify.actors.kit.metrics import Metrics
from ramify.actors.kit.report import RankState
from ramify.actors.layout import ProcessLayout, expects_cuda
from ramify.actors.scheduler.actor import SchedulerActor
from ramify.actors.tiers.comparer import BlockComparer, open_comparer
from ramify.actors.tiers.mover import DiskMover, check_folder, open_disk
from ramify.actors.watchdog import step_timeout
from ramify.protocol.cluster import KvEvents, ReplicaLoad
from ramify.protocol.config import EngineConfig
from ramify.protocol.errors import ConfigError
from ramify.protocol.messages import CacheMessage, GrammarMessage, SchedulerEvent, SessionMessage
from ramify.protocol.plan import ExecutorInfo
from ramify.protocol.wire import ServerInfo

BIG = 1 << 20  # messages of a core actor's mailbox
SESSIONS = BIG // 2  # how many there may be where sessions add more; the core's own are bounded by steps

log = get_log(__name__)


class CoreActors:
    """One core. A `CoreHost`. `routers`: who hears what the cache has, if anybody asks (`ListenKv`).

    `begun`: its first executor, which loads already.
    """

    def __init__(
        self,
        config: EngineConfig,
        layout: ProcessLayout,
        *,
        spec: ExecutorSpec,
        clock: Clock,
        metrics: Metrics,
        routers: Address[KvEvents] | None = None,
        begun: ProcessExecutor | None = None,
    ) -> None:
        self.cache: RadixCache | None = None
        self._executor: ExecutorHandle | None = None
        self._config = config
        self._layout = layout
        self._spec = spec
        self._begun = begun
        self._clock = clock
        self._metrics = metrics
        self._vocabulary: ReadAhead | None = None
        self._routers = routers
        self._scheduler: SchedulerActor | None = None
        self._keeper: ExecutorKeeper | None = None
        self._disk: DiskMover | None = None  # of KV
        self._comparer: BlockComparer | None = None
        self._to_scheduler: Mailbox[SchedulerEvent] = Mailbox("scheduler", BIG)
        self._to_cache: Mailbox[CacheMessage] = Mailbox("cache", BIG)
        self._to_grammar: Mailbox[GrammarMessage] = Mailbox("grammar", BIG)

    @property
    def executor(self) -> ExecutorHandle | None:
        """Once started; another one each time that it died."""
        return self._keeper.executor if self._keeper is not None else self._executor

    @property
    def info(self) -> ExecutorInfo:
        assert self.executor is not None
        return self.executor.info

    def ranks(self) -> list[RankState]:
        """Of the processes that hold the model together."""
        executor = self.executor
        return executor.ranks() if isinstance(executor, ProcessExecutor) else []

    async def load(self, group: TaskGroup, guard: Guard, progress: Progress) -> None:
        if self._config.model.grammar_backend == "outlines" and find_spec("outlines_core") is None:
            raise ConfigError(
                "--grammar-backend outlines needs outlines-core, which is not installed here: "
                f"`{sys.executable} -m pip install outlines-core`, or leave the flag out"
            )
        if (folder := self._config.model.kv_disk) is not None:  # before the model is loaded
            await anyio.to_thread.run_sync(check_folder, folder)
        layout = self._layout
        if isinstance(self._spec, ModelSpec) and expects_cuda(self._spec.config.device):
            # Seconds of another core, which are over before the model is there.
            self._vocabulary = ReadAhead(self._config.model.path)
            group.start_soon(self._vocabulary.run)
        log.info("placing the executor", **layout.told("executor"))
        self._executor = await self._start_executor(progress)
        model, info = self._config.model, self._executor.info
        self._disk = await open_disk(model, info, self._to_cache)
        self._comparer = open_comparer(model, info, self._to_cache)

    async def _start_executor(self, progress: Progress) -> ExecutorHandle:
        begun, self._begun = self._begun, None
        if begun is not None:
            return await begun.until_ready(progress)
        return await start_executor(self._spec, self._layout.executor, progress=progress)

    async def serve(
        self,
        group: TaskGroup,
        guard: Guard,
        spread: Spread[SessionMessage],
        epoch: str,
        faulty: Callable[[str | None], None],
    ) -> Core:
        executor, config, metrics = self.executor, self._config, self._metrics
        assert executor is not None
        info, mover = executor.info, self._disk
        file = mover.file if mover is not None else None
        schedule = config.schedule
        shares = CacheShares(schedule.retain_share, schedule.retain_leases)
        self.cache = RadixCache(
            info.pages,
            info.page_size,
            shares=shares,
            state_slots=info.state_slots,
            windows=windows_of(info, schedule.in_flight),
            host_blocks=info.host_blocks,
            disk=OnDisk(file.places, file.found, file.notes) if file is not None else None,
            part=snapshot_part(info),
            canaries=Canaries(config.model.kv_canary),
        )
        metrics.kv(info.pages * info.page_size, 0, 0)
        metrics.tiers = partial(self.cache.tiers, info.kv_bytes_per_token)
        if self._comparer is not None:
            metrics.canaries = self.cache.canaries.counts
        metrics.ranks = self.ranks
        cache = CacheActor(
            self._to_cache,
            self.cache,
            self._to_scheduler,
            spread,
            self._routers,
            clock=self._clock,
            disk=mover,
            comparer=self._comparer,
        )
        copier = KvCopier(lambda: self.info, spread, self._to_scheduler, metrics)
        self._scheduler = scheduler = SchedulerActor(
            self._to_scheduler,
            info,
            config.schedule,
            self._to_cache,
            executor,
            spread,
            self._clock,
            metrics,
            copier.copy,
        )
        limits = PoolLimits(seconds=config.limits.compile_ms / 1e3, backend=config.model.grammar_backend)
        pool = CompilePool(limits, self._clock)
        # On a CPU it would take what steps compute with, on servers that see no constraint too.
        ahead = info.device.startswith("cuda")
        grammar = GrammarActor(
            self._to_grammar,
            pool,
            self._vocabulary.body
            if self._vocabulary is not None
            else partial(read_elsewhere if ahead else read_here, config.model.path),
            self._to_scheduler,
            spread,
            ahead=ahead,
            unable=None if info.constrains else f"its executor on {info.device} cannot",
        )
        metrics.constraints = partial(counts_of, pool, grammar.registry)
        await group.start(guard("cache", cache.run))
        await group.start(guard("scheduler", scheduler.run))
        await group.start(guard("copier", copier.run))
        await group.start(guard("compile pool", pool.run))
        await group.start(guard("grammar", grammar.run))
        executor.connect(scheduler)
        self._keeper = ExecutorKeeper(
            executor,
            self._start_executor,
            scheduler,
            timeout=step_timeout(config.step_timeout_s, info.device),
            clock=self._clock,
            faulty=faulty,
            died=metrics.executor_died,
        )
        await group.start(guard("executor", self._keeper.run))
        metrics.drafter = info.drafter
        server = ServerInfo(
            version=PROTOCOL_VERSION, epoch=epoch, model=info.model, context=info.context
        )
        return Core(
            LimitedAddress(self._to_cache, SESSIONS),
            LimitedAddress(self._to_scheduler, SESSIONS),
            LimitedAddress(self._to_grammar, SESSIONS),
            server,
            info.context,
            info.vocab_size,
            info.pictures,
        )

    def load_now(self, heard: int) -> ReplicaLoad:
        """For routers. `heard`: requests of the one that asks that have come so far."""
        return self._scheduler.load(heard) if self._scheduler is not None else ReplicaLoad()

    async def close(self) -> None:
        if self.executor is not None:
            with anyio.CancelScope(shield=True):
                await self.executor.stop(grace=5.0)
        for user in (self._disk, self._comparer):
            if user is not None:
                with anyio.CancelScope(shield=True):
                    await anyio.to_thread.run_sync(user.close)
