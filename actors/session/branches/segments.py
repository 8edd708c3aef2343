"""What a branch is made of: segments of input and output, each a run of tokens with its text.

Segments are shared between branches after a fork, so a segment that is complete never changes; only
the segment of a running generation grows. This file knows positions, tokens and text; it does not
know templates, sockets or requests.

Marks. An output segment's text is released in chunks. After chunk i the segment has released
`counts[i]` tokens, whose text is exactly `chunks[0] + ... + chunks[i]`. Deltas start and end at
marks only, so a client's position always names one text.

    tokens  |t0 t1|t2|t3 t4 t5|t6 ...        counts  [2, 3, 6]
    text    |"Hel"|"lo"|" wor"| held back    chunks  ["Hel", "lo", " wor"]
"""

from array import array
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from enum import Enum
from functools import partial
from typing import ClassVar

import msgspec

from ramify.actors.calls.labels import Label, Labels, kind_of, label_bytes, merged
from ramify.actors.kit.memory import LOGPROB, MARK, SEGMENT, TOKEN, Held, Meter
from ramify.protocol.pictures import Picture
from ramify.protocol.saved import SavedRule
from ramify.protocol.wire import ChatMessage, Part, Role, TokenLogprob

Decode = Callable[[Sequence[int]], str]

_BEGINNING = 16  # characters of a content that tell where it begins


class Tail(Enum):
    """How a branch's text ends, which decides what a chat template has to add next.

    RAW: no template has been used (or raw text was appended after a turn).
    PROMPT: the generation prompt was just added; nothing is generated yet.
    OPEN: an assistant's turn without its end (length, cancel, or text put into its mouth).
    EOS: it ends with the sampled end-of-turn token, without what the template adds after it.
    PENDING: a complete turn without its end, which depends on what follows: that stands in a segment of
    its own behind it, which the next turn takes back.
    CLOSED: a complete turn.
    """

    RAW = "raw"
    PROMPT = "prompt"
    OPEN = "open"
    EOS = "eos"
    PENDING = "pending"
    CLOSED = "closed"


class History:
    """The messages of a conversation up to some place: those of `before`, then `messages`.

    The strict template renders turns anew behind a part of the old text. Then the segments of the
    branch no longer say what the messages before were. A history does.
    """

    __slots__ = ("before", "count", "messages")

    def __init__(self, before: "History | None", messages: Sequence[ChatMessage]) -> None:
        self.before = before
        self.messages = tuple(messages)
        self.count: int = len(self.messages) + (before.count if before is not None else 0)

    def all(self) -> list[ChatMessage]:
        """O(messages)."""
        parts = []
        at: History | None = self
        while at is not None:
            parts.append(at.messages)
            at = at.before
        return [message for part in reversed(parts) for message in part]


@dataclass(slots=True, eq=False, repr=False)
class SavedNumber:
    """The number under which a store has a segment, and how many bytes it takes there.

    `gone` gets both when no branch has the segment any more.
    """

    number: int
    _gone: list[tuple[int, int]]
    size: int = 0

    def __del__(self) -> None:
        self._gone.append((self.number, self.size))


class Rule(Held):
    """A constraint that outputs of a session stand under, kept once: all that do so share it.

    An output that was cut, or a fork in its middle, can be continued under it. `saved`: once a store
    has it.
    """

    __slots__ = ("__weakref__", "saved", "what")

    def __init__(self, what: SavedRule) -> None:
        self.what = what
        self.saved: SavedNumber | None = None

    @property
    def size(self) -> int:
        """Bytes that the constraint takes."""
        return SEGMENT + len(self.what.spec.text)


