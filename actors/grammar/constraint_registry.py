"""The constraints that requests may name: numbered, each once for each owner's name. Pure.

Names share nothing: otherwise the time until a first token would tell what others use. When there are
too many, or too many bytes, the name with most of them gives some up: of its sessions the one with most,
and of that the longest unused. So no owner displaces another's. The executor keeps what running requests
have. A number is never used twice. 0 is the vocabulary.
"""

from collections import Counter, OrderedDict
from dataclasses import dataclass

from ramify.actors.grammar.job_queue import Owner
from ramify.protocol.constraints import CompiledConstraint, ConstraintSpec

MOST = 512
MOST_BYTES = 512 << 20  # of their tables in the executor, or of their bodies where that is more
NOBODY = Owner()


@dataclass(slots=True)
class RegisteredConstraint:
    """`number`: what requests name. `owner`: the session that it counts for, the last one to ask."""

    number: int
    notes: tuple[str, ...]
    size: int
    owner: Owner


class ConstraintRegistry:
    """`hits`: found, `retired`: given up, both since the start; `bytes`: now."""

    def __init__(self, most: int = MOST, most_bytes: int = MOST_BYTES) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._known: OrderedDict[tuple[str, ConstraintSpec], RegisteredConstraint] = OrderedDict()
        # of each name, and of each session, in parts of the registry
        self._shares: dict[str, Counter[Owner]] = {}
        self._last = 0
        self.bytes = self.hits = self.retired = 0

    def __len__(self) -> int:
        return len(self._known)

    def find(self, spec: ConstraintSpec, owner: Owner = NOBODY) -> RegisteredConstraint | None:
        """The constraint, if it is registered for the owner's name."""
        key = owner.name, spec
        found = self._known.get(key)
        if found is None:
            return None
        self.hits += 1
        self._known.move_to_end(key)
        if found.owner != owner:
            self._count(found, -1)
            found.owner = owner
            self._count(found, 1)
        return found

    def peek(self, spec: ConstraintSpec, owner: Owner = NOBODY) -> RegisteredConstraint | None:
        """As `find`, without counting a use."""
        return self._known.get((owner.name, spec))

    def put(
        self, spec: ConstraintSpec, compiled: CompiledConstraint, owner: Owner = NOBODY
    ) -> tuple[RegisteredConstraint, list[int]]:
        """Register a new constraint. Returns it, and the numbers that requests may not name any more."""
        self._last += 1
        size = max(len(compiled.body), compiled.held)
        new = RegisteredConstraint(self._last, compiled.notes, size, owner)
        self._known[owner.name, spec] = new
        self._count(new, 1)
        retired = []
        while len(self._known) > 1 and (len(self._known) > self._most or self.bytes > self._most_bytes):
            retired.append(self._give_up(new))
        self.retired += len(retired)
        return new, retired

    def _give_up(self, but: RegisteredConstraint) -> int:
        """Retire the longest unused constraint of the largest owner. Returns its number."""
        names = sorted(self._shares.values(), key=Counter.total, reverse=True)
        for owner in (each for sessions in names for each, _ in sessions.most_common()):
            for key, entry in self._known.items():
                if entry.owner == owner and entry is not but:
                    del self._known[key]
                    self._count(entry, -1)
                    return entry.number
        raise AssertionError("there is one beside the new one")

    def _count(self, entry: RegisteredConstraint, sign: int) -> None:
        """Add (`sign` 1) or take off (-1) an entry's size at its owner."""
        self.bytes += sign * entry.size
        sessions = self._shares.setdefault(entry.owner.name, Counter())
        sessions[entry.owner] += sign * (entry.size * self._most + self._most_bytes)
        if not sessions[entry.owner]:
            del sessions[entry.owner]
        if not sessions:
            del self._shares[entry.owner.name]
