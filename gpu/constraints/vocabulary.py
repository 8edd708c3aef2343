"""The tokens of a model as a tree of bytes, for walks along an automaton. Pure.

Nodes are numbered level by level, so the children of neighbours are neighbours: a walk takes a level at
a time with a few operations on arrays. Made once for a model and shared by all constraints.

This file does not know automata, nor the tokenizer: only the bytes of each id and how text is tokenized.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, lru_cache
from itertools import pairwise
from operator import itemgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

MARK = 0xFF  # the first byte of a token that is no text; UTF-8 has none such, nor the last one, 0xFE
NAMELESS = b"\xff\xfe"  # an id without text or name
SHORT = 16  # bytes of a token whose mask may be shared between states: see `alike`
TAIL = 4  # tokens at the end of a text that the next text may change
_MOST_SPELLED = 8192  # texts whose spelling is kept


Hashes = NDArray[np.uint64]

_ONE = np.ones(1, np.uint64)
_BASE = np.uint64(0x9E3779B97F4A7C15)
_INVERSE = np.uint64(pow(int(_BASE), -1, 1 << 64))


def hashes_of(text: NDArray[np.uint8]) -> Hashes:
    """Hash each beginning of `text` [bytes, ...]: sums of (byte + 1) * base ** place."""
    powers = np.cumprod(np.concatenate([_ONE, np.full(len(text) - 1, _BASE)]))
    shape = (-1, *[1] * (text.ndim - 1))
    found: Hashes = np.cumsum((text + _ONE) * powers.reshape(shape), axis=0)
    return found


class Preorder(NamedTuple):
    """The nodes in preorder; `end`: int32, the first node after the subtree; `depth`: uint16."""

    byte: NDArray[np.uint8]
    depth: NDArray[np.uint16]
    end: NDArray[np.int32]
    token: NDArray[np.int32]


class Spelling(NamedTuple):
    """The tokens of a text, and the places in its last `TAIL` tokens where a longer one may begin: the
    byte, and the node of the text from there on. No tokens: the tokenizer writes it differently.
    """

    tokens: tuple[int, ...]
    borders: tuple[tuple[int, int], ...]


def _is_known(data: bytes) -> bool:
    """Whether `data` can be in text, or is a mark: not a byte 0xFE or 0xFF alone."""
    mark = data[0] == MARK and data[-1] == MARK - 1 and len(data) > 1
    return mark or not (b"\xfe" in data or b"\xff" in data)


class Vocabulary:
    """The token tree of a model.

    `size`: ids in a mask (the model's padded vocabulary); `words`: int32 words of a packed mask.
    `stop_ids`: end an output; they have no bytes. `encode`: the tokenizer's spelling of a text after
    other tokens. `tokens`: the bytes of each id. A token that is no text (`<tool_call>`)
    has a name between 0xFF and 0xFE, so that an automaton can tell it from the same text, spelled.
    `everything`: the mask of all ids, this very object wherever all are legal.
    `spelled`: the `Spelling` of a text, UTF-8. `going_on`: for a node and a bit for each byte whether a
    token ends after the node and one of these bytes, and whether one goes on there that does not end.
    Both are kept for all constraints, which have much in common.

    Arrays, one entry a node, the root is 0: `byte` uint8, `parent`, `child` (the first one; the children
    of a node are side by side) and `children` (how many), `token` (a token that ends there, or -1).
    `alone`: bool [256], the bytes that are tokens.
    `levels`: where the nodes of each depth begin.
    """

    def __init__(
        self,
        tokens: Sequence[bytes],
        stop_ids: Iterable[int],
        encode: Callable[[str], list[int]],
        size: int | None = None,
    ) -> None:
        """`tokens`: the bytes of each id; b"" for ids without text or name: free text alone has them."""
        self.size = max(len(tokens), size or 0)
        self.tokens = [data if data and _is_known(data) else NAMELESS for data in tokens]
        self.tokens += [NAMELESS] * (self.size - len(tokens))
        self.stop_ids = tuple(sorted(set(stop_ids)))
        self.encode = encode
        self.spelled = lru_cache(_MOST_SPELLED)(self._spelled)
        self.going_on = lru_cache(_MOST_SPELLED)(self._go_on)
        self._borders = lru_cache(_MOST_SPELLED)(self._find_borders)
        self.words = -(-self.size // 32)
        self.everything = self.pack(np.ones(self.size, np.bool_))
        self.everything.flags.writeable = False
        self._build()

    def is_text(self, token: int) -> bool:
        """Whether an id stands for text."""
        return 0 <= token < self.size and self.tokens[token][0] != MARK and token not in self.stop_ids

    def _build(self) -> None:
        stops = set(self.stop_ids)
        order = sorted((data, i) for i, data in enumerate(self.tokens) if i not in stops)
        self._order = order
        ids = np.array([i for _, i in order], np.int32)
        lengths = np.array([len(data) for data, _ in order], np.int64)
        longest = int(lengths.max(initial=0))
        joined = np.frombuffer(b"".join(data for data, _ in order), np.uint8)
        starts = np.cumsum(lengths) - lengths
        count = len(order)
        # Tokens in byte order: at each depth, one begins a new node if it differs there from the one
        # before it, or was in another node above.
        node = np.zeros(count, np.int64)  # of each token, at the depth before
        bytes_, parents = [np.zeros(1, np.uint8)], [np.full(1, -1, np.int64)]
        rows_of = [np.full(1, -1, np.int64)]
        self.levels = [0, 1]
        rows = np.arange(count)  # the tokens that are so long
        final = np.full(count, -1, np.int64)  # the node where each token ends
        for depth in range(longest):
            rows = rows[lengths[rows] > depth]
            here, above = joined[starts[rows] + depth], node[rows]
            new = np.ones(len(rows), np.bool_)
            new[1:] = (here[1:] != here[:-1]) | (above[1:] != above[:-1])
            bytes_.append(here[new])
            parents.append(above[new])
            rows_of.append(rows[new])
            node[rows] = numbers = np.cumsum(new) - 1 + self.levels[-1]
            last = lengths[rows] == depth + 1
            final[rows[last]] = numbers[last]
            self.levels.append(self.levels[-1] + int(new.sum()))
        self.byte = np.concatenate(bytes_)
        self._bytes = self.byte.tobytes()
        self.parent = np.concatenate(parents).astype(np.int32)
        total = len(self.byte)
        self.children = np.bincount(self.parent[1:], minlength=total).astype(np.int32)
        self.child = (1 + np.cumsum(self.children) - self.children).astype(np.int32)
        self.token = np.full(total, -1, np.int32)
        self.token[final[::-1]] = ids[::-1]  # the lowest id where several have the same bytes
        self._row = np.concatenate(rows_of)  # the first token, in byte order, below each node
        self.alone = np.zeros(256, np.bool_)
        self.alone[[data[0] for data, _ in order if len(data) == 1]] = True
        first = self.token[final]
        self.twins = np.column_stack([ids, first])[ids != first]  # ids with the bytes of another

    @cached_property
    def stops(self) -> NDArray[np.int32]:
        """The mask of `stop_ids`."""
        flags = np.zeros(self.size, np.bool_)
        flags[list(self.stop_ids)] = True
        return self.pack(flags)

    @cached_property
    def tails(self) -> Hashes:
        """The hashes (see `hashes_of`) of tokens' ends, all but their first bytes, sorted. 7 MB."""
        data = [data for data, _ in self._order]
        joined = np.frombuffer(b"".join(data), np.uint8)
        ends = np.cumsum([len(each) for each in data])
        powers = np.cumprod(np.concatenate([_ONE, np.full(len(joined), _BASE)]))
        inverse = np.cumprod(np.concatenate([_ONE, np.full(len(joined), _INVERSE)]))
        sums = np.concatenate([_ONE - _ONE, np.cumsum((joined + _ONE) * powers[:-1])])
        inner = np.ones(len(joined), np.bool_)
        inner[np.concatenate([[0], ends[:-1]])] = False
        begin = np.flatnonzero(inner)
        end = ends[np.searchsorted(ends, begin, side="right")]
        return np.unique((sums[end] - sums[begin]) * inverse[begin])

    @cached_property
    def depth(self) -> int:
        """The bytes of the longest token."""
        return len(self.levels) - 2

    @cached_property
    def preorder(self) -> "Preorder":
        """The whole tree, for a walk that goes down first."""
        return self._preorder(np.ones(len(self.byte), np.bool_), self.token)

    @cached_property
    def halves(self) -> "tuple[Preorder, Preorder]":
        """The trees of tokens of at most `SHORT` bytes, and of longer ones."""
        depth = self._depth
        long = (self.token >= 0) & (depth > SHORT)
        below = long.copy()
        for begin, end in pairwise(reversed(self.levels)):
            if end:  # not the root
                np.logical_or.at(below, self.parent[end:begin], below[end:begin])
        below[0] = True
        short = self._preorder(depth <= SHORT, np.where(depth <= SHORT, self.token, -1))
        return short, self._preorder(below, np.where(long, self.token, -1))

    @cached_property
    def _depth(self) -> NDArray[np.int64]:
        return np.repeat(np.arange(len(self.levels) - 1), np.diff(self.levels))

    def _preorder(self, keep: NDArray[np.bool_], token: NDArray[np.int32]) -> "Preorder":
        """Make the preorder of the nodes in `keep`, which has the parents of its nodes."""
        sizes = keep.astype(np.int64)
        for begin, end in pairwise(reversed(self.levels)):
            if end:
                np.add.at(sizes, self.parent[end:begin], sizes[end:begin])
        nodes = np.flatnonzero(keep)
        order = nodes[np.lexsort((self._depth[nodes], self._row[nodes]))]
        return Preorder(
            self.byte[order],
            self._depth[order].astype(np.uint16),
            (np.arange(len(order)) + sizes[order]).astype(np.int32),
            token[order].astype(np.int32),
        )

    def find(self, text: bytes) -> int:
        """Find the node of `text`, or -1 if no token begins with it."""
        node = 0
        for byte in text:
            node = self.below(node, byte)
            if node < 0:
                break
        return node

    def token_of(self, data: bytes) -> int:
        """Find the token with these bytes, or -1."""
        node = self.find(data)
        return int(self.token[node]) if node >= 0 else -1

    def below(self, node: int, byte: int) -> int:
        """Find the child of a node over `byte`, or -1."""
        begin = int(self.child[node])
        return self._bytes.find(byte, begin, begin + int(self.children[node]))

    def _spelled(self, text: bytes) -> Spelling:
        if not text:
            return Spelling((), ())
        tokens = tuple(self.encode(text.decode()))
        parts = [self.tokens[i] for i in tokens]
        if b"".join(parts) != text:
            return Spelling((), ())  # another normal form, for example
        tail = b"".join(parts[-TAIL:])
        begin = len(text) - len(tail)
        return Spelling(tokens, tuple((begin + at, node) for at, node in self._borders(tail)))

    def _find_borders(self, tail: bytes) -> tuple[tuple[int, int], ...]:
        """Find where in `tail` a token may begin that goes on after it, and the node of the rest.

        Texts with the same end have the same tail, and so the same borders.
        """
        nodes = ((at, self.find(tail[at:])) for at in range(len(tail)))
        return tuple((at, node) for at, node in nodes if node >= 0)

    def _go_on(self, node: int, accepted: bytes) -> tuple[bool, bool]:
        children = slice(int(self.child[node]), int(self.child[node]) + int(self.children[node]))
        takes = np.unpackbits(np.frombuffer(accepted, np.uint8))[self.byte[children]] > 0
        whole = self.token[children] >= 0
        return bool(takes[whole].any()), bool(takes[~whole].any())

    def longer(self, text: bytes) -> NDArray[np.int32]:
        """List the tokens that begin with `text` and have more bytes."""
        order = self._order
        first = bisect_left(order, text, key=itemgetter(0))
        last = bisect_left(order, True, lo=first, key=lambda one: not one[0].startswith(text))
        return np.array([i for data, i in order[first:last] if len(data) > len(text)], np.int32)

    def longest(self, text: bytes, at: int) -> int:
        """Find the longest token that stands in `text` at `at`. Raises ValueError if there is none."""
        node, found = 0, -1
        for end in range(at, len(text)):
            node = self.below(node, text[end])
            if node < 0:
                break
            if self.token[node] >= 0:
                found = int(self.token[node])
        if found < 0:
            raise ValueError(f"no token begins with the byte {text[at]:#04x}")
        return found

    def pack(self, legal: NDArray[np.bool_]) -> NDArray[np.int32]:
        """Pack `size` flags to a mask of `words` words: token i is bit i % 32 of word i // 32."""
        padded = np.zeros(self.words * 32, np.bool_)
        padded[: len(legal)] = legal
        return np.packbits(padded, bitorder="little").view(np.int32)

    def with_twins(self, row: NDArray[np.int32]) -> NDArray[np.int32]:
        """Add to `row` the tokens with the bytes of others, only one of which is in the tree."""
        if len(self.twins):
            ids, firsts = self.twins.T
            ids = ids[(row[firsts >> 5] >> (firsts & 31)) & 1 == 1]
            np.bitwise_or.at(row, ids >> 5, np.int32(1) << (ids & 31))
        return row

    def unpack(self, row: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Unpack the flags of a mask."""
        flags = np.unpackbits(row.view(np.uint8), bitorder="little", count=self.size)
        return flags.astype(np.bool_)
