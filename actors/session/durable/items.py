"""Branches, segments, constraints and ops as the items of a store, and what encoding costs. Pure."""

from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from ramify.actors.session.branches.branch import Label, SegmentLink, SessionBranch
from ramify.actors.session.branches.segments import InputSegment, OutputSegment, Rule, SavedNumber
from ramify.actors.session.branches.state import SAVED, SessionState
from ramify.actors.session.branches.tasks import FrameRun, Task
from ramify.protocol.errors import RamifyError
from ramify.protocol.plan import pack
from ramify.protocol.sampling import TokenLogprobs
from ramify.protocol.saved import (
    EXPORT,
    FORMAT,
    HEAD,
    Exported,
    SavedBranch,
    SavedError,
    SavedFrame,
    SavedHead,
    SavedInput,
    SavedLabel,
    SavedOp,
    SavedOutput,
    SavedRun,
    SavedWait,
    without_key,
)
from ramify.protocol.wire import Op, TokenLogprob

HANDLE = (1 << 32) - 1
ENCODED, MESSAGE = 500, 2  # bytes that are encoded in a microsecond; what a chat message takes


_encode = msgspec.msgpack.Encoder().encode


class StoreDelta:
    """What a store is to write and to drop next. `size`: bytes of all that it has then."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget all that was noted."""
        self.put: dict[str, bytes] = {}
        self.drop: list[str] = []
        self.size = 0

    def take(self) -> tuple[dict[str, bytes], list[str]]:
        """Take both, which the store is told now."""
        told = self.put, self.drop
        self.put, self.drop = {}, []
        return told

    def write(self, key: str, body: bytes, before: int = 0) -> int:
        """Note an item to write. `before`: the bytes that the store has of it. Returns its bytes now."""
        self.put[key] = body
        self.size += len(body) - before
        return len(body)

    def remove(self, key: str, size: int) -> None:
        if self.put.pop(key, None) is None:  # else it has gone before the store heard of it
            self.drop.append(key)
        self.size -= size


class Numbering:
    """Numbers of segments ("s"), constraints ("c") or tools ("t"). `gone`: those that are gone."""

    def __init__(self, letter: str) -> None:
        self.letter = letter
        self.count = 0
        self.gone: list[tuple[int, int]] = []  # number, bytes

    def new(self) -> SavedNumber:
        """Make the next number."""
        self.count += 1
        return SavedNumber(self.count, self.gone)

    def forget(self, items: StoreDelta) -> list[int]:
        """Drop the items of those that have gone."""
        gone, self.gone[:] = list(self.gone), []
        for number, size in gone:
            items.remove(f"{self.letter}{number}", size)
        return [number for number, _ in gone]


class OpItems:
    """Ops that wait or run, and their frames. `count`: those that were numbered."""

    def __init__(self, items: StoreDelta) -> None:
        self.count = 0
        self._items = items
        self.clear()

    def clear(self) -> None:
        """Forget all numbers: the store has none of these items."""
        self._ops: dict[int, tuple[int, int, Op]] = {}  # by id(): number, bytes
        self._frames: dict[int, tuple[int, int, FrameRun]] = {}

    def collect(
        self, tasks: list[Task], now: float, wall: float, runs: Callable[[Task], Iterable[SavedRun]]
    ) -> tuple[list[SavedWait], dict[int, dict[str, SavedError | None]]]:
        """Make items of the ops that wait. Returns them, and where ops of each frame failed, by branch.

        `runs(task)`: what its generation has done. `now`, `wall`: see `Recorder.collect`.
        """
        left: dict[int, list[Task]] = {}
        for task in tasks:
            left.setdefault(id(task.op), []).append(task)
        before, self._ops = self._ops, {}
        frames, self._frames = self._frames, {}
        waits: list[SavedWait] = []
        failed: dict[int, dict[str, SavedError | None]] = {}
        for tasks in left.values():
            first = tasks[0]
            frame = self._frames.get(id(first.frame)) or frames.get(id(first.frame))
            if frame is None:
                self.count += 1
                body = _encode(SavedFrame(first.frame.client, without_key(first.frame.opened)))
                frame = self.count, self._items.write(f"f{self.count}", body), first.frame
            self._frames[id(first.frame)] = frame
            if first.frame.failed:
                failed[frame[0]] = {
                    name: None if error is None else saved_error(error)
                    for name, error in first.frame.failed.items()
                }
            known = before.get(id(first.op))
            if known is None:
                self.count += 1
                arrived = wall - (now - first.arrived)
                body = _encode(SavedOp(frame[0], arrived, first.op))  # type: ignore[arg-type]
                known = self.count, self._items.write(f"o{self.count}", body), first.op
            self._ops[id(first.op)] = known
            begun = [run for task in tasks for run in runs(task)]
            waits.append(SavedWait(known[0], [task.place for task in tasks], begun))
        for key, (number, size, _) in before.items():
            if key not in self._ops:
                self._items.remove(f"o{number}", size)
        for key, (number, size, _) in frames.items():
            if key not in self._frames:
                self._items.remove(f"f{number}", size)
        return waits, failed


