"""An automaton whose outputs are checked against what they have written before, too.

The automaton's masks are those of all its outputs. Where names or items of an output have to differ
(`written`), its mask is a copy of the automaton's without the tokens that would double one, or could
only go on to. So two kinds of tokens are looked at: those that spell the beginning of an earlier name or
item, and those with a comma or a closing bracket in them.

Text that the automaton forces is forced here too: a byte is only taken if something can follow it that
doubles nothing.
"""

from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from ramify.gpu.constraints.forced import Plan
from ramify.gpu.constraints.token_automaton import TokenAutomaton
from ramify.gpu.constraints.vocabulary import Vocabulary
from ramify.gpu.constraints.written import Cursor, Seen, Written
from ramify.protocol.constraints import NO_STEP, CheckedPlace

MOST_LOOKED_AT = 2_000  # bytes that are tried to see whether an item can still differ
FEW = 16  # names and items; with more of them a mask is made in a thread

_SEPARATORS = frozenset(b",]}")
_OPENINGS = frozenset(b"[{")


class CheckedAutomaton:
    """The constraint of an automaton and of places: see `protocol.constraints.AutomatonBody`."""

    def __init__(self, machine: TokenAutomaton, places: tuple[CheckedPlace, ...]) -> None:
        self.machine = machine
        self.places = places
        self.suspects = _suspects(machine.vocabulary)
        self._twins: dict[int, list[int]] = {}
        for token, first in machine.vocabulary.twins.tolist():
            self._twins.setdefault(first, []).append(token)

    def matcher(self) -> "CheckedMatcher":
        return CheckedMatcher(self)

    def close(self) -> None:
        self.machine.close()

    def alike(self, token: int) -> list[int]:
        """`token`, and all others with its bytes."""
        return [token, *self._twins.get(token, ())]

    @cached_property
    def _accepted(self) -> list[bytes]:
        """Of each row of the automaton the bytes that it takes."""
        automaton = self.machine.automaton
        takes = (automaton.kinds > NO_STEP)[:, automaton.classes]
        return [np.flatnonzero(row).astype(np.uint8).tobytes() for row in takes]

    def accepted(self, state: int) -> bytes:
        """The bytes that may follow in `state`; maybe brackets that would be too deep, too."""
        return self._accepted[self.machine.automaton.row_of(state)]


