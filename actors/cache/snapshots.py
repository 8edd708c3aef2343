"""State slots: which node ends have a snapshot, who uses a slot, and which snapshot gives way.

A *snapshot* is the fixed state (delta net, Mamba, short convolution) behind the last token of a node, in
a slot that was written once. Slots 1 to `total` are handed out here; each has a count of uses: one for
the tree that keeps it as a snapshot, one for each run that reads or may write it. `windows.py` has what
else a snapshot may be.

Which one gives way (GreedyDual-Size; Cao and Irani 1997): a snapshot is worth the tokens that would have
to be run again without it, counted from the next shallower one; all slots have the same bytes. An *end*
(of a prompt, a turn, an append; a fork) counts `_END` times, as long as it is among the newest of its
branch. What is not used ages: worth is counted from a clock that each eviction moves on. So ends close
to each other thin out, and a shallow snapshot that many branches need is not dropped for being shallow.

Does not know KV, requests or time.
"""

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ramify.actors.cache.node import Node

STRIDE = 512  # tokens between the snapshots of a long prefill, if there is room for so many
NEAR = 64  # tokens that are run again rather than kept as a snapshot of their own
_ENDS = 3  # ends of ops within a prompt, beside its own end, that one prefill keeps
_NEWEST = 4  # ends of a branch that count as ends: those of the prompt and the answer of two turns
_END = 16
FEW = 2  # snapshots that a prefill may leave in the place of others
_REACH = 64  # nodes that are walked to see what a snapshot is worth


@dataclass(slots=True, eq=False)
class Snapshot:
    """The state at the end of `node`, in `slot`."""

    node: Node
    slot: int
    end: bool  # of a prompt, a turn or an append
    proven: bool = False  # somebody sampled from finite logits behind it
    since: int = 0  # the clock when it was last used
    stamp: int = 0  # of its valid entry in the heap; 0: it has none, as long as a run uses it


