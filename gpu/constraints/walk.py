"""Walks down the token tree, to find the tokens that an automaton takes from a state, and their states.

A kernel of `native` does it where it could be compiled (1 ms for 150,000 tokens that are all taken).
Elsewhere numpy takes all nodes of a depth that are still alive at once (10 ms).
"""

from functools import cache
from threading import Lock
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from ramify.gpu.constraints.byte_automaton import ENTER_CODE, POP_CODE, Nesting
from ramify.gpu.constraints.vocabulary import SHORT, Preorder, Vocabulary
from ramify.protocol.constraints import Layout

if TYPE_CHECKING:
    from ramify.gpu.native.tokens import TokenKernels


Which = Literal["all", "short", "long"]


class Walker(Protocol):
    """Interface: walks along an automaton. `halves`: a walk for part of the tokens is cheaper."""

    halves: bool

    def mask(self, state: int, which: Which = "all") -> NDArray[np.int32]:
        """Compute the packed mask of tokens that may follow in `state`: short ones, long ones, all."""
        ...

    def targets(self, state: int) -> NDArray[np.int32]:
        """Return for each token the state after it, or -1."""
        ...


def walker(
    vocabulary: Vocabulary,
    next: NDArray[np.int32],
    classes: NDArray[np.uint8],
    nesting: Nesting | None = None,
) -> Walker:
    """Make the fastest walker here. `next`: int32 [states, classes], `classes`: uint8 [256]."""
    kernels = _kernels()
    if kernels is None or len(vocabulary.levels) > MOST_DEPTH:
        if nesting is not None:
            return NestedNumpyWalker(vocabulary, next, classes, nesting)
        return NumpyWalker(vocabulary, next, classes)
    return NativeWalker(kernels, vocabulary, next, classes, nesting)


MOST_DEPTH = 1024  # of a tree that the kernel can walk


_compiling = Lock()


def _kernels() -> "TokenKernels | None":
    """Return the kernels, the same ones for all threads, which may call at once."""
    with _compiling:
        return _compiled()


@cache
def _compiled() -> "TokenKernels | None":
    try:
        from ramify.gpu.native.tokens import token_kernels
    except ImportError:  # llvmlite has no wheel for this machine
        return None
    return token_kernels()


class NativeWalker:
    """The walker with a compiled kernel."""

    halves = True

    def __init__(
        self,
        kernels: "TokenKernels",
        vocabulary: Vocabulary,
        next: NDArray[np.int32],
        classes: NDArray[np.uint8],
        nesting: Nesting | None = None,
    ) -> None:
        self._tree = vocabulary
        self._table = _offsets(next)
        self._classes = classes.astype(np.int32)
        if nesting is None:
            nesting = Nesting(Layout(len(next)), np.zeros(0, np.int32))
        self._packed = packed = Packed(nesting, next.shape[1])
        words = (packed.first, packed.width, packed.bits, packed.layout.depth)
        self._nesting = np.concatenate([words, packed.returns]).astype(np.int64)
        self._kernels = kernels  # their code lives as long as they
        _ = vocabulary.preorder  # made here, once for a model, and not while a step waits

    def mask(self, state: int, which: Which = "all") -> NDArray[np.int32]:
        mask = np.zeros(self._tree.words, np.int32)
        if which == "all":
            tree = self._tree.preorder
        else:
            tree = self._tree.halves[which == "long"]
        self._walk(tree, state, mask, 0)
        return self._tree.with_twins(mask)

    def targets(self, state: int) -> NDArray[np.int32]:
        mask = np.zeros(self._tree.words, np.int32)
        packed = np.full(self._tree.size, -1, np.int64)
        self._walk(self._tree.preorder, state, mask, packed.ctypes.data)
        found = self._packed.numbers(packed)
        found[packed < 0] = -1
        ids, firsts = self._tree.twins.T
        found[ids] = found[firsts]
        return found

    def _walk(self, tree: Preorder, state: int, mask: NDArray[np.int32], targets: int) -> None:
        tables = [array.ctypes.data for array in (*tree, self._classes, self._table)]
        start, nesting = self._packed.of(state), self._nesting.ctypes.data
        places = [len(tree.byte), *tables, start, mask.ctypes.data, targets, nesting]
        self._kernels.walk(*places)


def _offsets(next: NDArray[np.int32]) -> NDArray[np.int32]:
    """Convert `next` to offsets of rows: then a step is an addition and a look-up."""
    return np.ascontiguousarray(np.where(next >= 0, next * next.shape[1], next), np.int32).ravel()


class Packed:
    """The encoding of states for the kernel and `NestedNumpyWalker`: an offset, and above its 32 bits
    the stack and the number of the return; 0 outside of values without a schema.
    """

    def __init__(self, nesting: Nesting, width: int) -> None:
        self.layout = layout = nesting.layout
        self.width = width
        self.first = layout.states * width  # where the rows of inner states begin
        self.bits = layout.shift - layout.bits  # of the numbers of returns
        self.returns: NDArray[np.int64] = nesting.returns.astype(np.int64) * width

    def of(self, state: int) -> int:
        """Encode a state by its number."""
        layout = self.layout
        if state <= layout.states:
            return state * self.width
        inside = state - layout.states - 1
        inner = inside & (1 << layout.bits) - 1
        return (inside >> layout.bits << 32) + self.first + inner * self.width

    def numbers(self, packed: NDArray[np.int64]) -> NDArray[np.int32]:
        """Decode states to their numbers."""
        layout = self.layout
        rows = (packed & 0xFFFFFFFF) // self.width
        inside = layout.states + 1 + (packed >> 32 << layout.bits) + rows - layout.states
        return np.where(rows < layout.states, rows, inside).astype(np.int32)


