"""How much one socket may ask for: ops a second, ops a frame, strikes.

Pure: time is an argument. This file does not know what a refusal looks like on the wire.
"""

from ramify.protocol.config import Limits
from ramify.protocol.errors import LimitExceeded

STRIKES = 3  # unparseable frames, then 4400
VIOLATIONS = 10  # refused frames at once, then 4429 ...
FORGIVEN_PER_S = 0.2  # ... one is forgotten every five seconds


class TokenBucket:
    """`rate` tokens a second flow in, up to `burst`."""

    def __init__(self, rate: float, burst: float, now: float) -> None:
        self._rate = rate
        self._burst = burst
        self._level = burst
        self._at = now

    def take(self, tokens: float, now: float) -> float:
        """Take tokens. 0.0 if they were there; else seconds until they are (none were taken)."""
        if now > self._at:
            self._level = min(self._burst, self._level + (now - self._at) * self._rate)
            self._at = now
        # What exceeds the burst could never be had: it costs a full bucket.
        missing = min(tokens, self._burst) - self._level
        if missing > 0:
            return missing / self._rate
        self._level = max(0.0, self._level - tokens)
        return 0.0


class Guard:
    """The limits of one socket. After `abusive` turns true the socket is to be closed."""

    def __init__(self, limits: Limits, now: float) -> None:
        self._limits = limits
        self._ops = TokenBucket(limits.ops_per_second, limits.ops_burst, now)
        self._patience = TokenBucket(FORGIVEN_PER_S, VIOLATIONS, now)
        self._strikes = 0
        self.abusive = False

    def strike(self) -> bool:
        """Count an unparseable frame. True if it was the last one allowed."""
        self._strikes += 1
        return self._strikes >= STRIKES

    def admit(self, ops: int, now: float) -> None:
        """Count a frame of `ops` messages. Raises LimitExceeded if it has to be refused whole."""
        most = self._limits.ops_per_frame
        if ops > most:
            self._violation(now)
            raise LimitExceeded(
                f"the frame holds {ops} messages, at most {most} are allowed: split it",
                details={"max": most, "ops": ops},
            )
        wait = self._ops.take(max(1, ops), now)
        if wait:
            self._violation(now)
            raise LimitExceeded(
                f"more than {self._limits.ops_per_second} messages a second "
                f"(bursts of {self._limits.ops_burst}): slow down",
                details={"max": self._limits.ops_per_second},
                retry_ms=int(wait * 1000) + 1,
            )

    def control(self, now: float) -> None:
        """Count a WebSocket ping: it is answered, so it costs what a message costs."""
        if self._ops.take(1, now):
            self._violation(now)

    def _violation(self, now: float) -> None:
        if self._patience.take(1, now):
            self.abusive = True
