"""Snapshots that have left the device: fixed states and window tails, in slots of host memory.

A stored snapshot is what resumes at a position: a state in parts of a block's size, or the window pages
of the tokens before it, and the KV of other layers behind the last whole block. Its parts are entries of
`StoredBlocks` like blocks, under keys of their own, and give way as those do. One is found by the key of
the last whole block before it and the tokens behind that: its *note* says which, and goes with its first
part to the disk and to other replicas. Nobody has to trust a note, as the key says all of it.

A snapshot that gives way on the device is stored if its KV is proven, somebody may come back to it, and
it saves enough tokens of replay for its bytes. With a disk, so is what a request leaves. It is loaded
where that takes less time than the replay, and only with blocks that leave no gap before it.

Does not know slots of states, requests, or what a part holds.
"""

import struct
from collections.abc import Callable
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
from ramify.protocol.plan import FULL, STATE, WINDOW, ExecutorInfo, MovedBlock, pack

_MOST_SAVES = 128  # blocks that one look at the cache may order: what is beyond is not stored
_WORTH = 16  # tokens of replay, as `Snapshots.saves` counts them, that a part must save
_MOST_RESTS = 16  # snapshots behind one block; all others are not stored
_NOTE = struct.Struct("<16sHH")  # the key of the block before it, tokens behind that, parts


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
        # by the last whole block before each, and by its key: tokens behind the block, and parts
        self.behind: dict[bytes, dict[bytes, tuple[int, int]]] = {}
        stored.gone = self._gone
        if (disk := stored.disk) is not None:
            disk.gone, disk.came = self._gone, self.learn
            for key, note in disk.notes.items():
                self.learn(key, note)

    def learn(self, key: bytes, note: bytes) -> None:
        """Note a snapshot whose first part, `key`, is in host memory, on the disk, or on its way."""
        stored = self._stored
        there = key in stored.coming or stored.here_or_on_disk(key)
        if len(note) != _NOTE.size or key in stored.notes or not there:
            return
        base, rest, count = _NOTE.unpack(note)
        if rest < self._tree.block and len(self.behind.get(base, ())) < _MOST_RESTS:
            self.behind.setdefault(base, {})[key] = rest, count
            stored.notes[key] = note

    # --- from the device ----------------------------------------------------------------------

    def save(
        self, snapshot: Snapshot, states: Snapshots, *, ahead: bool = False, always: bool = False
    ) -> int:
        """Have it stored: its slot, or KV that leads to it, is about to go. `ahead`: for the disk,
        unless that has it; `always`: however little it saves. Returns how many blocks are ordered.
        """
        node, stored, size = snapshot.node, self._stored, self._tree.block
        if not (stored.slots and snapshot.proven and node.proven and node.last_use > 0):
            return 0
        forms = self._forms(snapshot, states)
        count = len(forms)
        if not always and states.saves(snapshot) < max(snapshots.NEAR, _WORTH * count):
            return 0
        base = stored.base(node)
        start = node.end // size * size
        key = _key(base, self._tree.tokens(node, start), count)
        keys = _parts(key, count)
        if node.end > start:
            keys.append(_part_key(key, -1))
            forms.append((FULL, 0, stored.table(node, start).tobytes()))
        if ahead and stored.disk is not None and all(map(stored.disk.has_or_gets, keys)):
            return 0
        if key in stored.notes and all(part in stored for part in keys):
            stored.touch(keys)
            return 0
        others = len(self.behind.get(base, {})) - (key in stored.notes)
        if others >= _MOST_RESTS or len(stored.saves) + len(forms) > _MOST_SAVES:
            return 0
        if stored.room < len(keys):
            return 0
        before = len(stored.saves)
        for part, (form, number, pages_of) in zip(keys, forms, strict=True):
            stored.put(part, pages_of, form, number)
        if key in stored:  # a small store may have dropped its own parts
            self.learn(key, _NOTE.pack(base, node.end - start, count))
        return len(stored.saves) - before

    def _forms(self, snapshot: Snapshot, states: Snapshots) -> list[tuple[int, int, bytes]]:
        """Of each of its parts what a `MovedBlock` says: form, part, pages."""
        if not isinstance(states, Tails):
            return [(STATE, number, pack([snapshot.slot])) for number in range(self._part)]
        pages, part = states.pages[snapshot.slot], self._part
        spans = enumerate(range(0, len(pages), part))
        return [(WINDOW, number, pages[at : at + part].tobytes()) for number, at in spans]

    def _gone(self, key: bytes) -> None:
        """A block or part is not stored in one place any more."""
        stored = self._stored
        if key not in stored.notes or key in stored.coming or stored.here_or_on_disk(key):
            return
        base, _, _ = _NOTE.unpack(stored.notes.pop(key))
        del self.behind[base][key]
        if not self.behind[base]:
            del self.behind[base]

    # --- to another replica -----------------------------------------------------------------------

    def give(self, tip: Node, behind: int, states: Snapshots) -> tuple[int, list[bytes], bytes]:
        """The deepest snapshot on the path to `tip` behind a position: where it stands, the keys of its
        parts, and what `take` is told; no keys: there is none. One that is on the device is saved.
        """
        node = tip
        while node.parent is not None and not node.snapshot:
            node = node.parent
        snapshot = states.of(node.snapshot)
        if snapshot is not None and node.end - behind > snapshots.NEAR:
            self.save(snapshot, states, always=True)
        found = self.find(tip, behind, tip.end, tip.end - 1, 0)
        if found is None:
            return 0, [], b""
        key, keys = found.parts[0], list(found.parts)
        if found.at % self._tree.block:
            keys.append(_part_key(key, -1))
        self._stored.touch(keys)
        return found.at, keys, key + self._stored.notes[key]

    def take(self, note: bytes) -> None:
        """Note a snapshot whose parts another replica sends."""
        self.learn(note[:KEY], note[KEY:])

    # --- to the device ------------------------------------------------------------------------

    def find(
        self, tip: Node, start: int, has_kv: int, last: int, cost: int, away: int | None = None
    ) -> StoredSnapshot | None:
        """The stored snapshot on the path to `tip`, behind `start` and not behind `last`, with which
        most is gained. `has_kv`: up to where KV is on the device. `cost`: tokens that could be computed
        while one block is loaded; `away`: while one comes from the disk, too; None: it is not asked.
        """
        if not self.behind or last - start <= snapshots.NEAR:
            return None
        stored, size = self._stored, self._tree.block
        there, room, absent = stored.__contains__, stored.slots, 0
        if away is not None:
            there, room = stored.here_or_on_disk, stored.slots // 2
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
                behind = _part_key(key, -1) if rest and end > has_kv else None
                own, more = (blocks, absent) if end > has_kv else ([], 0)
                total = len(own) + count + (behind is not None)
                if total > room or end - start - cost * total <= most:
                    continue
                parts = _parts(key, count)
                found = StoredSnapshot(end, first, own, parts, behind)
                if not self._whole(tip, found, key, base, at, there):
                    continue
                more += sum(part not in stored for part in parts)
                gain = end - start - cost * total - (away or 0) * more
                if gain > most:
                    best, most = found._replace(blocks=list(own)), gain
            base = next(keys, b"")
            if base and at + size > has_kv:
                if not there(base):
                    break
                blocks.append(base)
                absent += base not in stored
            at += size
        return best

    def _whole(
        self,
        tip: Node,
        found: StoredSnapshot,
        key: bytes,
        base: bytes,
        at: int,
        there: Callable[[bytes], bool],
    ) -> bool:
        """Whether all parts are there, and it stands for the path's tokens."""
        behind = [found.rest] if found.rest is not None else []
        if not all(map(there, found.parts + behind)):
            return False
        node = tip
        while node.start >= found.at and node.parent is not None:
            node = node.parent
        tokens = self._tree.tokens(node, at)[: 4 * (found.at - at)]
        return _key(base, tokens, len(found.parts)) == key

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


def snapshot_part(info: ExecutorInfo) -> int:
    """See `StoredSnapshots`; 0: the executor stores none."""
    if not info.host_blocks:
        return 0
    if info.state_slots:
        return -(-info.state_bytes // info.block_bytes)
    return info.block_bytes // info.window_bytes if info.window_pages else 0


def _key(base: bytes, tokens: bytes, count: int) -> bytes:
    """Of a snapshot of so many parts, and of the first of them."""
    told = count.to_bytes(4, "little") + b"snapshot"
    return blake2b(base + tokens + told, digest_size=KEY).digest()


def _parts(key: bytes, count: int) -> list[bytes]:
    return [key, *(_part_key(key, number) for number in range(1, count))]


def _part_key(key: bytes, number: int) -> bytes:
    return blake2b(key + number.to_bytes(4, "little", signed=True), digest_size=KEY).digest()
