"""Where requests of a model with fixed states or windows begin, and what they leave behind.

A request begins at the deepest position where both KV and a snapshot are; what has KV behind it is
replayed into pages of the request's own. Its slots are its own until it commits them as snapshots, or
ends. A snapshot that it reads stays until a step was sent that reads it: until it commits more than that
position.

`WindowResuming` does the same with window pages (`windows.py`): a run holds those of the tail that it
begins from and its own ones as long as a step may read them.

Does not choose pages, and knows no branches.
"""

from bisect import bisect_right
from typing import NamedTuple

import numpy as np

from ramify.actors.cache import snapshots
from ramify.actors.cache.allocator import Pages
from ramify.actors.cache.node import DEVICE, NO_PAGES, Node
from ramify.actors.cache.residency import Residency
from ramify.actors.cache.run import PageLease
from ramify.actors.cache.snapshots import STRIDE, Snapshots, marks
from ramify.actors.cache.tree import RadixTree
from ramify.actors.cache.windows import Ring, Tails, Windows
from ramify.protocol.messages import Commit
from ramify.protocol.plan import pack, unpack


class Begun(NamedTuple):
    """What `Granted` says of how a request begins. `proven`: so is what it begins from."""

    proven: bool = True
    state: int = 0
    slots: bytes = b""
    marks: bytes = b""
    windows: bytes = b""
    loaded: Pages = NO_PAGES  # what a stored snapshot is loaded to


def resumable(node: Node, at: int) -> Node:
    """The deepest node on the path to `node` that has a snapshot and ends by `at`; a root has the state
    of position 0.
    """
    while node.parent is not None and (not node.snapshot or node.end > at):
        node = node.parent
    return node


class Start(NamedTuple):
    """Where a run begins: at the snapshot of `node`, or, without one, at the stored one at `at`."""

    at: int
    node: Node | None

    @property
    def snapshot(self) -> int:
        return 0 if self.node is None else self.node.snapshot


def _ends(tip: Node, above: int) -> list[int]:
    """Where ops ended on the path to `tip` behind position `above`, in descending order."""
    ends: list[int] = []
    while tip.end > above and tip.parent is not None:
        ends += (tip.end, *tip.ends[::-1])
        tip = tip.parent
    return ends


def _covering(node: Node, at: int) -> Node:
    """The node on the path to `node` that has the token before position `at`."""
    while node.start >= at:
        assert node.parent is not None
        node = node.parent
    return node


