"""The members of an object as an automaton: which may come next, commas, counts. Pure.

After each member the automaton knows which one it was, so listed members come in their order, each at
most once, and none that is required can be passed over. Names that may come next share the states of
their common beginnings. Other members come behind the listed ones, or before all of them.
"""

from typing import NamedTuple

from ramify.actors.grammar.automaton import Automaton
from ramify.actors.grammar.schema.assembly import Assembly, reduced


class Listed(NamedTuple):
    """A member by name. `key`: the name as JSON, quotes included."""

    key: bytes
    value: Automaton
    required: bool


class Others(NamedTuple):
    """Members of other names. `keys`: these as JSON, quotes included; no two of them share a name."""

    keys: Automaton
    value: Automaton


class Separators(NamedTuple):
    """The texts between members, and between a name and its value."""

    comma: bytes
    colon: bytes


def objects(
    listed: list[Listed],
    others: list[Others],
    least: int,
    most: int | None,
    separators: Separators,
    names: float | None = None,
    early: bool = False,
) -> Automaton:
    """Objects of at least `least` and at most `most` members.

    `names`: how many names `others` have (infinity too), if a check keeps them different; None: two of
    them may have the same name. `early`: where none of `listed` is required, others may come before
    them too.
    """
    return _Objects(listed, others, least, most, separators, names, early).build()


class _Reading(NamedTuple):
    """The possible continuations of a name that is being read.

    `allowed`: listed members, whose keys are read as far as `position`; `states`: the state in each of
    `others`, -1 where it is none of these; `behind`: the listed member that may come next behind one of
    them.
    """

    allowed: tuple[int, ...]
    position: int
    states: tuple[int, ...]
    behind: int