def encoding_cost(segment: InputSegment | OutputSegment) -> int:
    """The cost of encoding a complete segment (see `Work`)."""
    if isinstance(segment, OutputSegment):
        return SAVED * len(segment.tokens) // ENCODED
    size = len(segment.text) + 4 * len(segment.tokens)
    size += 0 if segment.picture is None else len(segment.picture.pixels)
    return size // ENCODED + len(segment.messages) * MESSAGE


def unsaved(branch: SessionBranch) -> list[SegmentLink]:
    """Find the branch's segments that have no number yet, in order."""
    found: list[SegmentLink] = []
    link = branch.segments.top
    while link is not None and link.saved is None:
        found.append(link)
        link = link.before
    return found[::-1]


def reply_key(client: str, ident: int) -> str:
    """The key of the item with the replies to an op."""
    return f"r{ident}:{client}"


def saved_error(error: RamifyError) -> SavedError:
    """Encode an error; `publisher.error_of` makes it again."""
    return SavedError(error.code, error.message, error.retry_ms, error.details)


def saved_branches(
    branches: Iterable[SessionBranch], top: Callable[[SessionBranch], int]
) -> tuple[list[SavedBranch], list[SavedLabel]]:
    """Make the records of branches and of their labels. `top(branch)`: its last segment's number."""
    places: dict[int, int] = {}
    labels: list[Label] = []

    def place(label: Label | None) -> int:
        if label is None:
            return -1
        found = places.get(id(label))
        if found is None:
            label.ancestor()  # so that dropped ones between are left out
            found = places[id(label)] = len(labels)
            labels.append(label)
        return found

    saved = [
        SavedBranch(
            handle=branch.handle & HANDLE,
            top=top(branch),
            label=place(branch.label),
            of=place(branch.of),
            at=branch.at,
            own=branch.own,
            born=branch.born,
            cuts=branch.cuts,
            retain_s=branch.retain_s,
            meta=branch.meta,
            reason=branch.reason,
            persist=branch.persist,
            usage=branch.usage,
        )
        for branch in branches
    ]
    at = 0
    table: list[SavedLabel] = []
    while at < len(labels):  # `place` adds those above
        label = labels[at]
        table.append(SavedLabel(label.name, place(label.above), label.gone))
        at += 1
    return saved, table


def number_of(link: SegmentLink | None) -> int:
    """The number under which the store has the segment; 0: there is none."""
    return 0 if link is None or link.saved is None else link.saved.number


def rule_of(link: SegmentLink) -> Rule | None:
    """The constraint that the segment's record names. While it is written, the op's record does."""
    segment = link.segment
    return segment.rule if isinstance(segment, OutputSegment) and segment.ended else None


def rule_number(rule: Rule | None) -> int:
    """The number under which the store has the constraint; 0: there is none."""
    return 0 if rule is None or rule.saved is None else rule.saved.number