class NumpyWalker:
    """The walker with operations on arrays."""

    halves = False
    _kind: type[np.signedinteger] = np.int32  # of the states as `_ways` has them

    def __init__(
        self, vocabulary: Vocabulary, next: NDArray[np.int32], classes: NDArray[np.uint8]
    ) -> None:
        self._tree = vocabulary
        self._width = int(next.shape[1])
        self._flat = _offsets(next)
        self._column = classes.astype(np.int32)[vocabulary.byte]  # of each node

    def _nodes(self, state: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Find the nodes whose bytes the automaton takes from `state`, and the state after each."""
        tree, column = self._tree, self._column
        alive = np.zeros(1, np.int32)
        at = np.full(1, self._entry(state), self._kind)
        found, ends = [], []
        for depth in range(1, len(tree.levels) - 1):
            begin, end = tree.levels[depth], tree.levels[depth + 1]
            counts = tree.children[alive]
            total = int(counts.sum())
            if not total:
                break
            rows = np.repeat(at, counts)
            if total == end - begin:
                ways = self._ways(rows, column[begin:end])
                keep = ways >= 0
                alive = np.flatnonzero(keep).astype(np.int32)
                alive += begin
            else:
                offsets = tree.child[alive]
                offsets[1:] -= np.cumsum(counts, dtype=np.int32)[:-1]
                children = np.repeat(offsets, counts)
                children += np.arange(total, dtype=np.int32)
                ways = self._ways(rows, column[children])
                keep = ways >= 0
                alive = children[keep]
            at = ways[keep]
            found.append(alive)
            ends.append(at)
        if not found:
            return np.zeros(0, np.int32), np.zeros(0, np.int32)
        return np.concatenate(found), self._numbers(np.concatenate(ends))

    def _entry(self, state: int) -> int:
        """Encode a state for `_ways`."""
        return state * self._width

    def _ways(self, rows: NDArray[Any], columns: NDArray[np.int32]) -> NDArray[Any]:
        """Find the states after some, over a column each, -1: none. Overwrites `rows`."""
        rows += columns
        found: NDArray[np.int32] = self._flat[rows]
        return found

    def _numbers(self, ends: NDArray[Any]) -> NDArray[np.int32]:
        """Decode the states of `_ways` to numbers."""
        found: NDArray[np.int32] = (ends // self._width).astype(np.int32, copy=False)
        return found

    def mask(self, state: int, which: Which = "all") -> NDArray[np.int32]:
        tree = self._tree
        nodes = self._nodes(state)[0]
        if which != "all":
            nodes = nodes[
                (nodes >= tree.levels[min(SHORT + 1, len(tree.levels) - 1)]) == (which == "long")
            ]
        tokens = tree.token[nodes]
        legal = np.zeros(tree.size, np.bool_)
        legal[tokens[tokens >= 0]] = True
        return tree.with_twins(tree.pack(legal))

    def targets(self, state: int) -> NDArray[np.int32]:
        tree = self._tree
        nodes, states = self._nodes(state)
        tokens = tree.token[nodes]
        some = tokens >= 0
        found = np.full(tree.size, -1, np.int32)
        found[tokens[some]] = states[some]
        ids, firsts = tree.twins.T
        found[ids] = found[firsts]
        return found


class NestedNumpyWalker(NumpyWalker):
    """The walker with operations on arrays, through values without a schema."""

    _kind = np.int64

    def __init__(
        self,
        vocabulary: Vocabulary,
        next: NDArray[np.int32],
        classes: NDArray[np.uint8],
        nesting: Nesting,
    ) -> None:
        super().__init__(vocabulary, next, classes)
        self._packed = Packed(nesting, self._width)

    def _entry(self, state: int) -> int:
        return self._packed.of(state)

    def _numbers(self, ends: NDArray[Any]) -> NDArray[np.int32]:
        return self._packed.numbers(ends)

    def _ways(self, rows: NDArray[Any], columns: NDArray[np.int32]) -> NDArray[Any]:
        offsets = rows & 0xFFFFFFFF
        code = self._flat[offsets + columns].astype(np.int64)
        found = np.where(code >= 0, rows - offsets + code, -1)
        special = np.flatnonzero(code < -1)
        if len(special):
            found[special] = self._nested_ways(rows[special] >> 32, code[special])
        return found

    def _nested_ways(self, context: NDArray[np.int64], code: NDArray[np.int64]) -> NDArray[np.int64]:
        packed = self._packed
        stack, number = context >> packed.bits, context & (1 << packed.bits) - 1
        begun, entered = -2 - code, ENTER_CODE - code
        pushed = 2 * stack + (begun & 1)
        found = np.where(pushed >> packed.layout.depth > 0, -1, self._inner(pushed, number, begun >> 1))
        behind = self._inner(stack >> 1, number, 2 + (stack & 1))
        found = np.where(code == POP_CODE, np.where(stack > 1, behind, packed.returns[number]), found)
        return np.where(
            code <= ENTER_CODE, self._inner(np.ones_like(code), entered >> 1, entered & 1), found
        )

    def _inner(
        self, stack: NDArray[np.int64], number: NDArray[np.int64], inner: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Encode inner states by their numbers."""
        packed = self._packed
        found: NDArray[np.int64] = (
            ((stack << packed.bits) + number << 32) + packed.first + inner * packed.width
        )
        return found
