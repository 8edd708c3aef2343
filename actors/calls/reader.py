"""Reads an output as it is generated: which text is answer, thought or call, and which calls it holds.

Pure. However the text is cut into chunks, the end is the same: a form is a coroutine over characters
(`forms`), and what may still become a mark waits until that is known.

    START     blanks, then perhaps a thought, or a call without a mark
    THOUGHT   up to its end tag; then blanks, and perhaps another thought
    TEXT      up to a mark that begins a call, or (where a dialect has `tags`) a tag or a thought
    CALL      as far as the form goes; if it breaks, what it has not committed is text again

Two things come out. *Labels* (`take`) come as the text does, and tell what it is by all that is known
then; a call that breaks later keeps its label. *Results* (`calls`, `content`, `reasoning`) are what
counts, once `finish` was called.

Work is linear in the text: calls that break are read again, for at most as many characters as the
text is long (and some), then the rest is text.
"""

import re
from collections import deque
from collections.abc import Iterable, Iterator
from enum import Enum, auto
from typing import Literal, NamedTuple

import msgspec

from ramify.actors.calls.block import Block
from ramify.actors.calls.dialects import Dialect
from ramify.actors.calls.forms import Form
from ramify.actors.calls.toolbox import MAX_CALLS, Toolbox, call_id, shaped
from ramify.protocol.wire import JsonObject, Part, PartKind

PRIMED_MOST = 4096  # characters of a turn that were said before and are read as calls
_BLANKS = re.compile(r"\s*")
AGAIN_LEAST = 1 << 14  # characters that may be read again, however short the text is


class _State(Enum):
    START = auto()
    THOUGHT = auto()
    AFTER = auto()  # blanks behind a thought
    TEXT = auto()
    CALL = auto()


class TurnPlace(NamedTuple):
    """`part` of a turn in which an output begins. `pending`: what is begun there already: a call, or
    what may become its mark.
    """

    part: Literal["start", "thought", "answer"]
    pending: str


class _Numbers:
    """Of calls, in the order in which they begin. An object of its own: a call knows no reader."""

    def __init__(self) -> None:
        self.begun = 0

    def next(self) -> int:
        self.begun += 1
        return self.begun - 1


