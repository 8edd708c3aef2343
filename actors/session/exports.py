"""A session as one file: branches, text, tokens and `meta`, without its clients, keys and ops. Pure.

The file is that of `ramify store export` (`saved.Exported`). One that comes over the wire may say
anything, so everything in it is checked before a session is made of it: what a store has was written by
a server.
"""

import base64
import binascii
from array import array
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from ramify.actors.session.branch import Link
from ramify.actors.session.identity import Identity, view_key
from ramify.actors.session.recorder import HANDLE, saved_branches, saved_segment
from ramify.actors.session.rules import Rule
from ramify.actors.session.segments import Tail
from ramify.actors.session.sizes import json_size
from ramify.actors.session.state import SessionState
from ramify.protocol.config import Limits
from ramify.protocol.errors import BadRequest
from ramify.protocol.json_value import check_json
from ramify.protocol.plan import unpack
from ramify.protocol.saved import (
    EXPORT,
    FORMAT,
    HEAD,
    Exported,
    SavedBranch,
    SavedHead,
    SavedInput,
    SavedLabel,
    SavedOutput,
    SavedRule,
    SavedSegment,
    key_hash,
)
from ramify.protocol.wire import JsonObject, Persist, Tree

PATH = "$.import"
MOST_RULE = 1 << 18  # characters of a constraint with all that it is made of, as compilers take it
_encode = msgspec.msgpack.Encoder().encode


def exported(state: SessionState) -> bytes:
    """The file. No op of the session waits or runs."""
    items: dict[str, bytes] = {}
    numbers: dict[int, int] = {}
    rules: dict[int, int] = {}

    def number(link: Link | None) -> int:
        return 0 if link is None else numbers.get(id(link), 0)

    def numbered(rule: Rule | None) -> int:
        if rule is None:
            return 0
        if id(rule) not in rules:
            rules[id(rule)] = len(rules) + 1
            items[f"c{len(rules)}"] = _encode(rule.what)
        return rules[id(rule)]

    for branch in state.branches.values():
        new: list[Link] = []
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
    items[HEAD] = _encode(
        SavedHead(
            format=FORMAT,
            session="",
            key=b"",
            view_key=b"",
            owner="",
            namespace="",
            priority=0,
            displaceable=False,
            model=state.model,
            revision=1,
            lives=[],
            handles=state.handles,
            segments=len(numbers),
            created=0.0,
            ttl_s=None,
            persist=state.persist,
            meta=state.meta,
            branches=branches,
            labels=labels,
            clients=[],
            waits=[],
            failed={},
        )
    )
    return _encode(Exported(EXPORT, FORMAT, "", "", items))


class Importing(NamedTuple):
    """What a session that is made of a file will be."""

    identity: Identity
    owner: str
    namespace: str
    priority: int
    displaceable: bool
    persist: Persist
    created: float


def imported(
    text: str, into: Importing, *, model: str, vocab: int, context: int, limits: Limits
) -> dict[str, bytes]:
    """The items of a new session. `text`: the file in base64. Raises BadRequest, with the field."""
    file = _file(text)
    head = _decoded(file.items, HEAD, SavedHead)
    if head.format > FORMAT:
        raise _wrong("head.format", f"is {head.format}, this server knows up to {FORMAT}")
    if head.model != model:
        raise _wrong("head.model", f"is {head.model!r}, this server has {model!r}, whose tokens differ")
    checked = _Checked(file.items, head, vocab, context, limits)
    branches = checked.branches()
    key = into.identity.key
    items = {f"s{number}": file.items[f"s{number}"] for number in checked.segments}
    items.update((f"c{number}", file.items[f"c{number}"]) for number in checked.rules)
    items[HEAD] = _encode(
        SavedHead(
            format=FORMAT,
            session=into.identity.session,
            key=key_hash(key),
            view_key=key_hash(view_key(key)),
            owner=into.owner,
            namespace=into.namespace,
            priority=into.priority,
            displaceable=into.displaceable,
            model=model,
            revision=1,
            lives=[],
            handles=max((branch.handle for branch in branches), default=0),
            segments=max(checked.segments, default=0),
            created=into.created,
            ttl_s=None,
            persist=into.persist,
            meta=head.meta,
            branches=branches,
            labels=head.labels,
            clients=[],
            waits=[],
            failed={},
        )
    )
    return items


