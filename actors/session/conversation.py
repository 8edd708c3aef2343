"""The conversation that a branch holds, and how far a new rendering of it agrees with the branch. Pure.

A strict template renders the whole conversation at every turn, and may show earlier turns otherwise
than before (it leaves out reasoning, it moves the tools). So the messages have to be known, however
often turns were rendered anew: `Conversation.of` reads them off the pieces; where a rendering was
cut, the piece behind the cut has a `History` that says what was before it.
"""

from collections.abc import Sequence

import msgspec

from ramify.actors.session.branch import Branch
from ramify.actors.session.pieces import AnyPiece, History, OutputPiece, Piece, Tail
from ramify.protocol.wire import ChatMessage


class Conversation:
    """The messages of a branch.

    `base`: the position where they begin: raw text before it is no part of a conversation, and stays.
    `turns`: the appended turns with the place of their first message.
    """

    def __init__(self) -> None:
        self.messages: list[ChatMessage] = []
        self.base = 0
        self.turns: list[tuple[Piece, int]] = []
        self._open = False  # the last message is an assistant's, and goes on

    @staticmethod
    def of(branch: Branch) -> "Conversation":
        """Read it off the pieces. O(pieces + messages)."""
        found = Conversation()
        pieces = branch.pieces
        first = len(pieces)
        while first and pieces[first - 1].tail is not Tail.RAW:
            first -= 1
        found.base = pieces[first - 1].end if first else 0
        for piece in pieces[first:]:
            found._add(piece)
        return found

    def _add(self, piece: AnyPiece) -> None:
        if piece.history is not None:
            self.messages = piece.history.all()
            self._open = False
        if isinstance(piece, OutputPiece) or not piece.chat:  # text that is put into its mouth, too
            self._say(piece.text)
            self._open = piece.tail is Tail.OPEN
            return
        if piece.turn:
            self.turns.append((piece, len(self.messages)))
        self.messages.extend(piece.messages)
        self._open = bool(piece.messages) and piece.tail is Tail.OPEN and piece.role == "assistant"

    def _say(self, text: str) -> None:
        if self._open:
            last = self.messages[-1]
            self.messages[-1] = msgspec.structs.replace(last, content=last.content + text)
        else:
            self.messages.append(ChatMessage(role="assistant", content=text))


def common(branch: Branch, base: int, rendered: str) -> tuple[int, int]:
    """(position, characters of `rendered`) up to which the branch's text from `base` is a prefix of it.

    Only borders of pieces and marks of outputs count: elsewhere no position names the text.
    Pieces keep their rendered text with its guards, so equal turns compare equal.
    """
    position, chars = base, 0
    for piece in branch.pieces:
        if piece.start < base or piece.end <= base:
            continue
        raw = piece.raw
        if rendered.startswith(raw, chars):
            position, chars = piece.end, chars + len(raw)
            continue
        if isinstance(piece, OutputPiece):
            shared = common_prefix(raw, rendered[chars : chars + len(raw)])
            mark = piece.offset_mark(shared)
            position = piece.mark_position(mark)
            if piece.eos_text and position == piece.end:  # the last mark is behind the end of turn
                position -= 1
            chars += sum(map(len, piece.chunks[:mark]))
        break
    return position, chars


def history_before(branch: Branch, base: int, at: int, messages: Sequence[ChatMessage]) -> History:
    """`messages` as the history of what comes at position `at`; shares what the branch has of it."""
    for piece in reversed(branch.pieces):
        if piece.start < base:
            break
        if piece.end <= at and piece.history is not None:
            known = piece.history
            return History(known, messages[known.count :])
    return History(None, messages)


def borders(
    rendered: str, begin: int, turns: Sequence[tuple[Piece, int]], last: tuple[int, int]
) -> list[tuple[int, int, Piece | None]]:
    """Where appended turns begin in `rendered`, from character `begin` on: (character, message, piece).

    `turns`: those that were rendered before, which usually look the same; one that does not is a part of
    the turn before it. `last`: the new turn, None in the result.
    """
    found: list[tuple[int, int, Piece | None]] = []
    at = begin
    for piece, index in turns:
        place = rendered.find(piece.raw, at, last[0]) if piece.raw else -1
        if place >= 0:
            found.append((place, index, piece))
            at = place + len(piece.raw)
    return [*found, (max(last[0], at), last[1], None)]


def common_prefix(a: str, b: str) -> int:
    """How many characters `a` and `b` begin with alike."""
    low, high = 0, min(len(a), len(b))
    while low < high:  # binary search: slices compare at memory speed
        middle = (low + high + 1) // 2
        if a[:middle] == b[:middle]:
            low = middle
        else:
            high = middle - 1
    return low
