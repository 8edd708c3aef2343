"""Which nodes have KV: locks, page tables, eviction, and the page counts.

    free         in the allocator
    evictable    pages of resident nodes that no running request uses
    referenced   pages of locked nodes, and pages that are private to running requests

always add up to the pool. A resident node's parent is resident; a locked node's parent is locked.
So every evictable page can be reached by evicting leaves: resident nodes without resident children.

Least recently used first; nodes on a retained branch's path after all others, and not one moment
longer protected than that. The heaps are lazy: an entry is valid if it carries its node's stamp.
Does not know branches, requests or clocks (`now` is an argument).
"""

import heapq

from ramify.actors.cache.allocator import PageAllocator, Pages
from ramify.actors.cache.node import Node
from ramify.actors.cache.tree import RadixTree

_SHORT_PATH = 8  # nodes; joining so few costs little beside the copy itself


class Residency:
    """The pages of a tree's nodes, and what may be taken from them."""

    def __init__(self, tree: RadixTree, allocator: PageAllocator) -> None:
        self.tree = tree
        self.allocator = allocator
        self.evictable = 0
        self.locked = 0  # pages of locked nodes
        self.private = 0  # pages of running requests that are not in the tree
        self._plain: list[tuple[int, int, Node]] = []  # (last_use, stamp, node)
        self._retained: list[tuple[float, int, Node]] = []  # (until, stamp, node)
        self._uses = 0
        self._stamps = 0

    @property
    def free(self) -> int:
        return self.allocator.free_pages

    @property
    def referenced(self) -> int:
        return self.locked + self.private

    # --- locks ------------------------------------------------------------------------------

    def lock(self, node: Node) -> None:
        """Keep the path to the end of a resident `node`. Walks up to the first locked ancestor."""
        current: Node | None = node
        while current is not None:
            current.locks += 1
            if current.locks > 1:
                return
            assert current.pages is not None, current
            self.evictable -= len(current.pages)
            self.locked += len(current.pages)
            current = current.parent

    def unlock(self, node: Node) -> None:
        """Undo one `lock` of `node`. The pages stay, as cache."""
        self.touch(node)
        current: Node | None = node
        while current is not None:
            if current.locks < 1 or current.pages is None:
                raise RuntimeError(f"unlock without lock: {current!r}")
            current.locks -= 1
            if current.locks:
                return
            self.evictable += len(current.pages)
            self.locked -= len(current.pages)
            parent = current.parent
            if parent is not None:
                current.table = None
                self._offer(current)
            current = parent

    def touch(self, node: Node) -> None:
        """`node` was used just now."""
        self._uses += 1
        node.last_use = self._uses

    # --- pages ------------------------------------------------------------------------------

    def table(self, node: Node, own: Pages) -> bytes:
        """int32 page table: the whole pages of [0, node.end), then `own`. `node` is locked.

        One copy where the path is short. Of a longer path the joined table is kept on `node` for as
        long as it is locked, so that the siblings of a fork do not all walk it.
        """
        parts: list[memoryview | bytes] = [own.data]
        current = node
        while current.table is None:
            assert current.pages is not None
            assert current.parent is not None
            parts.append(current.pages.data)
            current = current.parent
        parts.append(current.table)
        parts.reverse()
        if len(parts) > _SHORT_PATH:
            node.table = b"".join(parts[:-1])
            parts = [node.table, own.data]
        return b"".join(parts)

    def take(self, count: int, now: float) -> Pages | None:
        """`count` pages private to a request, evicting as needed; None if there are not enough."""
        short = count - self.allocator.free_pages
        if short > 0:
            if short > self.evictable:
                return None
            self._evict(short, now)
        self.private += count
        return self.allocator.alloc(count)

    def give_back(self, pages: Pages) -> None:
        """Free pages that were private to a request."""
        self.private -= len(pages)
        self.allocator.free(pages)

    def publish(self, node: Node, pages: Pages) -> None:
        """A cold node under a resident parent becomes resident with a request's private pages.

        The caller locks it, or a node below, before anything is evicted.
        """
        parent = node.parent
        assert parent is not None
        assert parent.pages is not None
        assert node.pages is None
        node.pages = pages
        node.owner = 0
        parent.resident_children += 1
        self.private -= len(pages)
        self.evictable += len(pages)
        self.touch(node)

    # --- eviction ---------------------------------------------------------------------------

    def reconsider(self, node: Node) -> None:
        """The retention of `node` was lowered: put it back among the others."""
        if node.stamp:
            self._push(node)

    def _is_candidate(self, node: Node) -> bool:
        return (
            node.pages is not None
            and node.locks == 0
            and node.resident_children == 0
            and node.parent is not None
        )

    def _offer(self, node: Node) -> None:
        """Put `node` up for eviction, if it can be evicted and is not up yet.

        A node inside a page owns none; it is resident only for the sake of those below it.
        """
        while self._is_candidate(node):
            assert node.pages is not None
            assert node.parent is not None
            if len(node.pages):
                if not node.stamp:
                    self._push(node)
                return
            parent = node.parent
            self._make_cold(node)
            node = parent

    def _push(self, node: Node) -> None:
        self._stamps += 1
        node.stamp = self._stamps
        heapq.heappush(self._plain, (node.last_use, node.stamp, node))
        if len(self._plain) + len(self._retained) > 64 + 4 * self.tree.nodes:
            self._plain = [entry for entry in self._plain if entry[1] == entry[2].stamp]
            self._retained = [entry for entry in self._retained if entry[1] == entry[2].stamp]
            heapq.heapify(self._plain)
            heapq.heapify(self._retained)

    def _evict(self, count: int, now: float) -> None:
        """Free at least `count` pages, no more than needed. There are that many evictable."""
        while count > 0:
            node = self._next_victim(now)
            assert node.pages is not None
            if len(node.pages) > count:
                # Only the end of a long leaf: the pages before `cut` stay as a leaf of their own.
                size = self.tree.page_size
                cut = (node.start // size + len(node.pages) - count) * size
                self.tree.split(node, cut)
            assert node.parent is not None
            parent = node.parent
            count -= len(node.pages)
            self._make_cold(node)
            self._offer(parent)

    def _next_victim(self, now: float) -> Node:
        """Pop the node to evict next. Entries that are out of date are dropped or put right."""
        while True:
            if not self._plain or (self._retained and self._retained[0][0] <= now):
                until, stamp, node = heapq.heappop(self._retained)
                if node.stamp != stamp:
                    continue
                if until <= now:
                    self._push(node)  # the retention is over
                    continue
                if node.until != until and node.until > now:
                    heapq.heappush(self._retained, (node.until, stamp, node))
                    continue
            else:
                used, stamp, node = heapq.heappop(self._plain)
                if node.stamp != stamp:
                    continue
                if node.last_use != used and self._is_candidate(node):
                    heapq.heappush(self._plain, (node.last_use, stamp, node))
                    continue
                if node.until > now and self._is_candidate(node):
                    heapq.heappush(self._retained, (node.until, stamp, node))
                    continue
            node.stamp = 0
            if self._is_candidate(node):
                return node

    def _make_cold(self, node: Node) -> None:
        """Free a leaf's pages. Its tokens stay if a handle, request or node at or below needs them."""
        parent = node.parent
        assert parent is not None
        assert node.pages is not None
        self.evictable -= len(node.pages)
        self.allocator.free(node.pages)
        node.pages = None
        node.stamp = 0
        parent.resident_children -= 1
        parent.last_use = max(parent.last_use, node.last_use)
        if not node.refs and not node.children:
            self.tree.delete(node)