class _Checked:
    """What a file says of branches and segments. Raises BadRequest."""

    def __init__(
        self, items: Mapping[str, bytes], head: SavedHead, vocab: int, context: int, limits: Limits
    ) -> None:
        self._items = items
        self._head = head
        self._vocab = vocab
        self._context = context
        self._limits = limits
        self.segments: dict[int, int] = {0: 0}  # number -> the position behind it
        self.rules: set[int] = set()

    def branches(self) -> list[SavedBranch]:
        """As they are to be made. The segments that they need are in `segments`."""
        head, limits = self._head, self._limits
        if len(head.branches) > limits.branches:
            raise _wrong("head.branches", f"are {len(head.branches)}: at most {limits.branches}")
        self._labels(head.labels)
        self._meta("head.meta", head.meta)
        names: set[str] = set()
        handles: set[int] = set()
        found = []
        for i, branch in enumerate(head.branches):
            where = f"head.branches[{i}]"
            if not 0 <= branch.label < len(head.labels) or not -1 <= branch.of < len(head.labels):
                raise _wrong(f"{where}.label", "is none of head.labels")
            name = head.labels[branch.label].name
            if name in names or head.labels[branch.label].gone:
                raise _wrong(f"{where}.label", f"is {name!r}, which another branch has, or none")
            if branch.handle in handles or not 0 < branch.handle <= HANDLE >> 1:
                raise _wrong(f"{where}.handle", f"is {branch.handle}: taken, or out of range")
            names.add(name)
            handles.add(branch.handle)
            end = self._end(branch.top, where)
            if not 0 <= branch.at <= self._context:
                raise _wrong(f"{where}.at", f"is {branch.at}: 0 to {self._context} are positions")
            if not 0 <= branch.own <= end:
                raise _wrong(f"{where}.own", f"is {branch.own}, and the branch ends at {end}")
            self._meta(f"{where}.meta", branch.meta)
            found.append(msgspec.structs.replace(branch, born=0, cuts=[], retain_s=None, persist=None))
        del self.segments[0]
        return found

    def _meta(self, where: str, meta: JsonObject | None) -> None:
        if meta is None:
            return
        try:
            check_json(meta, where)
        except ValueError as error:
            raise _wrong(where, str(error)) from None
        if json_size(meta) > self._limits.meta_bytes:
            raise _wrong(where, f"has more than {self._limits.meta_bytes} bytes as JSON")

    def _labels(self, labels: list[SavedLabel]) -> None:
        if len(labels) > 2 * self._limits.branches:
            raise _wrong("head.labels", f"are {len(labels)}: at most {2 * self._limits.branches}")
        ends: set[int] = {-1}  # from there on the way up is known to end
        for i, label in enumerate(labels):
            try:
                msgspec.convert({"type": "tree", "id": 0, "branch": label.name}, Tree)
            except msgspec.ValidationError as error:
                raise _wrong(f"head.labels[{i}].name", f"is no name of a branch: {error}") from None
            way: set[int] = set()
            at = i
            while at not in ends:
                if at in way or not 0 <= at < len(labels):
                    raise _wrong(f"head.labels[{i}].above", "leads nowhere")
                way.add(at)
                at = labels[at].above
            ends |= way

    def _end(self, top: int, where: str) -> int:
        """The position behind segment `top`; it and all before it are checked."""
        way: list[int] = []
        number = top
        while number not in self.segments:
            segment = _decoded(self._items, f"s{number}", SavedSegment)
            if not 0 <= segment.before < number:
                raise _wrong(f"s{number}.before", "is no segment before it")
            way.append(number)
            number = segment.before
        for each in reversed(way):
            segment = _decoded(self._items, f"s{each}", SavedSegment)
            start = self.segments[segment.before]
            if segment.start != start:
                raise _wrong(f"s{each}.start", f"is {segment.start}, the one before ends at {start}")
            self.segments[each] = start + self._segment(each, segment)
            if self.segments[each] > self._context:
                raise _wrong(where, f"is longer than the context of {self._context} tokens")
        return self.segments[top]

    def _segment(self, number: int, segment: SavedInput | SavedOutput) -> int:
        """Its tokens."""
        where = f"s{number}"
        if len(segment.tokens) % 4:
            raise _wrong(f"{where}.tokens", "are no int32")
        tokens = unpack(segment.tokens)
        if tokens and (min(tokens) < 0 or max(tokens) >= self._vocab):
            raise _wrong(f"{where}.tokens", f"has ids that are none of the model's {self._vocab}")
        try:
            Tail(segment.tail)
        except ValueError:
            raise _wrong(f"{where}.tail", f"is {segment.tail!r}") from None
        if isinstance(segment, SavedOutput):
            self._output(where, segment, tokens)
        else:
            if segment.history is not None and not 0 <= segment.history[0] < number:
                raise _wrong(f"{where}.history", "is of no segment before it")
            behind = segment.history[1] if segment.history is not None else []
            for message in [*segment.messages, *behind]:
                try:
                    check_json(message.tool_calls, "tool_calls")
                except ValueError as error:
                    raise _wrong(f"{where}.messages", str(error)) from None
        return len(tokens)

    def _output(self, where: str, segment: SavedOutput, tokens: "array[int]") -> None:
        counts = segment.counts
        if not segment.ended:
            raise _wrong(f"{where}.ended", "is false: only complete sessions can be imported")
        if len(counts) != len(segment.sizes) or not all(map(int.__lt__, [0, *counts], counts)):
            raise _wrong(f"{where}.counts", "do not grow, or are not one for each of `sizes`")
        if counts and counts[-1] > len(tokens):
            raise _wrong(f"{where}.counts", f"end at {counts[-1]}, there are {len(tokens)} tokens")
        if min(segment.sizes, default=0) < 0 or sum(segment.sizes) != len(segment.text):
            raise _wrong(f"{where}.sizes", "do not add up to the text")
        if not 0 <= segment.since <= segment.start:
            raise _wrong(f"{where}.since", f"is {segment.since}, and the segment begins at its `start`")
        if segment.rule:
            self._rule(f"{where}.rule", segment.rule)
        if not 0 <= segment.lead <= len(segment.text):
            raise _wrong(f"{where}.lead", "is longer than the text")
        if segment.labels is not None and len(segment.labels) != len(counts):
            raise _wrong(f"{where}.labels", "are not one for each of `counts`")
        if segment.logprobs is not None and len(segment.logprobs) > len(tokens):
            raise _wrong(f"{where}.logprobs", "are more than there are tokens")

    def _rule(self, where: str, number: int) -> None:
        if number in self.rules:
            return
        if not 0 < number <= len(self._items):
            raise _wrong(where, f"is {number}: there is no such constraint")
        rule = _decoded(self._items, f"c{number}", SavedRule)
        if len(rule.spec.text) > MOST_RULE:
            raise _wrong(f"c{number}", f"is no constraint of at most {MOST_RULE} characters")
        self.rules.add(number)


def _file(text: str) -> Exported:
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise _wrong("", "is no base64") from None
    try:
        file = msgspec.msgpack.decode(data, type=Exported)
    except (msgspec.MsgspecError, ValueError) as error:
        raise _wrong("", f"is no session that `export` wrote: {error}") from None
    if file.what != EXPORT:
        raise _wrong("what", "says that it is something else than a session")
    if file.format > FORMAT:
        raise _wrong("format", f"is {file.format}, this server knows up to {FORMAT}")
    return file


def _decoded(items: Mapping[str, bytes], key: str, kind: Any) -> Any:
    body = items.get(key)
    if body is None:
        raise _wrong(key, "is missing")
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except (msgspec.MsgspecError, ValueError) as error:
        raise _wrong(key, f"cannot be read: {error}") from None


def _wrong(field: str, what: str) -> BadRequest:
    path = f"{PATH}.{field}" if field else PATH
    named = f"its field `{field}` " if field else "it "
    message = f"the file cannot be imported: {named}{what} - at `{path}`"
    return BadRequest(message, details={"path": path})
