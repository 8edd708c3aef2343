"""Blocks of KV that have left the device: which tokens they hold, and in which slot of host memory.

A block is the KV of `tree.block` tokens, over all layers. It belongs to the node that holds its last
position, as a page does. It is named by a key: a chained BLAKE2b of all tokens up to its end, salted by
the namespace. So it is found for whoever brings these tokens, whatever became of the node, and nobody
can make tokens that find another's KV. A node remembers the keys of its first blocks (`Node.keys`); on
any path the nodes that know all of theirs come first.

A node that is evicted has its blocks saved first, if they are proven, and if they are not stored yet.
What is stored and not used for longest gives way; of a path the deepest first. A slot that a running
request is to load from is *pinned* until it has: nothing else is written there.

Does not know pages that are free, requests, or what a block holds.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from itertools import islice, takewhile

import numpy as np

from ramify.actors.cache.allocator import Pages
from ramify.actors.cache.node import DEVICE, Node
from ramify.actors.cache.on_disk import OnDisk
from ramify.actors.cache.tree import RadixTree
from ramify.protocol.cluster import KEY, MOST_SOUGHT
from ramify.protocol.messages import CompareOrder
from ramify.protocol.plan import MovedBlock

ON_HOST, ON_DISK = 1, 2  # of `Inspected.tiers`
_LOOKED_AT = 8  # keys that are made at once grow by this factor, until one is not stored


class SaveBudget:
    """Of one look for blocks to save: so many, and so many that are looked at."""

    def __init__(self, blocks: int) -> None:
        self.blocks, self.looks = blocks, 32 * blocks
        self.present = 0  # blocks in a row that need not be saved

    def __bool__(self) -> bool:
        return self.blocks > 0 and self.looks > 0

    def look(self) -> bool:
        self.looks -= 1
        return bool(self)


class StoredBlocks:
    """`slots` blocks in host memory; 0: none is kept. `saves`: those to be copied before their pages are
    written.
    """

    def __init__(self, tree: RadixTree, slots: int = 0, disk: OnDisk | None = None) -> None:
        if slots and tree.block % tree.page_size:
            raise ValueError(f"blocks of {tree.block} tokens in pages of {tree.page_size}")
        self.slots = slots
        self.disk = disk if slots else None  # where copies go, if anywhere
        self.from_disk: set[bytes] = set()  # blocks that came from there, and were not loaded yet
        self.saves: list[MovedBlock] = []
        self._tree = tree
        self._size = tree.block
        self._pages = tree.block // tree.page_size  # of a block
        self.free = list(range(slots - 1, -1, -1))
        self._idle: OrderedDict[bytes, int] = OrderedDict()  # slots by key, the oldest first
        self._pinned: dict[bytes, list[int]] = {}  # slots and how many pin them, by key
        self.coming: dict[bytes, int] = {}  # slots that are filled from elsewhere, by key
        self.foreign: set[bytes] = set()  # keys of those that other replicas sent
        self.notes: dict[bytes, bytes] = {}  # of snapshots, by their first parts: `StoredSnapshots`
        # called with the key of each that is here no more, by whoever has more to forget then
        self.gone: Callable[[bytes], None] = lambda key: None

    def __len__(self) -> int:
        return len(self._idle) + len(self._pinned)

    def __contains__(self, key: bytes) -> bool:
        pinned = self._pinned.get(key)
        return key in self._idle if pinned is None else pinned[0] >= 0

    def held(self) -> Iterator[tuple[bytes, int, int]]:
        """Each key, its slot (-1: it was dropped) and how many pin it."""
        yield from ((key, slot, 0) for key, slot in self._idle.items())
        yield from ((key, slot, count) for key, (slot, count) in self._pinned.items())

    # --- from the device ----------------------------------------------------------------------

    def save(self, node: Node, left: "SaveBudget | None" = None) -> None:
        """Have the blocks that end in `node` copied: its pages, and those above it, are about to go.

        Not if it is not proven, or nobody is expected to come back to it. `left`: ahead of that, as many
        as are left.
        """
        size = self._size
        first, last = node.start // size, node.end // size
        if first == last or not self.slots or not node.proven or node.last_use <= 0:
            return
        keys = self.keys(node, last - first)
        table: Pages | None = None
        for index in range(last - first - 1, -1, -1):  # the deepest is to go first
            key = keys[index]
            if left is not None and not left.look():
                return
            if key in self._idle:
                if left is None:
                    self._idle.move_to_end(key)
                self._written(key)
                continue
            slot = self._claim(key)
            if slot is None:
                continue
            if table is None:
                table = self.table(node, first * self._pages)
            self._order(key, slot, table, index)
            if left is not None:
                left.blocks -= 1

    def _claim(self, key: bytes) -> int | None:
        """A slot for a block that is not stored, and is from now on; None: all are pinned."""
        slot = None if key in self._pinned or key in self.coming else self._slot()
        if slot is not None:
            self._idle[key] = slot
        return slot

    def _order(self, key: bytes, slot: int, table: Pages, index: int) -> None:
        """Save the block with `index` in the `table` to a slot."""
        pages = table[index * self._pages : (index + 1) * self._pages]
        self.saves.append(MovedBlock(slot, key, pages.tobytes()))
        self._written(key)

    def keep(self, node: Node, top: int, left: SaveBudget) -> int:
        """Have the blocks that end in `node`, below number `top`, copied to the disk by way of host
        memory: the deepest first, as many as are left. Returns the number below which the rest is.
        """
        size, disk = self._size, self.disk
        first, last = node.start // size, node.end // size
        top = min(top, last)
        if disk is None or node.parent is None or node.state is not DEVICE or not node.proven:
            return 0
        keys = self.keys(node, last - first) if top > first else []
        table: Pages | None = None
        while top > first and left.look():
            key = keys[top - 1 - first]
            if disk.has_or_gets(key) or key in self._idle or key in self._pinned or key in self.coming:
                left.present += 1
                self._written(key)
            else:
                slot = self._claim(key) if left else None
                if slot is None:
                    break
                table = self.table(node, first * self._pages) if table is None else table
                self._order(key, slot, table, top - 1 - first)
                left.blocks, left.present = left.blocks - 1, 0
            top -= 1
        return top

    def _written(self, key: bytes) -> None:
        if self.disk is not None:
            self.disk.want(key)

    def _slot(self) -> int | None:
        """A slot to write to; None: all are pinned."""
        if self.free:
            return self.free.pop()
        if not self._idle:
            return None
        oldest, slot = self._idle.popitem(last=False)
        self.foreign.discard(oldest)
        self.gone(oldest)
        return slot

    def table(self, node: Node, first: int) -> Pages:
        """The pages of the path to `node`, which is resident, from page index `first` on."""
        size = self._tree.page_size
        parts = [node.pages]
        while node.start // size > first and node.parent is not None:
            node = node.parent
            parts.append(node.pages)
        table: Pages = np.concatenate(parts[::-1])
        return table[first - node.start // size :]

    # --- parts of snapshots -------------------------------------------------------------------

    @property
    def room(self) -> int:
        """Slots that may be written to."""
        return len(self.free) + len(self._idle)

    def put(self, key: bytes, pages: bytes, form: int, part: int) -> None:
        """Have a part saved under `key`, if it is not stored. There is `room`."""
        if key in self._idle:
            self._idle.move_to_end(key)
            self._written(key)
            return
        slot = self._claim(key)
        if slot is not None:
            self.saves.append(MovedBlock(slot, key, pages, form, part))
            self._written(key)

    def pinned(self, key: bytes) -> int:
        """The slot of a pinned block or part."""
        return self._pinned[key][0]

    def base(self, node: Node) -> bytes:
        """The key of the last whole block before the end of `node`, or of the root."""
        size = self._size
        each, count = node, node.end // size - node.start // size
        while not count and each.parent is not None:
            each = each.parent
            count = each.end // size - each.start // size
        return self.keys(each, count)[count - 1] if count else self.seed(node)

    def seed(self, node: Node) -> bytes:
        """The key that those of all blocks on the path to `node` begin with."""
        while node.parent is not None:
            node = node.parent
        return blake2b(self._tree.namespace(node).encode(), digest_size=KEY).digest()

    # --- to the device ------------------------------------------------------------------------

    def find(self, tip: Node, start: int, end: int, *, disk: bool = False) -> list[bytes]:
        """Keys of the stored blocks of the path to `tip`, without a gap: from the one with position
        `start` on, and up to position `end`. `disk`: those on the disk are as good.
        """
        if not len(self) and not (disk and self.disk):
            return []
        there = self.here_or_on_disk if disk else self.__contains__
        return list(takewhile(there, self.path(tip, start, end)))

    def here_or_on_disk(self, key: bytes) -> bool:
        return key in self or (self.disk is not None and key in self.disk)

    def path(self, tip: Node, start: int, end: int) -> Iterator[bytes]:
        """Keys of the blocks of the path to `tip`, from the one with position `start` on, up to position
        `end`. They are made as they are asked for.
        """
        nodes: list[Node] = []
        each: Node | None = tip
        while each is not None and each.end > start:
            nodes.append(each)
            each = each.parent
        size = self._size
        at = start // size
        for node in reversed(nodes):
            first, last, more = node.start // size, min(node.end, end) // size, 1
            while at < last:
                stop = min(last, at + more)
                yield from islice(self.keys(node, stop - first), at - first, stop - first)
                at, more = stop, more * _LOOKED_AT

    def end(self, start: int, keys: Sequence[bytes]) -> int:
        """Where the last of these blocks ends, of which the first has position `start`; 0: none."""
        return (start // self._size + len(keys)) * self._size if keys else 0

    def pin(self, keys: Sequence[bytes]) -> None:
        """Keep these blocks where they are until `unpin`."""
        for key in keys:
            pinned = self._pinned.get(key)
            if pinned is not None:
                pinned[1] += 1
            else:
                self._pinned[key] = [self._idle.pop(key), 1]

    def unpin(self, keys: Sequence[bytes]) -> None:
        """Undo a `pin`: they were used now."""
        for key in reversed(keys):
            pinned = self._pinned[key]
            pinned[1] -= 1
            if not pinned[1]:
                del self._pinned[key]
                if pinned[0] >= 0:
                    self._idle[key] = pinned[0]

    def drop(self, keys: Sequence[bytes]) -> None:
        """Forget pinned blocks, whose bytes are not what was saved. Their slots are used again."""
        for key in keys:
            pinned = self._pinned.get(key)
            if pinned is not None and pinned[0] >= 0:
                self.free.append(pinned[0])
                self.foreign.discard(key)
                pinned[0] = -1
                self.gone(key)

    def loads(self, keys: Sequence[bytes], start: int, first: int, pages: Pages) -> list[MovedBlock]:
        """How pinned blocks fill the `pages` from page index `first` on; `start`: of the first block."""
        blocks: list[MovedBlock] = []
        for number, key in enumerate(keys, start // self._size):
            at = number * self._pages - first
            own = pages[max(0, at) : at + self._pages]
            if at < 0:
                own = np.concatenate((np.full(-at, -1, dtype=np.int32), own))
            blocks.append(MovedBlock(self._pinned[key][0], key, own.tobytes()))
        return blocks

    # --- from elsewhere: a disk, another replica ----------------------------------------------

    def place(self, key: bytes) -> int | None:
        """The slot of a stored block; None: it is not stored."""
        pinned = self._pinned.get(key)
        slot = self._idle.get(key, -1) if pinned is None else pinned[0]
        return None if slot < 0 else slot

    def reserve(self, key: bytes) -> int | None:
        """A slot to fill with block `key`, in which nothing else is written until `arrived`; None: it is
        stored or coming already, or there is no room.
        """
        if key in self._pinned or key in self._idle or key in self.coming:
            return None
        slot = self._slot()
        if slot is not None:
            self.coming[key] = slot
        return slot

    def arrived(self, key: bytes, *, whole: bool, foreign: bool = False) -> None:
        """A reserved slot was filled; not `whole`: it was not, and is free. `foreign`: by another
        replica.
        """
        slot = self.coming.pop(key, None)
        if slot is None:
            return  # of an executor that is gone
        if whole:
            self._idle[key] = slot
            self._written(key)
            if foreign:
                self.foreign.add(key)
            else:
                self.from_disk.add(key)
                if len(self.from_disk) > 2 * self.slots:
                    self.from_disk.clear()
        else:
            self.free.append(slot)
            self.gone(key)

    def save_twin(self, node: Node, number: int, key: bytes) -> CompareOrder | None:
        """Have a pinned block, which has this number on the path to `node`, saved a second time, as it
        is on the device; None: it is being compared already, or was dropped, or there is no room.
        """
        twin = blake2b(key, digest_size=KEY, person=b"twin").digest()
        slot, other = self.place(key), self.reserve(twin)
        if slot is None or other is None:
            if other is not None:
                self.arrived(twin, whole=False)
            return None
        table = self.table(node, number * self._pages)
        self.saves.append(MovedBlock(other, twin, table[: self._pages].tobytes()))
        return CompareOrder(key, slot, twin, other)

    # --- to and from other replicas -----------------------------------------------------------

    def lacking(self, tip: Node) -> tuple[int, list[bytes]]:
        """The first blocks of the path to `tip` that are neither on the device nor stored: the index of
        the first, and the keys of so many as one answer may have.
        """
        node = tip
        while node.state is not DEVICE:
            assert node.parent is not None
            node = node.parent
        size, last = self._size, tip.end - 1
        first = node.end // size + len(self.find(tip, node.end, last))
        most = min(MOST_SOUGHT, self.slots)
        return first, list(islice(self.path(tip, first * size, last), most)) if most else []

    def give(self, tip: Node, first: int, keys: Sequence[bytes]) -> list[MovedBlock]:
        """Slots of these blocks of the path to `tip`, and of parts of snapshots behind them, as many as
        there are without a gap. Blocks that are on the device alone are saved.
        """
        node, size = tip, self._size
        while node.state is not DEVICE or not node.proven:
            assert node.parent is not None
            node = node.parent
        table: Pages | None = None
        given: list[MovedBlock] = []
        path = self.path(tip, first * size, tip.end)
        for index, key in enumerate(keys):
            own = next(path, None)
            slot = self.place(key)
            if key in self._idle:
                self._idle.move_to_end(key)  # used now
            if slot is None and own == key and (first + index + 1) * size <= node.end:
                slot = self._claim(key)
                if slot is not None:
                    if table is None:
                        table = self.table(node, first * self._pages)
                    self._order(key, slot, table, index)
            if slot is None:
                break
            given.append(MovedBlock(slot, key, b""))
        return given

    def touch(self, keys: Sequence[bytes]) -> None:
        """Mark blocks as used last: they are wanted soon."""
        for key in keys:
            if key in self._idle:
                self._idle.move_to_end(key)

    def tier(self, node: Node, start: int) -> int:
        """Where the block with position `start` is, if it ends in `node`: `ON_HOST`, `ON_DISK`, 0
        (nowhere, or nobody has asked for its key yet), -1 (it does not end there).
        """
        index = start // self._size - node.start // self._size
        if not 0 <= index < node.end // self._size - node.start // self._size:
            return -1
        if index >= len(node.keys):
            return 0
        key = node.keys[index]
        if key in self:
            return ON_HOST
        return ON_DISK if self.disk is not None and key in self.disk else 0

    # --- keys ---------------------------------------------------------------------------------

    def keys(self, node: Node, count: int) -> list[bytes]:
        """The keys of the first `count` blocks that end in `node`, or more."""
        size, todo = self._size, list[tuple[Node, int]]()
        each, need = node, count
        while True:
            if len(each.keys) < need:
                todo.append((each, need))
            if each.keys or each.parent is None:
                break
            each = each.parent
            need = each.end // size - each.start // size
        key = each.keys[-1] if each.keys else self.seed(each)
        for each, need in reversed(todo):
            known = len(each.keys)
            tokens = self._tree.tokens(each, (each.start // size + known) * size)
            for at in range(0, 4 * size * (need - known), 4 * size):
                key = blake2b(key + tokens[at : at + 4 * size], digest_size=KEY).digest()
                each.keys.append(key)
        return node.keys
