"""A byte automaton as it came from a compile worker: one array, which a device reads as it is. Pure.

`protocol.constraints.AutomatonBody` has its layout. Only what takes microseconds is computed beforehand:
a new constraint is to be followed at once.
"""

from collections.abc import Iterable
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ramify.protocol.constraints import NO_STEP, POP_STEP, WORDS_HEADER, ForcedTexts, Layout

Int32s = NDArray[np.int32]

POP_CODE, ENTER_CODE = -6, -7  # codes in `NestedAutomaton.table`


class Nesting(NamedTuple):
    """The values without a schema of an automaton. `returns` int32: the states after them."""

    layout: Layout
    returns: Int32s


class ByteAutomaton:
    """An automaton. `words`: the body; `forced`: texts that must follow. `states`: their number, without
    the end and those inside values without a schema; the start is state 0.

    `columns`: number of classes of bytes; `classes` uint8 [256]: that of each byte; `final` bool
    [states]: whether the output may end there; `row` int32 [states]: which row of `kinds` int32 [rows,
    columns] has a state's steps over each class. `layout`: the numbering of states inside values without
    a schema; `nesting`: None: there are no such values.
    """

    nesting: Nesting | None = None

    def __init__(self, words: Int32s, forced: ForcedTexts) -> None:
        self.words, self.forced = words, forced
        self.columns, self.states = int(words[0]), int(words[1])
        self.layout = Layout(self.states, *words[3:WORDS_HEADER].tolist())
        behind = WORDS_HEADER + 256
        self.classes = words[WORDS_HEADER:behind].astype(np.uint8)
        self.final = words[behind : behind + self.states] > 0
        size = self.states + 1 + self.layout.inner
        begins = words[behind + size :][:size]
        steps = words[behind + 2 * size :][: int(words[2]) * self.columns]
        self.kinds = steps.reshape(int(words[2]), self.columns)
        self.row = begins[: self.states] // self.columns
        # for single look-ups, which are faster so than in arrays
        self._class = self.classes.tobytes()
        self._begins = begins.data
        self._steps = steps.data

    @cached_property
    def next(self) -> Int32s:
        """The state after a byte of each class, or -1: int32 [states, columns]."""
        steps = self.kinds[self.row]
        ahead = np.where(steps & 1, 0, np.arange(self.states, dtype=np.int32)[:, None])
        steps >>= 1
        steps += ahead
        return np.maximum(steps, -1, out=steps)

    @cached_property
    def table(self) -> Int32s:
        """`next`, followed by rows of states inside values without a schema."""
        return self.next

    def is_final(self, state: int) -> bool:
        """Whether the output may end in `state`, which is not the end."""
        return bool(self.final[state])

    def outer(self, state: int) -> int:
        """Return `state`, or, inside a value without a schema, the state after that value."""
        return state

    def row_of(self, state: int) -> int:
        """Return which row of `kinds` has the steps of `state`, which is not the end."""
        return int(self.row[state])

    def over(self, state: int, byte: int) -> int:
        """Return the state after `byte`, below 0: none."""
        step = self._steps[self._begins[state] + self._class[byte]]
        return step >> 1 if step & 1 else state + (step >> 1)

    def behind(self, state: int, data: Iterable[int]) -> int:
        """Return the state after all of `data`, -1: none."""
        begins, steps, classes = self._begins, self._steps, self._class
        for byte in data:
            step = steps[begins[state] + classes[byte]]
            state = step >> 1 if step & 1 else state + (step >> 1)
            if state < 0:
                return -1
        return state


class NestedAutomaton(ByteAutomaton):
    """An automaton with values without a schema: see `protocol.constraints.Layout`."""

    def __init__(self, words: Int32s, forced: ForcedTexts) -> None:
        super().__init__(words, forced)
        layout = self.layout
        self._returns = words[len(words) - layout.returns :]
        self.nesting = Nesting(layout, self._returns)
        self._first = self.states + 1  # of those values' states
        self._inner = (1 << layout.bits) - 1
        self._innermost = (1 << layout.shift) - 1

    @cached_property
    def next(self) -> Int32s:
        """The states, -1, or codes: `ENTER_CODE` - i - 2 * r where a value begins, with inner state i
        and return number r.
        """
        layout = self.layout
        found = super().next
        entries = found >= self._first
        inside = found[entries] - self._first
        numbers = (inside >> layout.bits) & (self._innermost >> layout.bits)
        found[entries] = ENTER_CODE - (inside & self._inner) - 2 * numbers
        return found

    @cached_property
    def table(self) -> Int32s:
        """`next`, and the rows of inner states, whose codes are -2 - bit - 2 * i and `POP_CODE` (see
        `AutomatonBody`).
        """
        begins = self.words[WORDS_HEADER + 256 + self._first + self.layout.inner :][self._first :]
        steps = self.kinds[begins[: self.layout.inner] // self.columns]
        states = np.arange(self.states, self.states + len(steps), dtype=np.int32)[:, None]
        inner = np.where(
            steps & 1, (steps >> 1) - 1, np.where(steps == NO_STEP, -1, states + (steps >> 1))
        )
        return np.concatenate([self.next, inner])

    def is_final(self, state: int) -> bool:
        return state < self.states and bool(self.final[state])

    def outer(self, state: int) -> int:
        inside = state - self._first
        if inside < 0:
            return state
        return int(self._returns[(inside & self._innermost) >> self.layout.bits])

    def row_of(self, state: int) -> int:
        return int(self._begins[self.index_of(state)]) // self.columns

    def index_of(self, state: int) -> int:
        """Return `state` itself, or the place of its inner state after the end."""
        first = self._first
        return state if state < first else first + ((state - first) & self._inner)

    def over(self, state: int, byte: int) -> int:
        first = self._first
        if state < first:
            step = self._steps[self._begins[state] + self._class[byte]]
            return step >> 1 if step & 1 else state + (step >> 1)
        inside = state - first
        step = self._steps[self._begins[first + (inside & self._inner)] + self._class[byte]]
        if not step & 1:
            return state + (step >> 1)
        stack, rest = inside >> self.layout.shift, inside & self._innermost & ~self._inner
        if step == POP_STEP:
            if stack == 1:
                return int(self._returns[rest >> self.layout.bits])
            return first + (stack >> 1 << self.layout.shift) + rest + 2 + (stack & 1)
        if stack >> self.layout.depth - 1:
            return -1
        code = -1 - step >> 1
        return first + (2 * stack + (code & 1) << self.layout.shift) + rest + (code >> 1)

    def behind(self, state: int, data: Iterable[int]) -> int:
        for byte in data:
            state = self.over(state, byte)
            if state < 0:
                return -1
        return state


def read_words(words: Int32s, forced: ForcedTexts) -> ByteAutomaton:
    """Make the automaton of an `AutomatonBody`."""
    return NestedAutomaton(words, forced) if words[3] else ByteAutomaton(words, forced)


def anything() -> ByteAutomaton:
    """Make an automaton of one state that takes every text."""
    words = [1, 1, 2, *[0] * 5, *[0] * 256, 1, 1, 0, 1, 0, NO_STEP]
    return ByteAutomaton(np.array(words, np.int32), ForcedTexts(*[b""] * 6))
