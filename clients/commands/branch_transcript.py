"""A branch as chat messages: read from a `tree` or a file, written to a file.

A conversation can be saved, loaded, and built again on a server that has lost it. Knows no sessions.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from ramify.protocol.errors import BadRequest
from ramify.protocol.pictures import MARK
from ramify.protocol.wire import Append, ChatMessage, Op, Rollback, SegmentState


class Attached(NamedTuple):
    """A picture: the name of its file, and the file."""

    name: str
    data: bytes


class Entry(NamedTuple):
    """A message, and the position at which it (or the append it was part of) starts.

    `pictures`: those of its marks, as far as they are known here.
    """

    message: ChatMessage
    start: int
    pictures: tuple[Attached, ...] = ()

    @property
    def named(self) -> ChatMessage:
        """The message with the names of pictures in their places."""
        first, *rest = self.message.content.split(MARK)
        names = [f": {each.name}" for each in self.pictures] + [""] * len(rest)
        told = [f"[picture{name}]{text}" for name, text in zip(names, rest, strict=False)]
        return msgspec.structs.replace(self.message, content="".join([first, *told]))


class BranchTranscript:
    """The messages of a branch. `raw`: some of its text is no message, such as raw input."""

    def __init__(self, entries: Iterable[Entry] = (), *, raw: bool = False) -> None:
        self.entries = list(entries)
        self.raw = raw

    @property
    def messages(self) -> list[ChatMessage]:
        return [entry.named for entry in self.entries]

    def add(self, role: Any, content: str, start: int, pictures: Sequence[Attached] = ()) -> None:
        message = ChatMessage(role=role, content=MARK * len(pictures) + content)
        self.entries.append(Entry(message, start, tuple(pictures)))

    def recall(self, before: "BranchTranscript") -> None:
        """Take over the pictures of the same messages, in order, of which a server tells no files."""
        known = [entry for entry in before.entries if entry.pictures]
        for at, entry in enumerate(self.entries):
            if MARK in entry.message.content:
                same = [each for each in known if each.message.content == entry.message.content]
                for found in same[:1]:
                    known.remove(found)
                    self.entries[at] = entry._replace(pictures=found.pictures)

    def cut(self, to: int) -> None:
        """Drop what lies behind position `to`, to which the branch was moved back."""
        self.entries = [entry for entry in self.entries if entry.start < to]

    def copy(self) -> "BranchTranscript":
        return BranchTranscript(self.entries, raw=self.raw)


def of_turns(turns: Sequence[SegmentState]) -> BranchTranscript:
    """Read the messages that `tree` with text shows."""
    found = BranchTranscript()
    for i, turn in enumerate(turns):
        if turn.messages:
            found.entries += [Entry(message, turn.start) for message in turn.messages]
        elif is_prompt(turns, i) or not turn.text or _goes_on(turns, i):
            continue
        elif turn.role != "assistant":
            found.raw = True
        elif found.entries and found.entries[-1].message.role == "assistant" and not _answers(turns, i):
            last, start, _ = found.entries.pop()  # a turn that went on
            found.add("assistant", last.content + turn.text, start)
        else:
            found.add("assistant", turn.text, turn.start)
    return found


def is_prompt(turns: Sequence[SegmentState], i: int) -> bool:
    """Whether turn `i` is what the template puts before an answer: made by the append before it."""
    turn = turns[i]
    if turn.kind != "input" or turn.messages or turn.role != "assistant" or i == 0:
        return False
    first = next(j for j in reversed(range(i)) if not _goes_on(turns, j))
    return bool(turns[first].messages) and turns[first].op == turn.op


def _goes_on(turns: Sequence[SegmentState], i: int) -> bool:
    """Whether turn `i` is a piece of the message before it, which has pictures."""
    turn, before = turns[i], turns[i - 1]
    same = i > 0 and turn.op == before.op and turn.kind == before.kind == "input"
    return same and not turn.messages and turn.role == before.role


def _answers(turns: Sequence[SegmentState], i: int) -> bool:
    """Whether turn `i` is the first text after a generation prompt."""
    return i > 0 and is_prompt(turns, i - 1)


def groups(messages: Sequence[ChatMessage]) -> list[list[ChatMessage]]:
    """Group messages as they are appended: an answer with what it answers; `/undo` takes both."""
    found: list[list[ChatMessage]] = []
    for message in messages:
        if message.role == "assistant" and found and found[-1][-1].role in ("user", "assistant", "tool"):
            found[-1].append(message)
        else:
            found.append([message])
    return found


def appends(branch: str, entries: Sequence[Entry]) -> list[Append]:
    """Make the ops that say them again; a picture whose file is not known is named."""
    told = [each.message if each.pictures else each.named for each in entries]
    files, made = [each.data for entry in entries for each in entry.pictures], list[Append]()
    for group in groups(told):
        count = sum(message.content.count(MARK) for message in group)
        shown, files = files[:count], files[count:]
        made.append(Append(id=0, branch=branch, messages=group, images=shown))
    return made


def write(path: Path, model: str | None, branch: str, messages: Sequence[ChatMessage]) -> None:
    """Write a branch's messages to a file. Raises BadRequest."""
    record = {"model": model, "branch": branch, "messages": msgspec.to_builtins(list(messages))}
    try:
        path.write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise BadRequest(f"cannot save {path}: {error.strerror}") from None


def read(path: Path) -> list[ChatMessage]:
    """Read the messages in a file of `write`, or in a plain list. Raises BadRequest."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadRequest(f"cannot load {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"cannot load {path}: it is not JSON: {error}") from None
    messages = record.get("messages") if isinstance(record, dict) else record
    try:
        found = msgspec.convert(messages, list[ChatMessage])
    except msgspec.ValidationError as error:
        raise BadRequest(f"cannot load {path}: `messages` is not a list of messages: {error}") from None
    if not found:
        raise BadRequest(f"cannot load {path}: it holds no messages")
    return found


def before_answer(branch: str, turns: Sequence[SegmentState]) -> list[Op]:
    """Make the ops that bring a branch back to where its last answer begins. Raises BadRequest."""
    end = turns[-1].end if turns else 0
    for i in reversed(range(len(turns))):
        turn = turns[i]
        if is_prompt(turns, i):
            return [Rollback(id=0, branch=branch, to=turn.end)] if turn.end < end else []
        if turn.messages:  # answers that were appended, not generated
            kept = list(turn.messages)
            while kept and kept[-1].role == "assistant":
                kept.pop()
            if not kept or kept[-1].role == "system":
                break
            again = Append(id=0, branch=branch, messages=kept)
            return [Rollback(id=0, branch=branch, to=turn.start), again]
    raise BadRequest("there is no message to answer on this branch")
