"""What waits: tasks, each an op on one of its branches, and what an append will put there. Data only.

An op with several branches becomes one task for each; `generate` with `n` becomes a fork and one
generation for each child. Tasks of one frame share a `FrameRun`, which remembers the branches
that failed.

A `PendingAppend` is what the template makes of an append, `Prepared` is the same with its tokens.
Neither depends on the branch's position, so branches that end alike share one: what costs time
(rendering, tokenizing) belongs to the op, not to the branch.
"""

from array import array
from collections.abc import Callable, Collection, Hashable, Sequence, Set
from dataclasses import KW_ONLY, dataclass
from typing import NamedTuple

import msgspec

from ramify.actors.calls.toolbox import Toolbox
from ramify.actors.session.branches.segments import History, OutputSegment, Rule, Tail
from ramify.actors.tokenizer.detokenizer import NO_STOPS, StopSet
from ramify.actors.tokenizer.histories import Bound
from ramify.protocol.errors import RamifyError
from ramify.protocol.pictures import Picture
from ramify.protocol.saved import SavedRun
from ramify.protocol.wire import ChatMessage, Generate, Op, Open, Role


class PendingPart(msgspec.Struct, frozen=True):
    """Text that becomes one segment; see `segments.InputSegment` for the fields.

    `chat`: rendered by the template, brings its own BOS. `op`: None: the op that appends it.
    """

    text: str
    chat: bool
    tail: Tail
    role: Role | None
    messages: Sequence[ChatMessage] = ()
    turn: int = 0
    op: int | None = None
    history: History | None = None
    picture: Picture | None = None  # in the place of the text
    ids: "array[int] | None" = None  # its tokens


class PendingAppend(msgspec.Struct, frozen=True):
    """An append that is decided on but not done.

    `cut`: move the branch back to there first; `over_prompt`: take the generation prompt back, which
    the branch ends with. `start`: it begins at position 0. `after`: the token that it stands behind,
    where that matters. `least`: its tokens are at least so many.
    """

    parts: list[PendingPart]
    start: bool
    after: int | None = None
    cut: int | None = None
    over_prompt: bool = False
    tokens: Sequence[int] | None = None  # given as tokens: nothing to encode
    least: int = 0  # not counted yet


class PartTokens(NamedTuple):
    """Tokens of one part; every branch that gets them holds the same two objects."""

    tokens: "array[int]"
    packed: bytes


class Prepared(msgspec.Struct, frozen=True):
    """An append with its tokens. `encoded`: of each part; None: certainly more than there is room for.

    `tokenized`: how many of them were made of text. `bound`: what was known of the first part. `marks`:
    the tokens before each of `append.marks`; None: the template does not show the place.
    """

    pending: PendingAppend
    encoded: list[PartTokens] | None
    tokenized: int = 0
    bound: Bound | None = None
    marks: Sequence[int | None] = ()


class Shared:
    """What the branches of one `append` share, by what they end with (`BranchWriter.situation`).

    `tickets`: what is being prepared off the event loop.
    """

    __slots__ = ("prepared", "tickets")

    def __init__(self) -> None:
        self.prepared: dict[Hashable, Prepared | RamifyError] = {}
        self.tickets: dict[Hashable, int] = {}


class Joined(NamedTuple):
    """Texts behind a branch, tokenized together with its end: all begin at position `at`.

    `own`, `tail`: the branch's own tokens and text from there on. All of them begin with that text.
    """

    at: int
    own: "array[int]"
    tail: str
    tokens: "list[array[int]]"


class Race:
    """A `prune` by "first" that waits: which of its sources have finished, in which order.

    A source has finished when all that was queued on it before the prune is done. Sources that finish at
    the same time keep the order of the op. One whose generation did not come to its own end comes last.
    `decided`: the winners, the best first, once they are known. `into`: where they will go.
    """

    __slots__ = ("_into", "_others", "_places", "_through", "_winners", "decided")

    def __init__(self, sources: Sequence[str], into: Sequence[str], winners: int) -> None:
        self.decided: list[str] | None = None
        self._places = {name: i for i, name in enumerate(sources)}
        self._into = frozenset(into)
        self._others = set(into) - set(sources)  # what else the prune waits for
        self._winners = winners
        self._through: dict[str, tuple[bool, float]] = {}

    def through(self, name: str, now: float, *, whole: bool) -> None:
        """Note that a source has finished. `whole`: its generation came to its own end."""
        if name in self._places:
            self._through.setdefault(name, (not whole, now))
        self._others.discard(name)

    def decide(self, failed: Collection[str]) -> bool:
        """Whether there are enough winners now, and nobody has said so before."""
        if self._others or self.decided is not None or len(self._through) < self._winners:
            return False
        if not self._into.isdisjoint(failed):  # it will be skipped
            return False
        through = [name for name in self._through if name not in failed]
        over = len(self._through) == len(self._places)
        enough = len(through) if over else sum(not self._through[name][0] for name in through)
        if enough < self._winners:
            return False
        through.sort(key=lambda name: (*self._through[name], self._places[name]))
        self.decided = through[: self._winners]
        return True

    @property
    def losers(self) -> list[str]:
        """The losing branches, in the order in which the op names them."""
        won = set(self.decided or ())
        return [name for name in self._places if name not in won]


class Kind(NamedTuple):
    """What the runner and the publisher need to know of a task, apart from its branches.

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

    __slots__ = ("_spent", "_stops", "_tools", "_turn", "client", "failed", "opened", "prompts", "rules")

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
        """The stop strings of an op of this frame, prepared once."""
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


@dataclass(slots=True, eq=False)
class Bill:
    """The bytes that an op holds until its last task is done. `left`: tasks that are not done.

    `held`: they count.
    """

    size: int
    left: int
    held: bool = False


@dataclass(slots=True, eq=False, repr=False)
class Task:
    """One op on one branch (or one fork), queued on every branch it touches.

    `branch`: the target, which its terminal reply names. The fork inside a `generate` with `n` is
    silent: it sends no reply; its failure is reported by the generations. `expects`: about how many
    tokens it is going to add to its branch, for whoever plans the KV pool. `deadline_ms`: from its
    arrival. `spared`: branches whose failure does not skip it. `race`, `scored`: what a `prune` that
    waits wants to know: who ends first, and the log-probabilities of what is generated where.
    `resumed`: where a generation goes on that an earlier server had begun.
    """

    kind: Kind
    op: Op
    frame: FrameRun
    branch: str | None
    touched: Sequence[str]
    _: KW_ONLY
    expects: int
    index: int = 0  # place among the op's targets: varies the seed
    children: Sequence[str] = ()
    shared: Shared | None = None  # input: what its branches have in common
    spared: Set[str] = frozenset()
    deadline_ms: int | None = None
    race: Race | None = None
    scored: tuple[str, ...] = ()
    place: int = 0  # among the op's tasks
    resumed: Resumed | None = None
    arrived: float = 0.0
    bill: Bill | None = None

    def __post_init__(self) -> None:
        self.touched = tuple(dict.fromkeys(self.touched))
        self.children = tuple(self.children)
