"""Time as a dependency: the engine's clock, and one that tests set by hand.

Times are seconds as float, monotonic, comparable between actors of one engine only (in whichever
process: the operating system has one monotonic clock).
"""

import asyncio
import heapq
import time
from collections.abc import Callable
from typing import Protocol

import anyio


class Timer(Protocol):
    """A call that waits for its time."""

    def cancel(self) -> None:
        """Do not call. Nothing happens if it was called already."""


class Clock(Protocol):
    """The time, as actors see it."""

    def now(self) -> float:
        """Seconds on a monotonic clock."""
        ...

    async def sleep_until(self, when: float) -> None:
        """Return at `when` or later; at once if it has passed."""

    def call_at(self, when: float, callback: Callable[[], object]) -> Timer:
        """Call `callback` on this event loop at `when` or soon after."""
        ...


class MonotonicClock:
    """The real clock: `time.perf_counter`, the loop's timers."""

    now = staticmethod(time.perf_counter)

    async def sleep_until(self, when: float) -> None:
        await anyio.sleep(max(0.0, when - self.now()))

    def call_at(self, when: float, callback: Callable[[], object]) -> Timer:
        return asyncio.get_running_loop().call_later(max(0.0, when - self.now()), callback)


class _Call:
    """A timer of the manual clock."""

    def __init__(self, callback: Callable[[], object]) -> None:
        self.callback: Callable[[], object] | None = callback

    def cancel(self) -> None:
        self.callback = None


class ManualClock:
    """A clock that stands still until a test calls `advance`."""

    def __init__(self, start: float = 1000.0) -> None:
        self._now = start
        self._due: list[tuple[float, int, _Call]] = []
        self._count = 0

    def now(self) -> float:
        return self._now

    async def sleep_until(self, when: float) -> None:
        if when <= self._now:
            await anyio.lowlevel.checkpoint()
            return
        event = anyio.Event()
        self.call_at(when, event.set)
        await event.wait()

    def call_at(self, when: float, callback: Callable[[], object]) -> Timer:
        call = _Call(callback)
        self._count += 1
        heapq.heappush(self._due, (when, self._count, call))
        return call

    def advance(self, seconds: float) -> None:
        """Move time forward and call whatever was due, in order of time."""
        self._now += seconds
        while self._due and self._due[0][0] <= self._now:
            call = heapq.heappop(self._due)[2]
            if call.callback is not None:
                call.callback()


async def watch_loop(clock: Clock, late: Callable[[float], None], interval: float = 0.25) -> None:
    """Call `late` every `interval` seconds with how late the event loop runs its timers, the first sign
    that something blocks it. Until cancelled.
    """
    while True:
        due = clock.now() + interval
        await clock.sleep_until(due)
        late(max(0.0, clock.now() - due))