class Suspects:
    """Masks of the tokens that may end an item: `inside` a string, `outside` one, and from `before` the
    first array or object that is checked.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        flags = np.zeros((3, vocabulary.size), np.bool_)
        for token, data in enumerate(vocabulary.tokens):
            if not vocabulary.is_text(token) or _SEPARATORS.isdisjoint(data):
                continue
            quote = data.find(b'"')
            opening = min((at for at in map(data.find, (b"[", b"{")) if at >= 0), default=len(data))
            flags[:, token] = (
                quote >= 0 and not _SEPARATORS.isdisjoint(data[quote:]),
                True,
                b"," in data[opening:],
            )
        self.inside, self.outside, self.before = map(vocabulary.pack, flags)


@lru_cache(maxsize=2)
def _suspects(vocabulary: Vocabulary) -> Suspects:
    """Once for a model."""
    return Suspects(vocabulary)


class CheckedMatcher:
    """The way of an output: its states in the automaton, and what it has written."""

    quick = True

    def __init__(self, shared: CheckedAutomaton) -> None:
        self._shared = shared
        self._machine = shared.machine
        self._written = Written(shared.places)
        self._states = [self._machine.start]
        self._cursors = [self._written.start()]
        self._kept: list[list[tuple[Seen, bytes]]] = []
        self._mask: NDArray[np.int32] | None = None

    @property
    def state(self) -> int:
        return self._states[-1]

    @property
    def everything(self) -> NDArray[np.int32]:
        return self._machine.vocabulary.everything

    def knows(self) -> bool:
        if not self._machine.knows(self._states[-1]):
            return False
        return self._mask is not None or not self._cursors[-1].near or self._cursors[-1].many() <= FEW

    def only(self) -> int:
        found = self._machine.only(self._states[-1])
        if found >= 0:
            return found
        mask = self.mask()
        if mask is self._machine.mask(self._states[-1]):
            return -1
        words = mask.view(np.uint32)
        some = np.flatnonzero(words)
        if len(some) != 1 or int(words[some[0]]).bit_count() != 1:
            return -1
        return 32 * int(some[0]) + int(words[some[0]]).bit_length() - 1

    def mask(self) -> NDArray[np.int32]:
        if self._mask is None:
            state = self._states[-1]
            found = self._machine.mask(state)
            if state != self._machine.end:
                doubling = self._doubling(found, state, self._cursors[-1])
                if doubling:
                    found = found.copy()
                    tokens = np.array(doubling)
                    bits = np.uint32(1) << (tokens & 31).astype(np.uint32)
                    np.bitwise_and.at(found.view(np.uint32), tokens >> 5, ~bits)
                    found.flags.writeable = False
            self._mask = found
        return self._mask

    def advance(self, token: int) -> bool:
        state = self._machine.advance(self._states[-1], token)
        if state < 0:
            return False
        cursor: Cursor | None = self._cursors[-1]
        if state != self._machine.end:
            cursor = self._behind(self._cursors[-1], token, state)
        if cursor is None:
            return False
        self._kept.append(self._written.commit(cursor))
        self._states.append(state)
        self._cursors.append(cursor)
        self._mask = None
        return True

    def rollback(self, count: int) -> None:
        if not 0 <= count < len(self._states):
            raise ValueError(f"cannot take back {count} of {len(self)} tokens")
        if not count:
            return
        del self._states[-count:]
        del self._cursors[-count:]
        undone = [one for kept in reversed(self._kept[-count:]) for one in reversed(kept)]
        del self._kept[-count:]
        self._written.take_back(self._cursors[-1].size, undone)
        self._mask = None

    def plan(self) -> Plan:
        return self._machine.plan(self._states[-1])

    def likely(self) -> tuple[int, ...]:
        return self._machine.likely(self._states[-1])

    def is_final(self) -> bool:
        return self._machine.is_final(self._states[-1])

    def has_ended(self) -> bool:
        return self._states[-1] == self._machine.end

    def __len__(self) -> int:
        return len(self._states) - 1

    def _behind(self, cursor: Cursor, token: int, state: int) -> Cursor | None:
        """Behind `token`, which leads to `state`; None if it doubles something, or nothing else can
        follow it.
        """
        found = self._written.walk(cursor, self._machine.vocabulary.tokens[token])
        return found if found is not None and self._can_differ(found, state) else None

    def _can_differ(self, cursor: Cursor, state: int) -> bool:
        """Whether something can follow that doubles nothing.

        As soon as what is under way is not the beginning of an earlier name or item it can: the rest of
        it may be anything that the automaton takes.
        """
        over, accepted = self._machine.automaton.over, self._shared.accepted
        todo = [(cursor, state)]
        looked_at = 0
        while todo and looked_at < MOST_LOOKED_AT:
            cursor, state = todo.pop()
            if not cursor.near:
                return True
            for byte in accepted(state):
                looked_at += 1
                target = over(state, byte)
                following = self._written.step(cursor, byte) if target >= 0 else None
                if following is not None:
                    if not following.near:
                        return True
                    todo.append((following, target))
        return looked_at >= MOST_LOOKED_AT

    def _doubling(self, mask: NDArray[np.int32], state: int, cursor: Cursor) -> list[int]:
        """The tokens of `mask` that double a name or an item, or could only go on to."""
        vocabulary, suspects = self._machine.vocabulary, self._shared.suspects
        if not cursor.watched:
            kind = suspects.before
        else:
            kind = suspects.inside if cursor.in_string else suspects.outside
        found: list[int] = []
        for token in _tokens(mask & kind):
            target = self._machine.advance(state, token)
            if token not in vocabulary.stop_ids and self._behind(cursor, token, target) is None:
                found.append(token)
        if cursor.near:
            self._look_along(cursor, state, found)
        return found

    def _look_along(self, cursor: Cursor, state: int, found: list[int]) -> None:
        """Add the tokens along the beginnings of earlier names and items."""
        tree, over = self._machine.vocabulary, self._machine.automaton.over
        todo: list[tuple[int, int, Cursor | None]] = [(0, state, cursor)]
        while todo:
            node, state, at = todo.pop()
            begin = int(tree.child[node])
            for child in range(begin, begin + int(tree.children[node])):
                byte = int(tree.byte[child])
                target = over(state, byte)
                if target < 0:
                    continue
                following = None if at is None else self._written.step(at, byte)
                if following is not None and not self._can_differ(following, target):
                    following = None
                if following is None:
                    if tree.token[child] >= 0:
                        found += self._shared.alike(int(tree.token[child]))
                elif not following.near:
                    continue
                todo.append((child, target, following))


def _tokens(mask: NDArray[np.int32]) -> list[int]:
    """The ids in a mask."""
    words = np.flatnonzero(mask)
    bits = np.unpackbits(mask[words].view(np.uint8), bitorder="little").reshape(len(words), 32)
    at, bit = np.nonzero(bits)
    found: list[int] = (32 * words[at] + bit).tolist()
    return found
