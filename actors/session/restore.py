"""Makes a session again of the items that a store has of it. Pure.

Text and positions are as they were saved. A generation that ran goes on behind its last saved token; ops
that waited run in their order. What came after the last save is lost: a client that has seen it hears
`truncate` when it resumes. Where a segment is missing, or damaged, the session is what came before it
(`salvage.py`), without ops and replies, and its clients hear `lost`.
"""

from array import array
from collections.abc import Mapping
from typing import Any

import msgspec

from ramify.actors.calls.labels import label_bytes
from ramify.actors.calls.toolbox import Toolbox
from ramify.actors.kit.log import get_log
from ramify.actors.kit.memory import BRANCH, LOGPROB, MARK, SEGMENT, TOKEN, Meter
from ramify.actors.kit.turns import Steps
from ramify.actors.session.branches.branch import Label, SegmentLink, SessionBranch
from ramify.actors.session.branches.segments import (
    History,
    InputSegment,
    OutputSegment,
    Rule,
    Segment,
    Tail,
)
from ramify.actors.session.branches.state import SessionState, retell
from ramify.actors.session.branches.tasks import Bill, FrameRun, Resumed, Task
from ramify.actors.session.core import SessionCore
from ramify.actors.session.durable.exports import DECODING, LONGEST, Checked, Unsound, saved_tools
from ramify.actors.session.durable.salvage import READ, salvaged
from ramify.actors.session.ops import HANDLERS, op_bytes
from ramify.actors.session.sockets.clients import Declared
from ramify.actors.session.sockets.publisher import error_of
from ramify.actors.tokenizer.pictures import settings_of
from ramify.protocol.plan import unpack
from ramify.protocol.sampling import TokenLogprobs
from ramify.protocol.saved import (
    FORMAT,
    HEAD,
    SavedBranch,
    SavedFrame,
    SavedHead,
    SavedInput,
    SavedOp,
    SavedOutput,
    SavedRule,
    SavedRun,
    SavedSegment,
)
from ramify.protocol.wire import Op, ServerMessage, TokenLogprob

MARKS = 8  # of an output, that are put together in a microsecond
BRANCH_COST = 10
ITEMS = 2  # that the recorder is told of in a microsecond
log = get_log(__name__)


class Damaged(Exception):
    """Items that do not belong together, or that nobody can read."""


def read_head(items: Mapping[str, bytes]) -> SavedHead:
    """Decode the head of a saved session. Raises Damaged, also for a format that is not known."""
    head: SavedHead = _decoded(items, HEAD, SavedHead)
    return head


def saved_tokens(items: Mapping[str, bytes], top: int) -> "array[int]":
    """The tokens up to the end of the segment with number `top` (0: none). Raises Damaged."""
    runs: list[bytes] = []
    number = top
    while number:
        saved: SavedSegment = _decoded(items, f"s{number}", SavedSegment)
        runs.append(saved.tokens)
        if saved.before >= number:  # they are numbered in the order in which they were made
            raise Damaged("its segments form a circle")
        number = saved.before
    return unpack(b"".join(reversed(runs)))


def restoring(
    core: SessionCore, items: Mapping[str, bytes], now: float, wall: float, *, stored: bool = True
) -> Steps[bool]:
    """Fill `core`, which is empty, from `items`. `now` and `wall` as in `Recorder.collect`.

    `stored`: the store has them. Returns whether all of them were sound; else the session lacks some,
    and is to be saved whole.

    Raises Damaged, and LimitExceeded if it may not hold so much.
    """
    head = read_head(items)
    if head.format > FORMAT:
        raise Damaged(f"the session was saved in format {head.format}, this server knows up to {FORMAT}")
    checked = Checked(items, head, core.state.vocab, LONGEST, None, settings_of(core.state.pictures))
    try:
        checked.names()
    except Unsound as error:
        raise Damaged(error.why) from None
    sound = yield from salvaged(items, head, checked)
    if sound is not head:
        log.error("a saved session lacks text; it is what came before", session=head.session)
    kept = items if sound is head else {key: body for key, body in items.items() if key[:1] != "r"}
    yield from _Restoring(core, kept, sound, checked, sound is head).run(now, wall, stored)
    if sound is not head:
        core.state.lives = []  # whoever has seen any of it hears `lost`
    return sound is head


