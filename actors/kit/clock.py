"""Time as a dependency. Tests have a clock that they set by hand (`tests/manual_clock.py`).

Times are seconds as float, monotonic, comparable between actors of one engine only (in whichever
process: the operating system has one monotonic clock).
"""

import asyncio
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


async def watch_loop(clock: Clock, late: Callable[[float], None], interval: float = 0.25) -> None:
    """Call `late` every `interval` seconds with how late the event loop runs its timers, the first sign
    that something blocks it. Until cancelled.
    """
    while True:
        due = clock.now() + interval
        await clock.sleep_until(due)
        late(max(0.0, clock.now() - due))
