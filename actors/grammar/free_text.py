"""Free text that is searched for triggers, as an automaton (Aho and Corasick 1975). Pure.

Free text is anything: any bytes, any tokens that are no text. So as long as no trigger is complete,
every token is legal, but for those that would complete one and go on wrongly.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ramify.actors.grammar.automaton import Automaton
from ramify.actors.grammar.fragment import Fragment
from ramify.actors.grammar.marks import BEGIN, END, symbols
from ramify.protocol.errors import ConstraintError

MAX_TRIGGER_BYTES = 8_192  # of all triggers together
_BYTES = 254  # those that are no part of a mark


class FreeText(NamedTuple):
    """`automaton`: of the texts without a trigger. `ends`: for each trigger, the state behind it, from
    which nothing leads on.
    """

    automaton: Automaton
    ends: list[int]


def free_text(triggers: Sequence[bytes]) -> FreeText:
    """Text up to one of `triggers`: the first that is complete, and of several at once the longest."""
    if sum(map(len, triggers)) > MAX_TRIGGER_BYTES:
        raise ConstraintError(f"the triggers have more than {MAX_TRIGGER_BYTES} bytes: shorten them")
    tree = _Tree(triggers)
    table, final = tree.table()
    made = Automaton.of(Fragment(table, final), np.arange(256).astype(np.uint8))
    return FreeText(made, tree.ends)


class _Tree:
    """The triggers as a tree over symbols: bytes and marks. A node is a state."""

    def __init__(self, triggers: Sequence[bytes]) -> None:
        self._edges: list[dict[bytes, int]] = [{}]
        self._complete: list[bool] = [False]
        self.ends: list[int] = []
        for trigger in triggers:
            node = 0
            for symbol in symbols(trigger):
                if self._complete[node]:  # a shorter one is complete before
                    break
                node = self._edges[node].setdefault(symbol, len(self._edges))
                if node == len(self._edges):
                    self._edges.append({})
                    self._complete.append(False)
            self._complete[node] = True
            self.ends.append(node)

    def _ways(self) -> list[dict[bytes, int]]:
        """For each node, all symbols that do not lead to the root."""
        ways = [dict(self._edges[0])]
        ways += [{} for _ in self._edges[1:]]
        queue = [(child, 0) for child in self._edges[0].values()]
        for node, fallback in queue:  # the longest other beginning that ends like this node
            ways[node] = {**ways[fallback], **self._edges[node]}
            if self._complete[fallback] and not self._complete[node]:
                # what ends here was complete inside a longer one
                self._complete[node] = True
                self._same_end(node, fallback)
            for symbol, child in self._edges[node].items():
                queue.append((child, ways[fallback].get(symbol, 0)))
        return ways

    def _same_end(self, node: int, other: int) -> None:
        """`node` ends as the trigger of `other` does."""
        self._alias[node] = self._alias.get(other, other)

    def table(self) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """The states, and which are free text."""
        self._alias: dict[int, int] = {}
        ways = self._ways()
        count = len(ways)
        rows: list[NDArray[np.int32]] = []
        inside: dict[tuple[tuple[bytes, int], ...], int] = {}  # states of the names of marks
        names: list[NDArray[np.int32]] = []

        def named(marks: tuple[tuple[bytes, int], ...]) -> int:
            """The state behind 0xFF and a part of a name; `marks`: the rest of each, and its node."""
            found = inside.get(marks)
            if found is None:
                found = inside[marks] = count + len(inside)
                row = np.full(256, -1, np.int32)
                names.append(row)
                row[:_BYTES] = named(()) if marks else found
                row[END] = next((node for rest, node in marks if rest == b"\xfe"), 0)
                for byte in {rest[0] for rest, _ in marks if rest != b"\xfe"}:
                    row[byte] = named(tuple((rest[1:], node) for rest, node in marks if rest[0] == byte))
            return found

        for node in range(count):
            row = np.full(256, -1, np.int32)
            rows.append(row)
            if self._complete[node]:
                continue
            row[:_BYTES] = 0
            marks = []
            for symbol, target in sorted(ways[node].items()):
                target = self._alias.get(target, target)
                if symbol[0] == BEGIN:
                    marks.append((symbol[1:], target))
                else:
                    row[symbol[0]] = target
            row[BEGIN] = named(tuple(marks))
        table = np.stack(rows + names)
        final = np.zeros(len(table), np.bool_)
        final[:count] = ~np.array(self._complete)
        return table, final
