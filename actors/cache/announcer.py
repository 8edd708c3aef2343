"""Which blocks of tokens have KV, told to the routers of a cluster as hashes (`protocol/cluster.py`).

Residency reports which nodes became resident or cold. Nothing else happens within a step, and nothing at
all without listeners. `flush`, some times a second, hashes the changed nodes in a few array operations.
Hashes are kept at the nodes. So a split divides them as it does pages, eviction looks nothing up, and
tokens that are evicted and computed again are not hashed again:

    node.hashes    uint64, of the first blocks that end in (start, end]; None: of none
    node.told      how many of these blocks routers know as resident

A node is *hashed* when all of its blocks are, and *told* when it has any and all were. On any path the
hashed nodes come first, and among them the told ones. Nodes between the last told one and a new one are
told with it.

Does not know who listens, or what for.
"""

import numpy as np

from ramify.actors.cache.node import Node, Tokens
from ramify.actors.cache.tree import RadixTree
from ramify.actors.kit.blocks import BlockHasher, Hashes, seed
from ramify.protocol.cluster import MOST_HASHES, KvEvents

MOST_TOKENS = 1 << 17  # that one flush hashes: about a millisecond


class Announcer:
    """Announces the blocks of `tree`. The first flushes tell all that is resident now."""

    def __init__(self, tree: RadixTree) -> None:
        self.size = size = tree.block
        self.seq = 0  # of the last `KvEvents`
        self._tree = tree
        self._hasher = BlockHasher(size)
        self._changed: dict[Node, None] = {}  # resident nodes that may not be told
        self._removed: list[Hashes] = []  # told, and not resident any more
        for node in tree.walk():
            if node.resident and (node.snapshot or not tree.states):
                self.stored(node)

    @property
    def pending(self) -> bool:
        """Whether something has changed since the last flush."""
        return bool(self._changed or self._removed)

    def stored(self, node: Node) -> None:
        """Note that `node` became resident."""
        if node.parent is not None:
            self._changed[node] = None

    def withdrawn(self, node: Node) -> None:
        """Note that `node` is resident, but no snapshot at or below it can be resumed."""
        if node.told:
            assert node.hashes is not None
            self._removed.append(node.hashes[: node.told])
            node.told = 0
        self._changed.pop(node, None)

    def removed(self, node: Node) -> None:
        """Note that `node` is no longer resident. Its parent is."""
        if node.told:
            assert node.hashes is not None
            self._removed.append(node.hashes[: node.told])
            node.told = 0
        if node in self._changed:
            del self._changed[node]
            parent = node.parent
            if parent is not None:  # it may have been cut off from `node`, and not be told either
                self.stored(parent)

    def flush(self) -> list[KvEvents]:
        """The changes, as messages for all listeners. Stops after `MOST_TOKENS` tokens:
        see `pending`.
        """
        removed, self._removed = self._removed, []
        stored: list[Hashes] = []
        tokens = 0
        while self._changed and tokens < MOST_TOKENS:
            tokens += self._tell(stored)
        events: list[KvEvents] = []
        if removed:
            events += [KvEvents(self._next(), removed=part) for part in _parts(removed)]
        if stored:
            events += [KvEvents(self._next(), stored=part) for part in _parts(stored)]
        return events

    def snapshot(self, listener: int) -> list[KvEvents]:
        """All told blocks, for one new listener: at least one message. O(tree)."""
        known = list(self._removed)
        known += [n.hashes[: n.told] for n in self._tree.walk() if n.hashes is not None and n.told]
        return [
            KvEvents(self.seq, stored=part, listener=listener, reset=not i)
            for i, part in enumerate(_parts(known) or [b""])
        ]

    def close(self) -> None:
        """Forget all hashes: the last listener has gone. O(tree)."""
        for node in self._tree.walk():
            node.hashes, node.told = None, 0

    # --- internals --------------------------------------------------------------------------

    def _next(self) -> int:
        self.seq += 1
        return self.seq

    def _tell(self, stored: list[Hashes]) -> int:
        """Add the untold blocks on the paths of some changed nodes to `stored`. Returns how many tokens.

        New blocks are hashed all at once, so no path may lead below another: such a node stays for the
        next call.
        """
        size, tokens = self.size, 0
        paths: list[list[Node]] = []  # from the tip up
        claimed: set[Node] = set()
        later: list[Node] = []
        while self._changed and tokens < MOST_TOKENS:
            tip, _ = self._changed.popitem()
            if not tip.resident or tip.parent is None:
                continue  # evicted, or merged into another
            path: list[Node] = []
            node = tip
            while node not in claimed and not self._is_told(node):
                path.append(node)
                assert node.parent is not None  # roots are told
                node = node.parent
            if node in claimed:
                later.append(tip)
            elif path:
                claimed.update(path)
                paths.append(path)
                tokens += tip.end - path[-1].start - path[-1].told * size
        self._hash(paths)
        for path in paths:
            for each in reversed(path):
                hashes = each.hashes
                assert hashes is not None
                if len(hashes) > each.told:
                    stored.append(hashes[each.told :] if each.told else hashes)
                    each.told = len(hashes)
        self._changed.update(dict.fromkeys(later))
        return tokens

    def _hash(self, paths: list[list[Node]]) -> None:
        """Hash what is not hashed of some paths, given from the tip up."""
        size = self.size
        runs: list[tuple[int, Tokens]] = []
        new: list[tuple[list[Node], int]] = []  # the nodes, the first block
        for path in paths:
            count = 0
            while count < len(path) and not self._is_hashed(path[count]):
                count += 1
            if not count:
                continue
            top = path[count - 1]
            first = top.start // size + (0 if top.hashes is None else len(top.hashes))
            fresh = np.frombuffer(self._tree.tokens(path[0], first * size), dtype=np.int32)
            runs.append((self._state(top), fresh))
            new.append((path[:count], first))
        for (nodes, first), hashes in zip(new, self._hasher.chains(runs), strict=True):
            for each in nodes:
                part = hashes[max(each.start // size - first, 0) : each.end // size - first]
                old = each.hashes  # only the uppermost may have any
                each.hashes = part if old is None else np.concatenate((old, part))

    def _is_told(self, node: Node) -> bool:
        """Whether the node and all above it were told. A node without a block's end never counts as
        told.
        """
        if not node.told:
            return node.parent is None
        return node.told == node.end // self.size - node.start // self.size

    def _is_hashed(self, node: Node) -> bool:
        return node.hashes is not None and len(node.hashes) == (
            node.end // self.size - node.start // self.size
        )

    def _state(self, node: Node) -> int:
        """The hash chain's state behind the last told block on the path to `node`."""
        while node.hashes is None or not len(node.hashes):
            if node.parent is None:
                return seed(self._tree.namespace(node))
            node = node.parent
        return int(node.hashes[-1])


def _parts(runs: list[Hashes]) -> list[bytes]:
    """The hashes in the form of messages."""
    if not runs:
        return []
    hashes = np.concatenate(runs)
    return [
        hashes[start : start + MOST_HASHES].tobytes() for start in range(0, len(hashes), MOST_HASHES)
    ]
