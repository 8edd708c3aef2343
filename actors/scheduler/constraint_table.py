"""Which constraints requests may name, and which the executor has. Pure.

The grammar actor says what there is (`Constrain`) and what no new request will name (`Unconstrain`).
The body of a constraint goes to the executor with the first plan after a request named it, so that it is
made while the request waits and its prompt is computed; it stays there until it is retired and the last
request that names it has ended. Ident 0 is the vocabulary: it goes with the next plan, with one of its
own if there is nothing to do, and stays. Bodies are kept: another executor may take that one's place.
"""

from ramify.protocol.messages import Constrain, Unconstrain
from ramify.protocol.plan import LoadConstraint, pack


class _LoadedConstraint:
    __slots__ = ("body", "loaded", "retired", "users")

    def __init__(self, body: bytes) -> None:
        self.body = body
        self.users = 0  # requests that have not ended
        self.loaded = False
        self.retired = False


class ConstraintTable:
    """See the module's top."""

    def __init__(self) -> None:
        self._entries: dict[int, _LoadedConstraint] = {}
        self.wanted: list[int] = []  # ids that the executor is to load
        self.due = False  # the executor lacks the vocabulary, or one of `wanted`
        self.dropped: list[int] = []  # ids that it is to forget

    def __len__(self) -> int:
        """Those that are known, the vocabulary apart."""
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
        """A request names the constraint. False if there is none (any more)."""
        entry = self._entries.get(ident)
        if entry is None or entry.retired or 0 not in self._entries:
            return False
        if not entry.users and not entry.loaded:
            self.wanted.append(ident)
            self.due = True
        entry.users += 1
        return True

    def give_back(self, ident: int) -> None:
        """A request that had taken it has ended."""
        entry = self._entries[ident]
        entry.users -= 1
        self._drop(ident, entry)

    def loads(self) -> list[LoadConstraint]:
        """What the next plan brings: all that requests have named since the last one, and still do."""
        loads = []
        wanted, self.wanted, self.due = self.wanted, [], False
        for ident in (0, *wanted):
            entry = self._entries.get(ident)
            if entry is not None and not entry.loaded and (entry.users or not ident):
                loads.append(LoadConstraint(ident, entry.body))
                entry.loaded = True
        return loads

    def reload(self) -> None:
        """Another executor has none of them. It gets each when a request runs that names it (`need`).

        Not before: should a body be why the last one died, a request that waits must not have it loaded.
        """
        for entry in self._entries.values():
            entry.loaded = False
        self.wanted, self.dropped = [], []
        self.due = 0 in self._entries

    def need(self, ident: int) -> None:
        """A request that has taken it is about to run."""
        if not self._entries[ident].loaded and ident not in self.wanted:
            self.wanted.append(ident)
            self.due = True

    def forgets(self) -> bytes:
        """int32, what the next plan drops: its rows are closed by then."""
        packed, self.dropped = pack(self.dropped), []
        return packed

    def _drop(self, ident: int, entry: _LoadedConstraint) -> None:
        if entry.retired and not entry.users:
            del self._entries[ident]
            if entry.loaded:
                self.dropped.append(ident)