class Snapshots:
    """The slots of one executor. `dropped` is called with each node whose snapshot has gone, `leaving`
    with each snapshot that is about to give way, while its slot is what it was.
    """

    def __init__(
        self,
        total: int,
        dropped: Callable[[Node], None] = lambda node: None,
        leaving: Callable[[Snapshot], None] = lambda snapshot: None,
    ) -> None:
        self.total = total
        self._dropped, self._leaving = dropped, leaving
        self._free = list(range(total, 0, -1))
        self._uses = [0] * (total + 1)
        self._of: dict[int, Snapshot] = {}  # by slot
        self._idle = 0  # snapshots that no run uses
        self._heap: list[tuple[int, int, int]] = []  # (worth, stamp, slot); see `Victims`
        self._stamps = 0
        self._clock = 0

    def __len__(self) -> int:
        return len(self._of)

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def available(self) -> int:
        """Slots that are free, or hold a snapshot that no run uses."""
        return len(self._free) + self._idle

    def uses(self, slot: int) -> int:
        return self._uses[slot]

    def of(self, slot: int) -> Snapshot | None:
        """The snapshot in a slot; None: it holds none."""
        return self._of.get(slot)

    def all(self) -> Iterable[Snapshot]:
        return list(self._of.values())

    def room(self, needed: int) -> int:
        """Slots for the snapshots of a prefill that needs `needed` to run; `FEW`: few are free."""
        return max(0, min(self.available - needed, max(self.free - 2 * needed, FEW)))

    # --- uses -------------------------------------------------------------------------------

    def take(self, count: int) -> list[int]:
        """`count` slots for a run, which has one use of each. There are that many `available`."""
        while len(self._free) < count:
            self._evict()
        taken = [self._free.pop() for _ in range(count)]
        for slot in taken:
            self._uses[slot] = 1
        return taken

    def use(self, slot: int) -> None:
        """Count one more run that uses a snapshot."""
        self._uses[slot] += 1
        if self._uses[slot] == 2 and slot in self._of:
            self._idle -= 1
            self._of[slot].stamp = 0

    def release(self, slot: int) -> None:
        """Count one run less that uses a slot."""
        self._uses[slot] -= 1
        snapshot = self._of.get(slot)
        if not self._uses[slot]:
            self._free.append(slot)
        elif self._uses[slot] == 1 and snapshot is not None:
            self._idle += 1
            self._push(snapshot)

    # --- snapshots --------------------------------------------------------------------------

    def put(self, node: Node, slot: int, *, end: bool) -> Snapshot:
        """`slot`, which a run uses, holds the state at the end of `node`, which has no snapshot yet."""
        snapshot = self._of[slot] = Snapshot(node, slot, end)
        node.snapshot = slot
        self._uses[slot] += 1
        snapshot.since = self._clock
        if end:
            self._outdate(node)
        return snapshot

    def touch(self, slot: int) -> Snapshot:
        """Mark the snapshot in `slot` as used now: a request begins from it."""
        snapshot = self._of[slot]
        snapshot.since = self._clock
        return snapshot

    def drop(self, node: Node) -> None:
        """Forget the snapshot of `node`. Runs that use its slot go on."""
        slot, node.snapshot = node.snapshot, 0
        del self._of[slot]
        if self._uses[slot] == 1:
            self._idle -= 1
        self.release(slot)
        self._dropped(node)

    def saved(self, node: Node) -> int:
        """Tokens from the next shallower snapshot to the end of `node`; of a long way, a part."""
        above = node.parent
        start = node.start
        for _ in range(_REACH):
            if above is None or above.snapshot:
                break
            start, above = above.start, above.parent
        return node.end - start

    def saves(self, snapshot: Snapshot) -> int:
        """The tokens of `saved`; several times as many for a snapshot at the end of a turn."""
        return self.saved(snapshot.node) * (_END if snapshot.end else 1)

    # --- internals --------------------------------------------------------------------------

    def _outdate(self, node: Node) -> None:
        """Of the ends above a new one, all but the newest are snapshots like others from now on."""
        above, ends = node.parent, 1
        for _ in range(_REACH):
            if above is None:
                return
            snapshot = self._of.get(above.snapshot)
            if snapshot is not None and snapshot.end:
                ends += 1
                if ends > _NEWEST and len(above.children) < 2:
                    snapshot.end = False
                    if snapshot.stamp:
                        self._push(snapshot)
                    return
            above = above.parent

    def _worth(self, snapshot: Snapshot) -> int:
        return snapshot.since + self.saves(snapshot)

    def _push(self, snapshot: Snapshot) -> None:
        self._stamps += 1
        snapshot.stamp = self._stamps
        heapq.heappush(self._heap, (self._worth(snapshot), snapshot.stamp, snapshot.slot))
        if len(self._heap) > 64 + 4 * self.total:
            self._heap = [entry for entry in self._heap if self._valid(entry)]
            heapq.heapify(self._heap)

    def _valid(self, entry: tuple[int, int, int]) -> bool:
        snapshot = self._of.get(entry[2])
        return snapshot is not None and snapshot.stamp == entry[1]

    def _evict(self) -> None:
        """Free the slot of the snapshot that is worth least. There is one that no run uses."""
        while True:
            entry = heapq.heappop(self._heap)
            if not self._valid(entry):
                continue
            snapshot = self._of[entry[2]]
            if self._worth(snapshot) > entry[0]:  # the one above it has gone
                self._push(snapshot)
                continue
            self._clock = max(self._clock, entry[0])
            self._leaving(snapshot)
            self.drop(snapshot.node)
            return


def marks(ends: Iterable[int], cached: int, prompt: int, room: int) -> list[int]:
    """Where a prefill of [cached, prompt) leaves snapshots, ascending; at most `room`.

    `ends`: where ops ended, in descending order. The last token of a prompt is always run, so what a
    sibling or another answer can begin from ends before it. By urgency: the end of the prompt, or of an
    op just before it; ends of the newest ops, and the first of all (system and tools); multiples of
    `STRIDE`, doubled until there is room. Where that is `FEW`, none of these: they would age the ends of
    other branches, which are more likely to be needed.
    """
    last = prompt - 1
    chosen: list[int] = []
    inside = [end for end in ends if cached < end <= last]
    if last - cached > NEAR:
        chosen.append(inside[0] if inside and last - inside[0] <= NEAR else last)
    first = inside[-1:] if not cached else []
    for end in (*inside[:_ENDS], *first):
        if end - cached > NEAR and all(abs(end - other) > NEAR for other in chosen):
            chosen.append(end)
    del chosen[max(0, room) :]
    left, stride = room - len(chosen), STRIDE
    while left > 0 and (last - 1) // stride - cached // stride > left:
        stride *= 2
    if left > 0 and room > FEW:
        for at in range(cached // stride * stride + stride, last, stride):
            if at - cached > NEAR and all(abs(at - other) > NEAR for other in chosen):
                chosen.append(at)
    return sorted(chosen)
