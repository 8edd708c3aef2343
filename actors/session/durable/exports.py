"""A session of one file: branches, text, tokens and `meta`, without clients, keys and ops. Pure.

The file is that of `ramify store export` and of `items.exported`. A file may say anything, so everything
in it is checked before a session is made of it (`Checked`): of one that comes over the wire, of one that
`ramify store import` adds to a store, and of what a store has when a session is taken up.
"""

import base64
import binascii
import re
from array import array
from collections.abc import Mapping
from math import isfinite
from typing import Any, NamedTuple

import msgspec

from ramify.actors.kit.memory import json_size
from ramify.actors.kit.turns import Steps
from ramify.actors.session.branches.segments import Tail
from ramify.actors.session.branches.state import SEGMENTS
from ramify.actors.session.durable.items import HANDLE, fresh_head
from ramify.actors.session.sockets.clients import Identity, view_key
from ramify.protocol.config import Limits
from ramify.protocol.errors import BadRequest
from ramify.protocol.json_value import check_json
from ramify.protocol.pictures import Picture, PictureSettings, placeholders
from ramify.protocol.plan import unpack
from ramify.protocol.saved import (
    EXPORT,
    FORMAT,
    HEAD,
    Exported,
    SavedBranch,
    SavedFrame,
    SavedHead,
    SavedInput,
    SavedLabel,
    SavedOp,
    SavedOutput,
    SavedRule,
    SavedSegment,
    key_hash,
)
from ramify.protocol.tools import check_tools
from ramify.protocol.wire import JsonObject, Persist, ServerMessage, Tools, Tree

PATH = "$.import"
EMPTY = 1024  # segments of a file that have no tokens
STORED = 16  # times the segments of a branch that a store may have: servers before had no bound
NEAR = 8  # segments with a history, of which one is continued
MOST_RULE = 1 << 18  # characters of a constraint with all that it is made of, as compilers take it
LONGEST = 1 << 31  # a position in a store; the context may have been longer when it was saved
DECODING = 6  # what it costs to read a segment, and to make one (see `Work`)
CHECKED = 128  # bytes of tokens that are compared in a microsecond
TOKENS = 1 << 31  # of a model that does not say it
_encode = msgspec.msgpack.Encoder().encode


class Importing(NamedTuple):
    """The parts of a session that is made of a file."""

    identity: Identity
    owner: str
    namespace: str
    priority: int
    displaceable: bool
    persist: Persist
    created: float


def imported(
    text: str,
    into: Importing,
    *,
    model: str,
    vocab: int,
    context: int,
    limits: Limits,
    pictures: PictureSettings | None = None,
) -> dict[str, bytes]:
    """Make the items of a new session. `text`: the file in base64. Raises BadRequest, with the field."""
    file = _file(text)
    head = _decoded(file.items, HEAD, SavedHead)
    if head.format > FORMAT:
        raise Unsound("head.format", f"is {head.format}, this server knows up to {FORMAT}")
    if head.model != model:
        raise Unsound("head.model", f"is {head.model!r}, this server has {model!r}, whose tokens differ")
    checked = Checked(file.items, head, vocab, context, limits, pictures)
    branches = checked.branches()
    key = into.identity.key
    del checked.segments[0]
    items = {f"s{number}": file.items[f"s{number}"] for number in checked.segments}
    items.update((f"c{number}", file.items[f"c{number}"]) for number in checked.rules)
    made = fresh_head(
        session=into.identity.session,
        key=key_hash(key),
        view_key=key_hash(view_key(key)),
        owner=into.owner,
        namespace=into.namespace,
        priority=into.priority,
        displaceable=into.displaceable,
        model=model,
        handles=max((branch.handle for branch in branches), default=0),
        segments=max(checked.segments, default=0),
        created=into.created,
        persist=into.persist,
        meta=head.meta,
        branches=branches,
        labels=head.labels,
    )
    items[HEAD] = _encode(made)
    return items


