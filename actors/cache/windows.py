"""Window tails: the KV of layers that see a window of tokens only, in a pool of its own.

At each position such a layer reads KV of up to `before` tokens before it. So a run needs the window
pages of its last tokens, and a prefix can be resumed where these are still there. A *tail* is that:
references to the window pages of the last `before` tokens of a node's path. It is a snapshot as those
of fixed states are, stands where they do, and gives way by the same rule. A page that several tails and
runs refer to is there once. So a fork costs nothing, and a tail a few tokens on only these.

A run has a table with a page for each position that it may run, made when it is granted. Positions that
no tail will need share pages, in a ring: position q takes the page of one at least `gap` before it,
which no step reads any more that could write q. So nothing is freed or taken from step to step.

Does not know pages of other layers, requests or time.
"""

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ramify.actors.cache.allocator import PageAllocator, Pages
from ramify.actors.cache.node import NO_PAGES, Node
from ramify.actors.cache.snapshots import Snapshot, Snapshots
from ramify.protocol.plan import ExecutorInfo


class Windows(NamedTuple):
    """`window`, `pages`: see `ExecutorInfo`. `chunk`: most prompt tokens of a row in a step.

    `slack`: most positions that steps under way may write behind the last accepted token of a run.
    """

    window: int
    pages: int
    chunk: int
    slack: int

    @property
    def before(self) -> int:
        """Tokens that a token sees, beside itself."""
        return self.window - 1

    @property
    def prompt_gap(self) -> int:
        """A position of a prompt may take the page of one that is so far before it."""
        return self.before + max(self.chunk, 2 * self.slack)

    @property
    def gap(self) -> int:
        """The same of a position that is decoded. Drafts that were refused may have been further on."""
        return self.before + 2 * self.slack

    @property
    def least(self) -> int:
        """Pages without which a request might never run: its ring, and the tail that it begins from."""
        return self.prompt_gap + self.before


def windows_of(info: ExecutorInfo, in_flight: int) -> Windows | None:
    """The pool that the executor has for window layers; None: it has none."""
    if not info.window_pages:
        return None
    if info.state_slots:
        raise ValueError("a model with both fixed states and window pages cannot be served yet")
    slack = (in_flight + 1) * (1 + max(info.max_drafts, info.max_forced))
    return Windows(info.window, info.window_pages, info.step_tokens, slack)


class Ring:
    """The window pages of one run: those that it alone has, and those that tails have or will have."""

    __slots__ = ("first", "last", "least", "own", "shared", "spare", "table")

    def __init__(
        self, first: int, tail: Pages, fresh: Pages, kept: npt.NDArray[np.bool_], gap: int, least: int
    ) -> None:
        """`first`: position of the first page of `tail`. `kept` [n]: of the positions behind it, those
        that tails are to have. `fresh`: pages for these, then for the ring. `least`: pages that the run
        alone writes, for as long as it runs.
        """
        n, count = len(kept), int(kept.sum())
        ring = fresh[count:]
        places = np.flatnonzero(~kept)
        table = np.empty(n, dtype=np.int32)
        table[kept] = fresh[:count]
        start = first + len(tail)
        size = min(len(places), gap)
        self.spare: Pages = ring[size:]  # its own, without a position
        # (last position, page) of its own, in this order
        self.own: deque[tuple[int, int]] = deque()
        if size:
            table[places] = ring[np.arange(len(places)) % size]
            newest = places[-size:]
            self.own.extend(zip((start + newest).tolist(), table[newest].tolist(), strict=True))
        self.first = first
        self.table: Pages = np.concatenate([tail, table])  # of [first, ..)
        self.shared: Pages = np.concatenate([tail, fresh[:count]])
        # of each of them, its position
        self.last = np.concatenate([np.arange(first, start), start + np.flatnonzero(kept)])
        self.least = least

    @property
    def alone(self) -> Pages:
        """Pages that no tail has, nor will have."""
        return np.array([*(page for _, page in self.own), *self.spare], dtype=np.int32)

    @property
    def pages(self) -> Pages:
        """All pages of the run, each once."""
        return np.concatenate([self.shared, self.alone])

    def span(self, start: int, end: int) -> Pages:
        """The pages of positions [start, end)."""
        if start < self.first:
            raise RuntimeError(f"window pages from {start} on are gone: those from {self.first} are not")
        return self.table[start - self.first : end - self.first].copy()

    def grow(self, count: int, gap: int) -> Pages:
        """Add pages of the run's own for `count` more positions. Returns them."""
        end = self.first + len(self.table)
        taken = np.empty(count, dtype=np.int32)
        spare = self.spare.tolist()
        for i in range(count):
            if spare:
                page = spare.pop()
            else:
                last, page = self.own.popleft()
                if last > end + i - gap:
                    raise RuntimeError(f"position {end + i} would overwrite {last} in its window")
            self.own.append((end + i, page))
            taken[i] = page
        self.spare = np.array(spare, dtype=np.int32)
        self.table = np.concatenate([self.table, taken])
        return taken

    def leave(self, position: int) -> Pages:
        """Drop the pages before `position`, which no step reads any more. Returns them."""
        cut = position - self.first
        if cut <= 0:
            return NO_PAGES
        self.first, self.table = position, self.table[cut:]
        over = self.last < position
        gone, self.shared, self.last = self.shared[over], self.shared[~over], self.last[~over]
        old = []
        while self.own and self.own[0][0] < position:
            old.append(self.own.popleft()[1])
        self.spare = np.concatenate([self.spare, np.array(old, dtype=np.int32)])
        more = min(len(self.spare), max(0, len(self.spare) + len(self.own) - self.least))
        freed, self.spare = self.spare[:more], self.spare[more:]
        return np.concatenate([gone, freed])


