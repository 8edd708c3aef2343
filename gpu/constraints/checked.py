"""An automaton whose outputs are also checked for repeated names and items.

The automaton's masks are those of all its outputs. Where names or items of an output have to differ
(`written`), its mask is a copy of the automaton's without the tokens that repeat one, or after which
every text would. So two kinds of tokens are looked at: those that spell the beginning of an earlier name
or item, and those with a comma or a closing bracket in them. Outside of all checked values the masks are
the same for all outputs: they lack only tokens that begin such a value and repeat something in it.

Text that the automaton forces is forced here too: a byte is only taken if a text can follow it that
repeats nothing.
"""

from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from ramify.gpu.constraints.byte_automaton import ENTER_CODE
from ramify.gpu.constraints.matcher import StatesConstraint, StatesMatcher
from ramify.gpu.constraints.token_automaton import TokenAutomaton
from ramify.gpu.constraints.vocabulary import Vocabulary
from ramify.gpu.constraints.written import OPENINGS, Cursor, Seen, WrittenOutput
from ramify.protocol.constraints import NO_STEP, JsonChecks
from ramify.protocol.errors import ConstraintError

MOST_LOOKED_AT = 2_000  # bytes that are tried to see whether an item can still differ
FEW = 16  # names and items; with more of them a mask is made in a thread

_SEPARATORS = frozenset(b",]}")


class CheckedAutomaton(StatesConstraint):
    """The constraint of an automaton and checks. `begins`: see `protocol.constraints.JsonChecks`;
    `doubling`: of states outside of checked values, the tokens that repeat something.
    """

    def __init__(self, machine: TokenAutomaton, checked: JsonChecks) -> None:
        """Raises ConstraintError if the begun text already repeats something."""
        super().__init__(machine)
        self._checked = checked
        self.begins = dict(checked.begins)
        self.suspects = _suspects(machine.vocabulary)
        self.doubling: dict[int, list[int]] = {}
        self.written()
        self._twins: dict[int, list[int]] = {}
        for token, first in machine.vocabulary.twins.tolist():
            self._twins.setdefault(first, []).append(token)

    def matcher(self) -> "CheckedMatcher":
        return CheckedMatcher(self)

    def written(self) -> tuple[WrittenOutput, Cursor]:
        """Begin a new output. Raises ConstraintError."""
        found = WrittenOutput(self._checked.places)
        place, text = self._checked.begun
        cursor = found.walk(found.start(), text, place)
        if cursor is None:
            raise ConstraintError("what stands there already has a name or an item twice")
        found.commit(cursor)
        return found, cursor

    def look_around(self) -> None:
        super().look_around()
        _ = self._beginning

    def may_begin(self, state: int) -> bool:
        """Whether a token may begin a checked value after `state`, and go on after a comma in it."""
        state = self.machine.automaton.outer(state)
        return state != self.machine.end and bool(self._beginning[state])

    @cached_property
    def _beginning(self) -> NDArray[np.bool_]:
        """Tell for each state whether a checked value begins in it, or after few enough bytes."""
        automaton = self.machine.automaton
        table = automaton.next
        if automaton.nesting is not None:  # where a value that no schema describes may be two brackets
            table = table.copy()
            entered = table <= ENTER_CODE
            table[entered] = automaton.nesting.returns[(ENTER_CODE - table[entered]) >> 1]
        found = np.zeros(len(table), np.bool_)
        found[list(self.begins)] = True
        sources, columns = np.nonzero(table >= 0)
        targets = table[sources, columns]
        for _ in range(self.suspects.ahead):
            new = sources[found[targets]]
            if found[new].all():
                break
            found[new] = True
        return found

    def alike(self, token: int) -> list[int]:
        """List `token`, and all others with its bytes."""
        return [token, *self._twins.get(token, ())]

    @cached_property
    def _accepted(self) -> list[bytes]:
        """The bytes that each row of the automaton takes."""
        automaton = self.machine.automaton
        takes = (automaton.kinds > NO_STEP)[:, automaton.classes]
        return [np.flatnonzero(row).astype(np.uint8).tobytes() for row in takes]

    def accepted(self, state: int) -> bytes:
        """Return the bytes that may follow in `state`, perhaps with brackets that are too deep."""
        return self._accepted[self.machine.automaton.row_of(state)]


