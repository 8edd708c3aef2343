"""The radix cache: one method per mailbox message, replies as return values.

Puts together the tree (tokens), residency (pages), branches (handles) and runs (requests):

    OpenBranch .. DropBranches   move handles; never allocate
    acquire                      find the resident prefix, lock it, take private pages for the rest; a
                                 page that the prefix ends in is copied to the first of them
    commit                       private pages of computed cold nodes become the tree's
    final commit                 append the output, move the handle, give everything else back

Does not know time (`now` is an argument), sockets, policy, or what a page holds.
"""

from typing import NamedTuple

import numpy as np

from ramify.actors.cache.allocator import PageAllocator, Pages
from ramify.actors.cache.announcer import Announcer
from ramify.actors.cache.branches import Branches
from ramify.actors.cache.leases import Bounds, Leases
from ramify.actors.cache.node import DEVICE, SUSPECT, Node
from ramify.actors.cache.on_disk import DiskWaits, OnDisk
from ramify.actors.cache.residency import REACH, Residency
from ramify.actors.cache.resuming import Begun, Resuming, Start, WindowResuming, resumable
from ramify.actors.cache.run import PageLease
from ramify.actors.cache.stored import StoredBlocks
from ramify.actors.cache.stored_snapshots import StoredSnapshot, StoredSnapshots
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


class _Found(NamedTuple):
    """The KV that there is of a branch. `node`: where it ends; `start`: where a run can begin in it."""

    node: Node
    start: Node
    reach: int  # tokens up to the end of `node`, or the last one that need not be run
    on: int  # the request that computes what is missing; 0: none does
    last: int  # position from which on all is run in any case


class UnknownRequest(RuntimeError):
    """A commit or grow of a request that does not run (a second final commit, for instance)."""


