"""Expressions to automata. Pure.

All parts of an expression share one partition of the 256 bytes into classes, made first: bytes that no
part tells apart are one symbol. Then parts are put together from the leaves (`fragment`).

Anchors inside (`^`, `$`, `\\b`) become symbols of their own. The automaton is cut with the one of all
texts in which each stands where it may stand, and then they are erased. So they are exact wherever they
stand, behind alternatives and repetitions too.
"""

from collections.abc import Iterator, Sequence
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from ramify.actors.grammar.characters import WORD, byte_tree
from ramify.actors.grammar.combining import Concatenation, choice, determinize, product, repetition
from ramify.actors.grammar.expression import (
    ANY_TEXT,
    Anchor,
    AnchorKind,
    Chars,
    Concat,
    Embedded,
    Expression,
    Literal,
    Look,
    Repeat,
    Union,
)
from ramify.actors.grammar.fragment import Flags, Fragment, Table, empty_text, reduce
from ramify.protocol.errors import ConstraintError

_ANCHORS: tuple[AnchorKind, ...] = get_args(AnchorKind)


def compile_expression(
    expression: Expression, *, search: bool = False
) -> tuple[Fragment, NDArray[np.uint8]]:
    """The reduced fragment of `expression`, start 0, and the class of each byte.

    `search`: of all texts that hold one of `expression`'s. Raises ConstraintError.
    """
    whole = _searching(expression) if search else _without_outer_anchors(expression, True, True)
    return _Compiler(whole).compile()


def _flat(expression: Expression) -> list[Expression]:
    """The parts of a concatenation."""
    if not isinstance(expression, Concat):
        return [expression]
    return [inner for part in expression.parts for inner in _flat(part)]


def _is_anchor(parts: list[Expression], at: int, kind: AnchorKind) -> bool:
    if not parts:
        return False
    part = parts[at]
    return isinstance(part, Anchor) and part.kind == kind


def _without_outer_anchors(expression: Expression, head: bool, tail: bool) -> Expression:
    """Without anchors that say nothing, because they stand at the ends of the whole."""
    if isinstance(expression, Union):
        return Union(tuple(_without_outer_anchors(part, head, tail) for part in expression.parts))
    parts = _flat(expression)
    while head and _is_anchor(parts, 0, "start"):
        parts = parts[1:]
    while tail and _is_anchor(parts, -1, "end"):
        parts = parts[:-1]
    if len(parts) == 1 and isinstance(parts[0], Union):
        return _without_outer_anchors(parts[0], head, tail)
    return parts[0] if len(parts) == 1 else Concat(tuple(parts))


def _searching(expression: Expression) -> Expression:
    """`expression` with any text around it, except where an anchor forbids that."""
    if isinstance(expression, Union):
        return Union(tuple(_searching(part) for part in expression.parts))
    parts = _flat(expression)
    if len(parts) == 1 and isinstance(parts[0], Union):
        return _searching(parts[0])
    head, tail = _is_anchor(parts, 0, "start"), _is_anchor(parts, -1, "end")
    before = [] if head else [ANY_TEXT]
    behind = [] if tail else [ANY_TEXT]
    return _without_outer_anchors(Concat((*before, *parts, *behind)), head, tail)


def _walk(expression: Expression) -> Iterator[Expression]:
    """`expression` and all that is in it, each object once."""
    seen: set[int] = set()
    stack = [expression]
    while stack:
        at = stack.pop()
        if id(at) in seen:
            continue
        seen.add(id(at))
        yield at
        match at:
            case Concat(parts) | Union(parts):
                stack.extend(parts)
            case Repeat(part):
                stack.append(part)
            case Look(part):
                stack.extend(_looked_for(part)[0])


def _looked_for(part: Expression) -> tuple[list[Expression], bool]:
    """The parts of what a lookahead looks for, and whether nothing may follow them."""
    parts = _flat(part)
    if _is_anchor(parts, -1, "end"):
        return parts[:-1], True
    return parts, False


