"""Which blocks of tokens have KV, told to the routers of a cluster as hashes (`protocol/cluster.py`).

Residency says which nodes became resident and which went cold; that is all that happens on the
way of a step, and nothing where nobody listens. `flush`, some times a second, hashes what is new,
all nodes in a few operations. What has been told of a node is kept at it, so a split divides it as
it does pages, and eviction looks nothing up:

    node.hashes    uint64, of the first blocks that end in (start, end]; None: nothing was told yet

A node is *told* when all of its blocks were. On any path the told nodes come first. Nodes between
the last of them and a new one are told with it.

Does not know who listens, or what for.
"""

import numpy as np

from ramify.actors.cache.node import Node, Tokens
from ramify.actors.cache.tree import RadixTree
from ramify.actors.kit.blocks import BlockHasher, Hashes, seed
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
            tokens += self._hash(stored)
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

    def _hash(self, stored: list[Hashes]) -> int:
        """Hash what is not told of some changed nodes' paths, onto `stored`. Returns how many tokens.

        All at once, so none of them may be below another: such a one stays for the next call.
        """
        size, tokens = self.size, 0
        runs: list[tuple[int, Tokens]] = []
        paths: list[tuple[list[Node], int]] = []  # nodes from the tip up, the first block to be told
        claimed: set[Node] = set()
        later: list[Node] = []
        while self._changed and tokens < MOST_TOKENS:
            tip, _ = self._changed.popitem()
            if tip.pages is None or tip.parent is None:
                continue  # evicted, or merged into another
            path: list[Node] = []
            node = tip
            while node not in claimed and not self._is_told(node):
                path.append(node)
                assert node.parent is not None  # roots are told
                node = node.parent
            if node in claimed:
                later.append(tip)
                continue
            if not path:
                continue
            claimed.update(path)
            top = path[-1]
            first = top.start // size + (0 if top.hashes is None else len(top.hashes))
            fresh = np.frombuffer(self._tree.tokens(tip, first * size), dtype=np.int32)
            tokens += len(fresh)
            runs.append((self._state(top), fresh))
            paths.append((path, first))
        for (path, first), hashes in zip(paths, self._hasher.chains(runs), strict=True):
            if len(hashes):
                stored.append(hashes)
            for each in path:
                part = hashes[max(each.start // size - first, 0) : each.end // size - first]
                old = each.hashes  # only the uppermost may have any
                each.hashes = part if old is None else np.concatenate((old, part))
        self._changed.update(dict.fromkeys(later))
        return tokens

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