class RadixCache:
    """`pages` KV pages of `page_size` tokens, and the tokens of every live branch.

    `reach`: see `Residency`. `block`: tokens of a block, see `Announcer`; a multiple of the page size.
    `shares`: what may be leased. `state_slots`, `windows`: of a model with fixed states or windows; its
    pages hold one token, so that a snapshot may stand anywhere. `host_blocks`: see `StoredBlocks`;
    `part`: see `StoredSnapshots`, 0: none is stored.
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
        self.runs: dict[int, PageLease] = {}
        self._listeners: set[int] = set()
        # Tokens that requests found on the device, in host memory, on the disk, at a peer
        self._hits = [0, 0, 0, 0]
        self._copies: list[int] = []  # see `take_copies`

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
        """What is where, for metrics."""
        size, stored = self.tree.block, self.residency.stored
        here, foreign = (self.total - self.free) * self.page_size // size, len(stored.foreign)
        blocks = here, len(stored) - foreign, len(stored.disk or ()), foreign
        named = zip(("device", "host", "disk", "peer"), blocks, self._hits, strict=True)
        took = {"disk": 0.0 if stored.disk is None else stored.disk.seconds}
        return [
            KvTier(tier, count, count * size * token_bytes, hits, took.get(tier))
            for tier, count, hits in named
        ]

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
        """What became resident or cold since the last call, for all listeners.

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
        """Have what the disk has of a branch come to host memory, as far as that is free."""
        tip = self.branches.find(branch)
        if tip is not None and tip.end > self.tree.block and self._resuming is None:
            found = self._found(tip, tip.end - 1)
            self.waits.ahead(tip, self._whole(found.reach))

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
        """What another replica may send of a branch. O(its blocks that are not on the device)."""
        tip = self.branches.find(message.branch)
        if tip is None or not tip.end or self._resuming is not None:
            return Lacking(message.session, message.branch)
        first, keys = self.residency.stored.lacking(tip)
        return Lacking(message.session, message.branch, first, b"".join(keys))

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

    def take_copies(self) -> bytes:
        """What was granted since the last call relies on these copies of pages: see `StepPlan.copies`.

        They are to be made before any page is written that was granted since then.
        """
        if not self._copies:
            return b""
        copies, self._copies = self._copies, []
        return pack(copies)

    def acquire(self, message: m.Acquire, now: float = 0.0) -> m.Granted | m.Denied:
        """All or nothing: a denied request holds nothing.

        Raises ValueError for a branch without tokens (there is nothing to run) and for a request
        that runs already.
        """
        request = message.request
        if request in self.runs:
            raise ValueError(f"request {request:#x} runs already")
        self.residency.rank = self.residency.next_rank() if message.spare else 0
        tip = self.branches.find(message.branch)
        if tip is None or (message.prompt and tip.end != message.prompt):
            return m.Denied(request, "gone")
        if tip.end == 0:
            raise ValueError(f"request {request:#x}: branch {message.branch:#x} has no tokens")
        last = tip.end - 1 if message.rerun is None else min(message.rerun, tip.end - 1)
        found = self._found(tip, last)
        if found.on:
            return m.Denied(request, "shared", resident=self._whole(found.start.end), on=found.on)
        if message.rate and self._resuming is None:
            whole = self._whole(found.reach)
            if self.waits.begin(request, tip, whole, last, message.rate, now):
                return m.Denied(request, "disk", resident=whole)
        return self._grant(message, tip, found, now)

    def _found(self, tip: Node, last: int) -> _Found:
        """The KV that there is of a branch; what begins at `last` or later is run in any case."""
        node, on, size = tip, 0, self.page_size
        while node.state is not DEVICE:
            # what is computed again in any case, as parts of pages are, is nobody's to wait for
            if min(node.end, last) // size > node.start // size:
                on = node.owner or on
            assert node.parent is not None
            node = node.parent
        resuming, reach = self._resuming, min(node.end, last)
        if resuming is None:
            return _Found(node, node, reach, on, last)
        start = resumable(node, reach)
        return _Found(node, start, reach, on or resuming.coming(node, start.end, reach), last)

    def _grant(self, message: m.Acquire, tip: Node, place: _Found, now: float) -> m.Granted | m.Denied:
        """See `acquire`; nobody computes what is missing."""
        request, resuming = message.request, self._resuming
        node, found, has_kv, _, _ = place
        stored = self.residency.stored
        away, begins, keys, loaded = self._stored(message, tip, place)
        reach = has_kv if resuming is None else min(begins.at, has_kv)
        size = self.page_size
        resident, cached = found.end - found.end % size, reach - reach % size
        source = self.tree.cut_page(node, reach) if reach > max(cached, loaded) else None
        if message.most and tip.end + message.extra - max(cached, loaded) > message.most:
            return m.Denied(request, "memory", resident=resident)
        anchor = self._anchor(node, cached)
        self.residency.lock(anchor)
        first = cached // self.page_size
        end, slots = tip.end + message.extra, message.slots
        need = -(-end // self.page_size) - first
        lacking = resuming.reserve(begins, end, slots) if resuming is not None else 0
        if lacking:
            self.residency.unlock(anchor)
            return m.Denied(request, "memory", resident=resident, slots=lacking)
        tip.refs += 1  # evicting the tail that is run again must not delete it
        self.leases.expire(now)
        if keys:
            stored.pin(keys)
        short_of_free = message.spare and need > self.free
        pages = None if short_of_free else self.residency.take(need, message.leave)
        if pages is None:
            to_be_had = self.free if short_of_free else self.free + self.evictable
            short = need + message.leave - to_be_had
            tip.refs -= 1
            if resuming is not None:
                resuming.leave(begins)
            stored.unpin(keys)
            self.residency.unlock(anchor)
            return m.Denied(request, "memory", resident=resident, short=short)
        if source is not None:  # it stays as it is until the plan runs, even if it was evicted just now
            self._copies += source, int(pages[0])
            cached = reach
        self.residency.touch(node)
        run = self.runs[request] = PageLease(
            request, message.branch, tip, anchor, first, pages, self.residency.rank
        )
        begun = Begun() if resuming is None else resuming.begin(run, begins, end, slots)
        blocks = self._loads(away, keys, cached, first, pages, begun.loaded) if keys else []
        run.stored, run.loaded = keys, max(0, loaded - cached)
        self._count_hits(cached, run.loaded, keys)
        cached += run.loaded
        _claim(tip, request)
        return m.Granted(
            request,
            cached,
            self.tree.tokens(tip, cached),
            self.residency.table(anchor, pages),
            self.tree.tokens(tip, 0) if message.history else b"",
            anchor.proven and begun.proven and not keys,
            begun.state,
            begun.slots,
            begun.marks,
            max(0, has_kv - cached) if resuming is not None else 0,
            begun.windows,
            blocks,
            run.loaded,
            self.branches.pictures(message.branch, cached),
        )

    def _stored(
        self, message: m.Acquire, tip: Node, found: _Found
    ) -> tuple[StoredSnapshot | None, Start, list[bytes], int]:
        """What a request is to load: a snapshot to begin with, if any, where it begins, the keys
        of all, and up to where that reaches; 0: nothing.
        """
        away, stored = self.residency.stored_snapshots, self.residency.stored
        start = Start(found.start.end, found.start)
        if message.load and self._resuming is None:
            cached = self._whole(found.reach)
            keys = stored.find(tip, cached, found.last)
            return None, start, keys, stored.end(cached, keys)
        if message.load and away is not None:
            snapshot = away.find(tip, start.at, found.node.end, found.last, message.cost)
            if snapshot is not None:
                return snapshot, Start(snapshot.at, None), snapshot.keys, snapshot.at
        return None, start, [], 0

    def _loads(
        self,
        away: StoredSnapshot | None,
        keys: list[bytes],
        cached: int,
        first: int,
        pages: Pages,
        target: Pages,
    ) -> list[MovedBlock]:
        """See `StoredBlocks.loads` and `StoredSnapshots.loads`."""
        snapshots = self.residency.stored_snapshots
        if away is not None and snapshots is not None:
            return snapshots.loads(away, pages, first, target)
        return self.residency.stored.loads(keys, cached, first, pages)

    def grow(self, message: m.Grow, now: float = 0.0) -> m.Grown:
        """Whole pages for at least `tokens` more slots, counted from the last page's end."""
        run = self._run(message.request)
        self.leases.expire(now)
        pages = self.residency.take(-(-message.tokens // self.page_size))
        if pages is None:
            return m.Grown(message.request, b"")
        run.grow(pages)
        windows = self._resuming.grow(run, len(pages)) if self._resuming is not None else b""
        return m.Grown(message.request, pages.tobytes(), windows)

    def commit(self, message: m.Commit) -> None:
        """See `messages.Commit`. Raises UnknownRequest, and ValueError for what cannot be."""
        run = self._run(message.request)
        self.residency.rank = run.rank
        if message.tokens and not message.final:
            raise ValueError(f"request {run.request:#x}: tokens come with the final commit only")
        if message.computed > run.end * self.page_size:
            raise ValueError(f"request {run.request:#x}: {message.computed} is past its last page")
        if run.stored and (message.final or message.computed >= run.first * self.page_size + run.loaded):
            self.residency.stored.drop(message.lost if message.finite is not False else run.stored)
            self.residency.stored.unpin(run.stored)
            run.stored = []
        if message.finite is False:
            if message.tokens or not message.final:
                raise ValueError(f"request {run.request:#x}: what is not finite ends without tokens")
            self.residency.distrust(run.anchor)
            if self._resuming is not None:
                self._resuming.distrust(run)
            self._finish(run, run.tip)
            return
        if message.finite and not run.mixed:
            self.residency.prove(run.anchor)  # what it found; then what it computed
        end = run.tip
        if message.tokens:
            end = self.tree.insert(end, np.frombuffer(message.tokens, dtype=np.int32))
        self._publish(run, end, message.computed)
        if message.finite and not run.mixed:
            self.residency.prove(run.anchor)
        if self._resuming is not None:
            self._resuming.keep(run, end, message)
        if message.final:
            self._finish(run, end)

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

    def _count_hits(self, cached: int, loaded: int, keys: list[bytes]) -> None:
        self._hits[0] += cached
        if not keys:
            return
        stored, size = self.residency.stored, self.tree.block
        peer = min(loaded, size * len(stored.foreign.intersection(keys)))
        disk = min(loaded - peer, size * len(stored.from_disk.intersection(keys)))
        stored.from_disk.difference_update(keys)
        for tier, count in enumerate((loaded - disk - peer, disk, peer), 1):
            self._hits[tier] += count

    # --- internals --------------------------------------------------------------------------

    def _bounds(self) -> Bounds:
        tokens, shares = self.total * self.page_size, self._shares
        return Bounds(tokens * shares.held // 100, shares.leases)

    def _whole(self, position: int) -> int:
        return position - position % self.page_size

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
            known = self._whole(end), -1
        end, tier = known
        for each in reversed(passed):
            tier = self.residency.stored.tier(each, end) if tier < 0 else tier
            found[each] = end, tier
        return end, tier

    def _run(self, request: int) -> PageLease:
        run = self.runs.get(request)
        if run is None:
            raise UnknownRequest(f"request {request:#x} does not run")
        return run

    def _anchor(self, node: Node, cached: int) -> Node:
        """The deepest node on the path to `node` that owns pages below `cached` and none above.

        The row uses just these pages. What is resident past `cached` (the last token, which runs
        again) stays evictable: with it locked, a prompt that fills the pool could never run.
        """
        while node.start >= cached and node.parent is not None:
            node = node.parent
        if node.end - cached >= self.page_size:
            node = self.tree.split(node, cached)
        return node

    def _publish(self, run: PageLease, tip: Node, computed: int) -> None:
        """Make the cold nodes of the path to `tip` resident, as far as whole computed pages reach.

        Not below a suspect node, where no other request may find them: they stay the request's own.
        """
        cold: list[Node] = []
        node = tip
        while not node.resident:
            cold.append(node)
            assert node.parent is not None
            node = node.parent
        whole = 0 if node.state is SUSPECT else self._whole(min(computed, tip.end))
        size = self.page_size
        anchor = run.anchor
        if cold and node.end // size > anchor.end // size:
            # what is replayed stands on nodes that have KV: proven, they hide nothing
            run.mixed = run.mixed or self._resuming is None or not node.proven
        for node in reversed(cold):
            if node.start < whole:
                upper = self.tree.split(node, min(whole, node.end))
                pages = run.give(upper.start // size, upper.end // size)
                self.residency.publish(upper, pages)
                anchor = upper
            if node.owner == run.request and node.end <= computed:
                node.disclaim()  # a part of a page: the next request computes its own
        if anchor is not run.anchor:
            self.residency.lock(anchor)
            self.residency.unlock(run.anchor)
            run.anchor = anchor

    def _finish(self, run: PageLease, end: Node) -> None:
        """Move the branch's handle to `end`, then give back all that the request still holds."""
        node = end
        while not node.resident:
            if node.owner == run.request:
                node.disclaim()
            assert node.parent is not None
            node = node.parent
        del self.runs[run.request]
        if self.residency.stored.disk is not None:
            self.residency.unsaved.append((node, 1 << 62))
        if self._resuming is not None:
            self._resuming.end(run)
        self.residency.give_back(run.rest())
        self.residency.unlock(run.anchor)
        if node is not run.anchor:  # else `unlock` did, before it was put up for eviction
            self.residency.touch(node)
        if self.branches.find(run.branch) is run.tip:
            self.branches.move(run.branch, end)
        run.tip.refs -= 1
        self.tree.prune(run.tip)
        if end is not run.tip:
            self.tree.prune(end)
        self.tree.tidy(node)


def _claim(node: Node, request: int) -> None:
    """What is cold on the path to `node` is computed by `request`."""
    while not node.resident and node.parent is not None:
        node.claim(request)
        node = node.parent
