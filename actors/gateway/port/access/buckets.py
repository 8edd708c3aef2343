"""Rates: a bucket that refuses, and one that lets its user run into debt.

Pure: time is an argument.
"""


class _Bucket:
    """Base: `rate` tokens a second flow in, up to `burst`."""

    def __init__(self, rate: float, burst: float, now: float) -> None:
        self._rate = rate
        self._burst = burst
        self.level = burst  # when it was last looked at: time only adds to it
        self._at = now

    def set_rate(self, rate: float, burst: float, now: float) -> None:
        """Change the rate from now on. What was taken stays taken."""
        self._refill(now)
        self._rate, self._burst = rate, burst
        self.level = min(self.level, burst)

    def _refill(self, now: float) -> None:
        if now > self._at:
            level = self.level + (now - self._at) * self._rate
            self.level = level if level < self._burst else self._burst
            self._at = now


class TokenBucket(_Bucket):
    """Refuses what is not there."""

    def take(self, tokens: float, now: float) -> float:
        """Take tokens. 0.0 if they were there; else seconds until they are (none were taken)."""
        self._refill(now)
        # What exceeds the burst could never be had: it costs a full bucket.
        missing = min(tokens, self._burst) - self.level
        if missing > 0:
            return missing / self._rate
        self.level = max(0.0, self.level - tokens)
        return 0.0


class DebtBucket(_Bucket):
    """Lets its user run into debt, which time pays off.

    For what is known only after it was taken: bytes that were read, frames that were parsed.
    """

    def spend(self, amount: float, now: float) -> None:
        """Take `amount`, whether it is there or not."""
        if now > self._at:  # `_refill`, with each frame
            level = self.level + (now - self._at) * self._rate
            self.level = level if level < self._burst else self._burst
            self._at = now
        self.level -= amount

    def wait(self, now: float) -> float:
        """Seconds until the debt is paid; 0.0 if there is none."""
        if self.level >= 0:
            return 0.0
        self._refill(now)
        return max(0.0, -self.level / self._rate)