def check_saved(items: Mapping[str, bytes]) -> None:
    """Raises Unsound if a server could not take up a session of which a store has these items.

    Runs in `ramify store`, which knows of the model what the session says.
    """
    head = _decoded(items, HEAD, SavedHead)
    if head.format > FORMAT:
        raise Unsound("head.format", f"is {head.format}, this version knows up to {FORMAT}")
    found = re.search(r"\((\d{1,9}) tokens\)$", head.model)
    checked = Checked(items, head, int(found[1]) if found else TOKENS, LONGEST, None)
    branches = checked.branches()
    handles = max((branch.handle for branch in branches), default=0)
    if not handles <= head.handles <= HANDLE >> 1:
        raise Unsound("head.handles", f"is {head.handles}, a branch has {handles}")
    if not max(checked.segments) <= head.segments < LONGEST:
        raise Unsound("head.segments", f"is {head.segments}, one has the number {max(checked.segments)}")
    running = {run.segment for wait in head.waits for run in wait.runs}
    for number, record in checked.records.items():
        if isinstance(record, SavedOutput) and not record.ended and number not in running:
            raise Unsound(f"s{number}.ended", "is false, and no op goes on with it")
    for wait in head.waits:
        op = _decoded(items, f"o{wait.number}", SavedOp)
        _decoded(items, f"f{op.frame}", SavedFrame)
    for number in {head.tools, *(client.tools for client in head.clients)} - {0}:
        saved_tools(items, number)
    for key in items:
        if not re.fullmatch(r"head|[csoft][0-9]{1,15}|r[0-9]{1,15}:.*", key, re.DOTALL):
            raise Unsound(key[:64], "is no item of a session")
        if key[:1] == "r":
            _decoded(items, key, list[ServerMessage])


def saved_tools(items: Mapping[str, bytes], number: int) -> list[JsonObject]:
    """Read the tools with this number. Raises Unsound."""
    key = f"t{number}"
    tools: list[JsonObject] = _decoded(items, key, Tools)
    try:
        check_json(tools, key)
        check_tools(tools, key)
    except ValueError as error:
        raise Unsound(key, str(error)) from None
    return tools


