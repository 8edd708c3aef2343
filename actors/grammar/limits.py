"""Limits of a constraint, before it is compiled and meanwhile.

A constraint comes from a client. Each number here is checked before the work that it bounds is done.
A time limit is in the processor's time of this process: a worker compiles one constraint at a time.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from time import process_time

from ramify.protocol.errors import ConstraintError

MAX_BYTES = 65_536  # of a pattern or a schema, as UTF-8
MAX_STRUCTURE_BYTES = 262_144  # of a structure: the schemas of all tools are in it
MAX_NESTING = 32  # groups inside groups
MAX_REPEAT = 1_000  # of one counted repetition: {m,n}
MAX_REPEAT_PRODUCT = 10_000  # of counted repetitions inside each other
MAX_STATES = 50_000  # of an automaton
MAX_WORK = 2_000_000  # moves looked at while one automaton is made deterministic: seconds
MAX_CELLS = 8_000_000  # of an automaton's table: states times classes of bytes, 4 bytes each
MAX_CHOICES = 2_000

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
