"""Errors as messages: what a refused frame or a failed op is answered with. Pure."""

from ramify.protocol.errors import (
    BadRequest,
    Cancelled,
    Conflict,
    ConstraintError,
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
from ramify.protocol.saved import SavedError
from ramify.protocol.wire import ClientMessage, Error, Op

_KINDS: dict[str, type[RamifyError]] = {
    kind.code: kind
    for kind in (
        BadRequest,
        Cancelled,
        Conflict,
        ConstraintError,
        DeadlineExceeded,
        Exists,
        Forbidden,
        LimitExceeded,
        NoBranch,
        NoSession,
        Overloaded,
        Skipped,
        TooLong,
        Unauthorized,
        Unsupported,
    )
}


def error_of(saved: SavedError) -> RamifyError:
    """The error that was saved; `internal` where this version does not know its code."""
    error = _KINDS.get(saved.code, RamifyError)(saved.message)
    error.details, error.retry_ms = saved.details, saved.retry_ms
    return error


def bare(error: RamifyError) -> RamifyError:
    """`error` without its traceback, so that it can be kept.

    The frames of a traceback hold what was worked on, often the error itself. They would count against
    the session until Python's garbage collector runs.
    """
    error.__traceback__ = error.__cause__ = error.__context__ = None
    return error


def error_message(error: RamifyError, *, ident: int | None = None, branch: str | None = None) -> Error:
    """`error` as the reply to op `ident`."""
    return Error(
        code=error.code,
        message=error.message,
        id=ident,
        branch=branch,
        retry_ms=error.retry_ms,
        details=error.details,
    )


def refusals(error: RamifyError, ops: list[ClientMessage]) -> list[Error]:
    """A frame is refused as a whole: the faulty op gets the error, the others `skipped`."""
    faulty = (error.details or {}).get("id")
    idents = [op.id for op in ops if isinstance(op, Op)]
    skipped = Skipped(f"the frame was refused because of op {faulty}")
    return [
        error_message(error if faulty in (None, ident) else skipped, ident=ident) for ident in idents
    ] or [error_message(error)]
