"""Which nodes have KV: locks, page tables, eviction, and the page counts.

    free         in the allocator
    evictable    pages of resident nodes without locks
    referenced   pages of locked nodes, and pages that are private to running requests

always add up to the pool. A resident node's parent is resident; a locked node's parent is locked. So
every evictable page can be reached by evicting leaves: resident nodes without resident children.

Kept locks. Locking a path costs its nodes up to the first locked one, and forks make paths of 10,000
nodes. So an unlock that has walked `reach` nodes and has as many before it stops there: the nodes above
stay locked, *kept* on behalf of that node, with its page table. The next request of the conversation, or
of any that shares the path, walks no further. Kept locks are undone, the oldest first, as soon as their
pages are wanted, so they deny no request memory.

Does not know branches, requests or clocks.
"""

from collections import deque

import numpy as np

from ramify.actors.cache.allocator import PageAllocator, Pages
from ramify.actors.cache.announcer import Announcer
from ramify.actors.cache.eviction import Victims, evictable
from ramify.actors.cache.node import DEVICE, SUSPECT, Node
from ramify.actors.cache.snapshots import Snapshot, Snapshots
from ramify.actors.cache.stored import SaveBudget, StoredBlocks
from ramify.actors.cache.stored_snapshots import StoredSnapshots
from ramify.actors.cache.tree import RadixTree

REACH = 64  # nodes that an unlock walks before it may stop
_SHORT_PATH = 8  # nodes; joining so few costs little beside the copy itself
_MOST_KEPT = 256  # paths
_KEPT_BYTES = 64 << 20  # of page tables of kept paths
_AHEAD = 4  # with less than total / _AHEAD pages free, blocks are saved ahead
MOST_AHEAD = 32  # of them at a time
FOR_DISK, _MOST_UNSAVED = 8, 1024  # blocks that are saved at a time for the disk; ends that wait
_ENOUGH = 32  # blocks in a row that are there: what is above them is, too
_RESERVE = 4  # with less than total / _RESERVE pages to be had, no path is kept