class _Restoring:
    def __init__(
        self,
        core: SessionCore,
        items: Mapping[str, bytes],
        head: SavedHead,
        checked: Checked,
        sound: bool,
    ) -> None:
        self._core = core
        self._items = items
        self._head = head
        self._records = checked.records
        self._sound = sound
        self._links: dict[int, SegmentLink | None] = {0: None}
        self._seen: dict[int, SegmentLink] = {}
        self._rules: dict[int, Rule] = {}
        self._tools: dict[int, Declared] = {}

    def run(self, now: float, wall: float, stored: bool) -> Steps[None]:
        core, head = self._core, self._head
        state = core.state
        state.persist = head.persist
        state.restore(head.revision, head.lives, head.handles, head.meta)
        runs = self._runs()
        labels = self._labels()
        for saved in sorted(head.branches, key=lambda each: each.handle):
            yield from self._way(saved.top)
            yield BRANCH_COST
            self._branch(state, saved, labels)
        resumed: dict[int, dict[int, Resumed]] = {}
        for number, run in runs:
            branch = self._running(run.segment)
            if branch is not None:
                segment = branch.segments.pop()
                assert isinstance(segment, OutputSegment)
                if run.opened is not None and run.opened < branch.position:
                    branch.truncate(run.opened, state.decode)
                resumed.setdefault(number, {})[run.place] = Resumed(segment, run)
        yield from retell(state, now)
        replies = yield from self._clients()
        if core.recorder is not None and self._sound:
            yield len(self._items) // ITEMS
            core.recorder.adopt(
                self._seen, self._rules, self._tools, head.segments, replies, self._items, stored=stored
            )
        core.publisher.now = now
        self._ops(resumed, now, wall)

    # --- segments --------------------------------------------------------------------------------

    def _way(self, number: int) -> Steps[None]:
        """Make the link of the segment with this number, and all links before it."""
        way: list[tuple[int, SavedSegment]] = []
        while number not in self._links:
            saved = self._records[number]
            way.append((number, saved))
            number = saved.before
        link = self._links[number]
        for each, saved in reversed(way):
            size = len(saved.tokens) // 4 + (len(saved.sizes) if isinstance(saved, SavedOutput) else 0)
            yield DECODING + size // MARKS
            link = SegmentLink(self._segment(saved), link)
            self._links[each] = self._seen[each] = link

    def _segment(self, saved: SavedSegment) -> Segment:
        meter = self._core.state.meter
        if isinstance(saved, SavedInput):
            return self._input(saved, meter)
        segment = _output(saved, meter)
        if saved.rule:
            segment.rule, segment.since = self._rule(saved.rule), saved.since
        return segment

    def _rule(self, number: int) -> Rule:
        rule = self._rules.get(number)
        if rule is None:
            what = _decoded(self._items, f"c{number}", SavedRule)
            rule = self._rules[number] = self._core.state.rule(what)
        return rule

    def _input(self, saved: SavedInput, meter: Meter) -> InputSegment:
        history = None
        if saved.history is not None:
            before, messages = saved.history
            link = self._links.get(before)
            history = History(link.segment.history if link is not None else None, messages)
        segment = InputSegment(
            saved.start,
            unpack(saved.tokens),
            saved.text,
            tail=Tail(saved.tail),
            role=saved.role,
            op=saved.op,
            messages=saved.messages,
            turn=saved.turn,
            raw=saved.text if saved.raw is None else saved.raw,
            chat=saved.chat,
            history=history,
            picture=saved.picture,
        )
        segment.count(meter)
        return segment

    # --- branches --------------------------------------------------------------------------------

    def _labels(self) -> list[Label]:
        labels = [Label(saved.name) for saved in self._head.labels]
        for label, saved in zip(labels, self._head.labels, strict=True):
            label.gone = saved.gone
            label.above = labels[saved.above] if saved.above >= 0 else None
        return labels

    def _branch(self, state: SessionState, saved: SavedBranch, labels: list[Label]) -> None:
        of, label = labels[saved.of] if saved.of >= 0 else None, labels[saved.label]
        branch = SessionBranch(
            "", state.number << 32 | saved.handle, of=of, at=saved.at, born=saved.born
        )
        branch.label = label
        branch.own, branch.cuts = saved.own, list(saved.cuts)
        branch.retain_s, branch.reason, branch.persist = saved.retain_s, saved.reason, saved.persist
        branch.usage = saved.usage
        branch.segments.restore(self._links[saved.top])
        state.branches[branch.name] = branch
        state.meter.add(BRANCH)
        state.annotate(branch, saved.meta)

    def _running(self, number: int) -> SessionBranch | None:
        link = self._links.get(number)
        if link is None:
            return None
        for branch in self._core.state.branches.values():
            if branch.segments.top is link:
                return branch
        return None

    # --- clients and ops -------------------------------------------------------------------------

    def _clients(self) -> Steps[dict[str, set[int]]]:
        replies: dict[str, dict[int, list[ServerMessage]]] = {}
        for key in self._items:
            if key[:1] == "r":
                yield len(self._items[key]) // READ
                ident, _, client = key[1:].partition(":")
                told = _decoded(self._items, key, list[ServerMessage])
                replies.setdefault(client, {})[int(ident)] = told
        for known in self._head.clients:
            yield len(self._items.get(f"t{known.tools}", b"")) // READ
            log = self._core.publisher.reply_log(known.name)
            log.restore(known.last, known.due, replies.get(known.name, {}))
            log.declared = self._declared(known.tools)
        if self._head.tools:
            self._core.publisher.declared = self._declared(self._head.tools)
        return {name: set(known) for name, known in replies.items()}

    def _declared(self, number: int) -> Declared:
        """The tools of that number; 0: none."""
        declared = self._tools.get(number)
        if declared is None:
            tools = saved_tools(self._items, number) if number else None
            declared = Declared(tools, self._core.state.meter)
            if number:
                self._tools[number] = declared
        return declared

    def _runs(self) -> list[tuple[int, SavedRun]]:
        return [(wait.number, run) for wait in self._head.waits for run in wait.runs]

    def _ops(self, resumed: dict[int, dict[int, Resumed]], now: float, wall: float) -> None:
        frames: dict[int, FrameRun] = {}
        begun: list[Task] = []
        for wait in self._head.waits:
            saved = _decoded(self._items, f"o{wait.number}", SavedOp)
            frame = frames.get(saved.frame)
            if frame is None:
                frame = frames[saved.frame] = self._frame(saved.frame)
            op = saved.op
            handler = HANDLERS.get(type(op)) if isinstance(op, Op) else None
            if handler is None:
                raise Damaged(f"op {wait.number} is none that waits")
            tasks = handler.tasks(op, frame)
            if not all(0 <= place < len(tasks) for place in wait.left):
                raise Damaged(f"op {wait.number} has no such part")
            bill = Bill(op_bytes(saved.op), len(wait.left))
            for place, task in enumerate(tasks):
                task.place, task.bill = place, bill
                task.resumed = resumed.get(wait.number, {}).get(place)
            left = [tasks[place] for place in wait.left]
            self._core.resume(left, min(now, now - (wall - saved.arrived)))
            begun += left
        self._core.resumed(begun)

    def _frame(self, number: int) -> FrameRun:
        saved = _decoded(self._items, f"f{number}", SavedFrame)
        tools = Toolbox(saved.opened.tools)
        frame = FrameRun(saved.opened, lambda: tools)
        for name, told in self._head.failed.get(number, {}).items():
            frame.failed[name] = None if told is None else error_of(told)
        return frame


