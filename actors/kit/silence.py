"""For how long something has said nothing, as far as this process was awake to hear it.

A process that was stopped itself, or whose machine slept, must not take its own absence for the
silence of others. So the time between two looks counts only up to a bound.

Pure: time is an argument.
"""

MOST_BETWEEN_LOOKS = 1.0  # seconds


class Silence:
    """`tick` it twice a second or more often, call `heard` at every sign of life."""

    def __init__(self, now: float) -> None:
        self.seconds = 0.0
        self._at = now

    def heard(self) -> None:
        """It lives."""
        self.seconds = 0.0

    def tick(self, now: float) -> float:
        """Time has passed. Returns the seconds of silence so far."""
        self.seconds += min(max(0.0, now - self._at), MOST_BETWEEN_LOOKS)
        self._at = now
        return self.seconds
