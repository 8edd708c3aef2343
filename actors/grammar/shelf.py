"""The constraints that requests may name: numbered, each once. Pure.

The least recently named are given up when there are too many or too many bytes; the executor keeps what
running requests have. A number is never used twice. 0 is the vocabulary.
"""

from collections import OrderedDict

from ramify.protocol.constraints import CompiledConstraint, ConstraintSpec

MOST = 512
MOST_BYTES = 512 << 20  # of their tables in the executor, or of their bodies where that is more


class Shelf:
    """See the module's top."""

    def __init__(self, most: int = MOST, most_bytes: int = MOST_BYTES) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._known: OrderedDict[ConstraintSpec, tuple[int, int]] = OrderedDict()  # number, bytes
        self._bytes = 0
        self._last = 0

    def __len__(self) -> int:
        return len(self._known)

    def find(self, spec: ConstraintSpec) -> int | None:
        """The number of a constraint that is here."""
        found = self._known.get(spec)
        if found is None:
            return None
        self._known.move_to_end(spec)
        return found[0]

    def put(self, spec: ConstraintSpec, compiled: CompiledConstraint) -> tuple[int, list[int]]:
        """A number for what is not here yet, and the numbers that nobody may name from now on."""
        self._last += 1
        size = max(len(compiled.body), compiled.held)
        self._known[spec] = self._last, size
        self._bytes += size
        retired = []
        while len(self._known) > 1 and (len(self._known) > self._most or self._bytes > self._most_bytes):
            _, (number, size) = self._known.popitem(last=False)
            self._bytes -= size
            retired.append(number)
        return self._last, retired
