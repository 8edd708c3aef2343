"""The segments of a branch: a stack that forks share.

Each link knows the one before it and one further back (Myers 1983, "An applicative random-access
stack"), so a copy costs nothing, an append or pop O(1), and finding a position O(log segments), whoever
else shares the links. A dropped branch leaves only the links that others still reach.
Does not know what a segment holds, beside where it starts.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Optional, overload

from ramify.actors.session.segments import Segment


class _Link:
    __slots__ = ("before", "count", "jump", "segment")

    def __init__(self, segment: Segment, before: Optional["_Link"]) -> None:
        self.segment = segment
        self.before = before
        self.count = 1
        self.jump: _Link | None = None  # None: before the first
        if before is not None:
            self.count = before.count + 1
            jump = before.jump
            if jump is not None and before.count - jump.count == jump.count - _count(jump.jump):
                self.jump = jump.jump
            else:
                self.jump = before


class SegmentList(Sequence[Segment]):
    """A list of segments that is cheap to copy and changes at its end only."""

    __slots__ = ("_top",)

    def __init__(self, top: _Link | None = None) -> None:
        self._top = top

    def copy(self) -> "SegmentList":
        """O(1). What either does from now on, the other does not see."""
        return SegmentList(self._top)

    def append(self, segment: Segment) -> None:
        self._top = _Link(segment, self._top)

    def pop(self) -> Segment:
        """Take the last segment off. Raises IndexError if there is none."""
        link = self._top
        if link is None:
            raise IndexError("pop of no segments")
        self._top = link.before
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
        link = self._top
        while link is not None and link.segment.start >= to:
            jump = link.jump
            link = jump if jump is not None and jump.segment.start >= to else link.before
        self._top = link

    def __len__(self) -> int:
        return _count(self._top)

    def __bool__(self) -> bool:
        return self._top is not None

    def __iter__(self) -> Iterator[Segment]:
        return reversed(list(reversed(self)))

    def __reversed__(self) -> Iterator[Segment]:
        link = self._top
        while link is not None:
            yield link.segment
            link = link.before

    @overload
    def __getitem__(self, index: int) -> Segment: ...
    @overload
    def __getitem__(self, index: slice) -> list[Segment]: ...
    def __getitem__(self, index: Any) -> Any:
        """O(log segments), and O(1) near the end; a slice costs O(segments)."""
        if index == -1 and self._top is not None:  # asked for with each token
            return self._top.segment
        if isinstance(index, slice):
            return list(self)[index]
        count = len(self)
        place = index + count + 1 if index < 0 else index + 1
        if not 1 <= place <= count:
            raise IndexError(f"segment {index} of {count}")
        link = self._top
        while link is not None and link.count > place:
            jump = link.jump
            link = jump if jump is not None and jump.count >= place else link.before
        assert link is not None
        return link.segment


def _count(link: _Link | None) -> int:
    return 0 if link is None else link.count
