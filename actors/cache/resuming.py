"""Where requests of a model with fixed states begin, and what they leave behind: `Snapshots` for runs.

A request begins at the deepest position where both KV and a snapshot are; what has KV behind it is
replayed into pages of the request's own. Its slots are its own until it commits them as snapshots, or
ends. A snapshot that it reads stays until a step was sent that reads it: until it commits more than that
position.

Does not choose pages, and knows no branches.
"""

from bisect import bisect_right

from ramify.actors.cache import snapshots
from ramify.actors.cache.node import Node
from ramify.actors.cache.residency import Residency
from ramify.actors.cache.run import PageLease
from ramify.actors.cache.snapshots import STRIDE, Snapshots, marks
from ramify.actors.cache.states import DEVICE
from ramify.actors.cache.tree import RadixTree
from ramify.protocol.messages import Commit
from ramify.protocol.plan import pack, unpack


def resumable(node: Node, at: int) -> Node:
    """The deepest node on the path to `node` that has a snapshot and ends by `at`; a root has the state
    of position 0.
    """
    while node.parent is not None and (not node.snapshot or node.end > at):
        node = node.parent
    return node


def _covering(node: Node, at: int) -> Node:
    """The node on the path to `node` that has the token before position `at`."""
    while node.start >= at:
        assert node.parent is not None
        node = node.parent
    return node


class Resuming:
    """The states of all running requests."""

    def __init__(self, tree: RadixTree, residency: Residency) -> None:
        self._tree = tree
        self._residency = residency
        self._leaving: dict[PageLease, list[int]] = {}  # positions of snapshots to come, ascending

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

    def reserve(self, node: Node, needed: int) -> int:
        """Use the snapshot of `node`. Returns how many slots are missing; then nothing is used."""
        states = self._states
        if node.snapshot:
            states.use(node.snapshot)
        lacking = max(0, needed - states.available)
        if lacking:
            self.leave(node)
        return lacking

    def leave(self, node: Node) -> None:
        """Undo `reserve`."""
        if node.snapshot:
            self._states.release(node.snapshot)

    def begin(self, run: PageLease, node: Node, needed: int) -> tuple[int, bytes, bytes, bool]:
        """After `reserve`: the slot that `run` begins from, its own slots, where it is to leave
        snapshots, and whether the state that it begins from is proven.
        """
        states, sure = self._states, True
        if node.snapshot:
            snapshot = states.touch(node.snapshot)
            run.reads = node.end, node.snapshot
            run.states.append(snapshot)
            sure = snapshot.proven
        ends: list[int] = []
        above = run.tip
        while above.end > node.end and above.parent is not None:
            ends += (above.end, *above.ends[::-1])
            above = above.parent
        chosen = marks(ends, node.end, run.tip.end, states.room(needed))
        own = states.take(needed + len(chosen))
        run.slots.update(own)
        if chosen:
            self._leaving[run] = chosen
        return node.snapshot, pack(own), pack(chosen), sure

    def keep(self, run: PageLease, end: Node, commit: Commit) -> None:
        """Make snapshots of what a run has left in its slots, on the path to `end`."""
        states = self._states
        if run.reads[1] and commit.computed > run.reads[0]:
            self._release_read(run)
        told = unpack(commit.states)
        for at, slot in zip(told[::2], told[1::2], strict=True):
            if slot not in run.slots or not 0 < at <= min(commit.computed, end.end):
                raise ValueError(f"request {run.request:#x}: no state at {at} can be in slot {slot}")
            run.slots.remove(slot)
            node = _covering(end, at)
            if node.state is DEVICE:
                node = self._tree.split(node, at)
                if not node.snapshot:
                    is_end = commit.final or at % STRIDE > 0
                    run.states.append(self._residency.snapshot(node, slot, end=is_end))
            if at == commit.computed and not commit.final:  # its next step may read it
                self._release_read(run)
                run.reads = at, slot
            else:
                states.release(slot)
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