class Checked:
    """What a file, or a store, says of branches and segments. Raises Unsound.

    `limits`: None for a session that a store has: a server before this one allowed it, and outputs in it
    may be running.
    """

    def __init__(
        self,
        items: Mapping[str, bytes],
        head: SavedHead,
        vocab: int,
        context: int,
        limits: Limits | None,
        pictures: PictureSettings | None = None,
    ) -> None:
        self._items = items
        self._pictures = pictures
        self._head = head
        self._vocab = vocab
        self._context = context
        self._limits = limits
        self.segments: dict[int, int] = {0: 0}  # number -> the position behind it
        self._counts: dict[int, int] = {0: 0}  # number -> how many there are up to it
        self._told: dict[int, int] = {0: 0}  # number -> the last one, up to it, that has a history
        self._before: dict[int, int] = {}  # number of one with a history -> the one before it
        self._empty = 0  # segments without tokens
        self.rules: set[int] = set()
        self.records: dict[int, SavedSegment] = {}

    def branches(self) -> list[SavedBranch]:
        """Check the branches. The segments that they need are in `segments`."""
        head, limits = self._head, self._limits
        if limits is not None and len(head.branches) > limits.branches:
            raise Unsound("head.branches", f"are {len(head.branches)}: at most {limits.branches}")
        self.names()
        self._meta("head.meta", head.meta)
        found = []
        for i, branch in enumerate(head.branches):
            where = f"head.branches[{i}]"
            end = self.end(branch.top, where)
            if not 0 <= branch.at <= self._context:
                raise Unsound(f"{where}.at", f"is {branch.at}: 0 to {self._context} are positions")
            if not 0 <= branch.own <= end:
                raise Unsound(f"{where}.own", f"is {branch.own}, and the branch ends at {end}")
            self._meta(f"{where}.meta", branch.meta)
            found.append(msgspec.structs.replace(branch, born=0, cuts=[], retain_s=None, persist=None))
        return found

    def names(self) -> None:
        """Check that labels lead upwards, and that each branch has a label and a handle of its own."""
        head = self._head
        self._labels(head.labels)
        names: set[str] = set()
        handles: set[int] = set()
        for i, branch in enumerate(head.branches):
            where = f"head.branches[{i}]"
            if not 0 <= branch.label < len(head.labels) or not -1 <= branch.of < len(head.labels):
                raise Unsound(f"{where}.label", "is none of head.labels")
            name = head.labels[branch.label].name
            if name in names or head.labels[branch.label].gone:
                raise Unsound(f"{where}.label", f"is {name!r}, which another branch has, or none")
            if branch.handle in handles or not 0 < branch.handle <= HANDLE >> 1:
                raise Unsound(f"{where}.handle", f"is {branch.handle}: taken, or out of range")
            names.add(name)
            handles.add(branch.handle)

    def _meta(self, where: str, meta: JsonObject | None) -> None:
        if meta is None:
            return
        try:
            check_json(meta, where)
        except ValueError as error:
            raise Unsound(where, str(error)) from None
        if self._limits is not None and json_size(meta) > self._limits.meta_bytes:
            raise Unsound(where, f"has more than {self._limits.meta_bytes} bytes as JSON")

    def _labels(self, labels: list[SavedLabel]) -> None:
        if self._limits is not None and len(labels) > 2 * self._limits.branches:
            raise Unsound("head.labels", f"are {len(labels)}: at most {2 * self._limits.branches}")
        ends: set[int] = {-1}  # from there on the way up is known to end
        for i, label in enumerate(labels):
            try:
                msgspec.convert({"type": "tree", "id": 0, "branch": label.name}, Tree)
            except msgspec.ValidationError as error:
                raise Unsound(f"head.labels[{i}].name", f"is no name of a branch: {error}") from None
            way: set[int] = set()
            at = i
            while at not in ends:
                if at in way or not 0 <= at < len(labels):
                    raise Unsound(f"head.labels[{i}].above", "leads nowhere")
                way.add(at)
                at = labels[at].above
            ends |= way

    def end(self, top: int, where: str) -> int:
        """Check segment `top` and all before it. Returns the position behind it."""
        for _ in self.reading(top, where):
            pass
        return self.segments[top]

    def reading(self, top: int, where: str) -> Steps[None]:
        """Check as `end` does, in parts."""
        way: list[int] = []
        number = top
        while number not in self.segments:
            yield DECODING
            segment = _decoded(self._items, f"s{number}", SavedSegment)
            if not 0 <= segment.before < number:
                raise Unsound(f"s{number}.before", "is no segment before it")
            way.append(number)
            self.records[number] = segment
            number = segment.before
        for each in reversed(way):
            segment = self.records[each]
            start = self.segments[segment.before]
            yield DECODING + len(segment.tokens) // CHECKED
            if segment.start != start:
                raise Unsound(f"s{each}.start", f"is {segment.start}, the one before ends at {start}")
            self._bound(each, segment)
            self.segments[each] = start + self._segment(each, segment)
            if self.segments[each] > self._context:
                raise Unsound(where, f"is longer than the context of {self._context} tokens")

    def _bound(self, number: int, segment: SavedInput | SavedOutput) -> None:
        """Check that there are no more segments and histories than a server would make itself."""
        count = self._counts[number] = self._counts[segment.before] + 1
        most = SEGMENTS if self._limits is not None else STORED * SEGMENTS
        if count > most:
            raise Unsound(f"s{number}", f"is the {count}th segment of a branch: at most {most}")
        if self._limits is None:
            return
        self._empty += not segment.tokens
        if self._empty > EMPTY:
            raise Unsound(f"s{number}", f"is one of more than {EMPTY} segments without tokens")
        told = self._told[number] = self._told[segment.before]
        if isinstance(segment, SavedInput) and segment.history is not None:
            self._told[number], self._before[number] = number, told
            for _ in range(NEAR):
                if told == segment.history[0]:
                    break
                told = self._before.get(told, 0)
            else:
                if segment.history[0]:
                    raise Unsound(f"s{number}.history", "is of none of the last segments that have one")

    def _segment(self, number: int, segment: SavedInput | SavedOutput) -> int:
        """Check a segment. Returns how many tokens it has."""
        where = f"s{number}"
        if len(segment.tokens) % 4:
            raise Unsound(f"{where}.tokens", "are no int32")
        tokens = unpack(segment.tokens)
        if isinstance(segment, SavedInput) and segment.picture is not None:
            self._check_picture(where, segment.picture, tokens)
        elif tokens and (min(tokens) < 0 or max(tokens) >= self._vocab):
            raise Unsound(f"{where}.tokens", f"has ids that are none of the model's {self._vocab}")
        try:
            Tail(segment.tail)
        except ValueError:
            raise Unsound(f"{where}.tail", f"is {segment.tail!r}") from None
        if isinstance(segment, SavedOutput):
            self._output(where, segment, tokens)
        else:
            if segment.history is not None and not 0 <= segment.history[0] < number:
                raise Unsound(f"{where}.history", "is of no segment before it")
            behind = segment.history[1] if segment.history is not None else []
            for message in [*segment.messages, *behind]:
                try:
                    check_json(message.tool_calls, "tool_calls")
                except ValueError as error:
                    raise Unsound(f"{where}.messages", str(error)) from None
        return len(tokens)

    def _check_picture(self, where: str, picture: Picture, tokens: "array[int]") -> None:
        settings = self._pictures
        if settings is None:
            raise Unsound(f"{where}.picture", "is there, and the model takes none")
        if picture.width * picture.height * 3 != len(picture.pixels):
            raise Unsound(f"{where}.picture", "has not the pixels of its size")
        try:
            ids = placeholders(picture, settings)
        except ValueError as error:
            raise Unsound(f"{where}.picture", str(error)) from None
        if tokens.tolist() != [*settings.before, *ids, *settings.after]:
            raise Unsound(f"{where}.tokens", "are not those of the picture")

    def _output(self, where: str, segment: SavedOutput, tokens: "array[int]") -> None:
        counts = segment.counts
        if not segment.ended:
            if self._limits is None:
                return  # its text is made of its tokens
            raise Unsound(f"{where}.ended", "is false: only complete sessions can be imported")
        if len(counts) != len(segment.sizes) or not all(map(int.__lt__, [0, *counts], counts)):
            raise Unsound(f"{where}.counts", "do not grow, or are not one for each of `sizes`")
        if counts and counts[-1] > len(tokens):
            raise Unsound(f"{where}.counts", f"end at {counts[-1]}, there are {len(tokens)} tokens")
        if min(segment.sizes, default=0) < 0 or sum(segment.sizes) != len(segment.text):
            raise Unsound(f"{where}.sizes", "do not add up to the text")
        if not 0 <= segment.since <= segment.start:
            raise Unsound(f"{where}.since", f"is {segment.since}, and the segment begins at its `start`")
        if segment.rule:
            self._rule(f"{where}.rule", segment.rule)
        if not 0 <= segment.lead <= len(segment.text):
            raise Unsound(f"{where}.lead", "is longer than the text")
        if segment.labels is not None and len(segment.labels) != len(counts):
            raise Unsound(f"{where}.labels", "are not one for each of `counts`")
        _check_scores(where, segment, tokens)

    def _rule(self, where: str, number: int) -> None:
        if number in self.rules:
            return
        if not 0 < number <= (len(self._items) if self._limits is not None else LONGEST):
            raise Unsound(where, f"is {number}: there is no such constraint")
        rule = _decoded(self._items, f"c{number}", SavedRule)
        if len(rule.spec.text) > MOST_RULE:
            raise Unsound(f"c{number}", f"is no constraint of at most {MOST_RULE} characters")
        self.rules.add(number)