class Tails(Snapshots):
    """The window pages, and which tails refer to them. A slot is the number of a tail."""

    def __init__(
        self,
        pages: int,
        dropped: Callable[[Node], None] = lambda node: None,
        leaving: Callable[[Snapshot], None] = lambda snapshot: None,
    ) -> None:
        super().__init__(pages, dropped, leaving)  # each tail has a page that no other one has
        self.allocator = PageAllocator(pages)
        self.runs = np.zeros(pages, dtype=np.int32)  # that refer to a page
        self.tails = np.zeros(pages, dtype=np.int32)
        self.held = 0  # pages that runs refer to
        self.pages: dict[int, Pages] = {}  # of each tail

    @property
    def obtainable(self) -> int:
        """Pages that no run refers to."""
        return self.allocator.total - self.held

    def hold(self, pages: Pages) -> None:
        """Count one more run that refers to each of `pages`."""
        self.runs[pages] += 1
        self.held += int((self.runs[pages] == 1).sum())

    def let_go(self, pages: Pages) -> None:
        """Count one run less for each of `pages`; free those that nothing refers to."""
        self.runs[pages] -= 1
        over = pages[self.runs[pages] == 0]
        self.held -= len(over)
        self.allocator.free(over[self.tails[over] == 0])

    def take_pages(self, count: int) -> Pages:
        """Take `count` pages for a run, of which that many are `obtainable`; tails give way."""
        while self.allocator.free_pages < count:
            self._evict()
        pages = self.allocator.alloc(count)
        self.hold(pages)
        return pages

    def add(self, pages: Pages) -> int:
        """The number of a tail of `pages`, which a run holds. The caller uses it."""
        (slot,) = self.take(1)
        self.pages[slot] = pages
        self.tails[pages] += 1
        return slot

    def release(self, slot: int) -> None:
        super().release(slot)
        if not self.uses(slot):  # no node has it
            pages = self.pages.pop(slot)
            self.tails[pages] -= 1
            over = pages[self.tails[pages] == 0]
            self.allocator.free(over[self.runs[over] == 0])

    def _worth(self, snapshot: Snapshot) -> int:
        """Tokens of replay that a tail saves for each page that it adds, in 1024ths."""
        added = min(self.saved(snapshot.node), len(self.pages[snapshot.slot]))
        return snapshot.since + self.saves(snapshot) * 1024 // added