class Resuming:
    """The states of all running requests. `count` slots are handed out."""

    def __init__(self, tree: RadixTree, residency: Residency, count: int) -> None:
        self._tree = tree
        self._residency = residency
        self._leaving: dict[PageLease, list[int]] = {}  # positions of snapshots to come, ascending
        self.renew(count)

    def renew(self, count: int) -> None:
        """Hand out so many from now on; no node has a snapshot."""
        self._residency.snapshots = Snapshots(
            count, self._residency.not_resumable, self._residency.leaving
        )

    @property
    def _states(self) -> Snapshots:
        states = self._residency.snapshots
        assert states is not None
        return states

    def coming(self, node: Node, start: int, end: int) -> int:
        """The request that is about to leave a snapshot in (start, end] of the path to `node`, where it
        saves a replay; 0: none is. O(runs that prefill), and a walk for each.
        """
        if end - start <= snapshots.NEAR:
            return 0
        for run, positions in self._leaving.items():
            count = bisect_right(positions, end)
            at = positions[count - 1] if count else 0
            if at - start > snapshots.NEAR and _covering(node, at) is _covering(run.tip, at):
                return run.request
        return 0

    def reserve(self, start: Start, end: int, needed: int) -> int:
        """Use the snapshot of `start` for a run up to position `end`. `needed`: see `Acquire.slots`.

        Returns how many slots are missing; then nothing is used.
        """
        states = self._states
        if start.snapshot:
            states.use(start.snapshot)
        lacking = max(0, needed + (start.node is None) - states.available)
        if lacking:
            self.leave(start)
        return lacking

    def leave(self, start: Start) -> None:
        """Undo `reserve`."""
        if start.snapshot:
            self._states.release(start.snapshot)

    def begin(self, run: PageLease, start: Start, end: int, needed: int) -> Begun:
        """After `reserve`: how `run` begins."""
        states, sure, slot = self._states, True, start.snapshot
        loaded = NO_PAGES
        if slot:
            snapshot = states.touch(slot)
            run.states.append(snapshot)
            sure = snapshot.proven
        elif start.node is None:
            (slot,) = states.take(1)
            loaded = np.array([slot], dtype=np.int32)
            run.resumes = start.at
        run.reads = (start.at, slot) if slot else (0, 0)
        chosen = marks(_ends(run.tip, start.at), start.at, run.tip.end, states.room(needed))
        own = states.take(needed + len(chosen))
        run.slots.update(own)
        if chosen:
            self._leaving[run] = chosen
        return Begun(sure, slot, pack(own), pack(chosen), loaded=loaded)

    def grow(self, run: PageLease, count: int) -> bytes:
        """See `Grown.windows`: `run` got pages for `count` more positions."""
        return b""

    def keep(self, run: PageLease, end: Node, commit: Commit) -> None:
        """Make snapshots of what a run has left in its slots, on the path to `end`."""
        states = self._states
        if run.reads[1] and commit.computed > run.reads[0]:
            if run.resumes:  # it is loaded, and as good as one that was always here
                self._stand(run, end, run.resumes, run.reads[1], commit)
                run.resumes = 0
            self._release_read(run)
        told = unpack(commit.states)
        for at, slot in zip(told[::2], told[1::2], strict=True):
            if slot not in run.slots or not 0 < at <= min(commit.computed, end.end):
                raise ValueError(f"request {run.request:#x}: no state at {at} can be in slot {slot}")
            run.slots.remove(slot)
            self._stand(run, end, at, slot, commit)
            if at == commit.computed and not commit.final:  # its next step may read it
                self._release_read(run)
                run.reads = at, slot
            else:
                states.release(slot)
        self._passed(run, commit)

    def _stand(self, run: PageLease, end: Node, at: int, slot: int, commit: Commit) -> None:
        """What resumes at `at` of the path to `end` is in `slot`, if that part is on the device."""
        node = _covering(end, at)
        if node.state is DEVICE:
            node = self._tree.split(node, at)
            if not node.snapshot:
                is_end = commit.final or at % STRIDE > 0
                run.states.append(self._residency.snapshot(node, slot, end=is_end))

    def _passed(self, run: PageLease, commit: Commit) -> None:
        left = self._leaving.pop(run, None)
        if left and left[-1] > commit.computed:
            self._leaving[run] = left[bisect_right(left, commit.computed) :]
        if commit.finite:
            for snapshot in run.states:
                snapshot.proven = True

    def distrust(self, run: PageLease) -> None:
        """Logits behind the states of `run` were not finite: those that are not proven are dropped."""
        for snapshot in run.states:
            if not snapshot.proven and self._states.of(snapshot.slot) is snapshot:
                self._states.drop(snapshot.node)

    def end(self, run: PageLease) -> None:
        """Give back the slots that `run` still has."""
        self._leaving.pop(run, None)
        self._release_read(run)
        for slot in run.slots:
            self._states.release(slot)

    def _release_read(self, run: PageLease) -> None:
        slot = run.reads[1]
        run.reads = 0, 0
        if slot:
            self._states.release(slot)