class _Objects:
    def __init__(
        self,
        listed: list[Listed],
        others: list[Others],
        least: int,
        most: int | None,
        separators: Separators,
        names: float | None,
        early: bool,
    ) -> None:
        self._listed = listed
        self._early = early
        self._names = names
        self._others = others
        self._least = least
        self._most = most
        self._separators = separators
        self._counted = least > 1 or most is not None
        self._top = max(least, 1) if most is None else most
        parts = [m.value for m in listed] + [part for other in others for part in other]
        data = b'{}"' + separators.comma + separators.colon + b"".join(m.key for m in listed)
        self._whole = Assembly(parts, data)
        self._needed: list[int] = [len(listed)] * (len(listed) + 1)  # the next required one
        for i in range(len(listed) - 1, -1, -1):
            self._needed[i] = i if listed[i].required else self._needed[i + 1]
        self._states: dict[tuple[int, int], int] = {}  # (next member, how many there are)
        self._waiting: list[tuple[int, int]] = []
        self._readings: dict[tuple[_Reading, int], int] = {}
        self._unread: list[tuple[_Reading, int, int]] = []  # readings that have no edges yet
        self._keys: dict[tuple[int, int, int], int] = {}
        self._values: dict[tuple[int, int], int] = {}
        self._rows: dict[int, list[list[int]]] = {}

    def build(self) -> Automaton:
        whole = self._whole
        start, closed = whole.state(), whole.state()
        whole.final(closed)
        whole.edge(start, whole.symbol(ord("{")), self._state(0, 0))
        for at, count in self._waiting:  # grows
            self._leave(at, count, closed)
            while self._unread:
                self._moves(*self._unread.pop())
        found = whole.finish()
        return reduced(found) if self._counted else found

    def _leave(self, at: int, count: int, closed: int) -> None:
        """The edges of the state in which member `at` or a later one may come."""
        whole, state = self._whole, self._states[at, count]
        needed = self._needed[at]
        if needed == len(self._listed) and count >= self._least:
            whole.edge(state, whole.symbol(ord("}")), closed)
        if self._most is not None and count >= self._most:
            return
        allowed = tuple(i for i in range(at, min(needed + 1, len(self._listed))) if self._may(i, count))
        open_to_others = needed == len(self._listed) and self._may(len(self._listed), count)
        behind = 0 if at == 0 and self._early else len(self._listed)
        reading = _Reading(allowed, 0, (0 if open_to_others else -1,) * len(self._others), behind)
        if not allowed and not (open_to_others and self._others):
            return
        first = self._read(reading, count)
        if count:
            whole.text(state, self._separators.comma, first)
        else:
            self._moves(reading, count, state)

    def _may(self, at: int, count: int) -> bool:
        """Whether behind `count` members, with those before `at` passed over, enough can follow."""
        if self._names is None:
            return True
        return count + len(self._listed) - at + self._names >= self._least

    def _state(self, at: int, count: int) -> int:
        """The state in which member `at` or a later one may come, behind `count` members."""
        count = min(count, self._top)
        found = self._states.get((at, count))
        if found is None:
            found = self._states[at, count] = self._whole.state()
            self._waiting.append((at, count))
        return found

    def _read(self, reading: _Reading, count: int) -> int:
        """The state of a name of which a beginning is read."""
        allowed, position, states, behind = reading
        count = count if self._counted else 1
        if not allowed and sum(state >= 0 for state in states) == 1:
            (kind,) = (i for i, state in enumerate(states) if state >= 0)
            return self._keys_of(kind, count, behind) + states[kind]
        if (
            len(allowed) == 1
            and max(states, default=-1) < 0
            and position == len(self._listed[allowed[0]].key)
        ):
            return self._member(allowed[0], count)
        found = self._readings.get((reading, count))
        if found is None:
            found = self._readings[reading, count] = self._whole.state()
            self._unread.append((reading, count, found))
        return found

    def _moves(self, reading: _Reading, count: int, state: int) -> None:
        """The edges of `state`, in which `reading` is where a name has come to."""
        allowed, position, states, behind = reading
        if len(allowed) == 1 and sum(at >= 0 for at in states) <= 1:
            self._spell(reading, count, state)
            return
        by_symbol: dict[int, list[int]] = {}
        for i in allowed:
            symbol = self._whole.symbol(self._listed[i].key[position])
            by_symbol.setdefault(symbol, []).append(i)
        alive = [(kind, at) for kind, at in enumerate(states) if at >= 0]
        symbols = set(by_symbol)
        rows = {kind: self._rows_of(kind)[at] for kind, at in alive}
        if len(alive) == 1:
            ((kind, at),) = alive
            keys = self._keys_of(kind, count if self._counted else 1, behind)
            self._whole.like(state, keys + at)
        else:
            for row in rows.values():
                symbols.update(symbol for symbol, target in enumerate(row) if target >= 0)
        for symbol in symbols:
            following = tuple(rows[kind][symbol] if kind in rows else -1 for kind in range(len(states)))
            listed = tuple(by_symbol.get(symbol, ()))
            ahead = position + 1 if listed else 0
            target = self._read(_Reading(listed, ahead, following, behind), count)
            self._whole.edge(state, symbol, target)

    def _spell(self, reading: _Reading, count: int, state: int) -> None:
        """Spell the rest of a listed member's name, from `state` on; at most one of
        `others` goes along.
        """
        (index,), position, states, behind = reading
        whole, key = self._whole, self._listed[index].key
        kind = next((kind for kind, at in enumerate(states) if at >= 0), -1)
        at = states[kind] if kind >= 0 else -1
        shared = count if self._counted else 1
        following = list(states)
        while True:
            symbol = whole.symbol(key[position])
            if at >= 0:
                whole.like(state, self._keys_of(kind, shared, behind) + at)
                at = following[kind] = self._rows_of(kind)[at][symbol]
            position += 1
            if position == len(key) and at < 0:
                whole.edge(state, symbol, self._member(index, shared if self._counted else count))
                return
            there = _Reading((index,), position, tuple(following), behind), shared
            known = self._readings.get(there)
            if known is not None:
                whole.edge(state, symbol, known)
                return
            target = self._readings[there] = whole.state()
            whole.edge(state, symbol, target)
            state = target

    def _rows_of(self, kind: int) -> list[list[int]]:
        """The table of the names of `others[kind]`."""
        found = self._rows.get(kind)
        if found is None:
            found = self._rows[kind] = self._whole.table(self._others[kind].keys).tolist()
        return found

    def _keys_of(self, kind: int, count: int, behind: int) -> int:
        """The state where names of `others[kind]` begin, if nothing else can come; `behind`: see
        `_Reading`.
        """
        found = self._keys.get((kind, count, behind))
        if found is None:
            colon = self._whole.state()
            found = self._keys[kind, count, behind] = self._whole.place(self._others[kind].keys, colon)
            end = self._state(behind, self._more_by_others(count))
            value = self._whole.place(self._others[kind].value, end)
            self._whole.text(colon, self._separators.colon, value)
        return found

    def _more_by_others(self, count: int) -> int:
        """Members that count behind one of `others`.

        If it may have the name of an earlier one, only one more than required counts towards `least`.
        """
        required = sum(member.required for member in self._listed)
        if self._names is None and self._least > required + 1:
            return max(count, 1)
        return count + 1

    def _member(self, index: int, count: int) -> int:
        """The state behind the name of a listed member."""
        found = self._values.get((index, count))
        if found is None:
            found = self._values[index, count] = self._whole.state()
            end = self._state(index + 1, count + 1)
            value = self._whole.place(self._listed[index].value, end)
            self._whole.text(found, self._separators.colon, value)
        return found