class Residency:
    """The pages of a tree's nodes, and what may be taken from them."""

    def __init__(self, tree: RadixTree, allocator: PageAllocator, reach: int = REACH) -> None:
        self.tree = tree
        self.allocator = allocator
        self.victims = Victims(tree)
        self.evictable = 0
        self.locked = 0  # pages of locked nodes
        self.private = 0  # pages of running requests that are not in the tree
        self.kept: dict[Node, int] = {}  # nodes with a kept lock, oldest first: bytes of their tables
        self._kept_bytes = 0
        self._reach = reach
        self._uses = 0
        self.rank = 0  # of what is computed now that nobody waits for, below 0; else 0: see `touch`
        self._ranks = 0
        self.announcer: Announcer | None = None  # where somebody listens to what is resident
        self.snapshots: Snapshots | None = None  # of a model with fixed states or windows
        self.stored = StoredBlocks(tree)  # where evicted KV goes to
        self.stored_snapshots: StoredSnapshots | None = None  # where snapshots do
        # Ends of requests whose blocks are to be on the disk, and below which number
        self.behind = False  # the disk was, when some were to be saved for it
        self.unsaved: deque[tuple[Node, int]] = deque(maxlen=_MOST_UNSAVED)

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
                if current in self.kept:  # used just now
                    self.kept[current] = self.kept.pop(current)
                return
            assert current.resident, current
            pages = len(current.pages)
            self.evictable -= pages
            self.locked += pages
            current = current.parent

    def unlock(self, node: Node) -> None:
        """Undo one `lock` of `node`. The pages stay, as cache."""
        self.touch(node)
        self._unlock(node, self._reach)
        while len(self.kept) > _MOST_KEPT or self._kept_bytes > _KEPT_BYTES:
            self._unlock(self._oldest_kept(), 0)
        while self.kept and _RESERVE * (self.free + self.evictable) < self.allocator.total:
            self._loosen()

    def touch(self, node: Node) -> None:
        """Mark `node` as used now, or, with `rank`, as spare work that was only computed."""
        if self.rank:
            if node.last_use <= 0:
                node.last_use = self.rank
            return
        self._uses += 1
        node.last_use = self._uses

    def demote(self, node: Node | None) -> None:
        """Have `node` evicted first, and what leads to it alone: nobody comes back. O(those nodes)."""
        while (
            node is not None
            and node.parent is not None
            and not node.locks
            and not node.held
            and node.refs < 2
        ):
            node.last_use = self.next_rank()
            if node.stamp:
                self.victims.push(node)
            node = node.parent
            if len(node.children) > 1:
                return

    def next_rank(self) -> int:
        """Rank of spare work: evicted before anything used; newest first."""
        self._ranks -= 1
        return self._ranks

    def _unlock(self, node: Node, reach: int) -> None:
        """Undo one lock of `node`, and of its ancestors as long as it was their only one.

        After `reach` nodes the rest may be kept; 0: it is not.
        """
        table, walked = None, 0
        current: Node | None = node
        while current is not None:
            if current.locks < 1 or not current.resident:
                raise RuntimeError(f"unlock without lock: {current!r}")
            if current.table is not None:
                table = current.table  # of the deepest node that has one
            if reach and walked >= reach and current.state is not SUSPECT and _is_deep(current, reach):
                self._keep(current, table)
                return
            current.locks -= 1
            if current.locks:
                if table is not None and self.kept.get(current) == 0:
                    self._set_table(current, table)
                return
            pages = len(current.pages)
            self.evictable += pages
            self.locked -= pages
            parent = current.parent
            if parent is not None:
                current.table = None
                if current.state is SUSPECT:
                    self.allocator.free(self._make_cold(current))
                else:
                    self._offer(current)
            else:
                self.tree.prune(current)  # a root that nothing else needs
            walked += 1
            current = parent

    def release_kept(self) -> None:
        """Undo all kept locks: what no request holds is evictable then."""
        while self.kept:
            self._unlock(self._oldest_kept(), 0)

    def _keep(self, node: Node, table: bytes | None) -> None:
        """The lock of `node` stays without a request. `table`: of `node` or one below, if known."""
        self.kept[node] = 0
        if table is not None:
            self._set_table(node, table)

    def _set_table(self, node: Node, table: bytes) -> None:
        """The page table of a kept node, cut from that of a node below."""
        node.table = table[: 4 * (node.end // self.tree.page_size)]
        self.kept[node] = len(node.table)
        self._kept_bytes += len(node.table)

    def _loosen(self) -> None:
        """Undo the oldest kept lock for some nodes; what is above them may be kept again."""
        self._unlock(self._oldest_kept(), self._reach)

    def _oldest_kept(self) -> Node:
        """A node whose lock is kept no more: the caller undoes it."""
        node = next(iter(self.kept))
        self._kept_bytes -= self.kept.pop(node)
        return node

    # --- pages ------------------------------------------------------------------------------

    def table(self, node: Node, own: Pages) -> bytes:
        """int32 page table: the whole pages of [0, node.end), then `own`. `node` is locked.

        One copy where the path is short. Of a longer path the joined table is kept on `node` for as
        long as it is locked, so that the siblings of a fork do not all walk it.
        """
        parts: list[memoryview | bytes] = [own.data]
        current = node
        while current.table is None:
            assert current.parent is not None
            parts.append(current.pages.data)
            current = current.parent
        parts.append(current.table)
        parts.reverse()
        if len(parts) > _SHORT_PATH:
            node.table = b"".join(parts[:-1])
            parts = [node.table, own.data]
        return b"".join(parts)

    def take(self, count: int, leave: int = 0) -> Pages | None:
        """Take `count` pages for a request, evicting as needed; None if there are too few.

        `leave`: pages that must stay free or evictable.
        """
        if leave:
            while count + leave > self.free + self.evictable and self.kept:
                self._loosen()
            if count + leave > self.free + self.evictable:
                return None
        short = count - self.allocator.free_pages
        if short > 0:
            while short > self.evictable and self.kept:
                self._loosen()
            if short > self.evictable:
                return None
            self._evict(short)
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
        assert parent.state is DEVICE
        node.fill(pages)
        parent.resident_children += 1
        count = len(pages)
        self.private -= count
        self.evictable += count
        self.touch(node)
        if self.announcer is not None and self.snapshots is None:
            self.announcer.stored(node)

    def renew(self, allocator: PageAllocator) -> None:
        """Nothing is resident or stored any more, and pages come from `allocator`. Nobody holds any."""
        self.stored, self.stored_snapshots = StoredBlocks(self.tree), None
        self.unsaved.clear()
        self.release_kept()
        if self.evictable:
            self._evict(self.evictable)
        self.allocator = allocator

    # --- fixed states, and windows ----------------------------------------------------------

    def snapshot(self, node: Node, slot: int, *, end: bool) -> Snapshot:
        """Note that `slot` holds the snapshot behind `node`, which is on the device and has none."""
        assert self.snapshots is not None
        snapshot = self.snapshots.put(node, slot, end=end)
        current: Node | None = node
        while current is not None:
            current.resumable += 1
            if current.resumable > 1:
                break
            current = current.parent
        if self.announcer is not None:
            self.announcer.stored(node)
        return snapshot

    def not_resumable(self, node: Node) -> None:
        """The snapshot of `node` is gone: routers may not count on what it alone resumed."""
        current: Node | None = node
        while current is not None:
            current.resumable -= 1
            if current.resumable:
                break
            if self.announcer is not None:
                self.announcer.withdrawn(current)
            current = current.parent
        if self.announcer is not None and current is not None:
            self.announcer.stored(current)

    def leaving(self, snapshot: Snapshot) -> None:
        """Store a snapshot that is about to go, or the KV that leads to it."""
        if self.stored_snapshots is not None and self.snapshots is not None:
            self.stored_snapshots.save(snapshot, self.snapshots)

    def _leave_for_disk(self, node: Node) -> int:
        """Save the snapshot of `node`, if the disk lacks it; how many blocks that takes."""
        away, states = self.stored_snapshots, self.snapshots
        snapshot = states.of(node.snapshot) if states is not None else None
        if away is None or states is None or snapshot is None:
            return 0
        return away.save(snapshot, states, ahead=True)

    def _forget_state(self, node: Node) -> None:
        """The KV of `node` goes, so what stands at its end cannot be resumed."""
        if node.snapshot:
            assert self.snapshots is not None
            self.snapshots.drop(node)

    # --- KV that is not finite --------------------------------------------------------------

    def prove(self, node: Node) -> None:
        """Logits over the path to `node` were finite. Costs the nodes that were not proven yet."""
        current: Node | None = node
        while current is not None and not current.proven:
            current.prove()
            current = current.parent

    def distrust(self, node: Node) -> None:
        """Make the unproven part of the path to `node` cold: logits over it were not finite.

        That part, and what was computed behind it, become cold at once, or as soon as the requests that
        use it have ended. Until then no other request gets it.
        """
        top: Node | None = None
        current: Node | None = node
        while current is not None and not current.proven:
            top, current = current, current.parent
        if top is None:
            return
        assert current is not None  # roots are proven
        below = [top]
        for each in below:  # grows meanwhile
            below.extend(child for child in each.children.values() if child.resident)
        for each in below:
            if each in self.kept:
                self._kept_bytes -= self.kept.pop(each)
                self._unlock(each, 0)
        freed: list[Pages] = []
        for each in reversed(below):
            if each.locks:
                self._forget_state(each)
                each.distrust()
            elif each.resident:
                freed.append(self._make_cold(each))
        if freed:
            self.allocator.free(np.concatenate(freed))
        self._offer(current)

    # --- eviction ---------------------------------------------------------------------------

    def _offer(self, node: Node) -> None:
        """Put `node` up for eviction, if it can be evicted and is not up yet.

        A node inside a page owns none; it is resident only for the sake of those below it.
        """
        while evictable(node):
            assert node.parent is not None
            if len(node.pages):
                if not node.stamp:
                    self.victims.push(node)
                return
            parent = node.parent
            self._make_cold(node)
            node = parent

    def _evict(self, count: int) -> None:
        """Free at least `count` pages, no more than needed. There are that many evictable."""
        freed: list[Pages] = []
        while count > 0:
            node = self.victims.pop()
            if len(node.pages) > count:
                # Only the end of a long leaf: the pages before `cut` stay as a leaf of their own.
                size = self.tree.page_size
                cut = (node.start // size + len(node.pages) - count) * size
                self.tree.split(node, cut)
            assert node.parent is not None
            parent = node.parent
            snapshot = self.snapshots.of(node.snapshot) if self.snapshots is not None else None
            if snapshot is not None:
                self.leaving(snapshot)
            self.stored.save(node)
            freed.append(self._make_cold(node))
            count -= len(freed[-1])
            self._offer(parent)
        self.allocator.free(np.concatenate(freed))

    def save_ahead(self) -> None:
        """Save some of what is evicted next, if that will be soon: then its pages go without a copy."""
        if _AHEAD * self.free > self.allocator.total:
            return
        left = SaveBudget(MOST_AHEAD)
        for node in self.victims.soon():
            current: Node | None = node
            while current is not None and left and not current.locks and current.resident_children < 2:
                self.stored.save(current, left)
                current = current.parent

    def save_for_disk(self) -> bool:
        """Save some of what requests left, so that a restart finds it. Whether to go on at once."""
        disk, left = self.stored.disk, SaveBudget(FOR_DISK)
        self.behind = disk is not None and disk.backlog > self.stored.slots // 2
        if disk is None or self.behind:
            return False
        while self.unsaved and left.look():
            node, top = self.unsaved.popleft()
            left.blocks -= self._leave_for_disk(node)
            top = self.stored.keep(node, top, left)
            if top > node.start // self.tree.block:
                self.unsaved.appendleft((node, top))
                return left.blocks < FOR_DISK or not left.looks  # else there is no slot
            if node.parent is not None and left.present < _ENOUGH:
                self.unsaved.appendleft((node.parent, 1 << 62))
            else:
                left.present = 0
        return bool(self.unsaved)

    def _make_cold(self, node: Node) -> Pages:
        """Take a leaf's pages away, for the caller to free.

        Its tokens stay if a handle, request or node at or below needs them.
        """
        parent = node.parent
        assert parent is not None
        self._forget_state(node)
        pages = node.empty()
        self.evictable -= len(pages)
        node.stamp = 0
        parent.resident_children -= 1
        parent.last_use = max(parent.last_use, node.last_use)
        if self.announcer is not None:
            self.announcer.removed(node)
        if not node.refs and not node.children:
            self.tree.delete(node)
        return pages


def _is_deep(node: Node, reach: int) -> bool:
    """`node` and `reach` of its ancestors are held for one lock alone."""
    current: Node | None = node
    for _ in range(reach + 1):
        if current is None or current.locks > 1:
            return False
        current = current.parent
    return True