class WindowResuming(Resuming):
    """The window pages of all running requests."""

    def __init__(self, tree: RadixTree, residency: Residency, windows: Windows) -> None:
        self._windows = windows
        super().__init__(tree, residency, windows.pages)

    def renew(self, count: int) -> None:
        window, least = self._windows.window, self._windows.least
        if window < 2 or count < least:
            raise ValueError(
                f"a window of {window} tokens in {count} pages: 2 tokens and {least} pages are the least"
            )
        self._residency.snapshots = Tails(count, self._residency.not_resumable, self._residency.leaving)

    @property
    def _tails(self) -> Tails:
        tails = self._residency.snapshots
        assert isinstance(tails, Tails)
        return tails

    def _size(self, count: int, more: int) -> int:
        """Pages that a run writes for `count` positions, and perhaps `more` that it decodes."""
        return max(min(count, self._windows.prompt_gap), min(count + more, self._windows.gap))

    def reserve(self, start: Start, end: int, needed: int) -> int:
        tails = self._tails
        if start.snapshot:
            tails.hold(tails.pages[start.snapshot])
        size = self._size(end - start.at, needed)
        if start.node is None:
            size += min(start.at, self._windows.before)
        lacking = max(0, size - tails.obtainable)
        if lacking:
            self.leave(start)
        return lacking

    def leave(self, start: Start) -> None:
        if start.snapshot:
            self._tails.let_go(self._tails.pages[start.snapshot])

    def begin(self, run: PageLease, start: Start, end: int, needed: int) -> Begun:
        tails, before, first = self._tails, self._windows.before, start.at
        tail, sure, loaded = NO_PAGES, True, NO_PAGES
        if start.snapshot:
            snapshot = tails.touch(start.snapshot)
            run.states.append(snapshot)
            tail, sure = tails.pages[start.snapshot], snapshot.proven
        elif start.node is None:
            tail = loaded = tails.take_pages(min(first, before))
            run.resumes = first
        size = self._size(end - first, needed)
        room = max(tails.allocator.free_pages - 2 * size, snapshots.FEW * before)
        room = min(room, tails.obtainable - size)
        chosen = self._choose(_ends(run.tip, first), first, run.tip.end, room)
        kept = np.zeros(end - first, dtype=np.bool_)
        for at in chosen:
            kept[max(0, at - before - first) : at - first] = True
        count = int(kept.sum())
        rest = end - first - count
        fresh = tails.take_pages(count + self._size(rest, needed))
        least = min(rest + needed, self._windows.gap)
        run.ring = Ring(first - len(tail), tail, fresh, kept, self._windows.prompt_gap, least)
        if chosen:
            self._leaving[run] = chosen
        return Begun(sure, windows=run.ring.table.tobytes(), loaded=loaded)

    def _choose(self, ends: list[int], start: int, prompt: int, room: int) -> list[int]:
        """As `marks`; the tails have at most `room` pages of [start, prompt) together."""
        count = snapshots.FEW
        if room > count * self._windows.before:
            count = (prompt - start) // snapshots.STRIDE + 8
        while count:
            chosen = marks(ends, start, prompt, count)
            spans = zip([start, *chosen], chosen, strict=False)
            if sum(min(at - above, self._windows.before) for above, at in spans) <= room:
                return chosen
            count = len(chosen) // 2
        return []

    def grow(self, run: PageLease, count: int) -> bytes:
        assert run.ring is not None
        return run.ring.grow(count, self._windows.gap).tobytes()

    def keep(self, run: PageLease, end: Node, commit: Commit) -> None:
        ring, tails, before = run.ring, self._tails, self._windows.before
        assert ring is not None
        computed = min(commit.computed, end.end)
        positions = [mark for mark in self._leaving.get(run, ()) if mark <= computed]
        ahead = self._windows.slack if commit.written > run.tip.end else self._windows.chunk
        intact = max(0, computed - before) >= ring.first and commit.written - computed <= ahead
        if run.resumes and computed > run.resumes:  # it is loaded
            positions.insert(0, run.resumes)
            run.resumes = 0
        if commit.final and computed and intact and not run.resumes:  # nothing is written over it
            positions.append(computed)
        for at in positions:
            slot = tails.add(ring.span(max(0, at - before), at))
            self._stand(run, end, at, slot, commit)
            tails.release(slot)
        self._passed(run, commit)
        tails.let_go(ring.leave(computed - before))

    def end(self, run: PageLease) -> None:
        self._leaving.pop(run, None)
        assert run.ring is not None
        self._tails.let_go(run.ring.pages)
