"""The executor in a process of its own, seen from the engine: the default.

It can be ended whatever it does, and launching kernels never competes with sockets for the
interpreter lock. Several ranks, which hold a model together, are a process each: rank 0 is told plans
and tells results, and the end of one is the end of all.
"""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path

import anyio
from msgspec import structs

from ramify.actors.executor.handle import ExecutorHandle, log
from ramify.actors.executor.messages import FromExecutor, SignOfLife, StartExecutor, ToExecutor
from ramify.actors.executor.spec import ExecutorSpec, ModelSpec, ProgressCallback, ranks_of
from ramify.actors.kit.mailbox import MailboxClosed, MailboxFull
from ramify.actors.kit.report import RankState
from ramify.actors.layout import layout_of, visible_gpus
from ramify.actors.processes.child_process import ChildProcess
from ramify.actors.processes.messages import Loading, StartFailed, decoder, encoder
from ramify.gpu.kv.host_memory import of_ranks
from ramify.gpu.ranks.checks import check_ranks
from ramify.gpu.ranks.ring import GroupCounters, GroupMemory, RankPlace
from ramify.protocol.config import EngineConfig
from ramify.protocol.messages import ExecutorMessage
from ramify.protocol.plan import ExecutorDown, ExecutorInfo, PicturesSeen, StepResult, StopExecutor

PROGRAM = "ramify.actors.executor.executor_program"
PARTING_SECONDS = 0.5  # in which the process shows that made another one fail
STATES = {"R": "running", "S": "sleeping", "D": "waiting for a device", "T": "stopped", "Z": "ended"}

Child = ChildProcess[ToExecutor, FromExecutor]


