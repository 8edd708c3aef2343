"""The pages of one running request.

A request uses the tree's pages for [0, cached) and pages of its own from there on, whatever the tree
holds: a row's page table never changes under it. Pages pass to the tree one by one as they are
committed. The rest is freed at the end: pages decoded too far, or computed by two requests at once. Does
not know the tree's rules: `requests.py` does.
"""

from dataclasses import dataclass, field

import numpy as np

from ramify.actors.cache.allocator import Pages
from ramify.actors.cache.node import Node
from ramify.actors.cache.snapshots import Snapshot
from ramify.actors.cache.windows import Ring

_GIVEN = -1


@dataclass(slots=True, eq=False, repr=False)
class PageLease:
    """A request from its grant to its final commit."""

    request: int
    branch: int
    tip: Node  # head of the branch when it was granted; holds a reference
    anchor: Node  # holds a lock: the deepest node whose pages the row uses
    first: int  # page index of the first own page
    _table: Pages  # its own pages: int32[capacity], the first `_count` are valid
    _count: int
    rank: int = 0  # see `Residency.rank`
    slots: set[int] = field(default_factory=set)  # state slots that it may write
    reads: tuple[int, int] = 0, 0  # a position, and the slot that it may still read; 0: none
    resumes: int = 0  # where the stored snapshot stands that it loads, until it is in the tree
    states: list[Snapshot] = field(default_factory=list)  # began from or left: as good as its logits
    ring: Ring | None = None  # of a model with windows
    stored: list[bytes] = field(default_factory=list)  # keys of blocks that it loads, pinned until then
    loaded: int = 0  # tokens in them that are not on the device
    compared: dict[int, bytes] = field(default_factory=dict)  # pinned blocks by number: see `Canaries`
    mixed: Node | None = None  # the deepest node whose pages another request computed meanwhile

    @property
    def proves(self) -> bool:
        """Whether its finite logits say that all KV to the anchor is good.

        They were not sampled over what another one computed meanwhile. That one proves it.
        """
        return self.mixed is None or self.mixed.proven

    @property
    def end(self) -> int:
        """Page index past the request's last page."""
        return self.first + self._count

    def grow(self, pages: Pages) -> None:
        """Append pages. Amortised O(len(pages))."""
        count = self._count + len(pages)
        if count > len(self._table):
            table = np.empty(max(count, 2 * len(self._table)), dtype=np.int32)
            table[: self._count] = self._table[: self._count]
            self._table = table
        self._table[self._count : count] = pages
        self._count = count

    def give(self, start: int, stop: int) -> Pages:
        """The own pages of page indices [start, stop), which belong to the tree from now on."""
        if not self.first <= start <= stop <= self.end:
            raise RuntimeError(f"pages [{start}, {stop}) of request {self.request:#x}")
        span = self._table[start - self.first : stop - self.first]
        pages = span.copy()
        if (pages == _GIVEN).any():
            raise RuntimeError(f"pages [{start}, {stop}) of request {self.request:#x} are given away")
        span[:] = _GIVEN
        return pages

    def rest(self) -> Pages:
        """The own pages that were not given away."""
        table = self._table[: self._count]
        own: Pages = table[table != _GIVEN]
        return own
