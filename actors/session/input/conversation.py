"""The conversation that a branch holds, and how far a new rendering of it agrees with the branch. Pure.

A strict template renders the whole conversation at every turn, and may show earlier turns otherwise
than before (it leaves out reasoning, it moves the tools). So the messages have to be known, however
often turns were rendered anew: `Conversation.of` reads them off the segments; where a rendering was
cut, the segment behind the cut has a `History` that says what was before it.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice, pairwise
from typing import NamedTuple

import msgspec

from ramify.actors.calls.templates import CALL_ID, NOTHING_ASKED, Asked
from ramify.actors.session.branches.branch import SessionBranch
from ramify.actors.session.branches.segments import History, InputSegment, OutputSegment, Segment, Tail
from ramify.actors.session.branches.tasks import PendingPart
from ramify.actors.session.input.template import ChatTemplate
from ramify.protocol.errors import BadRequest, RamifyError
from ramify.protocol.wire import ChatMessage, Effort, JsonObject, Open, Role

AROUND = 64  # characters that a turn counts for, beside its text
LOOK_BACK = 256  # messages that are searched for calls and results
ENDING = 32  # characters of a message that its end is known by


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
        """Read the conversation off a branch's segments. O(segments + messages)."""
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
        """Add a segment. `whole`: no later segment has a history that tells the messages before it."""
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
        """Put what was said into the last message."""
        if self._added:
            last = self.messages[-1]
            content = "".join([last.content, *self._added])
            self.messages[-1] = msgspec.structs.replace(last, content=content)
            self._added.clear()


def common(
    branch: SessionBranch, base: int, rendered: str, inside: Callable[[str, int], bool]
) -> tuple[int, int]:
    """Find (position, characters of `rendered`) up to which both begin alike, the branch from `base`.

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


def history_before(
    branch: SessionBranch, base: int, at: int, messages: Sequence[ChatMessage]
) -> History:
    """Make the history of what comes at position `at`; it shares what the branch has of `messages`."""
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
    """Find the borders in `rendered`. `begin`: position and character behind which it is new.

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


class Unrendered(NamedTuple):
    """A generation prompt that takes a rendering of the whole conversation: `run`.

    `size`: about how many characters that works on. `key`: branches with the same one share it.
    """

    key: Hashable
    size: int
    run: Callable[[], str]


class StrictRendering:
    """Renders the whole conversation anew at each turn. `inside`: see `common`."""

    def __init__(self, template: ChatTemplate, inside: Callable[[str, int], bool]) -> None:
        self._template = template
        self._inside = inside

    def append(
        self,
        branch: SessionBranch,
        messages: Sequence[ChatMessage],
        tools: list[JsonObject] | None,
        effort: Effort | None,
    ) -> tuple[list[PendingPart], int]:
        """Render what is appended for `messages`. Returns also the position to which the branch is cut.

        Raises BadRequest.
        """
        before = Conversation.of(branch.segments)
        every = [*before.messages, *messages]
        try:
            closed = self._template.strict(every, tools, False, effort)
        except BadRequest as error:
            if messages[-1].role != "system":
                raise
            raise BadRequest(f"{error}; append a system and a user turn in one `append`") from error
        rendered, end = closed, len(closed)
        if messages[-1].role in ("user", "tool"):
            rendered = self._template.strict(every, tools, True, effort)
            end = common_prefix(closed, rendered)  # then comes the generation prompt
        at, begin = common(branch, before.base, rendered, self._inside)
        end = max(end, begin)
        lost = [(segment, index) for segment, index in before.turns if segment.start >= at]
        changed = at < branch.position and any(
            _speaks(p) for p in branch.segments if p.end > at or p.start >= at
        )
        end_of = partial(self.end_of, every)
        new = Border(begin, len(before.messages), 1)
        if changed:
            new = self._new_turn(before, closed, begin, messages, tools)
        places = borders(rendered, (at, begin), lost, new, end_of)
        history: History | None = None
        if changed:
            history = history_before(branch, before.base, at, every[: places[0].message])
        parts: list[PendingPart] = []
        for here, following in pairwise([*places, Border(end, len(every), 0)]):
            shown = every[here.message : following.message]
            part = PendingPart(
                rendered[here.char : following.char],
                True,
                Tail.CLOSED,
                shown[-1].role if shown else "assistant",
                messages=shown,
                turn=here.turns,
                op=here.op,
                history=history,
            )
            parts.append(part)
            history = None
        if rendered[end:]:
            parts.append(PendingPart(rendered[end:], True, Tail.PROMPT, "assistant"))
        return parts, at

    def prompt(self, segments: Iterable[Segment], opened: Open) -> str:
        """Render the generation prompt behind these segments. Raises BadRequest."""
        every = Conversation.of(segments).messages
        closed, rendered = (
            self._template.strict(every, opened.tools, generate, opened.effort)
            for generate in (False, True)
        )
        return rendered[common_prefix(closed, rendered) :]

    def unrendered(
        self, branch: SessionBranch, opened: Open, known: Mapping[Hashable, str | RamifyError]
    ) -> Unrendered | None:
        """Return what `prompt_behind` would render; None: nothing, or it is `known`.

        The result goes into `known`, by its key. Another thread may run it: it works on the segments
        that the branch has now.
        """
        complete = branch.tail in (Tail.CLOSED, Tail.EOS, Tail.PENDING)
        key = branch.segments.top
        if not complete or not _rendered_anew(opened, branch.role) or key in known:
            return None
        segments = branch.segments.copy()
        return Unrendered(key, length_of(branch), lambda: self.prompt(segments, opened))

    def prompt_behind(
        self, branch: SessionBranch, role: Role, opened: Open, known: dict[Hashable, str | RamifyError]
    ) -> str:
        """Render the generation prompt behind a complete turn of `role`."""
        if not _rendered_anew(opened, role):
            ended = branch.tail is not Tail.PENDING
            return self._template.generation_prompt(role, tools=bool(opened.tools), closed=ended)
        # A template may want none here (R1 behind a tool's output), which stand-ins cannot tell.
        key = branch.segments.top
        prompt = known.get(key)
        if prompt is None:
            prompt = known[key] = self.prompt(branch.segments, opened)
        if isinstance(prompt, RamifyError):
            raise prompt
        return prompt

    def _new_turn(
        self,
        before: Conversation,
        rendered: str,
        begin: int,
        messages: Sequence[ChatMessage],
        tools: list[JsonObject] | None,
    ) -> Border:
        """Find where the new turn begins in `rendered`, whose text from `begin` on is new."""
        count = len(before.messages)
        try:
            added = self._template.delta(before.messages[-1].role, True, messages, tools, False)
        except BadRequest:  # the template joins these turns, or the second one looks back
            added = ""
        if added and rendered.endswith(added) and len(rendered) - len(added) >= begin:
            return Border(len(rendered) - len(added), count, 1)
        end = self.end_of(before.messages, count - 1)
        place = rendered.rfind(end, begin) if end else -1
        return Border(place + len(end), count, 1) if place >= 0 else Border(begin, count, -1)

    def end_of(self, messages: Sequence[ChatMessage], index: int) -> str:
        """The text that ends the rendering of a message; "" if it is not known."""
        message = messages[index]
        role = message.role
        closing = self._template.closing(role) or self._template.pending_end(role)
        content = message.content.strip()[-ENDING:]
        return content + closing if content and closing else ""


