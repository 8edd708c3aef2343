"""The constraints that requests may name, and those that the executor has loaded. Pure.

The grammar actor adds constraints (`Constrain`) and retires them (`Unconstrain`): no new request may
name a retired one. A constraint's body goes to the executor with the first plan after a request named
it. So it is built while the request waits and its prompt is computed. It stays there until it is retired
and the last request that names it has ended. Ident 0 is the vocabulary. It goes with the next plan, with
an empty one if there is nothing to do, and stays. Bodies are kept here for a successor of the executor.
"""

from dataclasses import dataclass

from ramify.protocol.messages import Constrain, Unconstrain
from ramify.protocol.plan import LoadConstraint, pack


@dataclass(slots=True)
class _LoadedConstraint:
    body: bytes
    users: int = 0  # requests that have not ended
    loaded: bool = False
    retired: bool = False


class ConstraintTable:
    """All constraints by ident; see the module's docstring."""

    def __init__(self) -> None:
        self._entries: dict[int, _LoadedConstraint] = {}
        self.wanted: list[int] = []  # ids that the executor is to load
        self.due = False  # the executor lacks the vocabulary, or one of `wanted`
        self.dropped: list[int] = []  # ids that it is to forget

    def __len__(self) -> int:
        """Known constraints, without the vocabulary."""
        return len(self._entries) - (0 in self._entries)

    def add(self, message: Constrain) -> None:
        self._entries[message.ident] = _LoadedConstraint(message.body)
        self.due |= not message.ident

    def retire(self, message: Unconstrain) -> None:
        entry = self._entries.get(message.ident)
        if entry is not None:
            entry.retired = True
            self._drop(message.ident, entry)

    def take(self, ident: int) -> bool:
        """Count a request that names the constraint. False: it is unknown or retired."""
        entry = self._entries.get(ident)
        if entry is None or entry.retired or 0 not in self._entries:
            return False
        if not entry.users and not entry.loaded:
            self.wanted.append(ident)
            self.due = True
        entry.users += 1
        return True

    def give_back(self, ident: int) -> None:
        """Count off a request that has ended."""
        entry = self._entries[ident]
        entry.users -= 1
        self._drop(ident, entry)

    def loads(self) -> list[LoadConstraint]:
        """Bodies for the next plan: those that requests named since the last plan and still use."""
        loads = []
        wanted, self.wanted, self.due = self.wanted, [], False
        for ident in (0, *wanted):
            entry = self._entries.get(ident)
            if entry is not None and not entry.loaded and (entry.users or not ident):
                loads.append(LoadConstraint(ident, entry.body))
                entry.loaded = True
        return loads

    def reload(self) -> None:
        """Mark all as not loaded, for another executor. Each is loaded when a request with it runs
        (`need`).

        Not earlier: a body may be why the last executor died, so a waiting request must not cause its
        load.
        """
        for entry in self._entries.values():
            entry.loaded = False
        self.wanted, self.dropped = [], []
        self.due = 0 in self._entries

    def need(self, ident: int) -> None:
        """Load the constraint, if it is not loaded: a request that has taken it is about to run."""
        if not self._entries[ident].loaded and ident not in self.wanted:
            self.wanted.append(ident)
            self.due = True

    def forgets(self) -> bytes:
        """Idents for the next plan to drop, int32; their rows are closed by then."""
        packed, self.dropped = pack(self.dropped), []
        return packed

    def _drop(self, ident: int, entry: _LoadedConstraint) -> None:
        if entry.retired and not entry.users:
            del self._entries[ident]
            if entry.loaded:
                self.dropped.append(ident)