def _check_scores(where: str, segment: SavedOutput, tokens: "array[int]") -> None:
    """Raises Unsound for log-probabilities that cannot be."""
    if segment.logprobs is not None and len(segment.logprobs) > len(tokens):
        raise Unsound(f"{where}.logprobs", "are more than there are tokens")
    for i, entry in enumerate(segment.logprobs or ()):
        if len(entry.top_ids) != len(entry.top_logprobs):
            raise Unsound(
                f"{where}.logprobs[{i}]", "has not one of `top_logprobs` for each of `top_ids`"
            )
        if not isfinite(entry.logprob) or not all(map(isfinite, entry.top_logprobs)):
            raise Unsound(f"{where}.logprobs[{i}]", "has a number that is not finite")
    if segment.mean is not None and not isfinite(segment.mean):
        raise Unsound(f"{where}.mean", "is not finite")


def _file(text: str) -> Exported:
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise Unsound("", "is no base64") from None
    try:
        file = msgspec.msgpack.decode(data, type=Exported)
    except (msgspec.MsgspecError, ValueError) as error:
        raise Unsound("", f"is no session that `export` wrote: {error}") from None
    if file.what != EXPORT:
        raise Unsound("what", "says that it is something else than a session")
    if file.format > FORMAT:
        raise Unsound("format", f"is {file.format}, this server knows up to {FORMAT}")
    return file


def _decoded(items: Mapping[str, bytes], key: str, kind: Any) -> Any:
    body = items.get(key)
    if body is None:
        raise Unsound(key, "is missing")
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except (msgspec.MsgspecError, ValueError) as error:
        raise Unsound(key, f"cannot be read: {error}") from None


class Unsound(BadRequest):
    """What is wrong with a file. `why`: with the field, as a reader of the file sees it."""

    def __init__(self, field: str, what: str) -> None:
        path = f"{PATH}.{field}" if field else PATH
        self.why = f"its field `{field}` {what}" if field else f"it {what}"
        super().__init__(
            f"the file cannot be imported: {self.why} - at `{path}`", details={"path": path}
        )