def _output(saved: SavedOutput, meter: Meter) -> OutputSegment:
    segment = OutputSegment(saved.start, op=saved.op, client=saved.client)
    segment.tokens = unpack(saved.tokens)
    segment.counts = list(saved.counts)
    at = 0
    for size in saved.sizes:
        segment.chunks.append(saved.text[at : at + size])
        at += size
    segment.quiet, segment.ended = saved.quiet, saved.ended
    segment.tail, segment.role = Tail(saved.tail), saved.role
    segment.lead, segment.eos_text, segment.mean = saved.lead, saved.eos_text, saved.mean
    segment.spoken, segment.complete = saved.spoken, saved.complete
    segment.charge(
        meter, SEGMENT + TOKEN * len(segment.tokens) + MARK * len(segment.chunks) + len(saved.text)
    )
    if saved.labels is not None:
        segment.labels = [tuple(each) if isinstance(each, list) else each for each in saved.labels]
        segment.grow(sum(map(label_bytes, segment.labels)))
    if saved.logprobs is not None:
        pairs = zip(segment.tokens, saved.logprobs, strict=False)  # a stop token has none
        segment.logprobs = [_logprob(token, each) for token, each in pairs]
        segment.grow(LOGPROB * sum(1 + len(each.top) for each in segment.logprobs))
    return segment


def _logprob(token: int, saved: TokenLogprobs) -> TokenLogprob:
    if len(saved.top_ids) != len(saved.top_logprobs):
        raise Damaged("`top_ids` and `top_logprobs` of a token are not of one length")
    top = list(zip(saved.top_ids, saved.top_logprobs, strict=True))
    return TokenLogprob(token=token, logprob=saved.logprob, top=top)


def _decoded(items: Mapping[str, bytes], key: str, kind: Any) -> Any:
    body = items.get(key)
    if body is None:
        raise Damaged(f"item {key!r} is missing")
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except (msgspec.MsgspecError, ValueError) as error:
        raise Damaged(f"item {key!r} cannot be read: {error}") from error
