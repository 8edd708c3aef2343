"""A branch: an append-only list of segments with a position, a template state and a cache handle.

Pure. It changes its own segments; telling the cache about it is the caller's part.
"""

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Optional, overload

from ramify.actors.session.branches.segments import (
    Decode,
    InputSegment,
    OutputSegment,
    SavedNumber,
    Segment,
    Tail,
)
from ramify.protocol.errors import BadRequest
from ramify.protocol.wire import Persist, Role, Usage

CUTS_KEPT = 64  # moves backwards that are told apart; a resume from before them replays more


class Label:
    """A branch's name, which its children share: a rename changes one object.

    `above`: the label of the branch that it was forked off. `gone`: its branch was dropped.
    """

    __slots__ = ("above", "gone", "name")

    def __init__(self, name: str, above: "Label | None" = None) -> None:
        self.name = name
        self.above = above
        self.gone = False
        if above is not None:
            above.ancestor()  # so that dropped branches do not pile up behind one that lives on

    def ancestor(self) -> "Label | None":
        """Find the nearest ancestor whose branch still exists. Dropped ones are skipped for good."""
        while self.above is not None and self.above.gone:
            self.above = self.above.above
        return self.above


class SegmentLink:
    """One segment of a `SegmentList`, and the one before it. `saved`: once a store has it.

    `output`, `history`: the nearest link before it whose segment is an output, or has a history.
    `turns`: those that begin up to here; `pixels`: bytes of pictures.
    """

    __slots__ = ("before", "count", "history", "jump", "output", "pixels", "saved", "segment", "turns")

    def __init__(self, segment: Segment, before: Optional["SegmentLink"]) -> None:
        self.segment = segment
        self.before = before
        self.count = 1
        self.saved: SavedNumber | None = None
        self.jump: SegmentLink | None = None  # None: before the first
        self.turns: int = abs(segment.turn)
        self.pixels: int = 0 if segment.picture is None else len(segment.picture.pixels)
        self.output: SegmentLink | None = None
        self.history: SegmentLink | None = None
        if before is not None:
            self.count = before.count + 1
            self.turns += before.turns
            self.pixels += before.pixels
            self.output = before if isinstance(before.segment, OutputSegment) else before.output
            self.history = before if before.segment.history is not None else before.history
            jump = before.jump
            if jump is not None and before.count - jump.count == jump.count - _count(jump.jump):
                self.jump = jump.jump
            else:
                self.jump = before


class SegmentList(Sequence[Segment]):
    """The segments of a branch: a stack that forks share, cheap to copy, changed at its end only.

    Each link knows the one before it and one further back (Myers 1983, "An applicative random-access
    stack"), so a copy costs nothing, an append or pop O(1), and finding a position O(log segments),
    whoever else shares the links. A dropped branch leaves only the links that others still reach.
    """

    __slots__ = ("top",)

    def __init__(self, top: SegmentLink | None = None) -> None:
        self.top = top

    def restore(self, top: SegmentLink | None) -> None:
        """Fill the list with the segments up to this link."""
        self.top = top

    def copy(self) -> "SegmentList":
        """Make an independent copy. O(1)."""
        return SegmentList(self.top)

    def append(self, segment: Segment) -> None:
        self.top = SegmentLink(segment, self.top)

    def pop(self) -> Segment:
        """Take the last segment off. Raises IndexError if there is none."""
        link = self.top
        if link is None:
            raise IndexError("pop of no segments")
        self.top = link.before
        return link.segment

    def remove(self, segment: Segment) -> None:
        """Take `segment` out, which is near the end. Raises IndexError if it is not there."""
        after: list[Segment] = []
        while (last := self.pop()) is not segment:
            after.append(last)
        for each in reversed(after):
            self.append(each)

    def cut(self, to: int) -> None:
        """Drop the segments that start at position `to` or later. O(log segments)."""
        self.top = self.before(to)

    def before(self, position: int) -> SegmentLink | None:
        """Find the last link whose segment starts before `position`. O(log segments)."""
        link = self.top
        while link is not None and link.segment.start >= position:
            jump = link.jump
            link = jump if jump is not None and jump.segment.start >= position else link.before
        return link

    def turn(self, turns: int) -> SegmentLink | None:
        """Find the last link with which, or after which, so many turns begin. O(log segments)."""
        link = self.top
        most = 0 if link is None else link.turns - turns
        while link is not None and _turns(link.before) > most:
            jump = link.jump
            link = jump if jump is not None and _turns(jump.before) > most else link.before
        return link

    def __len__(self) -> int:
        return _count(self.top)

    def __bool__(self) -> bool:
        return self.top is not None

    def __iter__(self) -> Iterator[Segment]:
        return reversed(list(reversed(self)))

    def __reversed__(self) -> Iterator[Segment]:
        link = self.top
        while link is not None:
            yield link.segment
            link = link.before

    @overload
    def __getitem__(self, index: int) -> Segment: ...
    @overload
    def __getitem__(self, index: slice) -> list[Segment]: ...
    def __getitem__(self, index: Any) -> Any:
        """O(log segments), and O(1) near the end; a slice costs O(segments)."""
        if index == -1 and self.top is not None:  # as nearly always
            return self.top.segment
        if isinstance(index, slice):
            return list(self)[index]
        count = len(self)
        place = index + count + 1 if index < 0 else index + 1
        if not 1 <= place <= count:
            raise IndexError(f"segment {index} of {count}")
        link = self.top
        while link is not None and link.count > place:
            jump = link.jump
            link = jump if jump is not None and jump.count >= place else link.before
        assert link is not None
        return link.segment


