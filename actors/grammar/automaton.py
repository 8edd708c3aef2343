"""Immutable deterministic automata over bytes: the languages that constraints stand for. Pure.

Every accepted text is valid UTF-8. An automaton is made from a regex (`from_regex`), from an expression
(`from_expression`), or from other automata (`union`, `intersect`, `minus`). To build a larger language
around one, put it into an expression (`expression.Embedded`).

It does not know tokens or models.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ramify.actors.grammar.combining import product
from ramify.actors.grammar.compiler import compile_expression
from ramify.actors.grammar.expression import ANY_TEXT, Expression
from ramify.actors.grammar.fragment import Fragment, nothing, reduce
from ramify.actors.grammar.regex import parse


class Automaton:
    """A DFA without useless states. `start` is 0.

    `next`: int32 [states, classes], the next state or -1. `classes`: uint8 [256], the column of each
    byte. `final`: bool [states].
    """

    __slots__ = ("classes", "final", "next")

    def __init__(
        self, next: NDArray[np.int32], classes: NDArray[np.uint8], final: NDArray[np.bool_]
    ) -> None:
        self.next = next
        self.classes = classes
        self.final = final
        for array in (next, classes, final):
            array.flags.writeable = False

    @classmethod
    def from_regex(cls, pattern: str, *, search: bool = False) -> "Automaton":
        r"""The texts that `pattern` matches as a whole; `search`: those that hold a match.

        Python's syntax with re.ASCII; ECMA 262's spellings of escapes are known too. Two things differ
        from Python: `$` is the end of the text only, and there are no backward looks, back references,
        possessive or conditional parts. Lookahead is for what nothing follows but the rest of the
        pattern. Raises ConstraintError with the position.
        """
        return cls.from_expression(parse(pattern), search=search)

    @classmethod
    def from_expression(cls, expression: Expression, *, search: bool = False) -> "Automaton":
        """The texts of `expression`; `search`: those that hold one. Raises ConstraintError."""
        return cls.of(*compile_expression(expression, search=search))

    @classmethod
    def of(cls, part: Fragment, classes: NDArray[np.uint8]) -> "Automaton":
        """The automaton of a fragment, with equal columns of the table merged."""
        if not part.final.any():
            part = nothing(part.table.shape[1])
        columns: dict[bytes, int] = {}
        turned = np.ascontiguousarray(part.table.T)
        numbers = [columns.setdefault(column.tobytes(), len(columns)) for column in turned]
        table = part.table
        if len(columns) < len(numbers):
            table = table[:, [numbers.index(i) for i in range(len(columns))]]
        return cls(
            np.ascontiguousarray(table),
            np.array(numbers, np.uint8)[classes],
            part.final.copy(),
        )

    def __len__(self) -> int:
        """States."""
        return len(self.final)

    def is_empty(self) -> bool:
        """Whether no text at all is accepted."""
        return not self.final.any()

    def walk(self, data: bytes, state: int = 0) -> int:
        """The state behind `data`, or -1."""
        for byte in data:
            if state < 0:
                return -1
            state = int(self.next[state, self.classes[byte]])
        return state

    def accepts(self, data: bytes) -> bool:
        """Whether `data` as a whole is in the language."""
        state = self.walk(data)
        return state >= 0 and bool(self.final[state])

    def union(self, *others: "Automaton") -> "Automaton":
        """The texts of this one or any other."""
        return self._combined(others, "or")

    def intersect(self, *others: "Automaton") -> "Automaton":
        """The texts of this one and all others."""
        return self._combined(others, "and")

    def minus(self, *others: "Automaton") -> "Automaton":
        """The texts of this one that no other has."""
        return self._combined(others, "minus")

    def complement(self) -> "Automaton":
        """All other texts, valid UTF-8 too."""
        return Automaton.from_expression(ANY_TEXT).minus(self)

    def includes(self, other: "Automaton") -> bool:
        """Whether every text of `other` is one of this one's."""
        return other.minus(self).is_empty()

    def overlaps(self, other: "Automaton") -> bool:
        """Whether a text is in both."""
        return not self.intersect(other).is_empty()

    def equals(self, other: "Automaton") -> bool:
        """Whether both have the same texts."""
        return self.includes(other) and other.includes(self)

    def _combined(self, others: Sequence["Automaton"], mode: str) -> "Automaton":
        found = self
        for other in others:
            codes = found.classes.astype(np.int64) * 256 + other.classes
            _, first, classes = np.unique(codes, return_index=True, return_inverse=True)
            left = Fragment(found.next[:, found.classes[first]], found.final)
            right = Fragment(other.next[:, other.classes[first]], other.final)
            found = Automaton.of(reduce(product(left, right, mode)), classes.astype(np.uint8))
        return found
