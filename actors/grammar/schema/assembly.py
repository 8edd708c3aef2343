"""Automata put together from states of our own and copies of others, without ambiguity. Pure.

JSON is deterministic: what comes next tells a comma from a bracket, and a quote from a digit. So arrays
and objects are laid out as tables, and each value inside is copied once for each place that it can end
in. The subset construction is needed for unions only.
"""

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from ramify.actors.grammar.automaton import Automaton
from ramify.actors.grammar.combining import choice
from ramify.actors.grammar.fragment import Fragment, reduce
from ramify.actors.grammar.limits import MAX_STATES
from ramify.actors.grammar.schema.errors import TooLarge

_ROOM = 2 * MAX_STATES  # states before equal ones are merged


class Assembly:
    """An automaton under construction. `parts`: all that may be placed; `data`: all bytes of edges."""

    def __init__(self, parts: Iterable[Automaton], data: Iterable[int]) -> None:
        codes = np.zeros(256, np.int64)
        codes[list(data)] = 1 + np.array(list(data), np.int64)
        self._parts = {id(part): part for part in parts}
        for alike in {part.classes.tobytes(): part.classes for part in self._parts.values()}.values():
            codes = np.unique(codes * 256 + alike, return_inverse=True)[1].ravel()
        unique, self._first, classes = np.unique(codes, return_index=True, return_inverse=True)
        self.symbols = len(unique)
        self._classes = classes.ravel().astype(np.uint8)
        self._size = 0
        self._tables: dict[int, NDArray[np.int32]] = {}
        self._placed: list[tuple[int, Automaton]] = []
        self._edges: tuple[list[int], list[int], list[int]] = ([], [], [])
        self._models: list[tuple[int, int]] = []
        self._links: list[tuple[NDArray[np.int64], int]] = []
        self._ends: list[int] = []

    def state(self) -> int:
        """A new state."""
        self._size += 1
        return self._size - 1

    def symbol(self, byte: int) -> int:
        """The symbol of `byte`."""
        return int(self._classes[byte])

    def edge(self, source: int, symbol: int, target: int) -> None:
        """Add an edge from `source` over `symbol` to `target`."""
        sources, symbols, targets = self._edges
        sources.append(source)
        symbols.append(symbol)
        targets.append(target)

    def text(self, source: int, data: bytes, target: int) -> None:
        """Add a path from `source` over all of `data` to `target`."""
        for byte in data[:-1]:
            following = self.state()
            self.edge(source, int(self._classes[byte]), following)
            source = following
        self.edge(source, int(self._classes[data[-1]]), target)

    def table(self, part: Automaton) -> NDArray[np.int32]:
        """The table of `part` over the symbols."""
        found = self._tables.get(id(part))
        if found is None:
            found = self._tables[id(part)] = part.next[:, part.classes[self._first]]
        return found

    def place(self, part: Automaton, end: int) -> int:
        """A copy of `part` whose texts go on in state `end`, which is one of our own; its start."""
        base = self._size
        self._size += len(part)
        if self._size > _ROOM:
            raise TooLarge("", f"it needs more than {_ROOM} states: lower its counts, or list less")
        self._placed.append((base, part))
        self._links.append((base + np.flatnonzero(part.final), end))
        return base

    def begin_as(self, state: int, start: int) -> None:
        """Let `state` do what the placed `start` does, beside its own edges."""
        self._links.append((np.array([state]), start))

    def like(self, state: int, model: int) -> None:
        """`state` does what the placed `model` does, where it has no edge of its own."""
        self._models.append((state, model))

    def final(self, state: int) -> None:
        """Texts may end in `state`."""
        self._ends.append(state)

    def finish(self) -> Automaton:
        """The automaton from state 0 on."""
        table = np.full((self._size, self.symbols), -1, np.int32)
        for base, part in self._placed:
            rows = self.table(part)
            table[base : base + len(rows)] = np.where(rows >= 0, rows + base, -1)
        if self._models:
            models = np.array(self._models)
            table[models[:, 0]] = table[models[:, 1]]
        sources, symbols, targets = self._edges
        table[sources, symbols] = targets
        for states, source in self._links:
            row = table[source]
            table[states] = np.where(row >= 0, row, table[states])
        final = np.zeros(self._size, np.bool_)
        final[self._ends] = True
        return Automaton(table, self._classes.copy(), final)


def one_of(parts: Sequence[Automaton]) -> Automaton:
    """The texts of any of `parts`."""
    if len(parts) == 1:
        return parts[0]
    kinds = {part.classes.tobytes(): part.classes for part in parts}
    _, first, classes = np.unique(
        np.stack(list(kinds.values())), axis=1, return_index=True, return_inverse=True
    )
    fragments = [Fragment(part.next[:, part.classes[first]], part.final) for part in parts]
    found = choice(fragments, len(first))
    if found.start:
        order = np.arange(len(found))
        order[[0, found.start]] = found.start, 0
        table = np.append(order, -1).astype(np.int32)[found.table[order]]
        found = Fragment(table, found.final[order])
    return Automaton(found.table, classes.ravel().astype(np.uint8), found.final)


def words(texts: Iterable[bytes]) -> Automaton:
    """`texts` (one or more), each as it is: their trie."""
    texts = list(texts)
    whole = Assembly((), b"".join(texts))
    nodes = {b"": whole.state()}
    for text in texts:
        _branch(whole, nodes, text)
        whole.final(nodes[text])
    return whole.finish()


def without(language: Automaton, texts: Iterable[bytes]) -> Automaton:
    """`language` without `texts`, behind none of whose texts one of it goes on."""
    texts = list(texts)
    whole = Assembly((language,), b"".join(texts))
    nodes, end = {b"": whole.state()}, whole.state()
    base = whole.place(language, end)
    for state in np.flatnonzero(language.final).tolist():
        whole.final(base + state)
    for text in texts:
        if language.walk(text) >= 0:
            _branch(whole, nodes, text[:-1])
            whole.edge(nodes[text[:-1]], whole.symbol(text[-1]), -1)
    for text, node in nodes.items():
        whole.like(node, base + language.walk(text))
    return whole.finish()


def _branch(whole: Assembly, nodes: dict[bytes, int], text: bytes) -> None:
    for size in range(1, len(text) + 1):
        if text[:size] not in nodes:
            node = nodes[text[:size]] = whole.state()
            whole.edge(nodes[text[: size - 1]], whole.symbol(text[size - 1]), node)


def reduced(language: Automaton) -> Automaton:
    """`language` without useless states; equal states are merged, except in loops: its parts have none
    there.
    """
    part = reduce(Fragment(language.next, language.final), loops=False)
    return Automaton(part.table, language.classes, part.final)
