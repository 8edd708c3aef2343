"""Tasks: what waits in the queues, an op on one of its branches. Data only.

An op with several branches becomes one task for each; `generate` with `n` becomes a fork and one
generation for each child. Tasks of one frame share a `FrameRun`, which remembers the branches
that failed.
"""

from collections.abc import Callable, Hashable, Sequence, Set
from typing import NamedTuple

from ramify.actors.calls.toolbox import Toolbox
from ramify.actors.session.branches.pending_appends import Shared
from ramify.actors.session.branches.rules import Rule
from ramify.actors.session.branches.segments import OutputSegment
from ramify.actors.session.queues.race import Race
from ramify.actors.tokenizer.detokenizer import NO_STOPS, StopSet
from ramify.protocol.errors import RamifyError
from ramify.protocol.saved import SavedRun
from ramify.protocol.wire import Generate, Op, Open


class Kind(NamedTuple):
    """What the runner and the publisher have to know of a task, beside its branches.

    `name`: as events call it. `adds`: it brings input, which a generation will want computed.
    `generates`: it brings output; a `cancel` of generations ends it, and a deadline may. `forks`: it
    makes its children. `silent`: it sends no reply. `cleans`: it runs even if its subtree is cancelled.
    `renames`: its branch has another name afterwards.
    """

    name: str
    adds: bool = False
    generates: bool = False
    forks: bool = False
    silent: bool = False
    cleans: bool = False
    renames: bool = False


ON_THE_LOOP = 4096  # characters: some milliseconds


class FrameRun:
    """The ops that came in one frame, and how their client opened the session.

    `failed`: branches on which one of them failed; with the error where the op itself did not
    report it. `stops`: the stop strings of an op, prepared once for all the branches that it generates
    on; `rules`: so are constraints, by op and what they depend on.
    """

    __slots__ = (
        *("_spent", "_stops", "_tools", "_turn", "client", "failed", "opened", "prompts", "rules"),
    )

    def __init__(self, opened: Open, tools: Callable[[], Toolbox]) -> None:
        self.client = opened.who
        self.opened = opened
        self._tools = tools
        self.prompts: dict[Hashable, str | RamifyError] = {}  # see `BranchWriter.open_turn`
        self.rules: dict[Hashable, Rule] = {}
        self.failed: dict[str, RamifyError | None] = {}
        self._turn = 0.0  # when the session last did something for it
        self._spent = 0  # characters that were tokenized on the event loop then
        self._stops: dict[int, StopSet] = {}

    @property
    def tools(self) -> Toolbox:
        """The tools that may be called."""
        return self._tools()

    def spend(self, size: int, now: float) -> bool:
        """Whether so many characters may be tokenized on the event loop, rather than in a thread.

        A frame has `ON_THE_LOOP` of them each time that the session has something to do: a program goes
        on for many steps, and a thread is slow to answer where the loop is busy.
        """
        if now != self._turn:
            self._turn, self._spent = now, 0
        if self._spent + size > ON_THE_LOOP:
            return False
        self._spent += size
        return True

    def stops(self, op: Generate) -> StopSet:
        """The stop strings of `op`, which came in this frame."""
        if not op.stop:
            return NO_STOPS
        known = self._stops.get(op.id)
        if known is None:
            known = self._stops[op.id] = StopSet(op.stop)
        return known


class Resumed(NamedTuple):
    """What a generation had done when its server ended. `segment`: its output, at its first position."""

    segment: OutputSegment
    run: SavedRun


class Bill:
    """The bytes that an op holds until its last task is done. `left`: tasks that are not done.

    `held`: they count.
    """

    __slots__ = ("held", "left", "size")

    def __init__(self, size: int, left: int) -> None:
        self.held = False
        self.size = size
        self.left = left


class Task:
    """One op on one branch (or one fork), queued on every branch it touches.

    `branch`: the target, which its terminal reply names. The fork inside a `generate` with `n` is
    silent: it sends no reply; its failure is reported by the generations. `expects`: about how many
    tokens it is going to add to its branch, for whoever plans the KV pool. `deadline_ms`: from its
    arrival. `spared`: branches whose failure does not skip it. `race`, `scored`: what a `prune` that
    waits wants to know: who ends first, and the log-probabilities of what is generated where.
    `resumed`: where a generation goes on that an earlier server had begun.
    """

    __slots__ = (
        "arrived",
        "bill",
        "branch",
        "children",
        "deadline_ms",
        "expects",
        "frame",
        "index",
        "kind",
        "op",
        "place",
        "race",
        "resumed",
        "scored",
        "shared",
        "spared",
        "touched",
    )

    def __init__(
        self,
        kind: Kind,
        op: Op,
        frame: FrameRun,
        branch: str | None,
        touched: Sequence[str],
        *,
        expects: int,
        index: int = 0,
        children: Sequence[str] = (),
        shared: Shared | None = None,
        spared: Set[str] = frozenset(),
        deadline_ms: int | None = None,
    ) -> None:
        self.kind = kind
        self.op = op
        self.frame = frame
        self.branch = branch
        self.touched = tuple(dict.fromkeys(touched))
        self.index = index  # place among the op's targets: varies the seed
        self.children = tuple(children)
        self.shared = shared  # input: what its branches have in common
        self.spared = spared
        self.deadline_ms = deadline_ms
        self.expects = expects
        self.race: Race | None = None
        self.scored: tuple[str, ...] = ()
        self.place = 0  # among the op's tasks
        self.resumed: Resumed | None = None
        self.arrived = 0.0
        self.bill: Bill | None = None
