"""Snapshots that have left the device: fixed states and window tails, in slots of host memory.

A stored snapshot is what resumes at a position: a state in parts of a block's size, or the window pages
of the tokens before it, and the KV of other layers behind the last whole block. Its parts are entries of
`StoredBlocks` like blocks, under keys of their own, and give way as those do. One is found by the key of
the last whole block before it and the tokens behind that.

A snapshot that gives way on the device is stored if its KV is proven, somebody may come back to it, and
it saves enough tokens of replay for its bytes. It is loaded where that takes less time than the replay,
and only with blocks that leave no gap before it.

Does not know slots of states, requests, or what a part holds.
"""

from hashlib import blake2b
from typing import NamedTuple

import numpy as np

from ramify.actors.cache import snapshots
from ramify.actors.cache.allocator import Pages
from ramify.actors.cache.node import Node
from ramify.actors.cache.snapshots import Snapshot, Snapshots
from ramify.actors.cache.stored import StoredBlocks
from ramify.actors.cache.tree import RadixTree
from ramify.actors.cache.windows import Tails
from ramify.protocol.cluster import KEY
from ramify.protocol.plan import FULL, STATE, WINDOW, ExecutorInfo, MovedBlock

_MOST_SAVES = 128  # blocks that one look at the cache may order: what is beyond is not stored
_WORTH = 16  # tokens of replay, as `Snapshots.saves` counts them, that a part must save
_MOST_RESTS = 16  # snapshots behind one block; all others are not stored


class StoredSnapshot(NamedTuple):
    """A stored snapshot at position `at`. `blocks`: keys of what has to be loaded of KV before it, from
    position `start` on; `parts`: of what it is made of; `rest`: of the KV behind the last whole block;
    None: it is not needed.
    """

    at: int
    start: int
    blocks: list[bytes]
    parts: list[bytes]
    rest: bytes | None

    @property
    def keys(self) -> list[bytes]:
        return [*self.blocks, *self.parts, *([self.rest] if self.rest is not None else [])]


