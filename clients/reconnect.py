"""The client's reaction to the end of its connection: the table of close codes in docs/protocol.md, as
data.

Also how long it waits before it tries again, and how fast it may send. Pure: no clock, no randomness of
its own; times are seconds and are passed in.
"""

from collections.abc import Callable
from enum import Enum
from typing import NamedTuple

from ramify.clients.errors import ConnectionLost, Replaced
from ramify.protocol.errors import BadRequest, Close, Forbidden, RamifyError, Unauthorized

FIRST_DELAY_S = 0.1
LAST_DELAY_S = 10.0
RATE_DELAY_S = 5.0  # at least this long after 4429
LONGEST_S = 60.0  # that a server's `retry_ms` is obeyed
_MOST = 10**9  # of a rate or burst: whatever is beyond is none


class Action(Enum):
    """RESUME: connect again and resume. SPLIT: the same, without the frame that was too big.

    BACK_OFF: the same, after a long wait. NEW_TOKEN: resume, if there is a fresh token. STOP: no more.
    """

    RESUME = "resume"
    SPLIT = "split"
    BACK_OFF = "back off"
    NEW_TOKEN = "new token"
    STOP = "stop"


class Verdict(NamedTuple):
    """The action to take, and the exception that ends the session if that is not possible."""

    action: Action
    error: RamifyError


class _Rule(NamedTuple):
    action: Action
    meaning: str
    error: type[RamifyError] = ConnectionLost


_RULES: dict[int, _Rule] = {
    Close.DONE: _Rule(Action.STOP, "the session was closed"),
    Close.DRAINING: _Rule(Action.RESUME, "the server is stopping"),
    1002: _Rule(Action.STOP, "the WebSocket protocol was violated"),
    Close.WRONG_TYPE: _Rule(Action.STOP, "the server refused a frame of this type", BadRequest),
    1005: _Rule(Action.RESUME, "the connection was closed without a code"),
    1006: _Rule(Action.RESUME, "the connection broke"),
    Close.BAD_UTF8: _Rule(Action.STOP, "the server read bad UTF-8", BadRequest),
    Close.TOO_BIG: _Rule(Action.SPLIT, "a frame was too big"),
    Close.SERVER_BUG: _Rule(Action.RESUME, "the server failed"),
    Close.RESTART: _Rule(Action.RESUME, "the server restarts"),
    1013: _Rule(Action.BACK_OFF, "the server is overloaded"),
    1014: _Rule(Action.RESUME, "a gateway lost the server"),
    Close.UNPARSEABLE: _Rule(Action.STOP, "the server cannot parse this client's frames", BadRequest),
    Close.UNAUTHORIZED: _Rule(Action.NEW_TOKEN, "the token is missing, wrong or spent", Unauthorized),
    Close.FORBIDDEN: _Rule(Action.STOP, "the server does not allow this", Forbidden),
    Close.TIMEOUT: _Rule(Action.RESUME, "the server did not hear from this client in time"),
    Close.REPLACED: _Rule(Action.STOP, "the same client connected again elsewhere", Replaced),
    Close.RATE: _Rule(Action.BACK_OFF, "the server asks for fewer requests"),
}
_UNKNOWN = _Rule(Action.STOP, "the server closed the connection")


def after_close(code: int | None, reason: str = "") -> Verdict:
    """Judge a close code (None or 1006: the connection broke without one)."""
    rule = _RULES.get(1006 if code is None else code, _UNKNOWN)
    told = [f"close code {code}"] if code is not None else []
    told += [reason] if reason else []
    text = f"{rule.meaning} ({': '.join(told)})" if told else rule.meaning
    return Verdict(rule.action, rule.error(text, details={"close": code, "reason": reason}))


def delay(attempt: int, jitter: float, floor_s: float = 0.0) -> float:
    """Compute the seconds to wait before try `attempt` (from 0): full jitter under a doubling ceiling.

    `jitter` is uniform in [0, 1). Full jitter spreads the clients of a server that came back
    (Brooker 2015, "Exponential backoff and jitter").
    """
    ceiling = min(LAST_DELAY_S, FIRST_DELAY_S * 2.0 ** min(attempt, 16))
    return floor_s + ceiling * jitter


def pause(retry_ms: int | None) -> float:
    """Bound the seconds that a server asks for with `retry_ms`."""
    return min(max(retry_ms or 0, 0), int(LONGEST_S * 1000)) / 1e3


class Pacer:
    """A token bucket over `limits.ops_per_second` and `limits.ops_burst`.

    The server refuses a frame that is over the rate; a client that waits first never is.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self.limit(0.0, 0.0)

    def limit(self, rate: float, burst: float) -> None:
        """Set the limits (ops per second, 0: none; ops). The bucket starts full.

        What a server cannot mean (a rate or a burst below 1) is no limit, or the least there is.
        """
        self._rate = float(min(rate, _MOST)) if rate >= 1 else 0.0
        self._burst = float(min(max(burst, 1), _MOST))
        self._level, self._at = self._burst, self._now()

    def wait(self, ops: int) -> float:
        """Take `ops` from the bucket. Returns the seconds to wait before they are sent."""
        if not self._rate:
            return 0.0
        now = self._now()
        self._level = min(self._burst, self._level + (now - self._at) * self._rate) - ops
        self._at = now
        return max(0.0, -self._level / self._rate)
