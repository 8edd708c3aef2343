"""The constraints that requests may name: numbered, each once. Pure.

When there are too many or too many bytes, the client that has most of them gives up those that it named
longest ago; so nobody pushes out what others use. The executor keeps what running requests have. A
number is never used twice. 0 is the vocabulary.
"""

from collections import Counter, OrderedDict
from dataclasses import dataclass

from ramify.protocol.constraints import CompiledConstraint, ConstraintSpec

MOST = 512
MOST_BYTES = 512 << 20  # of their tables in the executor, or of their bodies where that is more


@dataclass(slots=True)
class Shelved:
    """`number`: what requests name; `owner`: the client that it counts for, the last one to ask."""

    number: int
    notes: tuple[str, ...]
    size: int
    owner: str


class Shelf:
    """`hits`: asked for and there; `retired`: given up, since the start; `bytes`: now."""

    def __init__(self, most: int = MOST, most_bytes: int = MOST_BYTES) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._known: OrderedDict[ConstraintSpec, Shelved] = OrderedDict()
        self._shares: Counter[str] = Counter()  # of each owner, in parts of the shelf
        self._last = 0
        self.bytes = self.hits = self.retired = 0

    def __len__(self) -> int:
        return len(self._known)

    def find(self, spec: ConstraintSpec, owner: str = "") -> Shelved | None:
        """A constraint that is here, for a client that asks for it."""
        found = self._known.get(spec)
        if found is None:
            return None
        self.hits += 1
        self._known.move_to_end(spec)
        if found.owner != owner:
            self._count(found, -1)
            found.owner = owner
            self._count(found, 1)
        return found

    def peek(self, spec: ConstraintSpec) -> Shelved | None:
        """The same, for nobody."""
        return self._known.get(spec)

    def put(
        self, spec: ConstraintSpec, compiled: CompiledConstraint, owner: str = ""
    ) -> tuple[Shelved, list[int]]:
        """What is not here yet gets a number. Also the numbers that nobody may name from now on."""
        self._last += 1
        size = max(len(compiled.body), compiled.held)
        self._known[spec] = new = Shelved(self._last, compiled.notes, size, owner)
        self._count(new, 1)
        retired = []
        while len(self._known) > 1 and (len(self._known) > self._most or self.bytes > self._most_bytes):
            retired.append(self._give_up(spec))
        self.retired += len(retired)
        return new, retired

    def _give_up(self, but: ConstraintSpec) -> int:
        """The number of one that goes: of the greatest share, the one that was named longest ago."""
        for owner, _ in self._shares.most_common():
            for spec, entry in self._known.items():
                if entry.owner == owner and spec != but:
                    del self._known[spec]
                    self._count(entry, -1)
                    return entry.number
        raise AssertionError("there is one beside the new one")

    def _count(self, entry: Shelved, sign: int) -> None:
        """An entry comes or goes, or changes its owner."""
        self.bytes += sign * entry.size
        self._shares[entry.owner] += sign * (entry.size * self._most + self._most_bytes)
        if not self._shares[entry.owner]:
            del self._shares[entry.owner]
