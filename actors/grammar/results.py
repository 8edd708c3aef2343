"""What was compiled lately, and what could not be: the least recently asked for goes first. Pure.

Failures are kept too, so that a constraint that cannot be compiled costs its work once. Those that may
have been bad luck (a worker that was too slow, or was killed) are forgotten after a while.
"""

from collections import OrderedDict

from ramify.protocol.constraints import CompiledConstraint, ConstraintSpec
from ramify.protocol.errors import ConstraintError

Result = CompiledConstraint | ConstraintError

_OVERHEAD = 512  # bytes of an entry beside its texts


class Results:
    """`most_bytes`: of all entries together."""

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self._entries: OrderedDict[ConstraintSpec, tuple[Result, float | None]] = OrderedDict()
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, spec: ConstraintSpec, now: float) -> Result | None:
        """What became of `spec`, if it is known."""
        entry = self._entries.get(spec)
        if entry is None:
            return None
        result, until = entry
        if until is not None and now >= until:
            self._drop(spec)
            return None
        self._entries.move_to_end(spec)
        return result

    def put(self, spec: ConstraintSpec, result: Result, until: float | None = None) -> None:
        """Keep `result`, until a time at most."""
        if spec in self._entries:
            self._drop(spec)
        self._entries[spec] = (result, until)
        self.bytes += _size(spec, result)
        while self.bytes > self._most and len(self._entries) > 1:
            self._drop(next(iter(self._entries)))

    def _drop(self, spec: ConstraintSpec) -> None:
        result, _ = self._entries.pop(spec)
        self.bytes -= _size(spec, result)


def _size(spec: ConstraintSpec, result: Result) -> int:
    if isinstance(result, CompiledConstraint):
        own = len(result.body) + sum(map(len, result.notes))
    else:
        own = len(result.message)
    return len(spec.text) + own + _OVERHEAD
