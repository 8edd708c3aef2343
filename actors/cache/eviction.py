"""The order in which resident leaves are evicted.

Least recently used first; nodes on a retained branch's path after all others. The heaps are lazy: an
entry is valid if it carries its node's stamp, and is corrected when it comes up. Does not free pages,
and knows no branches or clocks.
"""

import heapq

from ramify.actors.cache.node import Node
from ramify.actors.cache.tree import RadixTree

_SOON = 8  # entries of a heap that are looked at


def evictable(node: Node) -> bool:
    """A resident leaf of the resident part of the tree that nothing holds."""
    return node.resident and node.locks == 0 and node.resident_children == 0 and node.parent is not None


class Victims:
    """The resident leaves that nothing holds, and perhaps others that were such."""

    def __init__(self, tree: RadixTree) -> None:
        self._tree = tree
        self._plain: list[tuple[int, int, Node]] = []  # (last_use, stamp, node)
        self._retained: list[tuple[float, int, Node]] = []  # (until, stamp, node)
        self._stamps = 0

    def __len__(self) -> int:
        """Entries, valid or not."""
        return len(self._plain) + len(self._retained)

    def push(self, node: Node) -> None:
        """Put `node` up; an entry that it has does not count any more."""
        self._stamps += 1
        node.stamp = self._stamps
        heapq.heappush(self._plain, (node.last_use, node.stamp, node))
        if len(self) > 64 + 4 * self._tree.nodes:
            self._plain = [entry for entry in self._plain if entry[1] == entry[2].stamp]
            self._retained = [entry for entry in self._retained if entry[1] == entry[2].stamp]
            heapq.heapify(self._plain)
            heapq.heapify(self._retained)

    def reconsider(self, node: Node) -> None:
        """Put `node`, whose retention got shorter, back among the others."""
        if node.stamp:
            self.push(node)

    def soon(self) -> list[Node]:
        """Some of the nodes that are evicted next. O(1): the heap's first entries."""
        first = self._plain[:_SOON]
        return [node for _, stamp, node in first if node.stamp == stamp and evictable(node)]

    def pop(self) -> Node:
        """The node to evict next. There is one."""
        while True:
            if self._plain:
                used, stamp, node = heapq.heappop(self._plain)
                if node.stamp != stamp:
                    continue
                if evictable(node):
                    if node.last_use != used:
                        heapq.heappush(self._plain, (node.last_use, stamp, node))
                        continue
                    if node.retained:
                        heapq.heappush(self._retained, (node.until, stamp, node))
                        continue
            else:
                until, stamp, node = heapq.heappop(self._retained)
                if node.stamp != stamp:
                    continue
                if evictable(node) and node.until != until:
                    heapq.heappush(self._retained, (node.until, stamp, node))
                    continue
            node.stamp = 0
            if evictable(node):
                return node
