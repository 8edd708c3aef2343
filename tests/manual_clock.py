"""A `Clock` that tests set by hand."""

import heapq
from collections.abc import Callable

import anyio

from ramify.actors.kit.clock import Timer


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
