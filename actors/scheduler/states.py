"""The state slots of one run: which one each of its steps reads and writes.

A run of a model with fixed states has as many working slots as steps may be in flight, and one: its
steps write them in turn. So what the last known step wrote is intact while others are under way, and a
step too many costs nothing. Where a prefill reaches a position at which the cache wants a snapshot, the
slot that was written there leaves the turn for good, and a spare one takes its place.

While a run decodes, each step of the planner is a step of the run. So its slots follow from the
planner's tick, and a step costs nothing for each run. Does not know the cache.
"""

from ramify.protocol.messages import Granted
from ramify.protocol.plan import unpack


class StateSlots:
    """`granted`: `working` slots, and a spare one for each mark. `cuts`: further positions where a chunk
    of the prefill ends.
    """

    def __init__(self, granted: Granted, working: int, cuts: tuple[int, ...] = ()) -> None:
        own, wanted = unpack(granted.slots).tolist(), unpack(granted.marks).tolist()
        self.newest = granted.state  # what its next step reads, while it does not decode
        self._order: list[int] = own[:working]  # the next one to write first
        self._spare: list[int] = own[working:]
        self._wanted = frozenset(wanted)
        self._stops = sorted({*wanted, *cuts}, reverse=True)
        self._kept: list[tuple[int, int]] = []  # positions and slots of snapshots not told yet
        # by the last chunks: the position behind each, and its slot
        self._written: list[tuple[int, int]] = []
        self._since: int | None = None  # the tick at which it began to decode
        self.lost = False  # its last step wrote what no token was taken from

    @property
    def cut(self) -> int:
        """Where the next chunk must end at the latest; 0: anywhere."""
        return self._stops[-1] if self._stops else 0

    def chunk(self, end: int) -> tuple[int, int]:
        """The slots that a chunk reads and writes, which ends at position `end`."""
        source, target = self.newest, self._order.pop(0)
        if end in self._wanted:
            self._kept.append((end, target))
            self._order.append(self._spare.pop())
        else:
            self._order.append(target)
        if end == self.cut:
            self._stops.pop()
        self._written = [*self._written[1 - len(self._order) :], (end, target)]
        self.newest = target
        return source, target

    def decodes(self, tick: int) -> None:
        """Note that the run decodes in each step from `tick` on. Its prompt ended in a working slot."""
        self._since = tick

    def pauses(self, tick: int) -> None:
        """Note that the run does not decode from `tick` on."""
        if self._since is not None:
            turn = (tick - self._since) % len(self._order)
            self._order = self._order[turn:] + self._order[:turn]
            self.newest = self._order[-1]
            self._since = None

    def pair(self, tick: int) -> tuple[int, int]:
        """The slots that its decode in the step of `tick` reads and writes."""
        assert self._since is not None
        turn = (tick - self._since) % len(self._order)
        return self._order[turn - 1], self._order[turn]

    def told(self, computed: int) -> list[int]:
        """Positions and slots of the snapshots up to `computed`, once each."""
        told = [pair for pair in self._kept if pair[0] <= computed]
        self._kept = self._kept[len(told) :]
        return [part for pair in told for part in pair]

    def after_prompt(self, position: int, in_flight: int) -> list[int]:
        """The state at `position`, behind the last accepted token but one; `in_flight`: its steps since.

        Only of a run that does not decode any more.
        """
        return [] if self.lost else [position, self._order[-1 - in_flight]]

    def in_prompt(self, position: int) -> list[int]:
        """The state at `position` of the prompt, if a late chunk ended there and it is no snapshot."""
        if position in self._wanted:
            return []
        return [part for pair in self._written if pair[0] == position for part in pair]