def saved_segment(
    link: SegmentLink,
    number: Callable[[SegmentLink | None], int] = number_of,
    numbered: Callable[[Rule | None], int] = rule_number,
) -> SavedInput | SavedOutput:
    """The record of a segment. `number(link)`: that of another one; `numbered(rule)`: of its
    constraint; 0: of none.
    """
    segment, before = link.segment, number(link.before)
    if isinstance(segment, InputSegment):
        return SavedInput(
            before=before,
            start=segment.start,
            tokens=pack(segment.tokens),
            text=segment.text,
            raw=None if segment.raw is segment.text else segment.raw,
            tail=segment.tail.value,
            role=segment.role,
            op=segment.op,
            messages=list(segment.messages),
            turn=segment.turn,
            chat=segment.chat,
            history=_history(link, segment, number),
            picture=segment.picture,
        )
    ended = segment.ended
    return SavedOutput(
        before=before,
        start=segment.start,
        tokens=pack(segment.tokens),
        ended=ended,
        counts=segment.counts if ended else [],
        sizes=[len(chunk) for chunk in segment.chunks] if ended else [],
        text=segment.text if ended else "",
        labels=_labels(segment) if ended else None,
        logprobs=_logprobs(segment.logprobs),
        spoken=segment.spoken,
        mean=segment.mean,
        op=segment.op,
        client=segment.client,
        quiet=segment.quiet,
        tail=segment.tail.value,
        role=segment.role,
        lead=segment.lead,
        eos_text=segment.eos_text,
        rule=numbered(rule_of(link)),
        since=segment.since,
        complete=segment.complete,
    )


def _history(
    link: SegmentLink, segment: InputSegment, number: Callable[[SegmentLink | None], int]
) -> tuple[int, Any] | None:
    """Find the segment whose history comes before this one's, and what this one adds."""
    history = segment.history
    if history is None:
        return None
    if history.before is None:
        return 0, list(history.messages)
    at = link.history
    while at is not None:
        if at.segment.history is history.before:
            return number(at), list(history.messages)
        at = at.history
    return 0, history.all()


def _labels(segment: OutputSegment) -> Any:
    if segment.labels is None:
        return None
    return [list(label) if isinstance(label, tuple) else label for label in segment.labels]


def _logprobs(entries: list[TokenLogprob] | None) -> list[TokenLogprobs] | None:
    if entries is None:
        return None
    return [
        TokenLogprobs(each.logprob, [t for t, _ in each.top], [p for _, p in each.top])
        for each in entries
    ]


def fresh_head(**fields: Any) -> SavedHead:
    """Make the head of a session that nobody has opened."""
    return SavedHead(
        format=FORMAT, revision=1, lives=[], ttl_s=None, clients=[], waits=[], failed={}, **fields
    )


def exported(state: SessionState) -> bytes:
    """Write a session as a file (`saved.Exported`), while no op of it waits or runs."""
    items: dict[str, bytes] = {}
    numbers: dict[int, int] = {}
    rules: dict[int, int] = {}

    def number(link: SegmentLink | None) -> int:
        return 0 if link is None else numbers.get(id(link), 0)

    def numbered(rule: Rule | None) -> int:
        if rule is None:
            return 0
        if id(rule) not in rules:
            rules[id(rule)] = len(rules) + 1
            items[f"c{len(rules)}"] = _encode(rule.what)
        return rules[id(rule)]

    for branch in state.branches.values():
        new: list[SegmentLink] = []
        link = branch.segments.top
        while link is not None and id(link) not in numbers:
            new.append(link)
            link = link.before
        for each in reversed(new):
            numbers[id(each)] = len(numbers) + 1
            items[f"s{len(numbers)}"] = _encode(saved_segment(each, number, numbered))
    branches, labels = saved_branches(
        state.branches.values(), lambda branch: number(branch.segments.top)
    )
    head = fresh_head(
        session="",
        key=b"",
        view_key=b"",
        owner="",
        namespace="",
        priority=0,
        displaceable=False,
        model=state.model,
        handles=state.handles,
        segments=len(numbers),
        created=0.0,
        persist=state.persist,
        meta=state.meta,
        branches=branches,
        labels=labels,
    )
    items[HEAD] = _encode(head)
    return _encode(Exported(EXPORT, FORMAT, "", "", items))