class _Compiler:
    """Compiles one expression."""

    def __init__(self, expression: Expression) -> None:
        self._expression = expression
        nodes = list(_walk(expression))
        kinds = {node.kind for node in nodes if isinstance(node, Anchor)}
        self._anchors = [kind for kind in _ANCHORS if kind in kinds]
        self._looks = any(isinstance(node, Look) for node in nodes)
        if self._looks:
            nodes.extend(_walk(ANY_TEXT))
        if kinds and self._looks:
            raise ConstraintError(
                "a lookahead beside anchors inside the regex cannot be compiled: write the cases out"
            )
        self._classes = self._partition(nodes)
        self._count = int(self._classes.max()) + 1
        self._symbols = self._count + len(self._anchors)
        self._known: dict[tuple[int, bool], Fragment] = {}

    def _partition(self, nodes: list[Expression]) -> NDArray[np.uint8]:
        """Bytes that every part treats alike have the same class."""
        cuts = np.zeros(257, np.int64)
        trees = [node.chars for node in nodes if isinstance(node, Chars)]
        if self._anchors:
            trees.append(WORD)
        for chars in trees:
            for edges in byte_tree(chars):
                for low, high, _ in edges:
                    cuts[[low, high + 1]] = 1
        for node in nodes:
            if isinstance(node, Literal):
                data = np.frombuffer(node.data, np.uint8).astype(np.int64)
                cuts[data] = 1
                cuts[data + 1] = 1
        codes = np.cumsum(cuts[:256])
        for node in nodes:
            if isinstance(node, Embedded):
                codes = np.unique(codes * 256 + node.automaton.classes, return_inverse=True)[1]
        return np.unique(codes, return_inverse=True)[1].astype(np.uint8)

    def compile(self) -> tuple[Fragment, NDArray[np.uint8]]:
        part = self._build(self._expression, True)
        if self._anchors:
            part = self._erased(product(part, self._context(), "and"))
        return reduce(part), self._classes

    def _build(self, node: Expression, tail: bool) -> Fragment:
        """The fragment of `node`. `tail`: nothing of the whole expression stands behind it."""
        found = self._known.get((id(node), tail and self._looks))
        if found is not None:
            return found
        match node:
            case Literal(data):
                found = self._literal(data)
            case Chars(chars):
                found = self._chars(chars)
            case Concat(parts):
                found = self._concat(_flat(node) if self._looks else parts, tail)
            case Union(parts):
                found = self._union(parts, tail)
            case Repeat(part, least, most):
                inner = reduce(self._build(part, False))
                found = repetition(inner, least, most)
            case Anchor(kind):
                found = self._anchor(kind)
            case Embedded(automaton):
                found = self._embedded(automaton.next, automaton.classes, automaton.final)
            case Look():
                found = self._concat([node], tail)
            case _:
                raise TypeError(f"{type(node).__name__} is no expression")
        self._known[id(node), tail and self._looks] = found
        return found

    def _embedded(self, next: Table, classes: NDArray[np.uint8], final: Flags) -> Fragment:
        first = np.unique(self._classes, return_index=True)[1]
        table = np.full((len(next), self._symbols), -1, np.int32)
        table[:, : self._count] = next[:, classes[first]]
        return Fragment(table, final)

    def _literal(self, data: bytes) -> Fragment:
        size = len(data)
        table = np.full((size + 1, self._symbols), -1, np.int32)
        table[np.arange(size), self._classes[np.frombuffer(data, np.uint8)]] = np.arange(1, size + 1)
        return Fragment(table, np.arange(size + 1) == size)

    def _chars(self, chars: tuple[tuple[int, int], ...]) -> Fragment:
        tree = byte_tree(chars)
        end = len(tree)
        table = np.full((end + 1, self._symbols), -1, np.int32)
        for state, edges in enumerate(tree):
            for low, high, target in edges:
                table[state, self._classes[low : high + 1]] = end if target < 0 else target
        return Fragment(table, np.arange(end + 1) == end)

    def _anchor(self, kind: AnchorKind) -> Fragment:
        table = np.full((2, self._symbols), -1, np.int32)
        table[0, self._count + self._anchors.index(kind)] = 1
        return Fragment(table, np.array([False, True]))

    def _concat(self, parts: Sequence[Expression], tail: bool) -> Fragment:
        chain = Concatenation(empty_text(self._symbols))
        for at in range(len(parts) - 1, -1, -1):
            part = parts[at]
            if isinstance(part, Look):
                if not tail:
                    raise ConstraintError(
                        "a lookahead inside a repetition, or in a part that something follows, cannot "
                        "be compiled: move it to the beginning, or write the cases out"
                    )
                mode = "minus" if part.negative else "and"
                chain = Concatenation(product(chain.fragment(), self._beginning(part.part), mode))
            else:
                chain.prepend(self._build(part, tail and at == len(parts) - 1))
        return chain.fragment()

    def _beginning(self, part: Expression) -> Fragment:
        """Texts that begin with one of `part`."""
        parts, whole = _looked_for(part)
        return self._concat(parts if whole else [*parts, ANY_TEXT], False)

    def _union(self, parts: Sequence[Expression], tail: bool) -> Fragment:
        return choice([self._build(part, tail) for part in parts], self._symbols)

    def _context(self) -> Fragment:
        """The texts over bytes and anchors in which each anchor stands where it may.

        A state is what stands before (nothing, a character of a word, another) and which may follow (a
        set of: a word's character, another, the end).
        """
        is_word = np.zeros(self._count, np.bool_)
        for low, high in WORD:
            is_word[self._classes[low : high + 1]] = True
        nothing, word, other, end = 0, 1, 2, 4
        whole = word | other | end
        ids = {(nothing, whole): 0}
        order = [(nothing, whole)]

        def number(state: tuple[int, int]) -> int:
            if state not in ids:
                ids[state] = len(order)
                order.append(state)
            return ids[state]

        rows = []
        for before, may in order:
            row = np.full(self._symbols, -1, np.int32)
            for kind, members in ((word, is_word), (other, ~is_word)):
                if may & kind:
                    row[: self._count][members] = number((kind, whole))
            for at, anchor in enumerate(self._anchors):
                border = other | end if before == word else word
                left = {
                    "start": may if before == nothing else 0,
                    "end": may & end,
                    "word": may & border,
                    "not word": may & ~border,
                }[anchor]
                if left:
                    row[self._count + at] = number((before, left))
            rows.append(row)
        table: Table = np.array(rows, np.int32)
        final: Flags = np.array([bool(may & end) for _, may in order])
        return Fragment(table, final)

    def _erased(self, part: Fragment) -> Fragment:
        """Without the anchors' symbols."""
        jumps: dict[int, list[int]] = {}
        table = part.table[:, : self._count]
        for at in range(len(self._anchors)):
            for state in np.flatnonzero(part.table[:, self._count + at] >= 0).tolist():
                jumps.setdefault(state, []).append(int(part.table[state, self._count + at]))
        return determinize(table, part.final, jumps, [part.start], np.zeros(len(table), np.bool_))
