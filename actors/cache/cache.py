"""The radix cache: one method per mailbox message, replies as return values.

Puts together the tree (tokens), residency (pages), branches (handles) and running requests (pages that
are not the tree's yet). Messages on branches move handles and never allocate.

Does not know time (`now` is an argument), sockets, policy, or what a page holds.
"""

from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from ramify.actors.cache.allocator import PageAllocator
from ramify.actors.cache.announcer import Announcer
from ramify.actors.cache.branches import Branches
from ramify.actors.cache.canaries import Canaries
from ramify.actors.cache.leases import Bounds, Leases
from ramify.actors.cache.node import DEVICE, Node
from ramify.actors.cache.on_disk import DiskWaits, OnDisk
from ramify.actors.cache.requests import RunningRequests
from ramify.actors.cache.residency import REACH, Residency
from ramify.actors.cache.resuming import Resuming, WindowResuming, resumable
from ramify.actors.cache.stored import StoredBlocks
from ramify.actors.cache.stored_snapshots import StoredSnapshots
from ramify.actors.cache.tree import RadixTree
from ramify.actors.cache.windows import Windows
from ramify.actors.kit.report import KvTier
from ramify.protocol import messages as m
from ramify.protocol.cluster import (
    BLOCK,
    MOST_LISTENERS,
    KvEvents,
    Lacking,
    ListenKv,
    ReadBlocks,
    SeekBlocks,
    UnlistenKv,
    split_keys,
)
from ramify.protocol.plan import STATE, WINDOW, MovedBlock, pack

GONE = -1  # the handle of a run whose session has dropped all of its own


class CacheShares(NamedTuple):
    """`held`: of the pool, in percent, that one holder may lease. `leases`: of a holder."""

    held: int = 100
    leases: int = 1 << 62


ALL = CacheShares()