class Reader:
    """One output. `position`: where it starts in its branch. `name`: see `call_id`."""

    def __init__(self, dialect: Dialect, tools: Toolbox, position: int, name: str = "") -> None:
        self.calls: list[JsonObject] = []
        self._dialect = dialect
        self.tools = tools
        self.position = position
        self.name = name
        self._openings = dialect.openings if tools else {}
        self._bare = dialect.bare if tools else None
        self._tags = dialect.tags
        if dialect.tags and dialect.thought is not None:
            self._tags = (*dialect.tags, dialect.thought.begin)
        marks = [*self._openings, *self._tags]
        self._first_of = {_State.TEXT: frozenset(mark[0] for mark in marks)}
        if dialect.thought is not None:
            self._first_of[_State.THOUGHT] = frozenset(dialect.thought.end[0])
        self._state = _State.START
        self._held = ""  # what may become a mark
        self._at = 0  # characters that have their place, before `_held` and the call that is read
        self._shown = 0  # characters that have a label
        self._parts: deque[Part] = deque()
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._call: Block | None = None
        self._numbers = _Numbers()
        self._ended = False
        self._again = 0

    # --- what comes out ------------------------------------------------------------------------

    @property
    def content(self) -> str:
        """The answer alone, without blanks around it."""
        return "".join(self._content).strip()

    @property
    def reasoning(self) -> str:
        """The thought, without blanks around it."""
        return "".join(self._reasoning).strip()

    @property
    def held(self) -> int:
        """Bytes that it holds, about: of text that is read, and of the call that it is in."""
        if self._ended:
            return 0
        return self._at + (self._call.held if self._call is not None else 0)

    def take(self) -> Iterator[Part]:
        """The labels of the text that came since, as far as they are known."""
        while self._parts:
            yield self._parts.popleft()

    # --- what goes in --------------------------------------------------------------------------

    def prime(self, prompt: str, said: str) -> None:
        """Read what stands before the output in its turn: the generation prompt, and earlier text of
        the turn.

        Calls that are complete there are not calls of this output; one that is begun there is.
        """
        thought = self._dialect.thought
        if thought is not None and prompt.rfind(thought.begin) > prompt.rfind(thought.end):
            self._state = _State.THOUGHT
        self.feed(self._recent(said))
        self.calls.clear()
        self._content.clear()
        self._reasoning.clear()
        self._shown = max(self._shown, self._at + len(self._held))
        if self._call is not None:
            self._shown = self._at + len(self._call.text)
            self._call.forget_labels()
        self._parts.clear()

    def _recent(self, said: str) -> str:
        """The part of it that has to be read: thoughts are found fast, long calls are skipped."""
        if len(said) <= PRIMED_MOST:
            return said
        thought = self._dialect.thought
        if self._state is _State.START and thought and said.lstrip().startswith(thought.begin):
            self._state = _State.THOUGHT
        if self._state is _State.THOUGHT and thought is not None:
            at, begun = 0, True
            while begun:
                end = said.find(thought.end, at)
                if end < 0:
                    return ""
                at = end + len(thought.end)
                found = _BLANKS.match(said, at)
                begun = found is not None and said.startswith(thought.begin, found.end())
            said = said[at:]
        self._state = _State.TEXT
        return said[-PRIMED_MOST:]

    @property
    def place(self) -> TurnPlace:
        """Where the output stands, before it begins: after `prime`."""
        pending = self._call.text if self._call is not None else self._held
        if self._state is _State.START:
            return TurnPlace("start", "")  # blanks and what may become a tag may stand there
        return TurnPlace("thought" if self._state is _State.THOUGHT else "answer", pending)

    def plain(self, text: str) -> PartKind | None:
        """Read `text` if it is of one kind, whatever follows; None if that takes a closer look."""
        marks = self._first_of.get(self._state)
        if marks is None or self._held or self._parts or not marks.isdisjoint(text):
            return None
        thought = self._state is _State.THOUGHT
        (self._reasoning if thought else self._content).append(text)
        self._at += len(text)
        self._shown = self._at
        return "reasoning" if thought else "text"

    def feed(self, text: str) -> None:
        """Read more text."""
        while text:
            match self._state:
                case _State.START:
                    text = self._start(text)
                case _State.THOUGHT:
                    text = self._thought(text)
                case _State.AFTER:
                    text = self._after(text)
                case _State.TEXT:
                    text = self._text(text)
                case _State.CALL:
                    text = self._in_call(text)

    def finish(self) -> None:
        """The text has ended."""
        while self._call is not None:
            call = self._call
            call.end()
            if call.broken:
                self.feed(self._back(call))
            else:
                self._close(call)
        self._ended = True
        held, self._held = self._held, ""
        self._put("reasoning" if self._state is _State.THOUGHT else "text", held)

    # --- states --------------------------------------------------------------------------------

    def _start(self, text: str) -> str:
        """Blanks, then what tells how the turn begins."""
        text, self._held = self._held + text, ""
        rest = text.lstrip()
        self._put("text", text[: len(text) - len(rest)])
        return self._begin(rest)

    def _begin(self, rest: str) -> str:
        """A thought, or the answer; until that is known, nothing."""
        thought = self._dialect.thought
        begin = thought.begin if thought is not None else ""
        if len(rest) < len(begin) and begin.startswith(rest):
            self._held = rest
            return ""
        if begin and rest.startswith(begin):
            self._put("markup", begin)
            self._state = _State.THOUGHT
            return rest[len(begin) :]
        return self._begin_answer(rest) if rest else ""

    def _begin_answer(self, rest: str) -> str:
        """The first character of the answer is there."""
        self._state = _State.TEXT
        if self._bare is not None and rest[0] in "{[":
            self._open("", self._bare)
        return rest

    def _thought(self, text: str) -> str:
        assert self._dialect.thought is not None
        end = self._dialect.thought.end
        text, self._held = self._held + text, ""
        found = text.find(end)
        if found < 0:
            keep = len(text) - _begins(text, (end,))
            self._put("reasoning", text[:keep])
            self._held = text[keep:]
            return ""
        self._put("reasoning", text[:found])
        self._put("markup", end)
        self._state = _State.AFTER
        return text[found + len(end) :]

    def _after(self, text: str) -> str:
        """Blanks behind a thought, then the answer or, as models do, another thought."""
        text, self._held = self._held + text, ""
        rest = text.lstrip()
        self._put("markup", text[: len(text) - len(rest)])
        return self._begin(rest)

    def _text(self, text: str) -> str:
        text, self._held = self._held + text, ""
        first, mark = len(text), ""
        openings = self._openings if self._numbers.begun < MAX_CALLS else {}
        for each in (*openings, *self._tags):
            found = text.find(each, 0, first + len(each))
            if 0 <= found < first:
                first, mark = found, each
        if mark:
            self._put("text", text[:first])
            if mark in openings:
                self._open(mark, openings[mark])
            else:
                self._put("markup", mark)
                thought = self._dialect.thought
                if thought is not None and mark == thought.begin:
                    self._state = _State.THOUGHT
            return text[first + len(mark) :]
        keep = len(text) - _begins(text, (*openings, *self._tags))
        self._put("text", text[:keep])
        self._held = text[keep:]
        return ""

    def _in_call(self, text: str) -> str:
        call = self._call
        assert call is not None
        rest = call.feed(text)
        if rest is None:
            self._label(call)
            return ""
        if call.broken:
            return self._back(call) + rest
        self._close(call)
        return rest

    # --- calls ---------------------------------------------------------------------------------

    def _open(self, mark: str, form: Form) -> None:
        self._state = _State.CALL
        self._call = Block(mark, form, self.tools, self._numbers.next)

    def _close(self, call: Block) -> None:
        """The call is complete: all of its text is calls."""
        self._label(call)
        self._at += len(call.text)
        self._end(call)

    def _back(self, call: Block) -> str:
        """The call broke: what is not committed is text. Returns what has to be read again."""
        self._label(call)
        text = call.text
        self._at += call.committed
        self._end(call)
        if not call.committed:
            self._put("text", call.mark)
        again = text[call.committed or len(call.mark) :]
        self._again += len(again)
        if self._again > self._at + len(again) + AGAIN_LEAST:
            self._openings = {}
        return again

    def _end(self, call: Block) -> None:
        for index, each in call.calls:
            ident = each.ident or call_id(self.name, self.position, index)
            self.calls.append(shaped(each, ident))
        self._call = None
        self._state = _State.TEXT

    # --- labels --------------------------------------------------------------------------------

    def _put(self, kind: PartKind, text: str) -> None:
        """`text`, the next one, is `kind`."""
        if kind == "text":
            self._content.append(text)
        elif kind == "reasoning":
            self._reasoning.append(text)
        start, self._at = self._at, self._at + len(text)
        self._show(Part(kind=kind, text=text), start)

    def _label(self, call: Block) -> None:
        """Label what was read of a call since the last time."""
        start = self._at + call.labelled
        for part in call.take():
            if part.name is not None and part.call is not None:
                ident = part.id or call_id(self.name, self.position, part.call)
                part = msgspec.structs.replace(part, id=ident)
            self._show(part, start)
            start += len(part.text)

    def _show(self, part: Part, start: int) -> None:
        """A label for text from `start` on, of which a part may have one."""
        end = start + len(part.text)
        if start < self._shown:
            part = msgspec.structs.replace(part, text=part.text[self._shown - start :])
        self._shown = max(self._shown, end)
        if part.text or part.name is not None or part.arguments is not None:
            self._parts.append(part)


def _begins(text: str, marks: Iterable[str]) -> int:
    """How many characters at the end of `text` may be the beginning of a mark."""
    most = 0
    for mark in marks:
        for size in range(min(len(mark) - 1, len(text)), most, -1):
            if text.endswith(mark[:size]):
                most = size
                break
    return most
