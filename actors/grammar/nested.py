"""Values of any depth: arrays and objects that no schema describes, as letters of an automaton. Pure.

To write such a value out takes a copy of all that it may hold for each level of nesting, twice as many
for each level more. So there are two letters for it, `OBJECT` and `ARRAY`: bytes that no text has. What
puts languages together (one behind the other, again and again, either of two) may take them for bytes;
what intersects or subtracts may not, as a letter stands for many texts.

A letter beside the bracket that its texts begin with would leave two ways to go on: there one level of
it is written out. Elsewhere an output goes from the letter's state into one table that all these values
share, and at their end to the state behind the letter. Meanwhile it has a stack: a bit for each array or
object that is open, which says what it stands in. See `protocol.constraints.Layout`.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ramify.actors.grammar.automaton import Automaton
from ramify.actors.grammar.combining import determinize
from ramify.actors.grammar.fragment import Fragment, TooAmbiguous, before
from ramify.protocol.constraints import Layout
from ramify.protocol.errors import ConstraintError

OBJECT, ARRAY = 0xF8, 0xF9
LEAST_DEPTH = 8
POP_CODE = -6  # codes of `Inside.next`; from here up to -2 there are those of pushes
BRACKETS = b"{["  # what the texts of the letters begin with
_LETTERS = bytes((OBJECT, ARRAY))
_NO_TEXT = 0xF5  # a byte that no text has, and no letter
_MOST_ROUNDS = 12  # levels that are written out
_MOST_COPIES = 64  # of objects and arrays, in one round

Table = NDArray[np.int32]


class Unsettled(ConstraintError):
    """Letters stand beside brackets in too many ways."""


class Inside(NamedTuple):
    """What follows the opening bracket of a letter's text, up to the closing one.

    `next` int32 [states, classes]: the next state, -1 for none, or a code, `POP_CODE` behind the closing
    bracket, or push(bit, kind). `classes` uint8 [256]. State 0 is behind `{`, 1 behind `[`, 2 behind a
    member, 3 behind an item.
    """

    next: Table
    classes: NDArray[np.uint8]


def push(bit: int, kind: int) -> int:
    """The code of an object (`kind` 0) or array (1) that begins in an object (`bit` 0) or array (1)."""
    return -2 - bit - 2 * kind


class Containers(NamedTuple):
    """Objects and arrays, of strings, numbers, literals and letters, and what they have inside."""

    objects: Automaton
    arrays: Automaton
    inside: Inside

    @classmethod
    def of(cls, objects: Automaton, arrays: Automaton) -> "Containers":
        """Containers of both automata, which have no useless or equal states, and the
        same separators.
        """
        return cls(objects, arrays, _inside((objects, arrays)))


class Letters(NamedTuple):
    """Edges over letters: from which states, over which letter (0 or 1), and to which ones."""

    states: NDArray[np.int64]
    kinds: NDArray[np.int64]
    targets: NDArray[np.int32]

    def where(self, flags: NDArray[np.bool_]) -> "Letters":
        """The letters with a flag."""
        return Letters(self.states[flags], self.kinds[flags], self.targets[flags])


class Nested(Automaton):
    """An automaton with letters, none beside its bracket; `classes` includes them. `returns`: the states
    behind letters, ascending.
    """

    __slots__ = ("inside", "layout", "letters", "returns")

    def __init__(self, automaton: Automaton, letters: Letters, inside: Inside) -> None:
        super().__init__(automaton.next, automaton.classes, automaton.final)
        self.letters = letters
        self.inside = inside
        self.returns: NDArray[np.int32] = np.unique(letters.targets)
        self.layout = Layout.of(len(automaton), len(self.returns), len(inside.next))
        if self.layout.depth < LEAST_DEPTH:
            raise Unsettled("too many values are not described")

    def walk(self, data: bytes, state: int = 0) -> int:
        """The state behind `data`, or -1; len(self) where a letter's text is open."""
        stack: list[int] = []  # the state behind the letter, then bits
        for byte in data:
            kind = BRACKETS.find(byte)
            if stack:
                following = int(self.inside.next[state, self.inside.classes[byte]])
                if following == POP_CODE:
                    last = stack.pop()
                    state = 2 + last if stack else last
                elif following < -1:
                    stack.append((-2 - following) & 1)
                    state = kind if len(stack) <= self.layout.depth else -1
                else:
                    state = following
            elif kind >= 0 and (behind := self._behind(state, kind)) >= 0:
                stack.append(behind)
                state = kind
            else:
                letter = byte in _LETTERS and self._behind(state, _LETTERS.index(byte)) >= 0
                state = -1 if letter else int(self.next[state, self.classes[byte]])
            if state < 0:
                return -1
        return len(self) if stack else state

    def accepts(self, data: bytes) -> bool:
        state = self.walk(data)
        return 0 <= state < len(self) and bool(self.final[state])

    def without_letters(self) -> NDArray[np.uint8]:
        """`classes`, letters as bytes that no text has."""
        return _no_letters(self.classes)

    def _behind(self, state: int, kind: int) -> int:
        """The state behind a letter in `state`, -1 if it has none."""
        found = (self.letters.states == state) & (self.letters.kinds == kind)
        return int(self.letters.targets[found][0]) if found.any() else -1


