"""The pieces of a branch: a stack that forks share.

Each link knows the one before it and one further back (Myers 1983, "An applicative random-access
stack"), so a copy costs nothing, an append or pop O(1), and finding a position O(log pieces), whoever
else shares the links. A dropped branch leaves only the links that others still reach.
Does not know what a piece holds, beside where it starts.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Optional, overload

from ramify.actors.session.pieces import AnyPiece


class _Link:
    __slots__ = ("before", "count", "jump", "piece")

    def __init__(self, piece: AnyPiece, before: Optional["_Link"]) -> None:
        self.piece = piece
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


class Pieces(Sequence[AnyPiece]):
    """A list of pieces that is cheap to copy and changes at its end only."""

    __slots__ = ("_top",)

    def __init__(self, top: _Link | None = None) -> None:
        self._top = top

    def copy(self) -> "Pieces":
        """O(1). What either does from now on, the other does not see."""
        return Pieces(self._top)

    def append(self, piece: AnyPiece) -> None:
        self._top = _Link(piece, self._top)

    def pop(self) -> AnyPiece:
        """Take the last piece off. Raises IndexError if there is none."""
        link = self._top
        if link is None:
            raise IndexError("pop of no pieces")
        self._top = link.before
        return link.piece

    def remove(self, piece: AnyPiece) -> None:
        """Take `piece` out, which is near the end. Raises IndexError if it is not there."""
        after: list[AnyPiece] = []
        while (last := self.pop()) is not piece:
            after.append(last)
        for each in reversed(after):
            self.append(each)

    def cut(self, to: int) -> None:
        """Drop the pieces that start at position `to` or later. O(log pieces)."""
        link = self._top
        while link is not None and link.piece.start >= to:
            jump = link.jump
            link = jump if jump is not None and jump.piece.start >= to else link.before
        self._top = link

    def __len__(self) -> int:
        return _count(self._top)

    def __bool__(self) -> bool:
        return self._top is not None

    def __iter__(self) -> Iterator[AnyPiece]:
        return reversed(list(reversed(self)))

    def __reversed__(self) -> Iterator[AnyPiece]:
        link = self._top
        while link is not None:
            yield link.piece
            link = link.before

    @overload
    def __getitem__(self, index: int) -> AnyPiece: ...
    @overload
    def __getitem__(self, index: slice) -> list[AnyPiece]: ...
    def __getitem__(self, index: Any) -> Any:
        """O(log pieces), and O(1) near the end; a slice costs O(pieces)."""
        if index == -1 and self._top is not None:  # asked for with each token
            return self._top.piece
        if isinstance(index, slice):
            return list(self)[index]
        count = len(self)
        place = index + count + 1 if index < 0 else index + 1
        if not 1 <= place <= count:
            raise IndexError(f"piece {index} of {count}")
        link = self._top
        while link is not None and link.count > place:
            jump = link.jump
            link = jump if jump is not None and jump.count >= place else link.before
        assert link is not None
        return link.piece


def _count(link: _Link | None) -> int:
    return 0 if link is None else link.count
