"""Measures for how long another process has been silent.

If this process was stopped, or the machine slept, that time must not count as silence of the other. So
the time between two ticks counts only up to a bound.

Pure: time is an argument.
"""

MOST_BETWEEN_LOOKS = 1.0  # seconds


class Silence:
    """`tick` it twice a second or more often, call `heard` at every sign of life."""

    def __init__(self, now: float) -> None:
        self.seconds = 0.0
        self._at = now

    def heard(self) -> None:
        """A sign of life has come."""
        self.seconds = 0.0

    def tick(self, now: float) -> float:
        """Time has passed. Returns the seconds of silence so far."""
        self.seconds += min(max(0.0, now - self._at), MOST_BETWEEN_LOOKS)
        self._at = now
        return self.seconds