@dataclass(slots=True, eq=False, repr=False)
class InputSegment(Held):
    """A run of tokens at positions [start, start + len(tokens)).

    `tail` and `role`: the state of the branch after this segment. `op`: the op that made it.
    `chat`: rendered by a template; `messages`: the chat turns in it (the strict template renders
    them again); `history`: those before it, where the segments before it do not say.
    `raw`: the text as the template rendered it, which strict mode compares; `text`: as people read it.
    `picture`: what it shows instead of text; such a segment is never cut.
    """

    start: int
    tokens: "array[int]"
    text: str
    _: KW_ONLY
    tail: Tail
    role: Role | None = None
    op: int | None = None
    messages: Sequence[ChatMessage] = ()
    # Appended turns that begin with it, which `rollback turns` counts. Negative: so many begin
    # somewhere inside it, since a template joined them to the turn before.
    turn: int = 0
    raw: str = None  # type: ignore[assignment]  # as `text`, until it is made
    chat: bool = False
    history: History | None = None
    picture: Picture | None = None

    def __post_init__(self) -> None:
        if self.raw is None:
            self.raw = self.text
        self.messages = tuple(self.messages)

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    def count(self, meter: Meter | None) -> None:
        """Let `meter` count the segment from now on: it is complete."""
        size = SEGMENT + TOKEN * len(self.tokens) + len(self.text)
        if self.raw is not self.text:
            size += len(self.raw)
        if self.picture is not None:
            size += len(self.picture.pixels)
        kept = [*self.messages, *(self.history.messages if self.history is not None else ())]
        self.charge(meter, size + sum(SEGMENT + _size(message) for message in kept))

    def cut(self, at: int, decode: Decode) -> "InputSegment":
        """A copy that ends at position `at`, start < at < end."""
        tokens = self.tokens[: at - self.start]
        text = decode(tokens)
        messages = _kept(self.messages, text)
        segment = InputSegment(
            self.start,
            tokens,
            text,
            tail=Tail.OPEN if self.tail is not Tail.RAW else Tail.RAW,
            role=messages[-1].role if messages else self.role,
            op=self.op,
            messages=messages,
            turn=self.turn,
            chat=self.chat,
            history=self.history,
        )
        segment.count(self.meter)
        return segment


