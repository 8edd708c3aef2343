"""A time limit on the construction of an automaton: each step checks it by itself.

In the processor's time of this process. A worker compiles one constraint at a time.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from time import process_time

from ramify.protocol.errors import ConstraintError

_until: ContextVar[float] = ContextVar("until")


@contextmanager
def deadline(until: float) -> Iterator[None]:
    """End constructions inside the block at `until`, in `time.process_time`."""
    token = _until.set(until)
    try:
        yield
    finally:
        _until.reset(token)


def check_deadline() -> None:
    """Raises ConstraintError behind the deadline, if there is one."""
    until = _until.get(None)
    if until is not None and process_time() > until:
        raise ConstraintError("compiling takes too long: use less oneOf and anyOf, fewer patterns")