def _count(link: SegmentLink | None) -> int:
    return 0 if link is None else link.count


def _turns(link: SegmentLink | None) -> int:
    return 0 if link is None else link.turns


class SessionBranch:
    """One branch of a session. `handle` is its name in the cache."""

    __slots__ = (
        "at",
        "born",
        "brought",
        "cuts",
        "handle",
        "label",
        "meta",
        "of",
        "own",
        "persist",
        "prefill",
        "reason",
        "retain_s",
        "segments",
        "usage",
    )

    def __init__(
        self, name: str, handle: int, *, of: Label | None = None, at: int = 0, born: int = 0
    ) -> None:
        self.label = Label(name, of)
        self.handle = handle
        self.of = of  # the label of the branch that it is a fork of
        self.at = at
        self.own = at  # what begins here or later was made on this branch
        self.segments = SegmentList()
        self.born = born  # the revision since which this branch has its name
        self.cuts: list[tuple[int, int]] = []  # moves backwards: (revision, position), both rising
        self.retain_s: float | None = None
        self.meta: dict[str, Any] | None = None
        self.persist: Persist | None = None  # None: as the session says
        self.prefill: int | None = None  # the request that computes appended tokens ahead of time
        # Tokens that these brought from host memory, and from the disk, since the last generation
        self.brought: tuple[int, int] = (0, 0)
        self.reason: str | None = None  # how the last generation ended
        self.usage: Usage | None = None  # and what it took

    @property
    def name(self) -> str:
        return self.label.name

    @property
    def parent(self) -> str | None:
        """The name of the branch that it was forked from, as it is called now."""
        return None if self.of is None else self.of.name

    @property
    def position(self) -> int:
        top = self.segments.top
        return 0 if top is None else top.segment.end

    @property
    def released(self) -> int:
        """The position up to which clients may have text: a generation holds back a few tokens."""
        top = self.segments.top
        if top is None:
            return 0
        last = top.segment
        return last.released if isinstance(last, OutputSegment) and not last.ended else last.end

    @property
    def tail(self) -> Tail:
        top = self.segments.top
        return Tail.RAW if top is None else top.segment.tail

    @property
    def role(self) -> Role | None:
        """The role of the last turn; None: no template was used."""
        top = self.segments.top
        return None if top is None else top.segment.role

    def tokens(self) -> "array[int]":
        """All tokens. O(position)."""
        out: array[int] = array("i")
        for segment in self.segments:
            out.extend(segment.tokens)
        return out

    def text(self) -> str:
        """All text, special tokens of sampled ends of turn left out. O(position)."""
        return "".join(segment.text for segment in self.segments)

    def fork(self, name: str, handle: int, at: int, decode: Decode, *, born: int = 0) -> "SessionBranch":
        """Make a child at position `at`, which shares the complete segments.

        O(log segments), and the tokens of the segment that is cut.
        """
        child = SessionBranch(name, handle, of=self.label, at=at, born=born)
        child.segments = self.segments.copy()
        child.truncate(at, decode)
        return child

    def twin(self, name: str, handle: int) -> "SessionBranch":
        """Make a second child of the same parent at the same position, just after the first. O(1)."""
        twin = SessionBranch(name, handle, of=self.of, at=self.at, born=self.born)
        twin.segments = self.segments.copy()
        twin.own, twin.reason = self.own, self.reason
        return twin

    def become(self, other: "SessionBranch") -> int:
        """Take over the handle and segments of `other`. Returns up to which position both were equal."""
        shared = self._common(other)
        same = self.segments[shared - 1].end if shared else 0
        self.handle, self.segments, self.reason = other.handle, other.segments.copy(), other.reason
        self.usage = other.usage
        self.own = min(self.own, same)
        return same

    def answer(self) -> OutputSegment | None:
        """The last generation since the branch was forked; None: there was none. O(1)."""
        last = self.output()
        return last if last is not None and last.start >= self.own else None

    def output(self) -> OutputSegment | None:
        """The last generation, of this branch or of one that it was forked from. O(1)."""
        return next(self.outputs_back_to(0), None)

    @property
    def running(self) -> OutputSegment | None:
        """The segment that a generation is writing, if there is one."""
        last = self.segments[-1] if self.segments else None
        return last if isinstance(last, OutputSegment) and not last.ended else None

    @property
    def unfinished(self) -> OutputSegment | None:
        """The constrained output inside which the branch ends, if any: a generation may continue it."""
        top = self.segments.top
        last = None if top is None else top.segment
        if not isinstance(last, OutputSegment) or last.rule is None or last.complete:
            return None
        return last

    def check_edge(self, at: int) -> None:
        """Raises BadRequest if position `at` is inside of a picture. O(log segments)."""
        link = self.segments.before(at)
        if link is not None and link.segment.picture is not None and at < link.segment.end:
            start, end = link.segment.start, link.segment.end
            raise BadRequest(
                f"position {at} is inside of a picture, which is one piece: give {start} or {end}",
                details={"start": start, "end": end},
            )

    def truncate(self, to: int, decode: Decode) -> None:
        """Cut back to position `to` (<= position). A segment that is cut becomes a new object."""
        self.own = min(self.own, to)
        segments = self.segments
        segments.cut(to)
        if segments and segments[-1].end > to:
            segments.append(segments.pop().cut(to, decode))

    def turn_start(self, turns: int) -> int | None:
        """Where the last `turns` appended turns begin. O(log segments).

        None if there are fewer, or if the template has joined that one to the turn before it.
        """
        link, top = self.segments.turn(turns), self.segments.top
        if link is None or top is None or link.segment.turn < 0:
            return None
        return link.segment.start if top.turns - _turns(link.before) == turns else None

    def cut_back(self, revision: int, to: int) -> None:
        """Remember for `undercut` that the branch was moved back to `to`. Memory is bounded."""
        cuts = self.cuts
        while cuts and cuts[-1][1] >= to:  # whoever missed that one missed this one too
            cuts.pop()
        cuts.append((revision, to))
        if len(cuts) > CUTS_KEPT:  # as if the second had gone back as far as the first
            cuts[:2] = [(cuts[1][0], cuts[0][1])]

    def undercut(self, revision: int | None) -> int | None:
        """The lowest position this branch was moved back to after `revision`; None: never.

        0 for a branch that got its name after `revision`: the client knows another one by it.
        """
        if revision is not None and self.born > revision:
            return 0
        cuts = [to for at, to in self.cuts if revision is None or at > revision]
        return min(cuts, default=None)

    def outputs_from(self, position: int) -> Iterable[OutputSegment]:
        """The output segments that end at or after `position`, in order."""
        top = self.segments.top
        if top is not None and (last := top.segment).start < position:  # as with each delta of a stream
            if isinstance(last, OutputSegment) and last.start + len(last.tokens) >= position:
                return (last,)
            return ()
        return reversed(list(self.outputs_back_to(position)))

    def outputs_back_to(self, position: int) -> Iterator[OutputSegment]:
        """The output segments that end at or after `position`, the last one first."""
        link = self.segments.top
        while link is not None:
            segment = link.segment
            if segment.end < position:
                break
            if isinstance(segment, OutputSegment):
                yield segment
            link = link.output

    def shared_with(self, parent: "SessionBranch") -> int:
        """How many segments the branch shares with the one that it was forked from. O(log segments)."""
        if parent.handle > self.handle:  # another one, that got the name later
            return 0
        return self._common(parent)

    def _common(self, other: "SessionBranch") -> int:
        """How many segments both lists begin with. O(log segments)."""
        mine, theirs = self.segments, other.segments
        low, high = 0, min(len(mine), len(theirs))
        while low < high:  # branches that part never share a segment again
            middle = (low + high + 1) // 2
            if mine[middle - 1] is theirs[middle - 1]:
                low = middle
            else:
                high = middle - 1
        return low

    def index_at(self, position: int) -> int:
        """The first segment that begins at or after `position`. O(log segments)."""
        return bisect_left(self.segments, position, key=lambda segment: segment.start)


def input_segment(
    branch: SessionBranch, tokens: Iterable[int], text: str, **fields: Any
) -> InputSegment:
    """Append input to the branch and return its segment."""
    run = tokens if isinstance(tokens, array) else array("i", tokens)  # several branches share one
    segment = InputSegment(branch.position, run, text, **fields)
    branch.segments.append(segment)
    return segment
