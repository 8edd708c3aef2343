"""How late the event loop runs what is due: the first sign that something blocks it."""

from typing import Protocol

from ramify.actors.kit.clock import Clock


class LagMetrics(Protocol):
    """Where the lag is reported."""

    def loop_lag(self, seconds: float, /) -> None:
        """How late a timer of the event loop was."""
        ...


async def watch_loop(clock: Clock, metrics: LagMetrics, interval: float = 0.25) -> None:
    """Measure the lag every `interval` seconds until cancelled."""
    while True:
        due = clock.now() + interval
        await clock.sleep_until(due)
        metrics.loop_lag(max(0.0, clock.now() - due))
