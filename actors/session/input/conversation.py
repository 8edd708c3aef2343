"""The conversation that a branch holds, and how far a new rendering of it agrees with the branch. Pure.

A strict template renders the whole conversation at every turn, and may show earlier turns otherwise
than before (it leaves out reasoning, it moves the tools). So the messages have to be known, however
often turns were rendered anew: `Conversation.of` reads them off the segments; where a rendering was
cut, the segment behind the cut has a `History` that says what was before it.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import msgspec

from ramify.actors.session.branches.branch import Branch
from ramify.actors.session.branches.segments import History, InputSegment, OutputSegment, Segment, Tail
from ramify.protocol.wire import ChatMessage


class Conversation:
    """The messages of a branch.

    `base`: the position where they begin: raw text before it is no part of a conversation, and stays.
    `turns`: the appended turns with the place of their first message.
    """

    def __init__(self, base: int) -> None:
        self.messages: list[ChatMessage] = []
        self.base = base
        self.turns: list[tuple[InputSegment, int]] = []
        self._open = False  # the last message is an assistant's, and goes on
        self._added: list[str] = []  # what it says beyond its content so far
        self._left_out = 0  # messages before `messages`, which a later history has

    @staticmethod
    def of(every: Iterable[Segment]) -> "Conversation":
        """Read it off a branch's segments. O(segments + messages)."""
        segments: list[Segment] = []
        base = 0
        for segment in reversed(list(every)):
            if segment.tail is Tail.RAW:
                base = segment.end
                break
            segments.append(segment)
        segments.reverse()
        found = Conversation(base)
        last = max((i for i, each in enumerate(segments) if each.history is not None), default=-1)
        for i, segment in enumerate(segments):
            found._add(segment, whole=i >= last)
        found._close()
        return found

    def _add(self, segment: Segment, *, whole: bool) -> None:
        """`whole`: no later segment has a history, which says what the messages before it were."""
        if segment.history is not None:
            self._close()
            self.messages = segment.history.all() if whole else []
            self._left_out = 0 if whole else segment.history.count
            self._open = False
        if isinstance(segment, OutputSegment) and segment.spoken is not None:
            if self._open:
                self._added.clear()
                self.messages.pop()
            self.messages.append(segment.spoken)
            self._open = False
            return
        if (
            isinstance(segment, OutputSegment) or not segment.chat
        ):  # text that is put into its mouth, too
            self._say(segment.text)
            self._open = segment.tail is Tail.OPEN
            return
        self._close()
        if segment.turn:
            self.turns.append((segment, self._left_out + len(self.messages)))
        self.messages.extend(segment.messages)
        self._open = bool(segment.messages) and segment.tail is Tail.OPEN and segment.role == "assistant"

    def _say(self, text: str) -> None:
        if not self._open:
            self._close()
            self.messages.append(ChatMessage(role="assistant"))
        self._added.append(text)

    def _close(self) -> None:
        """What was said goes into the last message."""
        if self._added:
            last = self.messages[-1]
            content = "".join([last.content, *self._added])
            self.messages[-1] = msgspec.structs.replace(last, content=content)
            self._added.clear()


def common(
    branch: Branch, base: int, rendered: str, inside: Callable[[str, int], bool]
) -> tuple[int, int]:
    """(position, characters of `rendered`) up to which the branch's text from `base` is a prefix of it.

    Only borders of segments and marks of outputs count: elsewhere no position names the text.
    `inside(text, char)`: whether a token that is written in the text spans that character; what the
    model said may begin like one. Segments keep their rendered text with its guards, so equal turns
    compare equal.
    """
    position, chars = base, 0
    for segment in branch.segments:
        if segment.start < base:
            continue
        raw = segment.raw
        if rendered.startswith(raw, chars):
            position, chars = segment.end, chars + len(raw)
            continue
        if isinstance(segment, OutputSegment):
            shared = common_prefix(raw, rendered[chars : chars + len(raw)])
            mark = segment.offset_mark(shared)
            end = chars + sum(map(len, segment.chunks[:mark]))
            while mark and inside(rendered, end):
                mark -= 1
                end -= len(segment.chunks[mark])
            position, chars = segment.mark_position(mark), end
            if segment.eos_text and position == segment.end:  # the last mark is behind the end of turn
                position -= 1
        break
    return position, chars


def history_before(branch: Branch, base: int, at: int, messages: Sequence[ChatMessage]) -> History:
    """`messages` as the history of what comes at position `at`; shares what the branch has of it."""
    link = branch.segments.top
    while link is not None and link.segment.start >= base:
        known = link.segment.history
        if known is not None and link.segment.end <= at:
            return History(known, messages[known.count :])
        link = link.history
    return History(None, messages)


SEARCHES = 64  # times the length of a rendering that are searched for the turns of one conversation


class Border(NamedTuple):
    """Where appended turns begin in a rendering.

    `turns`: how many, up to the next border; negative where they begin somewhere behind `char`.
    `op`: which appended them; None: the new one.
    """

    char: int
    message: int
    turns: int
    op: int | None = None


def borders(
    rendered: str,
    begin: tuple[int, int],
    lost: Sequence[tuple[InputSegment, int]],
    new: Border,
    end_of: Callable[[int], str],
) -> list[Border]:
    """The borders in `rendered`. `begin`: position and character behind which it is new.

    `lost`: turns before the new one, and the places of their first messages. Most look as before; else
    a turn begins where the message before it ends: `end_of(message)`, "" where that is not known. One
    that is not found is a part of the turn before it.
    """
    position, char = begin
    found: list[Border] = []
    hidden = 0
    at = char
    left = SEARCHES * len(rendered)  # characters: what is not found is searched for to the end
    for segment, message in lost:
        place: int | None = char
        if segment.start != position:
            place = _find(rendered, segment, message, at, new.char, end_of) if left > 0 else None
            left -= (new.char if place is None else place) - at
        if place is not None and place >= at:
            found.append(Border(place, message, abs(segment.turn), segment.op))
            at = place + (segment.start == position)  # the next one is not there too
        elif found:
            found[-1] = found[-1]._replace(turns=found[-1].turns + abs(segment.turn))
        else:
            hidden += abs(segment.turn)
    found.append(new._replace(char=max(new.char, char)))
    if found[0].char > char or hidden:  # the rest of a turn whose beginning was left standing
        found.insert(0, Border(char, found[0].message, -hidden))
    return found


def _find(
    rendered: str, segment: InputSegment, message: int, at: int, until: int, end_of: Callable[[int], str]
) -> int | None:
    if segment.raw:
        place = rendered.find(segment.raw, at, until)
        if place >= 0:
            return place
    end = end_of(message - 1) if message else ""
    if end:
        place = rendered.find(end, max(0, at - len(end)), until)
        if place >= 0:
            return place + len(end)
    return None


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
