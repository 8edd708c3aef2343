"""Running requests: what each acquires of a branch, how it grows, and what of it stays in the tree.

    acquire        find the resident prefix, lock it, take private pages for the rest; a page that the
                   prefix ends in is copied to the first of them
    commit         private pages of computed cold nodes become the tree's
    final commit   append the output, move the branch's handle, give everything else back

Does not know time (`now` is an argument), other messages of the mailbox, or what a page holds.
"""

from typing import NamedTuple

import numpy as np

from ramify.actors.cache.allocator import Pages
from ramify.actors.cache.branches import Branches
from ramify.actors.cache.canaries import Canaries
from ramify.actors.cache.leases import Leases
from ramify.actors.cache.node import DEVICE, SUSPECT, Node
from ramify.actors.cache.on_disk import DiskWaits
from ramify.actors.cache.residency import Residency
from ramify.actors.cache.resuming import Begun, Resuming, Start, resumable
from ramify.actors.cache.run import PageLease
from ramify.actors.cache.stored_snapshots import StoredSnapshot
from ramify.actors.cache.tree import RadixTree
from ramify.protocol import messages as m
from ramify.protocol.plan import MovedBlock, pack


class UnknownRequest(RuntimeError):
    """A commit or grow of a request that does not run (a second final commit, for instance)."""


class FoundKv(NamedTuple):
    """The KV that there is of a branch. `node`: where it ends; `start`: where a run can begin in it."""

    node: Node
    start: Node
    reach: int  # tokens up to the end of `node`, or the last one that need not be run
    on: int  # the request that computes what is missing; 0: none does
    last: int  # position from which on all is run in any case