# --- how a branch ends


def is_taken_back(branch: SessionBranch) -> bool:
    """Whether messages take back the last segment: a generation prompt, or the end of a pending turn."""
    if branch.tail is Tail.PROMPT:
        return True
    if branch.tail is not Tail.CLOSED or len(branch.segments) < 2:
        return False
    last, before = branch.segments[-1], branch.segments[-2]
    return before.tail is Tail.PENDING and isinstance(last, InputSegment) and not last.messages


def eos_text(branch: SessionBranch) -> str:
    """The end-of-turn token that the branch ends with, as the template spells it."""
    last = branch.output()
    return last.eos_text if last is not None else ""


def asked_of(branch: SessionBranch, messages: Sequence[ChatMessage], ends: tuple[str, ...]) -> Asked:
    """Collect what a template looks back at for `messages` that are about calls."""
    if not any(message.role == "tool" or message.tool_calls for message in messages):
        return NOTHING_ASKED
    calls: tuple[tuple[str, str], ...] | None = None if messages[0].role == "tool" else ()
    for said in islice(_back(branch), LOOK_BACK):
        if said is not None and said.role == "tool":
            if calls is not None:
                return Asked(calls, ends, again=True)
        elif calls is None:
            calls = _named((said.tool_calls if said is not None else None) or ())
    return Asked(calls or (), ends)


def _back(branch: SessionBranch) -> Iterator[ChatMessage | None]:
    """Read the messages of a branch, the last one first; None stands for text outside of messages."""
    for segment in reversed(branch.segments):
        if isinstance(segment, OutputSegment):
            yield segment.spoken
        elif not segment.chat:
            yield None
        else:  # without messages: the end of a turn, or a generation prompt
            yield from reversed(segment.messages)


def _named(calls: Sequence[JsonObject]) -> tuple[tuple[str, str], ...]:
    functions = [(call.get("function", call), call.get("id")) for call in calls]
    return tuple((str(each.get("name", "")), str(ident or CALL_ID)) for each, ident in functions)


def _speaks(segment: Segment) -> bool:
    """Whether a segment is a part of a conversation."""
    return isinstance(segment, OutputSegment) or bool(
        segment.messages or segment.history or not segment.chat
    )


def _rendered_anew(opened: Open, role: Role | None) -> bool:
    """Whether the prompt behind a turn of `role` needs a rendering of the whole conversation."""
    return opened.template == "strict" and role in ("user", "tool")


def length_of(branch: SessionBranch) -> int:
    """About how many characters a rendering of the branch's whole conversation works on."""
    return branch.position * 4 + len(branch.segments) * AROUND