def nested(automaton: Automaton, containers: Containers, *, as_it_is: bool = False) -> Automaton:
    """The automaton that `automaton`, with its letters, stands for. `as_it_is`: keep its states.

    Raises `Unsettled`.
    """
    for _ in range(_MOST_ROUNDS):
        letters = _letters(automaton)
        if not len(letters.states):
            return automaton
        columns = automaton.classes[list(BRACKETS)][letters.kinds]
        beside = automaton.next[letters.states, columns] >= 0
        if not beside.any():
            return Nested(automaton, letters, containers.inside)
        if as_it_is:
            break
        # with the same letters elsewhere: of these and what stands beside them there may be more unions
        pairs = letters.targets.astype(np.int64) * 2 + letters.kinds
        same = np.isin(pairs, pairs[beside])
        try:
            automaton = _written_out(automaton, letters.where(same), containers)
        except TooAmbiguous as error:
            raise Unsettled(error.message) from None
    raise Unsettled("values that are described stand beside such that are not, too deep in each other")


def may_hold(containers: Containers, text: str) -> bool:
    """Whether an array or object may begin in `text` and go on behind it."""
    data = text.encode()
    return any(
        nested(part, containers).walk(data[at:]) >= 0
        for part in (containers.objects, containers.arrays)
        for at in range(len(data))
        if data[at] in BRACKETS
    )


def _letters(automaton: Automaton) -> Letters:
    """The states to which letters lead; so do bytes that are no text where anything may be written."""
    columns = automaton.classes[list(_LETTERS)]
    there = automaton.next[:, columns]
    anything = automaton.next[:, automaton.classes[_NO_TEXT]][:, None]
    states, kinds = np.nonzero((there >= 0) & (there != anything))
    if (anything[states] >= 0).any():
        raise Unsettled("values that no schema describes stand beside free text")
    return Letters(states, kinds, there[states, kinds])


def _written_out(automaton: Automaton, letters: Letters, containers: Containers) -> Automaton:
    """`automaton` with one level of these letters replaced by what they stand for."""
    parts = (automaton, containers.objects, containers.arrays)
    first, classes = joined([part.classes for part in parts])
    tables = [part.next[:, part.classes[first]] for part in parts]
    whole = tables[0].copy()
    whole[letters.states, classes[list(_LETTERS)][letters.kinds]] = -1
    placed, size = [whole], len(whole)
    jumps: dict[int, list[int]] = {}
    starts: dict[tuple[int, int], int] = {}
    for state, kind, target in zip(*(part.tolist() for part in letters), strict=True):
        start = starts.get((kind, target))
        if start is None:
            start = starts[kind, target] = size
            if len(starts) > _MOST_COPIES:
                raise Unsettled("values that are described stand beside many that are not")
            table = tables[1 + kind]
            placed.append(np.where(table >= 0, table + size, -1).astype(np.int32, copy=False))
            for end in np.flatnonzero(parts[1 + kind].final).tolist():
                jumps[size + end] = [target]
            size += len(table)
        jumps.setdefault(state, []).append(start)
    table = np.concatenate(placed)
    final = np.zeros(size, np.bool_)
    final[: len(whole)] = automaton.final
    seeds = np.zeros(size, np.bool_)
    seeds[list(jumps)] = True
    pure = ~before(Fragment(table, final), seeds)
    return Automaton.of(determinize(table, final, jumps, [0], pure), classes)


def _inside(parts: tuple[Automaton, Automaton]) -> Inside:
    first, classes = joined([part.classes for part in parts])
    opening, letter = classes[list(BRACKETS)], classes[OBJECT]
    base, tables, heads = 0, [], []
    for bit, part in enumerate(parts):
        table = part.next[:, part.classes[first]].copy()
        outer = np.flatnonzero(table[:, letter] >= 0)
        heads += [
            (bit, base + int(table[0, opening[bit]])),
            (2 + bit, base + int(table[outer[0], letter])),
        ]
        ended = (table >= 0) & part.final[table]
        table[table >= 0] += base
        table[ended] = POP_CODE
        for kind in range(2):
            table[outer, opening[kind]] = push(bit, kind)
        table[:, classes[list(_LETTERS)]] = -1
        tables.append(table)
        base += len(table)
    used = np.concatenate([part.final for part in parts])
    used[[0, len(parts[0])]] = True
    order = [state for _, state in sorted(heads)]
    order += [state for state in np.flatnonzero(~used).tolist() if state not in order]
    whole = np.concatenate(tables)
    numbers = np.zeros(base, np.int32)
    numbers[order] = np.arange(len(order))
    return Inside(np.where(whole >= 0, numbers[whole], whole)[order].astype(np.int32), classes)


def _no_letters(classes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    found = classes.copy()
    found[list(_LETTERS)] = found[_NO_TEXT]
    return found


def joined(classes: Sequence[NDArray[np.uint8]]) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    """Classes that tell apart what any of `classes` does: a byte of each, and that of each byte."""
    _, first, found = np.unique(np.stack(classes), axis=1, return_index=True, return_inverse=True)
    return first, found.ravel().astype(np.uint8)
