"""Keeps an executor: watches it, and starts another one when it has died.

What ran waits meanwhile in the scheduler, and goes on from its last token. An executor that hangs is
ended and replaced as well, unless it is in a thread: threads cannot be ended.
"""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

import anyio
from anyio.abc import TaskStatus

from ramify.actors.executor.handle import ExecutorHandle
from ramify.actors.kit.clock import Clock
from ramify.actors.kit.log import get_log
from ramify.actors.processes.supervisor import Attempts, Ended, Policy, keep
from ramify.actors.scheduler.actor import SchedulerActor
from ramify.actors.watchdog import watch_executor
from ramify.protocol.errors import RamifyError
from ramify.protocol.plan import ExecutorInfo

BACK_OFF_SECONDS = 0.5  # the first pause
GRACE_SECONDS = 5.0  # for the end of one that has failed

_FREE = {
    "pages",
    "state_slots",
    "window_pages",
    "host_blocks",
    "host_memory",
    "rank_memory",
    "load_seconds",
    "attention_reason",
    "quantization_reason",
    "extend_sizes",
    "logits_cost",
}

_NO_WINDOWS = (
    ": it found too little memory for window pages, so its layers with a window would keep all; start "
    "the engine again, or give --window-tokens and --kv-tokens"
)

log = get_log(__name__)


class ExecutorLost(RamifyError):
    """No other executor can take the place of the one that died."""


class ExecutorKeeper:
    """`executor`: the one that serves, or did last. `start(progress)` makes another one.

    `timeout`: seconds that a step may take. `faulty` is told why nothing makes progress, and None when
    something does again. `died` is called for each executor that died.
    """

    def __init__(
        self,
        executor: ExecutorHandle,
        start: Callable[[Callable[[str, float], None]], Awaitable[ExecutorHandle]],
        scheduler: SchedulerActor,
        *,
        timeout: float,
        clock: Clock,
        faulty: Callable[[str | None], None],
        died: Callable[[], None],
    ) -> None:
        self.executor = executor
        self._start = start
        self._scheduler = scheduler
        self._timeout = timeout
        self._clock = clock
        self._faulty = faulty
        self._died = died
        self._dead: str | None = None  # why the last one died, until another one serves

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Until the executor is told to stop. Raises ExecutorLost, and NotStarted."""
        task_status.started()
        stopped = asyncio.Event()
        attempts = Attempts("the executor", Policy(first=BACK_OFF_SECONDS))
        await keep(partial(self._one, stopped), attempts, stop=stopped)

    async def _one(self, stopped: asyncio.Event) -> Ended:
        """Replace the executor if it has died, and watch it until it does."""
        if self._dead is not None:
            try:
                executor = await self._start(self._starts)
            except RamifyError as error:
                return Ended(f"{error} (the one before it died: {self._dead})", False)
            self._replace(executor)
        await watch_executor(self.executor, self._timeout, self._clock, self._faulty)
        reason = self.executor.failure
        if reason is None:
            stopped.set()
            return Ended("it was stopped", True)
        self._dead = reason
        self._died()
        self._faulty(f"the executor died: {reason}")
        while not self._scheduler.down:
            await self._clock.sleep_until(self._clock.now() + 0.01)
        await self.executor.stop(GRACE_SECONDS)
        if not self.executor.replaceable:
            raise ExecutorLost(f"{reason}, in a thread, which cannot be ended: see --executor")
        return Ended(reason, True)

    def _starts(self, what: str, done: float) -> None:
        self._faulty(f"the executor died ({self._dead}), another one starts: {what} {done:.0%}")

    def _replace(self, executor: ExecutorHandle) -> None:
        """It serves from now on. Raises ExecutorLost: it cannot."""
        known, self.executor, self._dead = self.executor.info, executor, None
        info = executor.info
        if different := _difference(info, known):
            why = _NO_WINDOWS if known.window_pages > 0 == info.window_pages else ""
            raise ExecutorLost(
                f"another executor differs from the one that died in its {different}{why}"
            )
        executor.connect(self._scheduler)
        self._scheduler.resume(executor, info)
        log.info("another executor serves", pages=info.pages)
        self._faulty(None)


def _difference(info: ExecutorInfo, known: ExecutorInfo) -> str:
    """The names of fields in which two executors of one model must not differ, and do."""
    fields = set(info.__struct_fields__) - _FREE
    return ", ".join(sorted(name for name in fields if getattr(info, name) != getattr(known, name)))