class ProcessExecutor(ExecutorHandle):
    """An executor in child processes. Made by `start`, or by `begin` and then `until_ready`."""

    def __init__(self, ranks: int) -> None:
        super().__init__(self._taken)
        self._progress: ProgressCallback | None = None  # None: nobody has asked yet
        self._ranks = range(ranks)
        self._children: list[Child] = []  # by rank
        self._silent = set(self._ranks)  # since the last sign of life of all
        self._infos: dict[int, ExecutorInfo] = {}  # of the ranks that have loaded
        self._counters: GroupCounters | None = None
        self._watch: asyncio.Future[list[None]] | None = None

    @classmethod
    async def start(cls, spec: ExecutorSpec, progress: ProgressCallback) -> "ProcessExecutor":
        """Start the processes and wait until the executor is ready. Cancelled, it kills them."""
        return await (await cls.begin(spec)).until_ready(progress)

    @classmethod
    async def begin(cls, spec: ExecutorSpec) -> "ProcessExecutor":
        """Start the processes, which load meanwhile. Cancelled, it kills them.

        Raises ModelError for ranks that could not hold the model.
        """
        if isinstance(spec, ModelSpec):
            check_ranks(spec.config, len(visible_gpus()))
        self = cls(ranks_of(spec))
        try:
            await self._start(spec)
        except BaseException:
            await self._abandon()
            raise
        return self

    async def until_ready(self, progress: ProgressCallback) -> "ProcessExecutor":
        """Wait until the executor is ready. Failed or cancelled, it kills the processes."""
        self._progress = progress
        try:
            await asyncio.wait([self._ready])
            self._ready.result()
        except BaseException:
            await self._abandon()
            raise
        return self

    async def end_unawaited(self) -> None:
        """End the processes if nobody has waited for them."""
        if self._progress is None:
            await self._abandon()
            if not self._ready.cancel():
                self._ready.exception()  # or it would be reported as one that nobody saw

    async def _start(self, spec: ExecutorSpec) -> None:
        if len(self._ranks) == 1:
            await self._start_rank(spec, 0, None)
        else:
            with GroupMemory(len(self._ranks)) as shared:
                self._counters = shared.counters()
                for place in shared.places:
                    await self._start_rank(spec, place.rank, place)
        watches = (self._watch_process(rank) for rank in self._ranks)
        self._watch = asyncio.gather(*watches)

    async def _start_rank(self, spec: ExecutorSpec, rank: int, place: RankPlace | None) -> None:
        child: Child = await ChildProcess.start(
            "executor" if place is None else f"executor rank {rank}",
            PROGRAM,
            decoder(FromExecutor),
            encoder(),
            partial(self._receive, rank),
            inherit=() if place is None else place.descriptors,
        )
        self._children.append(child)
        child.link.tell(StartExecutor(spec, place))

    @property
    def pid(self) -> int:
        """The process' id, that of rank 0."""
        return self._children[0].pid

    @property
    def pids(self) -> list[int]:
        """By rank."""
        return [child.pid for child in self._children]

    def ranks(self) -> list[RankState]:
        """How each of several is; none: there is one process."""
        if self._counters is None or len(self._children) < len(self._ranks):
            return []
        counted = self._counters.messages()
        return [
            _described(RankState(rank, self._children[rank].pid, steps, counted[0] - steps))
            for rank, steps in enumerate(counted)
        ]

    @property
    def expected(self) -> str | None:
        """A process gives signs of life also while it waits for a plan."""
        return super().expected or "the executor's process says nothing"

    def give_up(self, reason: str) -> None:
        super().give_up(reason)
        self._kill()

    async def stop(self, grace: float) -> bool:
        assert self._watch is not None
        if self.alive:
            try:
                self.tell(StopExecutor())
            except (MailboxClosed, MailboxFull):
                self._kill()
        await asyncio.wait([self._watch], timeout=grace)
        if not self._watch.done():
            log.warning("the executor does not end: killing its process", grace_s=grace)
            self._kill()
        await asyncio.wait([self._watch])
        self._close()
        return not any(child.killed or child.exit_code for child in self._children)

    def _kill(self) -> None:
        for child in self._children:
            child.kill()

    def _send(self, message: ExecutorMessage) -> None:
        self._children[0].link.tell(message)

    def _taken(self) -> None:
        """The scheduler has a result: the process may send one more."""
        self._children[0].link.consumed()

    def _receive(self, rank: int, message: FromExecutor) -> None:
        link = self._children[rank].link
        match message:
            case StepResult() | PicturesSeen():
                self._silent = set(self._ranks)  # all took part in it; of several, none sees
                self._result(message)  # its credit goes back when the scheduler has taken it
                return
            case SignOfLife():
                self._silent.discard(rank)
                if not self._silent:
                    self._silent = set(self._ranks)
                    self.signs += 1
            case Loading(what, done):
                if self._progress is not None:
                    self._progress(what, done)
            case ExecutorInfo():
                self._loaded(rank, message)
            case StartFailed():
                self._fail(message.message, message.exception("the executor"))
                link.close()
            case ExecutorDown(reason):
                self._down(rank, reason)
                link.close()
        link.consumed()

    def _loaded(self, rank: int, info: ExecutorInfo) -> None:
        self._infos[rank] = info
        if len(self._infos) == len(self._ranks) and not self._ready.done():
            self._ready.set_result(of_ranks([self._infos[each] for each in self._ranks]))

    def _down(self, rank: int, reason: str) -> None:
        """A rank failed. Where there are others, it may have done so because one of them has died."""
        if len(self._ranks) == 1:
            self._fail(reason)
        else:
            self._loop.call_later(PARTING_SECONDS, self._lose, f"rank {rank}: {reason}")

    def _lose(self, reason: str) -> None:
        self._fail(reason)
        self._kill()

    async def _watch_process(self, rank: int) -> None:
        """Wait for the end of the process and for what it had sent, then judge."""
        child = self._children[rank]
        code = await child.ended()
        if code == 0 and self._stopping:
            return
        if len(self._ranks) == 1:
            self._fail(child.explain(code))
        elif code < 0:
            self._lose(f"rank {rank}: {child.explain(code)}")
        else:
            self._down(rank, child.explain(code))

    async def _abandon(self) -> None:
        """Give up a start: no process, task or socket stays."""
        self.failure = "its start was given up"
        self._kill()
        with anyio.CancelScope(shield=True):
            await asyncio.gather(*(child.ended() for child in self._children), return_exceptions=True)
            if self._watch is not None:
                await asyncio.wait([self._watch])
        self._close()

    def _close(self) -> None:
        self._relay.close()
        if self._counters is not None:
            self._counters.close()
            self._counters = None


@asynccontextmanager
async def loading(config: EngineConfig) -> AsyncIterator[ProcessExecutor | None]:
    """The executor of an engine in this process, begun before the engine is there, even its modules.

    None: it belongs elsewhere. What nobody has waited for at the end is given up.
    """
    if config.replicas is not None or layout_of(config).executor != "process":
        yield None
        return
    begun = await ProcessExecutor.begin(ModelSpec(config.model))
    try:
        yield begun
    finally:
        await begun.end_unawaited()


def _described(rank: RankState) -> RankState:
    """With what the system knows of its process."""
    with suppress(OSError, IndexError, ValueError):
        process = Path(f"/proc/{rank.pid}")
        said = (process / "stat").read_text().rsplit(")", 1)[1].split()
        pages = int((process / "statm").read_text().split()[1])
        return structs.replace(
            rank,
            state=STATES.get(said[0], said[0]),
            resident_bytes=pages * os.sysconf("SC_PAGE_SIZE"),
            cpu_s=(int(said[11]) + int(said[12])) / os.sysconf("SC_CLK_TCK"),
        )
    return rank
