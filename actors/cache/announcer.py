"""Which blocks of tokens have KV, told to the routers of a cluster as hashes (`protocol/cluster.py`).

Residency says which nodes became resident and which went cold; that is all that happens on the
way of a step, and nothing where nobody listens. `flush`, behind it, hashes what is new. What has
been told of a node is kept at it, so a split divides it as it does pages, and eviction looks
nothing up:

    node.hashes    uint64, of the first blocks that end in (start, end]; None: nothing was told yet

A node is *told* when all of its blocks were. On any path the told nodes come first. Nodes between
the last of them and a new one are told with it.

Does not know who listens, or what for.
"""

import numpy as np

from ramify.actors.cache.node import Node
from ramify.actors.cache.tree import RadixTree
from ramify.actors.kit.blocks import NO_HASHES, BlockHasher, Hashes, seed
from ramify.protocol.cluster import MOST_HASHES, KvEvents

MOST_TOKENS = 1 << 17  # that one flush hashes: about a millisecond


class Announcer:
    """Of `tree`, in its blocks. All that is resident now is told by the first flushes."""

    def __init__(self, tree: RadixTree) -> None:
        self.size = size = tree.block
        self.seq = 0  # of the last `KvEvents`
        self._tree = tree
        self._hasher = BlockHasher(size)
        self._known: dict[int, None] = {}  # hashes that were told and not taken back, parents first
        self._changed: dict[Node, None] = {}  # resident nodes that may not be told
        self._removed: list[Hashes] = []
        for node in tree.walk():
            node.hashes = None
            if node.pages is not None:
                self.stored(node)

    @property
    def pending(self) -> bool:
        """Something has changed since the last flush."""
        return bool(self._changed or self._removed)

    def stored(self, node: Node) -> None:
        """`node` is resident now."""
        if node.parent is not None:
            self._changed[node] = None

    def removed(self, node: Node) -> None:
        """`node` is not resident any more. Its parent is."""
        if node.hashes is not None:
            if len(node.hashes):
                self._removed.append(node.hashes)
            node.hashes = None
        if node in self._changed:
            del self._changed[node]
            parent = node.parent
            if parent is not None:  # it may have been cut off from `node`, and not be told either
                self.stored(parent)

    def flush(self) -> list[KvEvents]:
        """What has changed, as messages for all. Stops after `MOST_TOKENS` tokens: see `pending`."""
        removed, self._removed = self._removed, []
        stored: list[Hashes] = []
        tokens = 0
        while self._changed and tokens < MOST_TOKENS:
            node, _ = self._changed.popitem()
            if (
                node.pages is not None and node.parent is not None
            ):  # else evicted, or merged into another
                tokens += self._tell(node, stored)
        events: list[KvEvents] = []
        if removed:
            gone = np.concatenate(removed)
            for each in gone.tolist():
                self._known.pop(each, None)
            events += [KvEvents(self._next(), removed=part) for part in _parts(gone)]
        if stored:
            new = np.concatenate(stored)
            self._known.update(dict.fromkeys(new.tolist()))
            events += [KvEvents(self._next(), stored=part) for part in _parts(new)]
        return events

    def snapshot(self, listener: int) -> list[KvEvents]:
        """All that `flush` has told and not taken back, for one listener. At least one message."""
        known = np.fromiter(self._known, dtype=np.uint64, count=len(self._known))
        return [
            KvEvents(self.seq, stored=part, listener=listener, reset=not i)
            for i, part in enumerate(_parts(known) or [b""])
        ]

    def close(self) -> None:
        """Nobody listens any more. O(tree)."""
        for node in self._tree.walk():
            node.hashes = None

    # --- internals --------------------------------------------------------------------------

    def _next(self) -> int:
        self.seq += 1
        return self.seq

    def _tell(self, node: Node, stored: list[Hashes]) -> int:
        """Hash what is not told of the path to `node`, onto `stored`. Returns how many tokens."""
        size = self.size
        path: list[Node] = []
        while not self._is_told(node):
            path.append(node)
            assert node.parent is not None  # roots are told
            node = node.parent
        if not path:
            return 0
        top, tip = path[-1], path[0]
        done = 0 if top.hashes is None else len(top.hashes)
        first = top.start // size + done
        count = tip.end // size - first
        if not count:
            for each in path:
                each.hashes = NO_HASHES if each.hashes is None else each.hashes
            return 0
        tokens = np.frombuffer(self._tree.tokens(tip, first * size), dtype=np.int32)
        hashes = self._hasher.chain(self._state(top), tokens)
        stored.append(hashes)
        for each in path:
            part = hashes[max(each.start // size - first, 0) : each.end // size - first]
            old = each.hashes  # only that of the first one may have any
            each.hashes = part if old is None else np.concatenate((old, part))
        return len(tokens)

    def _is_told(self, node: Node) -> bool:
        if node.hashes is None:
            return node.parent is None
        return len(node.hashes) == node.end // self.size - node.start // self.size

    def _state(self, node: Node) -> int:
        """Of the chain, behind the last block that is told on the path to `node`."""
        while node.hashes is None or not len(node.hashes):
            if node.parent is None:
                return seed(self._tree.namespace(node))
            node = node.parent
        return int(node.hashes[-1])


def _parts(hashes: Hashes) -> list[bytes]:
    return [
        hashes[start : start + MOST_HASHES].tobytes() for start in range(0, len(hashes), MOST_HASHES)
    ]
