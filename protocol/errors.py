"""Error codes of `ramify.v1` and the exceptions that carry them.

Tree:

    RamifyError                 code, message, details, retry_ms
    |-- BadRequest              bad_request: the frame or a field of it is wrong
    |   `-- InvalidField        also a ValueError: a message that cannot be made
    |-- Unauthorized            unauthorized: no token, or a wrong one
    |-- Forbidden               forbidden: known, but not allowed (a view key that writes)
    |-- NoSession, NoBranch     no_session, no_branch
    |-- Exists                  exists: the branch name is taken
    |-- Conflict                conflict: `expect` differs from the branch's position
    |-- LimitExceeded           limit
    |-- TooLong                 too_long: over the context length; details.max
    |-- ConstraintError         bad_constraint: a regex, schema or grammar; details.pointer or .position
    |-- Unsupported             unsupported: typed in the protocol, not served by this server
    |-- Overloaded              overloaded: a queue is full; retry_ms
    |-- DeadlineExceeded        deadline: the op's deadline passed before it started
    |-- Cancelled               cancelled: before the op started
    |-- Skipped                 skipped: an earlier op of the same frame failed
    |-- ModelError              bad_request: a model folder that cannot be served (start-up only)
    `-- ConfigError             bad_request: a setting that is out of range (start-up only)

This file does not know how an error travels: the session turns one into an `error` message.
"""

from typing import Any, ClassVar, Literal

Code = Literal[
    "bad_request",
    "unauthorized",
    "forbidden",
    "no_session",
    "no_branch",
    "exists",
    "conflict",
    "limit",
    "too_long",
    "bad_constraint",
    "unsupported",
    "overloaded",
    "deadline",
    "cancelled",
    "skipped",
    "internal",
]

MOST_TOLD = 500  # characters of a library's message that a client is told


def brief(message: str) -> str:
    """A library's message as a client is told it: one line of at most `MOST_TOLD` characters.

    Some quote all of what they were given, or made of it; the reason stands before that, or behind.
    """
    line = " ".join(message.split())
    half = MOST_TOLD // 2
    return line if len(line) <= MOST_TOLD else f"{line[: half - 5]} ... {line[-half:]}"


class RamifyError(Exception):
    """An error with a protocol code.

    `message` says what is wrong and how to mend it; `details` holds machine-readable facts
    (for example `{"max": 2048}`); `retry_ms` is set where trying again later can help.
    """

    code: ClassVar[Code] = "internal"

    def __init__(
        self, message: str, *, details: dict[str, Any] | None = None, retry_ms: int | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.details = details
        self.retry_ms = retry_ms


class BadRequest(RamifyError):
    code = "bad_request"


class InvalidField(BadRequest, ValueError):
    """A field that types alone do not catch; raised where the message is made or decoded."""


class Unauthorized(RamifyError):
    code = "unauthorized"


class Forbidden(RamifyError):
    code = "forbidden"


class NoSession(RamifyError):
    code = "no_session"


class NoBranch(RamifyError):
    code = "no_branch"


class Exists(RamifyError):
    code = "exists"


class Conflict(RamifyError):
    code = "conflict"


class LimitExceeded(RamifyError):
    code = "limit"


class TooLong(RamifyError):
    code = "too_long"


class ConstraintError(RamifyError):
    """A regex, schema or grammar that is wrong, too large, or not supported.

    `details` says where: `position` (a character of a regex or grammar) or `pointer` (a JSON pointer
    into a schema).
    """

    code = "bad_constraint"

    def __init__(self, message: str, *, pointer: str | None = None, position: int | None = None) -> None:
        where = {"pointer": pointer, "position": position}
        super().__init__(message, details={k: v for k, v in where.items() if v is not None} or None)


class Unsupported(RamifyError):
    code = "unsupported"


class Overloaded(RamifyError):
    code = "overloaded"


class DeadlineExceeded(RamifyError):
    """The op's deadline passed before it started."""

    code = "deadline"


class Cancelled(RamifyError):
    """The op was cancelled before it started. (A generation that started ends with a result.)"""

    code = "cancelled"


class Skipped(RamifyError):
    """An earlier op of the same frame failed on this branch, or refused the frame.

    Clients set `__cause__` to that failure.
    """

    code = "skipped"


class ModelError(RamifyError):
    """A model folder that this build cannot serve. `message` names the file and field."""

    code = "bad_request"


class ConfigError(RamifyError):
    """A setting that is out of range or contradicts another. `message` names the flag."""

    code = "bad_request"


class Close:
    """WebSocket close codes of `ramify.v1` (RFC 6455 section 7.4 and the private range)."""

    DONE = 1000
    DRAINING = 1001
    WRONG_TYPE = 1003
    BAD_UTF8 = 1007
    TOO_BIG = 1009
    SERVER_BUG = 1011
    RESTART = 1012
    UNPARSEABLE = 4400
    UNAUTHORIZED = 4401
    FORBIDDEN = 4403
    TIMEOUT = 4408
    REPLACED = 4409
    RATE = 4429