class StoredSnapshots:
    """Those in `stored`. `form`: STATE or WINDOW. `part`: parts of a state, or window pages of one."""

    def __init__(self, tree: RadixTree, stored: StoredBlocks, form: int, part: int) -> None:
        self._tree, self._stored, self._form, self._part = tree, stored, form, part
        # the last whole block before each, by the snapshot's own key: tokens behind the block, and parts
        self.behind: dict[bytes, dict[bytes, tuple[int, int]]] = {}
        self.first: dict[bytes, tuple[bytes, bytes]] = {}  # by the key of its first part: both keys
        stored.gone = self._gone

    # --- from the device ----------------------------------------------------------------------

    def save(self, snapshot: Snapshot, states: Snapshots) -> None:
        """Have it stored: its slot, or KV that leads to it, is about to go."""
        node, stored, size = snapshot.node, self._stored, self._tree.block
        if not (stored.slots and snapshot.proven and node.proven and node.last_use > 0):
            return
        forms: list[tuple[int, int, bytes]] = []
        if isinstance(states, Tails):
            pages = states.pages[snapshot.slot]
            for number, at in enumerate(range(0, len(pages), self._part)):
                forms.append((WINDOW, number, pages[at : at + self._part].tobytes()))
        else:
            own = np.array([snapshot.slot], dtype=np.int32).tobytes()
            forms += [(STATE, number, own) for number in range(self._part)]
        if states.saves(snapshot) < max(snapshots.NEAR, _WORTH * len(forms)):
            return
        base = stored.base(node)
        start = node.end // size * size
        key = self._key(base, self._tree.tokens(node, start))
        keys = [_part_key(key, number) for number in range(len(forms))]
        if node.end > start:
            keys.append(_part_key(key, -1))
            forms.append((FULL, 0, stored.table(node, start).tobytes()))
        if keys[0] in self.first and all(part in stored for part in keys):
            stored.touch(keys)
            return
        others = len(self.behind.get(base, {})) - (keys[0] in self.first)
        if others >= _MOST_RESTS or len(stored.saves) + len(forms) > _MOST_SAVES:
            return
        if stored.room < len(keys):
            return
        for part, (form, number, pages_of) in zip(keys, forms, strict=True):
            stored.put(part, pages_of, form, number)
        if all(part in stored for part in keys):  # a small store may have dropped its own parts
            self.behind.setdefault(base, {})[key] = node.end - start, len(forms) - (node.end > start)
            self.first[keys[0]] = base, key

    def _gone(self, key: bytes) -> None:
        """A block or part is not stored any more."""
        place = self.first.pop(key, None)
        if place is not None:
            base, own = place
            del self.behind[base][own]
            if not self.behind[base]:
                del self.behind[base]

    # --- to the device ------------------------------------------------------------------------

    def find(self, tip: Node, start: int, has_kv: int, last: int, cost: int) -> StoredSnapshot | None:
        """The stored snapshot on the path to `tip`, behind `start` and not behind `last`, with which
        most is gained. `has_kv`: up to where KV is on the device. `cost`: tokens that could be computed
        while one block is loaded.
        """
        if not self.first or last - start <= snapshots.NEAR:
            return None
        stored, size = self._stored, self._tree.block
        best: StoredSnapshot | None = None
        most = snapshots.NEAR
        first = has_kv // size * size  # blocks from there on are loaded
        blocks: list[bytes] = []
        at = start // size * size
        keys = stored.path(tip, max(0, at - size), last)
        base = next(keys, b"") if at else stored.seed(tip)
        while base:
            for key, (rest, count) in self.behind.get(base, {}).items():
                end = at + rest
                if not start < end <= last:
                    continue
                found = self._whole(tip, key, count, base, at, rest, end > has_kv)
                if found is None:
                    continue
                parts, behind = found
                own = blocks if end > has_kv else []
                total = len(own) + len(parts) + (behind is not None)
                gain = end - start - cost * total
                if gain > most:
                    best, most = StoredSnapshot(end, first, list(own), parts, behind), gain
            base = next(keys, b"")
            if base and at + size > has_kv:
                if base not in stored:
                    break
                blocks.append(base)
            at += size
        return best

    def _whole(
        self, tip: Node, key: bytes, count: int, base: bytes, at: int, rest: int, needs_kv: bool
    ) -> tuple[list[bytes], bytes | None] | None:
        """The keys of the parts of a snapshot, if all are there and it stands for the path's tokens."""
        parts = [_part_key(key, number) for number in range(count)]
        behind = _part_key(key, -1) if rest and needs_kv else None
        if any(part not in self._stored for part in parts):
            return None
        if behind is not None and behind not in self._stored:
            return None
        node = tip
        while node.start >= at + rest and node.parent is not None:
            node = node.parent
        tokens = self._tree.tokens(node, at)[: 4 * rest]
        return (parts, behind) if self._key(base, tokens) == key else None

    def loads(self, found: StoredSnapshot, pages: Pages, first: int, target: Pages) -> list[MovedBlock]:
        """How a pinned snapshot is loaded: KV to `pages`, from position `first` on, the rest to
        `target`: a state slot, or window pages.
        """
        stored, size = self._stored, self._tree.block
        blocks = stored.loads(found.blocks, found.start, first, pages) if found.blocks else []
        if found.rest is not None:
            start = found.at // size * size
            own = pages[max(0, start - first) : found.at - first]
            if start < first:
                own = np.concatenate((np.full(first - start, -1, dtype=np.int32), own))
            blocks.append(MovedBlock(stored.pinned(found.rest), found.rest, own.tobytes()))
        for number, key in enumerate(found.parts):
            own = target
            if self._form == WINDOW:
                own = target[number * self._part : (number + 1) * self._part]
            blocks.append(MovedBlock(stored.pinned(key), key, own.tobytes(), self._form, number))
        return blocks

    @staticmethod
    def _key(base: bytes, tokens: bytes) -> bytes:
        return blake2b(base + tokens + b"snapshot", digest_size=KEY).digest()


def snapshot_part(info: ExecutorInfo) -> int:
    """See `StoredSnapshots`; 0: the executor stores none."""
    if not info.host_blocks:
        return 0
    if info.state_slots:
        return -(-info.state_bytes // info.block_bytes)
    return info.block_bytes // info.window_bytes if info.window_pages else 0


def _part_key(key: bytes, number: int) -> bytes:
    return blake2b(key + number.to_bytes(4, "little", signed=True), digest_size=KEY).digest()
