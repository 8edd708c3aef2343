"""Notices an executor that has stopped or hangs: first in `/readyz`, then by ending it.

An executor gives a sign of life with every result, and one in a process also while it waits for work.
A step may be long and healthy: a prefill of 2,048 tokens takes many seconds where a large model runs
on a CPU. So readiness is lost after 4 s, or twice the longest step of late, and comes back by itself;
only a step over `--step-timeout` is the executor's end, as its death would be (`keeper`). A tower that
runs on pictures beside the steps is watched in the same way: it may take as long for each of its layers.

`StepWatch` is pure. This file does not know what a step is.
"""

from collections.abc import Callable

from ramify.actors.executor.handle import ExecutorHandle
from ramify.actors.kit.clock import Clock
from ramify.actors.kit.log import get_log
from ramify.actors.processes.silence import Silence

LOOK_SECONDS = 0.5
OVERDUE_SECONDS = 4.0  # readiness tells of it within 5 s
LONGEST_STEPS = 2.0  # times the longest step of late
FORGOTTEN = 0.999  # of the longest step, at each look: half of it in six minutes
TIMEOUT_SECONDS, CPU_TIMEOUT_SECONDS = 60.0, 600.0  # `--step-timeout`, where it is not given

log = get_log(__name__)


class StepWatch:
    """`look` says what is wrong. `over`: it has been wrong for the whole timeout."""

    def __init__(self, timeout: float, now: float) -> None:
        self.over = False
        self._timeout = timeout
        self._silence = Silence(now)
        self._signs = -1
        self._longest = 0.0  # of late, in seconds

    def look(self, expected: str | None, signs: int, now: float) -> str | None:
        """The fault, for people, or None. To be called every `LOOK_SECONDS`."""
        silent = self._silence.tick(now)
        self._longest *= FORGOTTEN
        if expected is None or signs != self._signs:
            if signs != self._signs:
                self._longest = max(self._longest, silent)
            self._signs = signs
            self._silence.heard()
            return None
        self.over = silent >= self._timeout
        if silent < min(self._timeout, max(OVERDUE_SECONDS, LONGEST_STEPS * self._longest)):
            return None
        return f"{expected} for {silent:.0f} s"


def step_timeout(asked: float | None, device: str) -> float:
    """Seconds that a step may take."""
    if asked is not None:
        return asked
    return CPU_TIMEOUT_SECONDS if device == "cpu" else TIMEOUT_SECONDS


async def watch_executor(
    executor: ExecutorHandle, allowed: float, clock: Clock, tell: Callable[[str | None], None]
) -> None:
    """Look until the executor is gone. `tell` is called with the fault whenever it changes."""
    watch, tower = (StepWatch(allowed, clock.now()) for _ in range(2))
    known = None
    while executor.alive:
        fault = watch.look(executor.expected, executor.signs, clock.now())
        slow = tower.look(executor.tower_expected, executor.tower_signs, clock.now())
        fault = slow if fault is None or tower.over else fault
        if fault is not None and known is None:
            log.warning("the executor is overdue", fault=fault)
        elif fault is None and known is not None:
            log.info("the executor goes on")
        if fault != known:
            tell(fault)
        known = fault
        if watch.over or tower.over:
            executor.give_up(f"{fault}, longer than --step-timeout allows ({allowed:g} s)")
            return
        await clock.sleep_until(clock.now() + LOOK_SECONDS)
