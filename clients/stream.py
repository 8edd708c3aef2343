"""A sent op and the text it brings back: `Ticket` and `Stream`. Pure state of the client core.

A ticket is one op with the branches that still owe a terminal reply. A generation's ticket has a
stream for each of its branches. This file does not know frames, connections or tasks.

Text is kept as parts, one for each delta: after part i the branch is `parts[i].position` tokens
long. Servers start and end deltas where text and tokens agree, and no delta spans two
generations, so cutting between parts is exact.

    branch    |---- prompt ----| gen 5                | input | gen 7
    positions                  24     30        41    43      60      66
    parts of stream 5          |"Paris"|" is the"|    |  stream 7: |"Yes"|
"""

from typing import NamedTuple

from ramify.protocol.errors import RamifyError
from ramify.protocol.wire import (
    Append,
    Delta,
    Done,
    Drop,
    Generate,
    Ok,
    Op,
    Select,
    StateReply,
    TokenLogprob,
    names,
)
from ramify.protocol.wire import Part as Kind

UNSENT = 0  # an op's id until it is sent


class StreamPart(NamedTuple):
    """Text up to `position` (absolute, in tokens)."""

    position: int
    text: str
    tokens: list[int] | None = None
    logprobs: list[TokenLogprob] | None = None
    kinds: list[Kind] | None = None


class TextDelta(NamedTuple):
    """New text of a generation, everything since the last read.

    `cut`: how many characters of what was read before are taken back first. It is 0 but after
    another client rolled the branch back, or after a server died that had not saved them. `tokens`,
    `logprobs`: where asked for. `parts`: what the text is (answer, reasoning, call), where the session
    was opened with `parts=True`.
    """

    branch: str
    position: int
    text: str
    tokens: list[int] | None = None
    logprobs: list[TokenLogprob] | None = None
    cut: int = 0
    parts: list[Kind] | None = None


class Stream:
    """The text of one generation on one branch."""

    __slots__ = ("branch", "cut", "done", "error", "held", "parts", "start", "taken")

    def __init__(self, branch: str) -> None:
        self.branch = branch
        self.start = 0  # deltas up to here are an earlier generation's
        self.parts: list[StreamPart] = []
        self.taken = 0  # parts that the consumer has read
        self.cut = 0  # characters the consumer has to take back
        self.held = False  # after a resume: whose text the parts are is not settled yet
        self.done: Done | None = None
        self.error: RamifyError | None = None

    @property
    def settled(self) -> bool:
        return self.done is not None or self.error is not None

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.parts)

    @property
    def end(self) -> int:
        """The position its text reaches; 0 before the first delta."""
        return self.parts[-1].position if self.parts else 0

    def add(self, delta: Delta) -> None:
        if delta.truncate is not None:
            self.cut_back(delta.truncate)
        if delta.position > self.start:
            self.parts.append(
                StreamPart(delta.position, delta.text, delta.tokens, delta.logprobs, delta.parts)
            )

    def begin_at(self, start: int) -> None:
        """Note that the generation starts at position `start`: what came before is not its text."""
        self.start = start
        early = sum(part.position <= start for part in self.parts)
        if early:
            self.cut += sum(len(part.text) for part in self.parts[: self.taken])
            self.taken = 0  # the reader starts over
            del self.parts[:early]

    def cut_back(self, to: int) -> list[StreamPart]:
        """Take off the parts that end after position `to`, and return them."""
        kept = len(self.parts)
        while kept and self.parts[kept - 1].position > to:
            kept -= 1
        over = self.parts[kept:]
        self.cut += sum(len(part.text) for part in self.parts[kept : self.taken])
        self.taken = min(self.taken, kept)
        del self.parts[kept:]
        return over

    def finish(self, done: Done, text: str | None) -> list[StreamPart]:
        """Note that the generation ended. Returns parts past its end: text of a later generation.

        `text`, where the server sent it, is the whole text and replaces what the deltas gave.
        """
        over = self.cut_back(done.position)
        self.begin_at(done.usage.prompt)
        self.done = done
        self.held = False
        if text is not None and text != self.text:
            read = "".join(part.text for part in self.parts[: self.taken])
            tokens = [token for part in self.parts for token in part.tokens or ()]
            logprobs = [entry for part in self.parts for entry in part.logprobs or ()]
            common = len(read) if text.startswith(read) else 0
            self.cut += len(read) - common
            rest = StreamPart(done.position, text[common:], tokens or None, logprobs or None)
            self.parts = [StreamPart(done.position, text[:common]), rest] if common else [rest]
            self.taken = 1 if common else 0
        return over

    def fail(self, error: RamifyError) -> None:
        self.error = error

    def take(self) -> TextDelta | None:
        """Take everything that has not been read, as one delta; None if there is nothing new."""
        if self.held or (self.taken == len(self.parts) and not self.cut):
            return None
        fresh, cut = self.parts[self.taken :], self.cut
        self.taken, self.cut = len(self.parts), 0
        position = self.end
        if len(fresh) == 1:
            only = fresh[0]
            return TextDelta(
                self.branch, position, only.text, only.tokens, only.logprobs, cut, only.kinds
            )
        return TextDelta(
            self.branch,
            position,
            "".join(part.text for part in fresh),
            [token for part in fresh for token in part.tokens or ()] or None,
            [entry for part in fresh for entry in part.logprobs or ()] or None,
            cut,
            [kind for part in fresh for kind in part.kinds or ()] or None,
        )


class Ticket:
    """An op on its way: without an id until it is sent, settled when every reply is in.

    `replies`: `ok`, `done` and `state` messages as they came; `error`: the first error.
    `frame`: the tickets it was submitted with. `waiting`: branches that owe a terminal reply,
    `{None}` for ops that are answered once.
    """

    __slots__ = ("error", "frame", "id", "op", "replies", "resumed", "streams", "waiting")

    def __init__(self, op: Op, frame: "list[Ticket]") -> None:
        self.op = op
        self.frame = frame
        self.id: int | None = None
        self.resumed = False  # a connection was lost while it was under way
        self.replies: list[Ok | Done | StateReply] = []
        self.error: RamifyError | None = None
        branches = answering_branches(op)
        self.waiting: set[str | None] = {*branches} if branches else {None}
        self.streams: dict[str, Stream] = {}
        if isinstance(op, Generate | Select):
            self.streams = {name: Stream(name) for name in branches}

    @property
    def settled(self) -> bool:
        return not self.waiting

    def owes(self, branch: str | None) -> bool:
        """Whether a reply that names `branch` is the first one for it. For tickets that wait."""
        return branch is None or self.waiting == {None} or branch in self.waiting

    def settle(self, branch: str | None) -> None:
        """Note the reply for `branch` (None: for all that are left)."""
        if branch is None or self.waiting == {None}:
            self.waiting.clear()
        else:
            self.waiting.discard(branch)

    def fail(self, error: RamifyError, branch: str | None = None) -> None:
        """Note that the op failed on `branch` (None: on all that are left)."""
        self.error = self.error or error
        for name, stream in self.streams.items():
            if branch in (None, name) and not stream.settled:
                stream.fail(error)
        self.settle(branch)


def answering_branches(op: Op) -> list[str]:
    """Find the branches that each get a terminal reply; [] for ops that are answered once."""
    match op:
        case Generate():
            return op.as_ or names(op.branch)
        case Append() | Select() | Drop():
            return names(op.branch)
    return []