class RunningRequests:
    """The requests that run, by number, and the pages that each has leased.

    `waits`: requests that wait for the disk. `resuming`: of a model with fixed states or windows.
    """

    def __init__(
        self,
        tree: RadixTree,
        residency: Residency,
        branches: Branches,
        leases: Leases,
        waits: DiskWaits,
        resuming: Resuming | None,
        canaries: Canaries,
    ) -> None:
        self._tree = tree
        self._residency = residency
        self._branches = branches
        self._leases = leases
        self._waits = waits
        self._resuming = resuming
        self._canaries = canaries
        self._page_size = tree.page_size
        self.runs: dict[int, PageLease] = {}
        # Tokens that requests found on the device, in host memory, on the disk, at a peer
        self.hits = [0, 0, 0, 0]
        self._copies: list[int] = []  # see `take_copies`

    def acquire(self, message: m.Acquire, now: float = 0.0) -> m.Granted | m.Denied:
        """All or nothing: a denied request holds nothing.

        Raises ValueError for a branch without tokens (there is nothing to run) and for a request
        that runs already.
        """
        request = message.request
        if request in self.runs:
            raise ValueError(f"request {request:#x} runs already")
        self._residency.rank = self._residency.next_rank() if message.spare else 0
        tip = self._branches.find(message.branch)
        if tip is None or (message.prompt and tip.end != message.prompt):
            return m.Denied(request, "gone")
        if tip.end == 0:
            raise ValueError(f"request {request:#x}: branch {message.branch:#x} has no tokens")
        last = tip.end - 1 if message.rerun is None else min(message.rerun, tip.end - 1)
        found = self.find(tip, last)
        if found.on:
            return m.Denied(request, "shared", resident=self._tree.whole(found.start.end), on=found.on)
        if message.rate:
            keys, gain = self.on_disk(tip, found, message.cost, message.rate)
            if self._waits.begin(request, keys, message.rate, now, gain):
                there = self._tree.whole(min(found.start.end, found.reach))
                return m.Denied(request, "disk", resident=there)
        return self._grant(message, tip, found, now)

    def find(self, tip: Node, last: int) -> FoundKv:
        """The KV that there is of a branch; what begins at `last` or later is run in any case."""
        node, on, size = tip, 0, self._page_size
        while node.state is not DEVICE:
            # what is computed again in any case, as parts of pages are, is nobody's to wait for
            if min(node.end, last) // size > node.start // size:
                on = node.owner or on
            assert node.parent is not None
            node = node.parent
        resuming, reach = self._resuming, min(node.end, last)
        if resuming is None:
            return FoundKv(node, node, reach, on, last)
        start = resumable(node, reach)
        return FoundKv(node, start, reach, on or resuming.coming(node, start.end, reach), last)

    def on_disk(
        self, tip: Node, found: FoundKv, cost: int = 0, rate: float = 0.0
    ) -> tuple[list[bytes], int]:
        """What a request would load if host memory had what the disk has: keys of blocks; and the tokens
        that a snapshot among them saves, if it begins with one. `cost`, `rate`: see `Acquire`.
        """
        stored, away = self._residency.stored, self._residency.stored_snapshots
        disk = stored.disk
        if not disk:
            return [], 0
        if self._resuming is None:
            return stored.find(tip, self._tree.whole(found.reach), found.last, disk=True), 0
        start, has_kv, price = found.start.end, found.node.end, disk.cost(rate)
        snapshot = away.find(tip, start, has_kv, found.last, cost, price) if away is not None else None
        return ([], 0) if snapshot is None else (snapshot.keys, snapshot.at - start)

    def _grant(self, message: m.Acquire, tip: Node, place: FoundKv, now: float) -> m.Granted | m.Denied:
        """See `acquire`; nobody computes what is missing."""
        request, resuming = message.request, self._resuming
        node, found, has_kv, _, _ = place
        stored = self._residency.stored
        away, begins, keys, loaded, compared = self._stored(message, tip, place)
        reach = has_kv if resuming is None else min(begins.at, has_kv)
        size = self._page_size
        resident, cached = found.end - found.end % size, reach - reach % size
        more = max(0, loaded - cached)
        source = self._tree.cut_page(node, reach) if reach > max(cached, loaded) else None
        if message.most and tip.end + message.extra - max(cached, loaded) > message.most:
            return m.Denied(request, "memory", resident=resident, stored=more)
        anchor = self._anchor(node, cached)
        self._residency.lock(anchor)
        first = cached // self._page_size
        end, slots = tip.end + message.extra, message.slots
        need = -(-end // self._page_size) - first
        lacking = resuming.reserve(begins, end, slots) if resuming is not None else 0
        if lacking:
            self._residency.unlock(anchor)
            return m.Denied(request, "memory", resident=resident, slots=lacking, stored=more)
        tip.refs += 1  # evicting the tail that is run again must not delete it
        self._leases.expire(now)
        pinned = [*keys, *compared.values()]
        stored.pin(pinned)
        short_of_free = message.spare and need > self._residency.free
        pages = None if short_of_free else self._residency.take(need, message.leave)
        if pages is None:
            available = self._residency.free
            if not short_of_free:
                available += self._residency.evictable
            short = need + message.leave - available
            tip.refs -= 1
            if resuming is not None:
                resuming.leave(begins)
            stored.unpin(pinned)
            self._residency.unlock(anchor)
            return m.Denied(request, "memory", resident=resident, short=short, stored=more)
        if source is not None:  # it stays as it is until the plan runs, even if it was evicted just now
            self._copies += source, int(pages[0])
            cached = reach
        self._residency.touch(node)
        run = self.runs[request] = PageLease(
            request, message.branch, tip, anchor, first, pages, need, self._residency.rank
        )
        begun = Begun() if resuming is None else resuming.begin(run, begins, end, slots)
        blocks = self._loads(away, keys, cached, first, pages, begun.loaded) if keys else []
        run.stored, run.loaded, run.compared = keys, max(0, loaded - cached), compared
        if pinned:
            self._canaries.granted(bool(compared))
        host, disk = self._count_hits(cached, run.loaded, keys)
        cached += run.loaded
        _claim(tip, request)
        return m.Granted(
            request,
            cached,
            self._tree.tokens(tip, cached),
            self._residency.table(anchor, pages),
            self._tree.tokens(tip, 0) if message.history else b"",
            anchor.proven and begun.proven and not keys,
            begun.state,
            begun.slots,
            begun.marks,
            max(0, has_kv - cached) if resuming is not None else 0,
            begun.windows,
            blocks,
            run.loaded,
            self._branches.pictures(message.branch, cached),
            host,
            disk,
        )

    def _stored(
        self, message: m.Acquire, tip: Node, found: FoundKv
    ) -> tuple[StoredSnapshot | None, Start, list[bytes], int, dict[int, bytes]]:
        """What a request is to load: a snapshot to begin with, if any, where it begins, the keys
        of all, and up to where that reaches; 0: nothing. Or else blocks to compare: see `Canaries`.
        """
        away, stored = self._residency.stored_snapshots, self._residency.stored
        start = Start(found.start.end, found.start)
        if message.load and self._resuming is None:
            cached = self._tree.whole(found.reach)
            keys = stored.find(tip, cached, found.last)
            first = cached // self._tree.block
            if keys and not message.most and (compared := self._canaries.choose(keys, first)):
                return None, start, [], 0, compared
            return None, start, keys, stored.end(cached, keys), {}
        if message.load and away is not None:
            snapshot = away.find(tip, start.at, found.node.end, found.last, message.cost)
            if snapshot is not None:
                return snapshot, Start(snapshot.at, None), snapshot.keys, snapshot.at, {}
        return None, start, [], 0, {}

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
        snapshots = self._residency.stored_snapshots
        if away is not None and snapshots is not None:
            return snapshots.loads(away, pages, first, target)
        return self._residency.stored.loads(keys, cached, first, pages)

    def grow(self, message: m.Grow, now: float = 0.0) -> m.Grown:
        """Take whole pages for at least `tokens` more slots, counted from the last page's end."""
        run = self._run(message.request)
        self._leases.expire(now)
        pages = self._residency.take(-(-message.tokens // self._page_size))
        if pages is None:
            return m.Grown(message.request, b"")
        run.grow(pages)
        windows = self._resuming.grow(run, len(pages)) if self._resuming is not None else b""
        return m.Grown(message.request, pages.tobytes(), windows)

    def commit(self, message: m.Commit) -> None:
        """See `messages.Commit`. Raises UnknownRequest, and ValueError for what cannot be."""
        run = self._run(message.request)
        self._residency.rank = run.rank
        if message.tokens and not message.final:
            raise ValueError(f"request {run.request:#x}: tokens come with the final commit only")
        if message.computed > run.end * self._page_size:
            raise ValueError(f"request {run.request:#x}: {message.computed} is past its last page")
        loaded = run.first * self._page_size + run.loaded
        if run.stored and (message.final or message.computed >= loaded):
            self._residency.stored.drop(message.lost if message.finite is not False else run.stored)
            self._residency.stored.unpin(run.stored)
            run.stored = []
        if message.finite is False:
            if message.tokens or not message.final:
                raise ValueError(f"request {run.request:#x}: what is not finite ends without tokens")
            self._residency.distrust(run.anchor)
            if self._resuming is not None:
                self._resuming.distrust(run)
            self._finish(run, run.tip)
            return
        if message.finite and run.proves:
            self._residency.prove(run.anchor)  # what it found; then what it computed
        end = run.tip
        if message.tokens:
            end = self._tree.insert(end, np.frombuffer(message.tokens, dtype=np.int32))
        self._publish(run, end, message.computed)
        self._compare(run)
        if message.finite and run.proves:
            self._residency.prove(run.anchor)
        if self._resuming is not None:
            self._resuming.keep(run, end, message)
        if message.final:
            self._finish(run, end)

    def _compare(self, run: PageLease) -> None:
        """Compare blocks that were computed although they are stored, once all are in the tree."""
        if run.compared and run.anchor.end // self._tree.block > max(run.compared):
            self._canaries.compare(self._residency.stored, run.anchor, run.compared)
            run.compared = {}

    def take_copies(self) -> bytes:
        """Copies of pages on which grants since the last call rely: see `StepPlan.copies`.

        They are to be made before any page is written that was granted since then.
        """
        if not self._copies:
            return b""
        copies, self._copies = self._copies, []
        return pack(copies)

    def _count_hits(self, cached: int, loaded: int, keys: list[bytes]) -> tuple[int, int]:
        """See `Granted.host`, `disk`; what other replicas sent is in host memory."""
        self.hits[0] += cached
        if not keys:
            return 0, 0
        stored, size = self._residency.stored, self._tree.block
        peer = min(loaded, size * len(stored.foreign.intersection(keys)))
        disk = min(loaded - peer, size * len(stored.from_disk.intersection(keys)))
        stored.from_disk.difference_update(keys)
        for tier, count in enumerate((loaded - disk - peer, disk, peer), 1):
            self.hits[tier] += count
        return loaded - disk, disk

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
        if node.end - cached >= self._page_size:
            node = self._tree.split(node, cached)
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
        whole = 0 if node.state is SUSPECT else self._tree.whole(min(computed, tip.end))
        size = self._page_size
        anchor = run.anchor
        if cold and node.end // size > anchor.end // size:
            run.mixed = node
        for node in reversed(cold):
            if node.start < whole:
                upper = self._tree.split(node, min(whole, node.end))
                pages = run.give(upper.start // size, upper.end // size)
                self._residency.publish(upper, pages)
                anchor = upper
            if node.owner == run.request and node.end <= computed:
                node.disclaim()  # a part of a page: the next request computes its own
        if anchor is not run.anchor:
            self._residency.lock(anchor)
            self._residency.unlock(run.anchor)
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
        if run.compared:
            self._canaries.give_up(self._residency.stored, run.compared.values())
        if self._residency.stored.disk is not None:
            self._residency.unsaved.append((node, 1 << 62))
        if self._resuming is not None:
            self._resuming.end(run)
        self._residency.give_back(run.rest())
        self._residency.unlock(run.anchor)
        if node is not run.anchor:  # else `unlock` did, before it was put up for eviction
            self._residency.touch(node)
        if self._branches.find(run.branch) is run.tip:
            self._branches.move(run.branch, end)
        run.tip.refs -= 1
        self._tree.prune(run.tip)
        if end is not run.tip:
            self._tree.prune(end)
        self._tree.tidy(node)


def _claim(node: Node, request: int) -> None:
    """What is cold on the path to `node` is computed by `request`."""
    while not node.resident and node.parent is not None:
        node.claim(request)
        node = node.parent
