"""Pauses between attempts, twice as long after each that failed. Pure."""


class BackOff:
    """Pauses of `first` seconds up to `most`. `failures`: in a row."""

    def __init__(self, first: float, most: float = 30.0) -> None:
        self.failures = 0
        self._first = self._next = first
        self._most = most

    def succeeded(self) -> None:
        """The next pause is short again."""
        self.failures = 0
        self._next = self._first

    def failed(self) -> float:
        """One more has failed. Returns the seconds to wait before the next."""
        self.failures += 1
        pause = min(self._next, self._most)
        self._next = 2 * pause
        return pause
