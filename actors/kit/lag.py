"""The lag of the event loop: how late it runs timers, the first sign that something blocks it."""

from typing import Protocol

from ramify.actors.kit.clock import Clock


class LagMetrics(Protocol):
    """The receiver of lag measurements."""

    def loop_lag(self, seconds: float, /) -> None:
        """Observe how late a timer of the event loop was."""


async def watch_loop(clock: Clock, metrics: LagMetrics, interval: float = 0.25) -> None:
    """Measure the lag every `interval` seconds until cancelled."""
    while True:
        due = clock.now() + interval
        await clock.sleep_until(due)
        metrics.loop_lag(max(0.0, clock.now() - due))
