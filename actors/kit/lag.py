"""How late the event loop runs what is due: the first sign that something blocks it."""

from ramify.actors.kit.clock import Clock
from ramify.actors.kit.metrics import Metrics


async def watch_loop(clock: Clock, metrics: Metrics, interval: float = 0.25) -> None:
    """Measure the lag every `interval` seconds until cancelled."""
    while True:
        due = clock.now() + interval
        await clock.sleep_until(due)
        metrics.loop_lag(max(0.0, clock.now() - due))
