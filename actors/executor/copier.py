"""Copies blocks of KV between the host memory of replicas, in threads: jobs in order, several
blocks of each at once.

On one machine the target reads the source's memory, and no byte goes over a link. Else the bytes are
part of the answers. A block is kept only if it is what was sealed under its key (`gpu.kv.host_memory`),
and comes from the same model, weights and format (its stamp).

Does not know which tokens a block holds.
"""

import os
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import anyio
import anyio.to_thread
from anyio.abc import TaskStatus

from ramify.actors.kit.fanout import Spread
from ramify.actors.kit.log import get_log
from ramify.actors.kit.mailbox import Address, MailboxClosed
from ramify.actors.kit.metrics import Metrics
from ramify.gpu.kv.host_memory import HostMemory
from ramify.protocol.cluster import BlocksRead, CopiedIn, CopyIn, CopyOut, SentBlock
from ramify.protocol.messages import SchedulerEvent, SessionMessage
from ramify.protocol.plan import ExecutorInfo

THREADS = max(1, min(4, (os.cpu_count() or 1) // 4))  # numpy copies and sums without Python's lock
MOST_OPEN = 8  # memories of other replicas
TRIES, PAUSE_SECONDS = 25, 0.002  # a GPU's copy to the host may end after its step

log = get_log(__name__)


class KvCopier:
    """`info()`: of the executor that there is. Answers go to `sessions`, and to `scheduler`.
    `metrics` has the time of the copies that came.
    """

    def __init__(
        self,
        info: Callable[[], ExecutorInfo],
        sessions: Spread[SessionMessage],
        scheduler: Address[SchedulerEvent],
        metrics: Metrics,
    ) -> None:
        self._info = info
        self._sessions = sessions
        self._scheduler = scheduler
        self._metrics = metrics
        self._jobs: deque[CopyOut | CopyIn] = deque()
        self._woken = anyio.Event()
        self._open: dict[str, HostMemory] = {}  # by path, the oldest first

    def copy(self, job: CopyOut | CopyIn) -> None:
        """Do it behind the others. How many there are is bounded by who asks."""
        self._jobs.append(job)
        self._woken.set()

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Until cancelled, or the scheduler's mailbox is closed."""
        task_status.started()
        with ThreadPoolExecutor(THREADS, "kv copies") as self._threads:
            await self._serve()

    async def _serve(self) -> None:
        while True:
            await self._woken.wait()
            self._woken = anyio.Event()
            while self._jobs:
                job = self._jobs.popleft()
                if isinstance(job, CopyOut):
                    await self._out(job)
                    continue
                begin = time.perf_counter()
                answer = await anyio.to_thread.run_sync(self._in, job)
                self._metrics.copied_s += time.perf_counter() - begin
                try:
                    self._scheduler.tell(answer)
                except MailboxClosed:
                    return

    async def _out(self, job: CopyOut) -> None:
        read, info = job.read, self._info()
        if read.shared:
            blocks = [SentBlock(block.slot, block.key, 0) for block in job.blocks]
        else:
            blocks = await anyio.to_thread.run_sync(self._read, job)
        answer = BlocksRead(
            read.session, read.branch, blocks, info.kv_stamp, info.host_memory, info.host_blocks
        )
        self._sessions.put([(read.session, answer)])
        self._sessions.start()

    # --- in a thread -----------------------------------------------------------------------------

    def _read(self, job: CopyOut) -> list[SentBlock]:
        """Blocks with their bytes, up to the first that is not there."""
        found: list[SentBlock] = []
        try:
            memory = self._own()
        except OSError as error:
            log.warning("blocks cannot be read", reason=str(error))
            return found
        for block in job.blocks:
            for _ in range(TRIES):
                if (read := memory.read(block.slot, block.key)) is not None:
                    break
                time.sleep(PAUSE_SECONDS)
            else:
                break
            found.append(SentBlock(block.slot, block.key, *read))
        return found

    def _in(self, job: CopyIn) -> CopiedIn:
        put, read = job.put, job.put.read
        wanted = [(block, slot) for block, slot in zip(read.blocks, job.slots, strict=True) if slot >= 0]
        kept: list[bytes] = []
        if wanted and read.stamp == self._info().kv_stamp:
            try:
                own = self._own()
                source = None if wanted[0][0].body else self._memory(read.memory, read.slots)
            except OSError as error:  # the source is gone
                log.warning("blocks cannot be copied", reason=str(error))
            else:
                done = self._threads.map(lambda each: _write(own, each[1], each[0], source), wanted)
                kept = [block.key for (block, _), there in zip(wanted, done, strict=True) if there]
        refused = [block.key for block, _ in wanted if block.key not in kept]
        return CopiedIn(put.session, put.branch, b"".join(kept), b"".join(refused))

    def _own(self) -> HostMemory:
        info = self._info()
        return self._memory(info.host_memory, info.host_blocks)

    def _memory(self, path: str, slots: int) -> HostMemory:
        """The memory at `path`. Raises OSError."""
        memory = self._open.get(path)
        if memory is None:
            memory = self._open[path] = HostMemory(slots, self._info().block_bytes, path)
            if len(self._open) > MOST_OPEN:
                del self._open[next(iter(self._open))]
        return memory


def _write(own: HostMemory, slot: int, block: SentBlock, source: HostMemory | None) -> bool:
    """Whether the block is in `slot` of `own` now."""
    if source is None:
        return own.write(slot, block.key, block.seal, block.body)
    if block.slot >= source.count:
        return False
    for _ in range(TRIES):
        data = source.blocks[block.slot].data
        if own.write(slot, block.key, int(source.seals[block.slot]), data):
            return True
        time.sleep(PAUSE_SECONDS)
    return False
