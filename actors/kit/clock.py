"""Time as a dependency: the engine's clock, and one that tests set by hand.

Times are seconds as float, monotonic, comparable between actors of one engine only.
"""

import heapq
import time
from collections.abc import Callable
from typing import Protocol

import anyio


class Clock(Protocol):
    """What actors know of time."""

    def now(self) -> float:
        """Seconds on a monotonic clock."""
        ...

    async def sleep_until(self, when: float) -> None:
        """Return at `when` or later; at once if it has passed."""
        ...


class MonotonicClock:
    """The real clock: `time.perf_counter`, the loop's timers."""

    now: Callable[[], float] = staticmethod(time.perf_counter)

    async def sleep_until(self, when: float) -> None:
        await anyio.sleep(max(0.0, when - self.now()))


class ManualClock:
    """A clock that stands still until a test calls `advance`."""

    def __init__(self, start: float = 1000.0) -> None:
        self._now = start
        self._sleepers: list[tuple[float, int, anyio.Event]] = []
        self._count = 0

    def now(self) -> float:
        return self._now

    async def sleep_until(self, when: float) -> None:
        if when <= self._now:
            await anyio.lowlevel.checkpoint()
            return
        event = anyio.Event()
        self._count += 1
        heapq.heappush(self._sleepers, (when, self._count, event))
        await event.wait()

    def advance(self, seconds: float) -> None:
        """Move time forward and wake whoever slept until then."""
        self._now += seconds
        while self._sleepers and self._sleepers[0][0] <= self._now:
            heapq.heappop(self._sleepers)[2].set()
