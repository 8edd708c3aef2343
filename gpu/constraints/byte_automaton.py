"""A byte automaton as it came from a compile worker: one array, which a device reads as it is. Pure.

See `protocol.constraints.AutomatonBody` for what is where. Nothing is made of it beforehand but what
takes microseconds: a constraint that nobody has seen is to be followed at once.
"""

from collections.abc import Iterable
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ramify.protocol.constraints import NO_STEP, WORDS_HEADER, ForcedTexts

Int32s = NDArray[np.int32]


class ByteAutomaton:
    """`words`: as int32; `forced`: which texts must follow. `states`: how many, without the end; the
    start is state 0.

    `columns`: classes of bytes; `classes` uint8 [256]: that of each byte; `final` bool [states]: whether
    the output may end there; `row` int32 [states]: which of `kinds` int32 [rows, columns] has a state's
    steps over each class.
    """

    def __init__(self, words: Int32s, forced: ForcedTexts) -> None:
        self.words, self.forced = words, forced
        self.columns, self.states = int(words[0]), int(words[1])
        behind = WORDS_HEADER + 256
        self.classes = words[WORDS_HEADER:behind].astype(np.uint8)
        self.final = words[behind : behind + self.states] > 0
        begins = words[behind + self.states + 1 :][: self.states + 1]
        steps = words[behind + 2 * (self.states + 1) :]
        self.kinds = steps.reshape(int(words[2]), self.columns)
        self.row = begins[:-1] // self.columns
        # what is looked up one by one: faster so than in arrays
        self._class = self.classes.tobytes()
        self._begins = begins.data
        self._steps = steps.data

    @cached_property
    def next(self) -> Int32s:
        """int32 [states, columns]: the state behind a byte of each class, or -1."""
        steps = self.kinds[self.row]
        ahead = np.where(steps & 1, 0, np.arange(self.states, dtype=np.int32)[:, None])
        steps >>= 1
        steps += ahead
        return np.maximum(steps, -1, out=steps)

    def over(self, state: int, byte: int) -> int:
        """The state behind `byte`, below 0 for none."""
        step = self._steps[self._begins[state] + self._class[byte]]
        return step >> 1 if step & 1 else state + (step >> 1)

    def behind(self, state: int, data: Iterable[int]) -> int:
        """The state behind all of `data`, -1 for none."""
        begins, steps, classes = self._begins, self._steps, self._class
        for byte in data:
            step = steps[begins[state] + classes[byte]]
            state = step >> 1 if step & 1 else state + (step >> 1)
            if state < 0:
                return -1
        return state


def anything() -> ByteAutomaton:
    """One state that takes every text."""
    words = [1, 1, 2, 0, *[0] * 256, 1, 1, 0, 1, 0, NO_STEP]
    return ByteAutomaton(np.array(words, np.int32), ForcedTexts(*[b""] * 6))
