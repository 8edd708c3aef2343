"""Recent results of compilation for each name, failures too. Pure.

A result is known to the name that asked for it, and to no other: otherwise the time of an answer would
tell what others have asked for. When there is too much, the name with most of it loses its longest
unused result, so no name displaces another's. Failures are kept too, so that a constraint that cannot be
compiled costs its work once. Failures by bad luck (a worker that was too slow, or was killed) are
forgotten after a while.
"""

from collections import Counter, OrderedDict

from ramify.actors.processes.messages import ProcessMessage
from ramify.protocol.constraints import CompiledConstraint, ConstraintSpec
from ramify.protocol.errors import ConstraintError

Result = CompiledConstraint | ConstraintError

_OVERHEAD = 512  # bytes of an entry beside its texts
_Kept = OrderedDict[ConstraintSpec, tuple[Result, float | None]]


class CompilerReady(ProcessMessage, frozen=True):
    """From a worker: it can take a constraint, one at a time."""


class CompileDone(ProcessMessage, frozen=True):
    """From a worker: the constraint is compiled."""

    compiled: CompiledConstraint


class CompileFailed(ProcessMessage, frozen=True):
    """From a worker: the constraint cannot be compiled."""

    message: str
    pointer: str | None = None
    position: int | None = None

    @staticmethod
    def of(error: ConstraintError) -> "CompileFailed":
        details = error.details or {}
        return CompileFailed(error.message, details.get("pointer"), details.get("position"))

    def exception(self) -> ConstraintError:
        return ConstraintError(self.message, pointer=self.pointer, position=self.position)


FromWorker = CompilerReady | CompileDone | CompileFailed
MAX_FRAME = 1 << 26  # bytes on the way to a worker, and back
TOO_MUCH = 4  # exit code of a worker whose constraint took too much memory


class Results:
    """`most_bytes`: of all entries together."""

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self._names: dict[str, _Kept] = {}
        self._sizes: Counter[str] = Counter()  # bytes of each name
        self.bytes = 0

    def __len__(self) -> int:
        return sum(map(len, self._names.values()))

    def get(self, name: str, spec: ConstraintSpec, now: float) -> Result | None:
        """The kept result of `spec` for `name`, or None."""
        kept = self._names.get(name)
        entry = kept.get(spec) if kept is not None else None
        if kept is None or entry is None:
            return None
        result, until = entry
        if until is not None and now >= until:
            self._drop(name, spec)
            return None
        kept.move_to_end(spec)
        return result

    def put(self, name: str, spec: ConstraintSpec, result: Result, until: float | None = None) -> None:
        """Keep `result`, at most until `until`."""
        if spec in self._names.get(name, {}):
            self._drop(name, spec)
        self._names.setdefault(name, OrderedDict())[spec] = (result, until)
        self._count(name, _size(spec, result))
        while self.bytes > self._most and len(self) > 1:
            largest = max(self._sizes, key=lambda each: self._sizes[each])
            self._drop(largest, next(iter(self._names[largest])))

    def _drop(self, name: str, spec: ConstraintSpec) -> None:
        kept = self._names[name]
        result, _ = kept.pop(spec)
        if not kept:
            del self._names[name]
        self._count(name, -_size(spec, result))

    def _count(self, name: str, more: int) -> None:
        self.bytes += more
        self._sizes[name] += more
        if not self._sizes[name]:
            del self._sizes[name]


def _size(spec: ConstraintSpec, result: Result) -> int:
    if isinstance(result, CompiledConstraint):
        own = len(result.body) + sum(map(len, result.notes))
    else:
        own = len(result.message)
    return len(spec.text) + own + _OVERHEAD
