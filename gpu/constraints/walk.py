"""Which tokens an automaton takes from a state, and where they lead: a walk down the token tree.

A kernel of `native` does it where it could be compiled (1 ms for 150,000 tokens that are all taken).
Elsewhere numpy takes all nodes of a depth that are still alive at once (10 ms).
"""

from functools import cache
from threading import Lock
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from ramify.gpu.constraints.vocabulary import SHORT, Preorder, Vocabulary

if TYPE_CHECKING:
    from ramify.gpu.native.tokens import TokenKernels


Which = Literal["all", "short", "long"]


class Walker(Protocol):
    """Walks beside one automaton. `halves`: whether a walk for a part of the tokens costs less."""

    halves: bool

    def mask(self, state: int, which: Which = "all") -> NDArray[np.int32]:
        """The packed mask of the tokens that may follow in `state`: short ones, long ones, all."""
        ...

    def targets(self, state: int) -> NDArray[np.int32]:
        """For each token the state behind it, or -1."""
        ...


def walker(vocabulary: Vocabulary, next: NDArray[np.int32], classes: NDArray[np.uint8]) -> Walker:
    """The fastest one here. `next`: int32 [states, classes], `classes`: uint8 [256]."""
    kernels = _kernels()
    if kernels is None or len(vocabulary.levels) > MOST_DEPTH:
        return NumpyWalker(vocabulary, next, classes)
    return NativeWalker(kernels, vocabulary, next, classes)


MOST_DEPTH = 1024  # of a tree that the kernel can walk


_compiling = Lock()


def _kernels() -> "TokenKernels | None":
    """The same ones for all threads, which may ask at once."""
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
    """With a compiled kernel."""

    halves = True

    def __init__(
        self,
        kernels: "TokenKernels",
        vocabulary: Vocabulary,
        next: NDArray[np.int32],
        classes: NDArray[np.uint8],
    ) -> None:
        self._tree = vocabulary
        self._width = next.shape[1]
        self._table = _offsets(next)
        self._classes = classes.astype(np.int32)
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
        found = np.full(self._tree.size, -1, np.int32)
        self._walk(self._tree.preorder, state, mask, found.ctypes.data)
        found[found >= 0] //= self._width
        ids, firsts = self._tree.twins.T
        found[ids] = found[firsts]
        return found

    def _walk(self, tree: Preorder, state: int, mask: NDArray[np.int32], targets: int) -> None:
        bytes_, depths, ends, tokens = (array.ctypes.data for array in tree)
        nodes, start = len(tree.byte), state * self._width
        classes, table = self._classes.ctypes.data, self._table.ctypes.data
        self._kernels.walk(
            nodes, bytes_, depths, ends, tokens, classes, table, start, mask.ctypes.data, targets
        )


def _offsets(next: NDArray[np.int32]) -> NDArray[np.int32]:
    """`next` with offsets of rows instead of their numbers: a step is an addition and a look-up."""
    return np.ascontiguousarray(np.where(next >= 0, next * next.shape[1], -1), np.int32).ravel()


class NumpyWalker:
    """With operations on arrays."""

    halves = False

    def __init__(
        self, vocabulary: Vocabulary, next: NDArray[np.int32], classes: NDArray[np.uint8]
    ) -> None:
        self._tree = vocabulary
        self._width = next.shape[1]
        self._flat = _offsets(next)
        self._column = classes.astype(np.int32)[vocabulary.byte]  # of each node

    def _nodes(self, state: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """The nodes whose bytes the automaton takes from `state`, and the state behind each."""
        tree, flat, column = self._tree, self._flat, self._column
        alive = np.zeros(1, np.int32)
        at = np.full(1, state * self._width, np.int32)
        found, ends = [], []
        for depth in range(1, len(tree.levels) - 1):
            begin, end = tree.levels[depth], tree.levels[depth + 1]
            counts = tree.children[alive]
            total = int(counts.sum())
            if not total:
                break
            rows = np.repeat(at, counts)
            if total == end - begin:
                rows += column[begin:end]
                ways = flat[rows]
                keep = ways >= 0
                alive = np.flatnonzero(keep).astype(np.int32)
                alive += begin
            else:
                offsets = tree.child[alive]
                offsets[1:] -= np.cumsum(counts, dtype=np.int32)[:-1]
                children = np.repeat(offsets, counts)
                children += np.arange(total, dtype=np.int32)
                rows += column[children]
                ways = flat[rows]
                keep = ways >= 0
                alive = children[keep]
            at = ways[keep]
            found.append(alive)
            ends.append(at)
        if not found:
            return np.zeros(0, np.int32), np.zeros(0, np.int32)
        return np.concatenate(found), np.concatenate(ends) // self._width

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
