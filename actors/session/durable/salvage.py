"""What is left of a saved session some of whose segments are missing or damaged. Pure.

A branch is cut back to the last segment before its gap. Which one that is, the missing segment alone
knew; two things tell it. A branch has what its parent had where it was forked off, and what its
children have up to where they were. And a segment that no other one follows, on which no branch ends,
was followed by the missing one, where only one is missing and only one stands so. Where nothing tells
it, the branch is empty: less than it was, never another one's text.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import msgspec

from ramify.actors.kit.turns import Steps
from ramify.actors.session.durable.exports import DECODING, Checked, Unsound, saved_tools
from ramify.protocol.saved import (
    SavedBranch,
    SavedFrame,
    SavedHead,
    SavedOp,
    SavedOutput,
    SavedSegment,
)
from ramify.protocol.wire import ServerMessage

READ = 64  # bytes of replies and ops that are read in a microsecond


def salvaged(items: Mapping[str, bytes], head: SavedHead, checked: Checked) -> Steps[SavedHead]:
    """Return `head` itself if all segments of its branches are sound; else what of it is sound, without
    ops and replies. All segments that its branches need are in `checked.records`.
    """
    gaps: dict[int, _Gap] = {}  # by a branch's place
    for place, branch in enumerate(head.branches):
        try:
            yield from checked.reading(branch.top, f"head.branches[{place}]")
        except Unsound:
            gaps[place] = _gap(branch.top, checked)
    yield sum(len(body) for key, body in items.items() if key[:1] in "roft") // READ
    if not gaps and _readable(items, head):
        return head
    yield DECODING * len(items)
    return _Salvage(items, head, checked, gaps).head()


def _readable(items: Mapping[str, bytes], head: SavedHead) -> bool:
    """Whether replies, ops that wait and clients' tools can be read."""
    try:
        for key, body in items.items():
            if key[:1] == "r":
                int(key[1:].partition(":")[0])
                msgspec.msgpack.decode(body, type=list[ServerMessage])
        for wait in head.waits:
            op = msgspec.msgpack.decode(items[f"o{wait.number}"], type=SavedOp)
            msgspec.msgpack.decode(items[f"f{op.frame}"], type=SavedFrame)
        for number in {head.tools, *(client.tools for client in head.clients)} - {0}:
            saved_tools(items, number)
    except (KeyError, ValueError, msgspec.MsgspecError, Unsound):
        return False
    return True


class _Gap(NamedTuple):
    """Why a branch is not whole. `missing`: the segment that is not sound; 0: a sound one, `below`,
    does not fit what follows. `start`: where that begins.
    """

    missing: int
    start: int
    below: int


def _gap(top: int, checked: Checked) -> _Gap:
    number, start = top, 1 << 31
    while number in checked.records and number not in checked.segments:
        record = checked.records[number]
        number, start = record.before, record.start
    return _Gap(0, start, number) if number in checked.segments else _Gap(number, start, 0)


class _Salvage:
    def __init__(
        self,
        items: Mapping[str, bytes],
        head: SavedHead,
        checked: Checked,
        gaps: dict[int, _Gap],
    ) -> None:
        self._head = head
        self._checked = checked
        self._gaps = gaps
        self._orphan = self._only_orphan(items)

    def head(self) -> SavedHead:
        head = self._head
        return msgspec.structs.replace(
            head,
            branches=[self._branch(place) for place in range(len(head.branches))],
            clients=[],
            waits=[],
            failed={},
            tools=0,
        )

    def _branch(self, place: int) -> SavedBranch:
        branch, top = self._head.branches[place], self._head.branches[place].top
        if place in self._gaps:
            start = self._gaps[place].start
            fits = [each for each in self._candidates(place) if self._checked.segments[each] <= start]
            top = max(fits, key=self._checked.segments.__getitem__, default=0)
        while top and not _complete(self._checked.records[top]):
            top = self._checked.records[top].before  # it was being written, and nobody goes on with it
        end = self._checked.segments[top]
        return msgspec.structs.replace(
            branch,
            top=top,
            own=min(branch.own, end),
            cuts=[cut for cut in branch.cuts if cut[1] <= end],
            reason=branch.reason if top == branch.top else None,
        )

    def _candidates(self, place: int) -> Iterator[int]:
        """Find segments that the branch had before its gap."""
        branch, gap = self._head.branches[place], self._gaps[place]
        if not gap.missing:
            yield gap.below
            return
        for other, each in enumerate(self._head.branches):
            if other not in self._gaps and each.label == branch.of:
                yield from self._chain(each.top, branch.at)
            if other not in self._gaps and each.of == branch.label:
                yield from self._chain(each.top, each.at)
        if self._orphan is not None:
            yield self._orphan

    def _chain(self, top: int, upto: int) -> Iterator[int]:
        """Find the last segment of a sound branch that ends at `upto` or before."""
        while top and self._checked.segments[top] > upto:
            top = self._checked.records[top].before
        if top:
            yield top

    def _only_orphan(self, items: Mapping[str, bytes]) -> int | None:
        """Find the one segment that no other follows, if there is one. See the module docstring."""
        if len({gap.missing for gap in self._gaps.values()}) != 1:
            return None
        missing = next(iter(self._gaps.values())).missing
        followed = {branch.top for branch in self._head.branches}
        sound: list[int] = []
        for key in items:
            if key[:1] != "s" or not key[1:].isdecimal():
                continue
            number = int(key[1:])
            try:
                self._checked.end(number, key)
            except Unsound:
                record = self._checked.records.get(number)
            else:
                sound.append(number)
                record = self._checked.records[number] if number else None
            if record is not None:
                followed.add(record.before)
        orphans = [number for number in sound if number not in followed and number < missing]
        return orphans[0] if len(orphans) == 1 else None


def _complete(record: SavedSegment) -> bool:
    return record.ended if isinstance(record, SavedOutput) else True
