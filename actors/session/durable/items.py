"""Branches, segments and constraints as the items of a store, and what encoding them costs. Pure."""

from collections.abc import Callable, Iterable
from typing import Any

from ramify.actors.session.branches.branch import Branch, Label, Link
from ramify.actors.session.branches.segments import InputSegment, OutputSegment, Rule
from ramify.actors.session.branches.state import SAVED
from ramify.protocol.errors import RamifyError
from ramify.protocol.plan import pack
from ramify.protocol.sampling import TokenLogprobs
from ramify.protocol.saved import (
    SavedBranch,
    SavedError,
    SavedInput,
    SavedLabel,
    SavedOutput,
)
from ramify.protocol.wire import TokenLogprob

HANDLE = (1 << 32) - 1
ENCODED, MESSAGE = 500, 2  # bytes that are encoded in a microsecond; what a chat message takes


def encoding_cost(segment: InputSegment | OutputSegment) -> int:
    """What it costs to encode a complete segment (see `Work`)."""
    if isinstance(segment, OutputSegment):
        return SAVED * len(segment.tokens) // ENCODED
    size = len(segment.text) + 4 * len(segment.tokens)
    return size // ENCODED + len(segment.messages) * MESSAGE


def unsaved(branch: Branch) -> list[Link]:
    """The branch's segments that have no number yet, in order."""
    found: list[Link] = []
    link = branch.segments.top
    while link is not None and link.saved is None:
        found.append(link)
        link = link.before
    return found[::-1]


def reply_key(client: str, ident: int) -> str:
    """The item with the replies to an op."""
    return f"r{ident}:{client}"


def saved_error(error: RamifyError) -> SavedError:
    """What `replies.error_of` makes an error of again."""
    return SavedError(error.code, error.message, error.retry_ms, error.details)


def saved_branches(
    branches: Iterable[Branch], top: Callable[[Branch], int]
) -> tuple[list[SavedBranch], list[SavedLabel]]:
    """The branches and the table of their labels. `top(branch)`: the number of its last segment."""
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


def number_of(link: Link | None) -> int:
    """As the store knows the segment; 0: there is none."""
    return 0 if link is None or link.saved is None else link.saved.number


def rule_of(link: Link) -> Rule | None:
    """The constraint that the record of the segment names. Of one that is written the op tells it."""
    segment = link.segment
    return segment.rule if isinstance(segment, OutputSegment) and segment.ended else None


def rule_number(rule: Rule | None) -> int:
    """As the store knows the constraint; 0: there is none."""
    return 0 if rule is None or rule.saved is None else rule.saved.number


def saved_segment(
    link: Link,
    number: Callable[[Link | None], int] = number_of,
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
    link: Link, segment: InputSegment, number: Callable[[Link | None], int]
) -> tuple[int, Any] | None:
    """The segment whose history comes before its own, and what its own adds."""
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