@dataclass(slots=True, eq=False, repr=False)
class OutputSegment(Held):
    """What one generation produced (and produces, while it runs).

    `rule`: the constraint that it stands under; the output under it began at position `since`, in this
    segment or in one that it continues. `complete`: it ended by itself, so nothing continues it.
    """

    turn: ClassVar = 0
    messages: ClassVar[tuple[ChatMessage, ...]] = ()
    picture: ClassVar[None] = None
    history: ClassVar[History | None] = None

    start: int
    op: int | None = None
    client: str | None = None  # whose op it was: ids are numbered per client
    cached: int | None = None  # of the prompt, once it has a token; None: nobody knows
    tokens: "array[int]" = field(default_factory=partial(array, "i"))
    counts: list[int] = field(default_factory=list)
    chunks: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    reading: Labels | None = None  # while it runs, where there is something to tell apart
    labels: list[Label] | None = None  # of the chunks, as far as they are known
    spoken: ChatMessage | None = None  # the turn that it ends, where its text cannot say it
    mean: float | None = None  # of all its tokens' log-probabilities, once it has ended
    rule: Rule | None = None
    since: int = field(init=False)
    complete: bool = False
    quiet: bool = False  # its text travels in `done`, if at all, not in deltas
    ended: bool = False
    tail: Tail = Tail.OPEN
    role: Role | None = "assistant"
    lead: int = 0  # characters that its text begins with and that stood on the branch before
    eos_text: str = ""  # the end-of-turn token that was sampled and kept, as the template spells it

    def __post_init__(self) -> None:
        self.since = self.start

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    @property
    def text(self) -> str:
        return "".join(self.chunks)

    @property
    def raw(self) -> str:
        return self.text + self.eos_text

    @property
    def said(self) -> str:
        """The text that it added to the branch, without thoughts where they are labelled."""
        text = self.text[self.lead :]
        if self.labels is None:
            return text
        parts = self.parts(0, len(self.chunks))
        if not any(part.kind == "reasoning" for part in parts):
            return text
        return "".join(part.text for part in parts if part.kind in ("text", "call")).lstrip()

    def release(self, count: int, text: str) -> None:
        """Release tokens up to `count`, with their `text`. Counts only grow.

        An empty chunk still makes a mark, so that a delta can announce the position.
        """
        counts = self.counts
        before = counts[-1] if counts else 0
        if count == before:
            if text:
                raise ValueError(f"text {text!r} without a token at mark {count}")
            return
        self.grow(MARK + TOKEN * (count - before) + len(text))
        counts.append(count)
        self.chunks.append(text)
        if self.reading is not None:
            self._label(self.reading, self.reading.add(text))

    def read(self, reading: Labels) -> None:
        """Begin to label its text: answer, thought or call."""
        self.reading, self.labels = reading, []

    def ends(self) -> None:
        """Note that its text is complete."""
        self.ended = True
        if self.reading is not None:
            self._label(self.reading, self.reading.finish())
            self.reading = None

    def _label(self, reading: Labels, labels: list[Label]) -> None:
        assert self.labels is not None
        self.labels += labels
        self.grow(sum(map(label_bytes, labels)) + reading.grown())

    @property
    def thought(self) -> int:
        """Tokens of thoughts, as far as it is labelled."""
        total = before = 0
        for count, label in zip(self.counts, self.labels or (), strict=False):
            if kind_of(label) == "reasoning":
                total += count - before
            before = count
        return total

    @property
    def labelled(self) -> int:
        """How many chunks have their label, so that they can be sent as parts."""
        return len(self.chunks) if self.labels is None else len(self.labels)

    def parts(self, first: int, last: int) -> list[Part]:
        """The parts of the chunks from `first` to `last`."""
        plain: list[Label] = ["text"]
        labels = plain * (last - first) if self.labels is None else self.labels[first:last]
        return merged(labels, self.chunks[first:last])

    @property
    def released(self) -> int:
        """The position up to which text has been released."""
        return self.start + (self.counts[-1] if self.counts else 0)

    def mark_at(self, position: int) -> int:
        """How many chunks lie wholly before `position`: a delta from there begins with the next one."""
        return bisect_right(self.counts, position - self.start)

    def mark_position(self, mark: int) -> int:
        """The position after `mark` chunks."""
        return self.start + (self.counts[mark - 1] if mark else 0)

    def offset_mark(self, chars: int) -> int:
        """The largest number of chunks whose text is at most `chars` characters long."""
        total = 0
        for i, chunk in enumerate(self.chunks):
            total += len(chunk)
            if total > chars:
                return i
        return len(self.chunks)

    def cut(self, at: int, decode: Decode) -> "OutputSegment":
        """A copy that ends at position `at`, start < at < end. Its tokens are complete."""
        segment = OutputSegment(self.start, op=self.op, client=self.client)
        segment.tokens = self.tokens[: at - self.start]
        mark = self.mark_at(at)
        segment.counts = self.counts[:mark]
        segment.chunks = self.chunks[:mark]
        marks = MARK * mark + sum(map(len, segment.chunks))
        segment.charge(self.meter, SEGMENT + TOKEN * len(segment.tokens) + marks)
        shown = segment.counts[-1] if mark else 0
        labels = self.labels
        if labels is not None:
            segment.labels = labels[:mark]
            while len(segment.labels) < mark:
                segment.labels.append("text")
            if shown < len(segment.tokens):  # a part of a chunk has its first part's kind
                segment.labels.append(kind_of(labels[mark]) if mark < len(labels) else "text")
            segment.grow(sum(map(label_bytes, segment.labels)))
        if shown < len(segment.tokens):
            segment.release(len(segment.tokens), decode(segment.tokens[shown:]))
        if self.logprobs is not None:
            segment.logprobs = self.logprobs[: len(segment.tokens)]
            segment.grow(LOGPROB * sum(1 + len(each.top) for each in segment.logprobs))
        segment.quiet, segment.lead = self.quiet, self.lead
        segment.rule, segment.since = self.rule, self.since
        segment.ended = True
        if self.tail is Tail.RAW:  # no turn was open
            segment.tail, segment.role = Tail.RAW, self.role
        return segment


Segment = InputSegment | OutputSegment


def _size(message: ChatMessage) -> int:
    return len(message.content) + len(message.reasoning or "")


def _kept(messages: Sequence[ChatMessage], text: str) -> list[ChatMessage]:
    """The messages that `text`, the beginning of their rendering, shows; the last one so far."""
    kept: list[ChatMessage] = []
    at = 0
    for message in messages:
        content = message.content.strip()  # templates may trim it
        found = text.find(content, at)
        if found < 0:
            begin = text.find(content[:_BEGINNING], at)
            if begin >= 0 and content.startswith(text[begin:]):
                kept.append(msgspec.structs.replace(message, content=text[begin:], tool_calls=None))
            break
        kept.append(message)
        at = found + len(content)
    return kept