class ItemEndMasks:
    """Masks of the tokens that may end an item: from `inside` a string, from `outside` one, and from
    `before` a checked array or object, which begins after at most `ahead` bytes of the token.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        flags = np.zeros((3, vocabulary.size), np.bool_)
        self.ahead = 0
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
            if flags[2, token]:
                self.ahead = max(self.ahead, data.rfind(b","))
        self.inside, self.outside, self.before = map(vocabulary.pack, flags)


@lru_cache(maxsize=2)
def _suspects(vocabulary: Vocabulary) -> ItemEndMasks:
    """Make the masks, once for a model."""
    return ItemEndMasks(vocabulary)


class CheckedMatcher(StatesMatcher):
    """The matcher of an output: its states in the automaton, and what it has written."""

    def __init__(self, shared: CheckedAutomaton) -> None:
        super().__init__(shared.machine)
        self._shared = shared
        self._written, cursor = shared.written()
        self._cursors = [cursor]
        self._kept: list[list[tuple[Seen, bytes]]] = []
        self._mask: NDArray[np.int32] | None = None

    def knows(self) -> bool:
        state, cursor = self._states[-1], self._cursors[-1]
        if not self._machine.knows(state):
            return False
        if cursor.outside:
            return not self._is_looked_at(state) or self._machine.only(state) >= 0
        return self._mask is not None or not cursor.near or cursor.many() <= FEW

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
            cursor = self._behind(self._cursors[-1], self._states[-1], token, state)
        if cursor is None:
            return False
        self._kept.append(self._written.commit(cursor))
        self._states.append(state)
        self._cursors.append(cursor)
        self._mask = None
        return True

    def rollback(self, count: int) -> None:
        self._check_way_back(count)
        if not count:
            return
        del self._states[-count:]
        del self._cursors[-count:]
        undone = [one for kept in reversed(self._kept[-count:]) for one in reversed(kept)]
        del self._kept[-count:]
        self._written.take_back(self._cursors[-1].size, undone)
        self._mask = None

    def _behind(self, cursor: Cursor, state: int, token: int, target: int) -> Cursor | None:
        """Move behind `token`, which leads from `state` to `target`. None: it repeats something, or
        every text after it would.
        """
        found = self._walk(cursor, state, self._machine.vocabulary.tokens[token])
        return found if found is not None and self._can_differ(found, target) else None

    def _walk(self, cursor: Cursor, state: int, data: bytes) -> Cursor | None:
        """Move behind `data`, from `state` on. None: it repeats something. Any value may begin in it."""
        step, begins = self._written.step, self._shared.begins
        walked = 0  # bytes that lead to `state`
        for at, byte in enumerate(data):
            root = -1
            if byte in OPENINGS and cursor.outside:
                state, walked = self._machine.automaton.behind(state, data[walked:at]), at
                root = begins.get(state, -1)
            found = step(cursor, byte, root)
            if found is None:
                return None
            cursor = found
        return cursor

    def _can_differ(self, cursor: Cursor, state: int) -> bool:
        """Whether a text can follow that repeats nothing.

        It can as soon as the begun name or item is not the beginning of an earlier one: the rest of it
        may be anything that the automaton takes.
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
        """List the tokens of `mask` that repeat a name or an item, or after which every text would."""
        suspects = self._shared.suspects
        if cursor.outside:
            if self._is_looked_at(state):
                found = self._doubling_of(mask & suspects.before, state, cursor)
                self._shared.doubling[state] = found
            return self._shared.doubling.get(state, [])
        if not cursor.watched:
            kind = suspects.before
        else:
            kind = suspects.inside if cursor.in_string else suspects.outside
        found = self._doubling_of(mask & kind, state, cursor)
        if cursor.near:
            self._look_along(cursor, state, found)
        return found

    def _is_looked_at(self, state: int) -> bool:
        """Whether tokens are still to be looked at in `state`, outside of checked values."""
        return self._shared.may_begin(state) and state not in self._shared.doubling

    def _doubling_of(self, mask: NDArray[np.int32], state: int, cursor: Cursor) -> list[int]:
        """List the tokens of a mask that repeat something, or after which every text would."""
        found: list[int] = []
        for token in _tokens(mask):
            target = self._machine.advance(state, token)
            if token in self._machine.vocabulary.stop_ids:
                continue
            if self._behind(cursor, state, token, target) is None:
                found.append(token)
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
    """List the ids in a mask."""
    words = np.flatnonzero(mask)
    bits = np.unpackbits(mask[words].view(np.uint8), bitorder="little").reshape(len(words), 32)
    at, bit = np.nonzero(bits)
    found: list[int] = (32 * words[at] + bit).tolist()
    return found
