"""Exceptions that clients raise: the protocol's own, by code, and those of a lost connection.

    RamifyError (ramify.protocol.errors)
    |-- BadRequest, Unauthorized, Forbidden, NoBranch, Exists, Conflict, LimitExceeded, TooLong,
    |   Unsupported, Overloaded, DeadlineExceeded, Cancelled, Skipped    as the server sent them
    |-- BadConstraint, Internal          codes that only servers send
    |-- NoSession
    |   `-- SessionLost                  the session went away while this client was using it
    `-- ConnectionLost                   no way back to the server (also a ConnectionError)
        `-- Replaced                     another connection of the same client took over (4409)

This file does not know when an error is raised; `session.py` and `connect.py` decide that.
"""

from ramify.protocol.errors import (
    BadRequest,
    Cancelled,
    Code,
    Conflict,
    DeadlineExceeded,
    Exists,
    Forbidden,
    LimitExceeded,
    NoBranch,
    NoSession,
    Overloaded,
    RamifyError,
    Skipped,
    TooLong,
    Unauthorized,
    Unsupported,
)
from ramify.protocol.wire import Done, Error


class BadConstraint(RamifyError):
    """A constraint that does not compile or is over a limit."""

    code = "bad_constraint"


class Internal(RamifyError):
    """A fault of the server, or an answer that breaks the protocol."""

    code = "internal"


class SessionLost(NoSession):
    """The server no longer has the session (restart, expiry, or closed by another client).

    Its branches are gone; open a new session and append what you kept.
    """


class ConnectionLost(RamifyError, ConnectionError):
    """The connection ended for good. `details["close"]` is the WebSocket close code, if any.

    Ops without a reply may or may not have run on the server.
    """


class Replaced(ConnectionLost):
    """A newer connection with the same `client` name attached to the session."""


_BY_CODE: dict[Code, type[RamifyError]] = {
    "bad_request": BadRequest,
    "unauthorized": Unauthorized,
    "forbidden": Forbidden,
    "no_session": NoSession,
    "no_branch": NoBranch,
    "exists": Exists,
    "conflict": Conflict,
    "limit": LimitExceeded,
    "too_long": TooLong,
    "bad_constraint": BadConstraint,
    "unsupported": Unsupported,
    "overloaded": Overloaded,
    "deadline": DeadlineExceeded,
    "cancelled": Cancelled,
    "skipped": Skipped,
    "internal": Internal,
}


def from_message(error: Error) -> RamifyError:
    """Make the exception for an `error` message."""
    return _BY_CODE[error.code](error.message, details=error.details, retry_ms=error.retry_ms)


def from_done(done: Done) -> RamifyError | None:
    """Make the exception of a generation that ended with reason "error"; None for others."""
    if done.reason != "error":
        return None
    return _BY_CODE[done.error or "internal"](done.message or "the generation failed on the server")
