"""A branch: an append-only list of pieces with a position, a template state and a cache handle.

Pure. It changes its own pieces; telling the cache about it is the caller's part.
"""

from array import array
from bisect import bisect_left
from collections.abc import Iterable
from typing import Any

from ramify.actors.session.history import Pieces
from ramify.actors.session.pieces import AnyPiece, Decode, OutputPiece, Piece, Tail
from ramify.protocol.wire import BranchState, Role, Turn

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
        """The nearest one above it whose branch is there. It does not look at the others again."""
        while self.above is not None and self.above.gone:
            self.above = self.above.above
        return self.above


class Branch:
    """One branch of a session. `handle` is its name in the cache."""

    __slots__ = (
        "at",
        "born",
        "cuts",
        "handle",
        "label",
        "meta",
        "of",
        "own",
        "pieces",
        "prefill",
        "reason",
        "retain_s",
    )

    def __init__(
        self, name: str, handle: int, *, of: Label | None = None, at: int = 0, born: int = 0
    ) -> None:
        self.label = Label(name, of)
        self.handle = handle
        self.of = of  # the label of the branch that it is a fork of
        self.at = at
        self.own = at  # what begins here or later was made on this branch
        self.pieces = Pieces()
        self.born = born  # the revision since which this branch has its name
        self.cuts: list[tuple[int, int]] = []  # moves backwards: (revision, position), both rising
        self.retain_s: float | None = None
        self.meta: dict[str, Any] | None = None
        self.prefill: int | None = None  # the request that computes appended tokens ahead of time
        self.reason: str | None = None  # how the last generation ended

    @property
    def name(self) -> str:
        return self.label.name

    @property
    def parent(self) -> str | None:
        """The name of the branch that it was forked from, as it is called now."""
        return None if self.of is None else self.of.name

    @property
    def position(self) -> int:
        return self.pieces[-1].end if self.pieces else 0

    @property
    def released(self) -> int:
        """The position that clients may know: a running generation holds a few tokens back."""
        if not self.pieces:
            return 0
        last = self.pieces[-1]
        return last.released if isinstance(last, OutputPiece) and not last.ended else last.end

    @property
    def tail(self) -> Tail:
        return self.pieces[-1].tail if self.pieces else Tail.RAW

    @property
    def role(self) -> Role | None:
        """Role of the last turn, where a template was used."""
        return self.pieces[-1].role if self.pieces else None

    def tokens(self) -> "array[int]":
        """All tokens. O(position)."""
        out: array[int] = array("i")
        for piece in self.pieces:
            out.extend(piece.tokens)
        return out

    def text(self) -> str:
        """All text, special tokens of sampled ends of turn left out. O(position)."""
        return "".join(piece.text for piece in self.pieces)

    def fork(self, name: str, handle: int, at: int, decode: Decode, *, born: int = 0) -> "Branch":
        """A child at position `at`; shares the complete pieces. O(log pieces), and the piece it cuts."""
        child = Branch(name, handle, of=self.label, at=at, born=born)
        child.pieces = self.pieces.copy()
        child.truncate(at, decode)
        return child

    def twin(self, name: str, handle: int) -> "Branch":
        """Another child of the same parent at the same position as this one, which is new. O(1)."""
        twin = Branch(name, handle, of=self.of, at=self.at, born=self.born)
        twin.pieces = self.pieces.copy()
        twin.own, twin.reason = self.own, self.reason
        return twin

    def become(self, other: "Branch") -> int:
        """Hold what `other` holds, by its handle. Returns the position up to which it did before."""
        shared = self._common(other)
        same = self.pieces[shared - 1].end if shared else 0
        self.handle, self.pieces, self.reason = other.handle, other.pieces.copy(), other.reason
        self.own = min(self.own, same)
        return same

    def answer(self) -> OutputPiece | None:
        """Its last generation, if there was one since it was forked. O(pieces since)."""
        for piece in reversed(self.pieces):
            if piece.start < self.own:
                break
            if isinstance(piece, OutputPiece):
                return piece
        return None

    def truncate(self, to: int, decode: Decode) -> None:
        """Cut back to position `to` (<= position). A piece that is cut becomes a new object."""
        self.own = min(self.own, to)
        pieces = self.pieces
        pieces.cut(to)
        if pieces and pieces[-1].end > to:
            pieces.append(pieces.pop().cut(to, decode))

    def turn_start(self, turns: int) -> int | None:
        """Where the last `turns` appended turns begin.

        None if there are fewer, or if the template has joined that one to the turn before it.
        """
        for piece in reversed(self.pieces):
            turns -= abs(piece.turn)
            if piece.turn and turns <= 0:
                return piece.start if turns == 0 and piece.turn > 0 else None
        return None

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

    def outputs_from(self, position: int) -> Iterable[OutputPiece]:
        """The output pieces that end at or after `position`, in order."""
        pieces = self.pieces
        if pieces and (last := pieces[-1]).start < position:  # as with each delta of a stream
            return (last,) if last.end >= position and isinstance(last, OutputPiece) else ()
        found: list[OutputPiece] = []
        for piece in reversed(self.pieces):
            if piece.end < position:
                break
            if isinstance(piece, OutputPiece):
                found.append(piece)
        return reversed(found)

    def shared_with(self, parent: "Branch") -> int:
        """How many pieces it has in common with the branch that it was forked off. O(log pieces)."""
        if parent.handle > self.handle:  # another one, that got the name later
            return 0
        return self._common(parent)

    def _common(self, other: "Branch") -> int:
        """How many pieces both begin with. O(log pieces)."""
        mine, theirs = self.pieces, other.pieces
        low, high = 0, min(len(mine), len(theirs))
        while low < high:  # branches that part never share a piece again
            middle = (low + high + 1) // 2
            if mine[middle - 1] is theirs[middle - 1]:
                low = middle
            else:
                high = middle - 1
        return low

    def index_at(self, position: int) -> int:
        """The first piece that begins at or after `position`. O(log pieces)."""
        return bisect_left(self.pieces, position, key=lambda piece: piece.start)

    def state(
        self,
        running: OutputPiece | None,
        resident: int,
        *,
        turns: list[Turn] | None = None,
        turns_from: int | None = None,
    ) -> BranchState:
        """As `state` messages show it. `resident`: tokens with KV (-1: not known)."""
        return BranchState(
            branch=self.name,
            position=self.released,
            parent=self.parent,
            at=self.at if self.parent is not None else None,
            running=running.op if running else None,
            started_at=running.start if running else None,
            kv="gpu" if resident > 0 else "none",
            resident=resident if resident >= 0 else None,
            retain_s=self.retain_s,
            reason=self.reason,
            meta=self.meta,
            turns=turns,
            turns_from=turns_from,
        )


def turn_of(piece: AnyPiece, text: bool, tokens: bool) -> Turn:
    """A piece as `tree` shows it: of one that is being written, what is released."""
    messages = piece.messages if text and not isinstance(piece, OutputPiece) else ()
    output = isinstance(piece, OutputPiece)
    end = piece.released if isinstance(piece, OutputPiece) and not piece.ended else piece.end
    return Turn(
        kind="output" if output else "input",
        start=piece.start,
        end=end,
        op=piece.op,
        role=piece.role,
        text=piece.text if text else None,
        tokens=piece.tokens[: end - piece.start].tolist() if tokens else None,
        messages=list(messages) or None,
    )


def input_piece(branch: Branch, tokens: Iterable[int], text: str, **fields: Any) -> Piece:
    """Append input to the branch and return its piece."""
    run = tokens if isinstance(tokens, array) else array("i", tokens)  # several branches share one
    piece = Piece(branch.position, run, text, **fields)
    branch.pieces.append(piece)
    return piece
