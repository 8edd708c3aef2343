"""A node of the radix tree, and how token runs are compared.

A node holds the tokens of positions [start, end) of every branch below it. It is *resident* if
`pages` is set and *cold* otherwise (never computed, or evicted). A page belongs to the node that
holds its last position, so a node owns page indices [start // P, end // P) of its path: any split
divides the pages with no rest, and a page that a fork cuts is owned by each side on its own.

Does not know counts of pages, eviction order or branches; `tree.py` and `residency.py` keep the
fields below true.
"""

from typing import Optional

import numpy as np
import numpy.typing as npt

from ramify.actors.cache.allocator import Pages
from ramify.actors.kit.blocks import Hashes

Tokens = npt.NDArray[np.int32]

NO_PAGES: Pages = np.empty(0, dtype=np.int32)
NO_TOKENS: Tokens = np.empty(0, dtype=np.int32)
_FIRST_COMPARE = 256  # tokens; doubled for each further comparison


class Node:
    """One run of tokens. Its identity is its *end*: a split creates a new node for the upper part."""

    __slots__ = (
        "children",
        "end",
        "hashes",
        "last_use",
        "locks",
        "owner",
        "pages",
        "parent",
        "proven",
        "refs",
        "resident_children",
        "retained",
        "stamp",
        "start",
        "suspect",
        "table",
        "tokens",
        "told",
        "until",
    )

    def __init__(self, parent: Optional["Node"], start: int, tokens: Tokens) -> None:
        self.parent = parent  # None: a root, or deleted
        self.children: dict[int, Node] = {}  # by first token
        self.start = start
        self.end = start + len(tokens)
        self.tokens = tokens  # int32[end - start]
        self.pages: Pages | None = None  # int32[end // P - start // P] when resident
        self.refs = 0  # branch handles and running requests whose head is this node's end
        self.locks = 0  # running requests anchored here, plus locked children, plus one if kept
        self.resident_children = 0
        self.owner = 0  # cold only: the running request that is computing it
        self.last_use = 0
        self.stamp = 0  # of its valid entry in an eviction heap; 0: it has none
        self.retained = 0  # retained branches whose head is here, plus retained children
        self.until = 0.0  # about when the last of them ends: who goes first among the retained
        self.proven = False  # resident only: somebody sampled from finite logits over this KV
        self.suspect = False  # resident and locked only: a request over this KV was not finite
        self.hashes: Hashes | None = None  # of its first blocks, as far as they are known (`Announcer`)
        self.told = 0  # resident only: of how many of them routers were told
        self.table: bytes | None = None  # page table of [0, end), if kept; only while locked

    def __repr__(self) -> str:
        state = "cold" if self.pages is None else f"{len(self.pages)} pages"
        return f"<Node [{self.start}, {self.end}) {state} refs={self.refs} locks={self.locks}>"


def common_prefix(a: Tokens, b: Tokens) -> int:
    """How many leading tokens are equal. O(result), vectorised, in growing blocks."""
    length = min(len(a), len(b))
    position, block = 0, _FIRST_COMPARE
    while position < length:
        stop = min(position + block, length)
        differs = a[position:stop] != b[position:stop]
        first = int(differs.argmax())
        if differs[first]:
            return position + first
        position, block = stop, block * 2
    return length


def compact(values: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """`values`, copied if it is a small view that keeps a much larger buffer alive."""
    base = values.base
    if isinstance(base, np.ndarray):
        held = base.nbytes
    elif isinstance(base, bytes):
        held = len(base)
    else:
        return values
    return values.copy() if held > 4 * values.nbytes + 256 else values
