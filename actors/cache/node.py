"""A node of the radix tree, and how token runs are compared.

A node holds the tokens of positions [start, end) of every branch below it. `state` says where their KV
is:

    GONE        nowhere: never computed, or evicted
    COMPUTING   a running request computes it: `Node.owner`
    DEVICE      in the node's pages, for every request
    SUSPECT     in the node's pages, but logits over them were not finite: only the requests that
                already use them keep them

What has left the device for another tier belongs to no node: whoever brings its tokens finds it by the
keys of its blocks (`stored.py`), also when the node is long deleted.

The node is *resident* if it is on the device, and *cold* otherwise. A page
belongs to the node that holds its last position, so a node owns page indices [start // P, end // P) of
its path: any split divides the pages with no rest, and a page that a fork cuts is owned by each side
on its own.

Only the methods of `Node` change `state` and what belongs to it. Does not know counts of pages,
eviction order or branches; `tree.py` and `residency.py` keep the other fields true.
"""

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Optional

import numpy as np
import numpy.typing as npt

from ramify.actors.cache.allocator import Pages
from ramify.actors.kit.blocks import Hashes

Tokens = npt.NDArray[np.int32]

NO_PAGES: Pages = np.empty(0, dtype=np.int32)
NO_TOKENS: Tokens = np.empty(0, dtype=np.int32)
_FIRST_COMPARE = 256  # tokens; doubled for each further comparison


class KvState(IntEnum):
    """An integer, because it is looked up by each change: an `Enum` is hashed in Python."""

    GONE = 0
    COMPUTING = 1
    DEVICE = 2
    SUSPECT = 3


GONE, COMPUTING, DEVICE, SUSPECT = KvState

FOLLOWS: dict[KvState, frozenset[KvState]] = {
    # straight to DEVICE: output, and what another request was to compute
    GONE: frozenset({COMPUTING, DEVICE}),
    COMPUTING: frozenset({COMPUTING, GONE, DEVICE}),  # COMPUTING: by another request
    DEVICE: frozenset({SUSPECT, GONE}),
    SUSPECT: frozenset({DEVICE, GONE}),  # DEVICE: a later request's logits were finite
}
"""The states that may follow each state."""

ON_DEVICE = frozenset({DEVICE, SUSPECT})
"""The states in which a node has pages."""


@dataclass(slots=True, eq=False, repr=False)
class Node:
    """One run of tokens. Its identity is its *end*: a split creates a new node for the upper part."""

    parent: Optional["Node"]  # None: a root, or deleted
    start: int
    tokens: Tokens  # int32[end - start]
    end: int = field(init=False)
    children: dict[int, "Node"] = field(default_factory=dict)  # by first token
    state: KvState = GONE
    resident: bool = False  # state is DEVICE or SUSPECT; kept, because walks ask it of each node
    pages: Pages = field(default_factory=lambda: NO_PAGES)  # int32[end // P - start // P] when resident
    refs: int = 0  # branch handles and running requests whose head is this node's end
    locks: int = 0  # running requests anchored here, plus locked children, plus one if kept
    resident_children: int = 0
    owner: int = 0  # COMPUTING only: the running request that is computing it
    last_use: int = 0
    stamp: int = 0  # of its valid entry in an eviction heap; 0: it has none
    # by holder: its leases that end here, plus the children that it holds (`Leases`)
    held: dict[str, int] | None = None
    until: float = 0.0  # about when the last of them ends: who goes first among the retained
    proven: bool = False  # DEVICE only: somebody sampled from finite logits over this KV
    hashes: Hashes | None = None  # of its first blocks, as far as they are known (`Announcer`)
    keys: list[bytes] = field(default_factory=list)  # of its first blocks, likewise (`StoredBlocks`)
    told: int = 0  # resident only: of how many of them routers were told
    snapshot: int = 0  # DEVICE only: the slot with the fixed state at its end; 0: there is none
    resumable: int = 0  # its snapshot, plus the children that have one at or below them
    ends: tuple[int, ...] = ()  # positions inside of it where absorbed nodes ended
    table: bytes | None = None  # page table of [0, end), if kept; only while locked

    def __post_init__(self) -> None:
        self.end = self.start + len(self.tokens)

    def __repr__(self) -> str:
        pages = f" {len(self.pages)} pages" if self.resident else ""
        place = f"[{self.start}, {self.end}) {self.state.name.lower()}{pages}"
        return f"<Node {place} refs={self.refs} locks={self.locks}>"

    @property
    def retained(self) -> bool:
        """Whether a lease ends at or below this node."""
        return bool(self.held)

    # --- changes of state ---------------------------------------------------------------------

    def _become(self, state: KvState) -> None:
        if state not in FOLLOWS[self.state]:
            raise RuntimeError(f"{self!r} cannot become {state.name.lower()}")
        self.state = state
        self.resident = state in ON_DEVICE

    def claim(self, request: int) -> None:
        """Note that `request` computes this node's KV."""
        self._become(COMPUTING)
        self.owner = request

    def disclaim(self) -> None:
        """Note that the request which was to compute this KV does not."""
        self._become(GONE)
        self.owner = 0

    def fill(self, pages: Pages) -> None:
        """Note that this node's KV is in `pages`."""
        self._become(DEVICE)
        self.owner = 0
        self.pages = pages

    def empty(self) -> Pages:
        """Note that this node's KV is gone. Returns the pages, for the caller to free."""
        self._become(GONE)
        pages, self.pages = self.pages, NO_PAGES
        self.proven = False
        return pages

    def distrust(self) -> None:
        """Logits over its KV were not finite. Again: no change."""
        if self.state is not SUSPECT:
            self._become(SUSPECT)

    def prove(self) -> None:
        """Logits over its KV were finite."""
        if self.state is SUSPECT:
            self._become(DEVICE)
        self.proven = True

    def cut_from(self, node: "Node", count: int) -> None:
        """Become the upper part of `node`, in the same state; the first `count` pages become its own."""
        self.state, self.resident = node.state, node.resident
        self.owner, self.proven = node.owner, node.proven
        self.pages, node.pages = node.pages[:count], node.pages[count:]

    def is_alike(self, other: "Node") -> bool:
        """Whether both have the same state, so that they may be merged."""
        return self.state is other.state and self.owner == other.owner and self.proven == other.proven


def common_prefix(a: Tokens, b: Tokens) -> int:
    """Length of the common prefix. O(result), vectorised, in growing blocks."""
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