class RadixCache:
    """`pages` KV pages of `page_size` tokens, and the tokens of every live branch.

    `reach`: see `Residency`. `block`: tokens of a block, see `Announcer`; a multiple of the page size.
    `shares`: what may be leased. `state_slots`, `windows`: of a model with fixed states or windows; its
    pages hold one token, so that a snapshot may stand anywhere. `host_blocks`: see `StoredBlocks`;
    `part`: see `StoredSnapshots`, 0: none is stored. `canaries`: none with fixed states or windows.
    """

    def __init__(
        self,
        pages: int,
        page_size: int = 1,
        reach: int = REACH,
        block: int = BLOCK,
        shares: CacheShares = ALL,
        state_slots: int = 0,
        windows: Windows | None = None,
        host_blocks: int = 0,
        disk: OnDisk | None = None,
        part: int = 0,
        canaries: Canaries | None = None,
    ) -> None:
        snapshots = state_slots > 0 or windows is not None
        if snapshots and page_size != 1:
            raise ValueError(f"page_size is {page_size}: fixed states and windows need pages of 1 token")
        self.page_size = page_size
        self.tree = RadixTree(page_size, block, states=snapshots)
        self.residency = Residency(self.tree, PageAllocator(pages), reach)
        self._form, self._part = STATE if windows is None else WINDOW, part
        self._store(host_blocks, disk)
        self.waits = DiskWaits(self.residency.stored)
        self._resuming: Resuming | None = None  # of a model with fixed states or windows
        if windows is not None:
            self._resuming = WindowResuming(self.tree, self.residency, windows)
        elif state_slots:
            self._resuming = Resuming(self.tree, self.residency, state_slots)
        self._shares = shares
        self.leases = Leases(self.tree, self.residency.victims.reconsider, self._bounds())
        self.branches = Branches(self.tree, self.leases)
        self.canaries = canaries if canaries is not None else Canaries()
        parts = self.tree, self.residency, self.branches, self.leases, self.waits, self._resuming
        self._requests = requests = RunningRequests(*parts, self.canaries)
        self.runs = requests.runs
        self.acquire, self.grow, self.commit = requests.acquire, requests.grow, requests.commit
        self.take_copies = requests.take_copies
        self._listeners: set[int] = set()

    @property
    def allocator(self) -> PageAllocator:
        return self.residency.allocator

    @property
    def total(self) -> int:
        return self.allocator.total

    @property
    def free(self) -> int:
        return self.residency.free

    @property
    def evictable(self) -> int:
        return self.residency.evictable

    @property
    def referenced(self) -> int:
        return self.residency.referenced

    def tiers(self, token_bytes: int) -> list[KvTier]:
        """Blocks, bytes and hits of each tier, for metrics."""
        size, stored = self.tree.block, self.residency.stored
        here, foreign = (self.total - self.free) * self.page_size // size, len(stored.foreign)
        blocks = here, len(stored) - foreign, len(stored.disk or ()), foreign
        named = zip(("device", "host", "disk", "peer"), blocks, self._requests.hits, strict=True)
        tiers = [KvTier(tier, count, count * size * token_bytes, hits) for tier, count, hits in named]
        if (disk := stored.disk) is None:
            tiers[2] = replace(tiers[2], load_s=0.0)
        else:
            paces = {"read_s": disk.block_s, "write_s": disk.write_s, "slow": disk.slow}
            tiers[2] = replace(tiers[2], load_s=disk.seconds, **paces)
        return tiers

    # --- branches ---------------------------------------------------------------------------

    def open_branch(self, message: m.OpenBranch) -> None:
        self.branches.open(message.branch, self.tree.root(message.namespace))

    def extend_branch(self, message: m.ExtendBranch) -> None:
        """O(new tokens). The tokens are not copied."""
        tokens = np.frombuffer(message.tokens, dtype=np.int32)
        self.branches.extend(message.branch, tokens, message.pictures)

    def fork_branch(self, message: m.ForkBranch) -> None:
        self.branches.fork(message.branch, message.children, message.at)

    def move_branch(self, message: m.MoveBranch) -> None:
        self.branches.rollback(message.branch, message.to)

    def retain_branches(self, message: m.RetainBranches) -> None:
        for branch, until in message.until.items():
            self.leases.retain(branch, self.branches.head(branch), message.owner, until)

    def drop_branches(self, message: m.DropBranches) -> None:
        for branch in message.branches:
            self.branches.drop(branch)

    def drop_sessions(self, message: m.DropSessions, *, keep: bool = True) -> None:
        """O(their handles and what runs). A session that has none, or has gone already, is no error.

        `keep`: what they retained is kept until its time.

        What still runs there moves no handle any more: the session may open others of these numbers.
        """
        dropped = set(message.sessions)
        for session in dropped:
            for branch in self.branches.of(session):
                self.branches.drop(branch, keep=keep)
        for run in self.runs.values():
            if m.session_of(run.branch) in dropped:
                run.branch = GONE

    def inspect(self, message: m.Inspect) -> m.Inspected:
        """O(branches and cold nodes): a cold path that many of the branches share is walked once."""
        found: dict[Node, tuple[int, int]] = {}  # cold nodes that were passed
        kept, unwanted = self.branches.keep(message)
        self.residency.demote(unwanted)
        nodes = map(self.branches.find, message.branches)
        known = [(-1, 0) if node is None else self._resident(node, found) for node in nodes]
        tiers = [max(0, tier) for _, tier in known]
        return m.Inspected(message.id, [end for end, _ in known] + kept, tiers if any(tiers) else [])

    # --- what is resident, for routers ------------------------------------------------------

    def listen_kv(self, message: ListenKv) -> list[KvEvents]:
        """A snapshot for a listener; `news` has what follows. Beyond `MOST_LISTENERS`: nothing."""
        listeners = self._listeners
        if message.listener not in listeners and len(listeners) >= MOST_LISTENERS:
            return []
        if self.residency.announcer is None:
            self.residency.announcer = Announcer(self.tree)
        listeners.add(message.listener)
        return self.residency.announcer.snapshot(message.listener)

    def unlisten_kv(self, message: UnlistenKv) -> None:
        self._listeners.discard(message.listener)
        if not self._listeners and self.residency.announcer is not None:
            self.residency.announcer.close()
            self.residency.announcer = None

    def news(self) -> list[KvEvents]:
        """Blocks that became resident or cold since the last call, for all listeners.

        Bounded: call it again while there is `pending_news`.
        """
        announcer = self.residency.announcer
        return announcer.flush() if announcer is not None and announcer.pending else []

    @property
    def pending_news(self) -> bool:
        announcer = self.residency.announcer
        return announcer is not None and announcer.pending

    @property
    def may_save(self) -> bool:
        """Whether blocks are to be saved for the disk again, and none could. Once."""
        residency = self.residency
        disk, slots = residency.stored.disk, residency.stored.slots
        if disk is None or not residency.behind or disk.backlog > slots // 4:
            return False
        residency.behind = False
        return bool(residency.unsaved)

    def fetch_ahead(self, branch: int) -> None:
        """Fetch the blocks of a branch from the disk into free host memory."""
        tip = self.branches.find(branch)
        if tip is not None and tip.end > self.tree.block:
            keys, _ = self._requests.on_disk(tip, self._requests.find(tip, tip.end - 1))
            self.waits.ahead(keys)

    # --- requests ---------------------------------------------------------------------------

    def settle(self, message: m.Settle, now: float = 0.0) -> m.Settled:
        """Commits, grows, puts, acquires, reads, in this order. `now`: clock seconds, for retention."""
        stored = self.residency.stored
        for commit in message.commits:
            self.commit(commit)
        grown = [self.grow(grow, now) for grow in message.grows]
        if message.kept or message.refused:
            self._arrived(message)
        slots = [self._accept(keys) for keys in message.puts] if message.puts else []
        if message.notes and (away := self.residency.stored_snapshots) is not None:
            for note in message.notes:
                away.take(note)
        verdicts = [self.acquire(acquire, now) for acquire in message.acquires]
        reads = [self._give(read) for read in message.reads] if message.reads else []
        more = False
        if stored.slots:
            more = self.residency.save_for_disk()  # before what adds to the disk's backlog
            self.residency.save_ahead()
        counts = self.free, self.evictable, self.referenced
        saves, stored.saves = stored.saves, []
        copies = self.take_copies()
        return m.Settled(verdicts, grown, *counts, copies, saves, slots, reads, more)

    def lacking(self, message: SeekBlocks) -> Lacking:
        """The blocks of a branch that another replica may send, or a snapshot that it may have. O(blocks
        that are not on the device).
        """
        session, branch = message.session, message.branch
        tip, away = self.branches.find(branch), self.residency.stored_snapshots
        if tip is None or not tip.end or (self._resuming is not None and away is None):
            return Lacking(session, branch)
        states = self.residency.snapshots
        if message.behind is not None:
            if away is None or states is None:
                return Lacking(session, branch)
            at, keys, note = away.give(tip, message.behind, states)
            return Lacking(session, branch, at, b"".join(keys), note=note)
        first, keys = self.residency.stored.lacking(tip)
        resumes = None
        if away is not None:
            begin = self._requests.find(tip, tip.end - 1)
            start = begin.start.end
            found = away.find(tip, start, begin.node.end, begin.last, 0)
            resumes = start if found is None else found.at
        return Lacking(session, branch, first, b"".join(keys), resumes)

    def _arrived(self, message: m.Settle) -> None:
        stored = self.residency.stored
        for key in split_keys(b"".join(message.kept)):
            stored.arrived(key, whole=True, foreign=True)
        for key in split_keys(b"".join(message.refused)):
            stored.arrived(key, whole=False)

    def _accept(self, keys: bytes) -> bytes:
        """Slots for blocks that another replica sends; -1: it is here, or comes, or there is no room."""
        slots = map(self.residency.stored.reserve, split_keys(keys))
        return pack(-1 if slot is None else slot for slot in slots)

    def _give(self, message: ReadBlocks) -> list[MovedBlock]:
        tip = self.branches.find(message.branch)
        stored = self.residency.stored
        if tip is None or not stored.slots:
            return []
        return stored.give(tip, message.first, split_keys(message.keys))

    def renew(self, pages: int, count: int = 0, host_blocks: int = 0) -> None:
        """Have `pages` without KV from now on, `count` state slots or window pages, and `host_blocks` in
        host memory. O(tree).
        """
        if self.runs:
            raise RuntimeError(f"the pool is renewed while {len(self.runs)} requests run")
        disk = self.residency.stored.disk
        self.residency.renew(PageAllocator(pages))
        self._store(host_blocks, disk)
        self.waits.renew(self.residency.stored)
        self.canaries.renew()
        if self._resuming is not None:
            self._resuming.renew(count)
        self.leases.bounds = self._bounds()

    def _store(self, host_blocks: int, disk: OnDisk | None) -> None:
        residency = self.residency
        residency.stored = StoredBlocks(self.tree, host_blocks, disk)
        if host_blocks and self._part:
            residency.stored_snapshots = StoredSnapshots(
                self.tree, residency.stored, self._form, self._part
            )

    # --- internals --------------------------------------------------------------------------

    def _bounds(self) -> Bounds:
        tokens, shares = self.total * self.page_size, self._shares
        return Bounds(tokens * shares.held // 100, shares.leases)

    def _resident(self, node: Node, found: dict[Node, tuple[int, int]]) -> tuple[int, int]:
        """Resident tokens of the path to `node`, and where the block behind them is: `ON_HOST`,
        `ON_DISK`, 0 (nowhere), -1 (it does not end on this path). `found`: known ones, of cold nodes.
        """
        passed: list[Node] = []
        while node.state is not DEVICE and node not in found:
            passed.append(node)
            assert node.parent is not None
            node = node.parent
        known = found.get(node)
        if known is None:
            end = node.end if self._resuming is None else resumable(node, node.end).end
            known = self.tree.whole(end), -1
        end, tier = known
        for each in reversed(passed):
            tier = self.residency.stored.tier(each, end) if tier < 0 else tier
            found[each] = end, tier
        return end, tier
