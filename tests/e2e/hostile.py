"""Hostile frames: of the shapes that `protocol/wire/` declares, with values that it may not expect.

The shapes are read from the types (`msgspec.inspect`), so a new op or field is covered without a change
here. Values are drawn in three moods: `plain` (what a client would send), `edge` (the limits of what the
types allow) and `wild` (beyond them: 10^310, NaN, lone surrogates, msgpack extensions, deep nesting).
Everything follows from a `random.Random`.

Not a test module: `test_hostile.py` sends a few, `benchmarks/hostile_frames.py` many. This file knows
shapes and bytes. It knows no socket, and not what a server should answer.
"""

import base64
import json
import math
import random
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import msgspec

from ramify.protocol.wire import ClientMessage

Mood = Literal["plain", "edge", "wild"]
Codec = Literal["json", "msgpack"]

NAMES = ["main", "a", "b", "c", "d/e", "f.g", "x" * 64]
INTEGERS = [
    0, -1, 1, 2, 63, 64, 65, 255, 256, 1023, 1024, 1025, 2**31 - 1, 2**31, 2**32, 2**53 - 1, 2**53,
    2**63 - 1, 2**63, 2**64 - 1, 2**64, -(2**31), -(2**53), -(2**63), -(2**63) - 1, 10**30, -(10**30),
    10**309, 10**310,
]  # fmt: skip
FLOATS = [0.0, -0.0, 1e-45, 5e-324, 1e-300, 1e-7, 0.5, 1.0, 1e16, 1e308, math.nan, math.inf, -math.inf]
TEXTS = [
    "", " ", "\x00", "e", "th", "hello world", "one two three four five six seven", "\n\n\n", "\ufeff",
    "é" * 40, "<|im_start|>user\nhi<|im_end|>\n", "<|endoftext|>", "🙂" * 30, "\U0010ffff", "\u202e",
    "a\u0301" * 20, "{{ messages }}",
    "{{ messages }}",
    "{% for x in range(10**9) %}x{% endfor %}", "../../etc/passwd", "$.id", "main", "$[0]",
]  # fmt: skip
ONE_OF = {"append": ("text", "messages", "tokens"), "rollback": ("to", "turns")}  # exactly one of them
FRAME = 300_000  # characters, about what a frame may hold
LARGE = 1500  # a limit that a frame seldom reaches
HUGE = 0.004  # how often a text or list is as large as a frame may be
MIXES = [(60, 30, 10, 0), (30, 60, 10, 0), (20, 40, 40, 0), (30, 30, 30, 10)]
NEW_NAMES = frozenset({"as", "name"})  # fields for branches that are not there yet
BRANCHES = frozenset({"branch", "as", "from", "into", "score_from", "name", "have"})
POSITIONS = frozenset({"at", "to", "expect", "upto", "have"})
FREQUENT = {
    "append": 12, "generate": 12, "fork": 6, "rollback": 5, "cancel": 3, "join": 4, "prune": 6,
}  # beside 2  # fmt: skip
UNSUPPORTED = frozenset({"persist"})
CONSTRAINTS: list[dict[str, Any]] = [
    {"regex": "[ab]{1,4}"},
    {"regex": "(a|b)*c"},
    {"choices": ["yes", "no", "e"]},
    {"json_schema": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}},
    {"json_schema": {"type": "array", "items": {"type": "string"}, "uniqueItems": True, "maxItems": 3}},
    {"grammar": 'root ::= "a" root | "b"'},
    {
        "structural_tag": {
            "tags": [{"begin": "<t>", "end": "</t>", "regex": "[0-9]+"}],
            "triggers": ["<t>"],
        }
    },
    {"regex": "(a+)+$"},
    {"json_schema": {"$ref": "#"}},
]
TOOLS = [
    {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}},
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "Looks a word up",
            "parameters": {"type": "object", "properties": {"word": {"type": "string"}}},
        },
    },
]
FREE = frozenset({"meta", "tools", "tool_calls"})  # JSON of the client's own


class Raw(NamedTuple):
    """A value in the bytes of each codec, for what Python's own values cannot say."""

    json: bytes
    msgpack: bytes


class Pairs(NamedTuple):
    """An object whose keys may repeat, or be no strings."""

    items: list[tuple[Any, Any]]


class HostileFrame(NamedTuple):
    """What goes into one WebSocket message. `binary`: the kind of message it is sent as."""

    data: bytes
    binary: bool


@dataclass
class Memory:
    """What one client knows of its session, so that its frames reach branches, ops and sessions."""

    next_id: int = 1
    made: int = 0
    names: list[str] = field(default_factory=lambda: ["main"])
    sessions: list[tuple[str, str]] = field(default_factory=list)  # (session, key or view key)
    position: int = 0
    files: list[str] = field(default_factory=list)  # that `export` gave

    def take(self, message: dict[str, Any]) -> None:
        """Learn from a message of the server's."""
        name = message.get("branch")
        result = message.get("result")
        if isinstance(result, dict) and isinstance(result.get("file"), str):
            self.files = [result["file"], *self.files[:3]]
        match message.get("type"):
            case "state":
                for key in ("key", "key", "key", "view_key"):  # a viewer can do little
                    if key in message:
                        self.sessions.append((message["session"], message[key]))
                del self.sessions[:-16]
                if "id" not in message and message["op"] < 2**52:
                    self.next_id = message["op"] + 1
                self.names = [branch["branch"] for branch in message["branches"]][:64]
            case "ok" if isinstance(name, str) and "position" in message:
                self.names = [name, *self.names[:63]]
            case "ok" | "error" if name in self.names:  # dropped, or not there
                self.names = [known for known in self.names if known != name]
        if isinstance(message.get("position"), int):
            self.position = message["position"]


class Hostile:
    """Frames of one client. `mix`: how often a frame is plain, edge, wild, or no frame at all."""

    def __init__(self, rng: random.Random, codec: Codec, memory: Memory) -> None:
        self.random = rng
        self.codec: Codec = codec
        self.memory = memory
        self.mix = MIXES[0]
        info = msgspec.inspect.type_info(ClientMessage)
        assert isinstance(info, msgspec.inspect.UnionType)
        self._types = {t.tag: t for t in info.types if isinstance(t, msgspec.inspect.StructType)}
        self._ops = [tag for tag in self._types if tag not in ("open", "close")]
        self._weights = [FREQUENT.get(tag, 2) for tag in self._ops]

    # --- frames ----------------------------------------------------------------------------------

    def frame(self) -> HostileFrame:
        """The next frame after `open`."""
        kind = self.random.choices(["plain", "edge", "wild", "broken"], self.mix)[0]
        if kind == "broken":
            return self._broken()
        return self.encode(self.messages(kind))  # type: ignore[arg-type]

    def messages(self, mood: Mood) -> list[Any]:
        """Some ops. In a mood one of them, now and then all, has values of the mood."""
        if mood == "plain" and self.random.random() < 0.15:
            return self.program()
        count = self.random.choice([1, 1, 1, 2, 3, 5, 8])
        odd = self.random.randrange(count)
        every = self.random.random() < 0.2
        made = []
        for i in range(count):
            tag = self.random.choices(self._ops, self._weights)[0]
            if self.random.random() < 0.002:
                tag = self.random.choice(["open", "close"])
            made.append(self.message(tag, mood if every or i == odd else "plain"))
        return made

    def program(self) -> list[Any]:
        """A program of one frame: branches that are made, generate, and come together or race."""
        count = self.random.choice([2, 3, 8])
        self.memory.made += 1
        names = [f"p{self.memory.made}.{i}" for i in range(count)]
        generate: dict[str, Any] = {"branch": names, "max_tokens": self.random.choice([1, 4, 24])}
        if self.random.random() < 0.4:
            generate["constraint"] = self.random.choice(CONSTRAINTS)
        if self.random.random() < 0.5:
            end: dict[str, Any] = {"type": "join", "from": names}
        else:
            by = self.random.choice(["first", "logprob", "number", "vote"])
            end = {"type": "prune", "from": names, "by": by, "into": "main"}
        steps: list[dict[str, Any]] = [
            {"type": "fork", "as": names},
            {"type": "append", "branch": names, "text": self.random.choice(TEXTS) or "x"},
            {"type": "generate", **generate},
            end,
            {"type": "generate", "max_tokens": 4},
            {"type": "drop", "branch": names} if self.random.random() < 0.3 else {"type": "export"},
        ]
        if self.random.random() < 0.2:  # in the middle of it
            steps.insert(
                self.random.randrange(1, 5), {"type": "cancel", "branch": names[0], "subtree": True}
            )
        return [{**step, "id": self._ident("plain")} for step in steps]

    def _imported(self) -> str:
        """A file that this client has exported, as it was or with damage."""
        file = self.random.choice(self.memory.files)
        if self.random.random() < 0.5:
            return file
        data = bytearray(base64.b64decode(file))
        for _ in range(self.random.choice([1, 1, 8])):
            data[self.random.randrange(len(data))] = self.random.randrange(256)
        return base64.b64encode(bytes(data)).decode()

    def opening(self, client: str, mood: Mood) -> list[Any]:
        """`open` and perhaps ops. It may resume a session that this client has seen, by either key."""
        message = self.message("open", mood)
        if mood != "wild" or self.random.random() < 0.5:
            message["client"] = client
        for name in ("session", "key", "token", "model"):
            message.pop(name, None)
        if self.memory.sessions and self.random.random() < 0.6:
            message["session"], message["key"] = self.random.choice(self.memory.sessions)
            message.pop("import", None)
        elif self.memory.files and self.random.random() < 0.5:
            message["import"] = self._imported()
        if mood == "plain":
            message.pop("tools", None)
            if self.random.random() < 0.4:
                message["tools"] = TOOLS
        return [message, *(self.messages("plain") if self.random.random() < 0.4 else [])]

    def message(self, tag: str, mood: Mood) -> dict[str, Any]:
        """One message. In a mood at least one field is set that a plain message may lack."""
        struct_type = self._types[tag]
        fields = list(struct_type.fields)
        forced = self.random.choice(fields) if mood != "plain" and fields else None
        one_of = ONE_OF.get(tag, ())
        chosen = self.random.choice(one_of) if one_of and self.random.random() < 0.99 else None
        message: dict[str, Any] = {"type": tag}
        for each in fields:
            name = each.encode_name
            wanted = each.required or each is forced or self.random.random() < 0.2
            if chosen is not None and name in one_of:
                wanted = name == chosen
            if each is not forced and name in UNSUPPORTED | {"n", "expect", "k", "score_from"}:
                wanted = self.random.random() < 0.03
            if wanted:
                message[name] = self._value(each.type, name, mood if each is forced else "plain")
        if tag == "generate" and mood == "plain":  # `as` is for the children that `n` makes
            message.pop("as", None)
        if tag == "generate" and "constraint" in message and self.random.random() < 0.8:
            message["constraint"] = self.random.choice(CONSTRAINTS)
        if mood == "wild" and self.random.random() < 0.05:
            message[self._text("edge")[:40]] = 1  # an unknown field
        return message

    def encode(self, messages: list[Any]) -> HostileFrame:
        """One frame, sometimes with an array around a single message."""
        value = messages[0] if len(messages) == 1 and self.random.random() < 0.5 else messages
        if self.codec == "json":
            return HostileFrame(to_json(value), False)
        return HostileFrame(to_msgpack(value), True)

    def _broken(self) -> HostileFrame:
        """Bytes that are no frame, or half of one, or of the other kind."""
        whole = self.encode(self.messages("plain"))
        match self.random.randrange(7):
            case 0:
                return HostileFrame(whole.data[: self.random.randrange(len(whole.data))], whole.binary)
            case 1:
                return HostileFrame(whole.data, not whole.binary)
            case 2:
                return HostileFrame(self.random.randbytes(self.random.randrange(64)), whole.binary)
            case 3:
                return HostileFrame(
                    b"[" * 100_000 if self.codec == "json" else b"\x91" * 100_000, whole.binary
                )
            case 4:
                at = self.random.randrange(len(whole.data))
                bad = self.random.choice([b"\xff", b"\xc3\x28", b"\xed\xa0\x80", b"\xf0\x82\x82\xac"])
                return HostileFrame(whole.data[:at] + bad + whole.data[at + 1 :], whole.binary)
            case 5:
                return HostileFrame(b"", whole.binary)
            case _:
                return HostileFrame(whole.data + whole.data, whole.binary)

    # --- values ----------------------------------------------------------------------------------

    def _value(self, kind: Any, name: str, mood: Mood) -> Any:
        """A value of a declared type. `name`: the field's, which says what a client would give."""
        if mood == "wild" and self.random.random() < 0.25:
            return self._anything(name)
        match kind:
            case msgspec.inspect.UnionType():
                options = [t for t in kind.types if not isinstance(t, msgspec.inspect.NoneType)]
                if len(options) < len(kind.types) and self.random.random() < 0.1:
                    return None
                return self._value(self.random.choice(options), name, mood)
            case msgspec.inspect.IntType():
                return self._integer(kind, name, mood)
            case msgspec.inspect.FloatType():
                return self._float(kind, mood)
            case msgspec.inspect.BoolType():
                return self.random.random() < 0.5
            case msgspec.inspect.StrType():
                return self._string(kind, name, mood)
            case msgspec.inspect.LiteralType():
                return self.random.choice(kind.values) if mood != "wild" else self._text(mood)
            case msgspec.inspect.ListType():
                return self._list(kind, name, mood)
            case msgspec.inspect.DictType():
                return self._dict(kind, name, mood)
            case msgspec.inspect.StructType():
                return {
                    f.encode_name: self._value(f.type, f.encode_name, mood)
                    for f in kind.fields
                    if f.required or self.random.random() < 0.4
                }
            case _:
                return self._free(mood, 0)

    def _integer(self, kind: Any, name: str, mood: Mood) -> Any:
        if name == "id" or name == "ops":
            return self._ident(mood)
        low = _first(kind.ge, None if kind.gt is None else kind.gt + 1)
        high = _first(kind.le, None if kind.lt is None else kind.lt - 1)
        if mood == "plain":
            if name in POSITIONS:
                return max(0, self.memory.position + self.random.choice([0, 0, 0, -1, -3, 1]))
            return self.random.randint(0 if low is None else low, min(24 if high is None else high, 24))
        known = [bound for bound in (low, high) if bound is not None]
        near = [bound + step for bound in known for step in (-1, 0, 1)]
        choices = [*near, *INTEGERS]
        if mood == "edge":
            choices = [
                n for n in choices if (low is None or n >= low) and (high is None or n <= high)
            ] or known
        return self.random.choice(choices)

    def _ident(self, mood: Mood) -> Any:
        memory = self.memory
        if mood == "wild":
            return self.random.choice([*INTEGERS, 1.5, "7", None])
        if mood == "edge" or self.random.random() < 0.02:  # repeated, or out of order
            return self.random.choice([0, 1, max(0, memory.next_id - 2)])
        memory.next_id += self.random.choice([1, 1, 1, 7])
        return memory.next_id - 1

    def _float(self, kind: Any, mood: Mood) -> Any:
        low, high = _first(kind.ge, kind.gt), _first(kind.le, kind.lt)
        if mood == "plain":
            top = 2.0 if high is None else min(float(high), 2.0)
            return self.random.uniform(0.01 if not low else float(low), top)
        known = [float(bound) for bound in (low, high) if bound is not None]
        choices = [*known, *FLOATS, *(math.nextafter(bound, math.inf) for bound in known)]
        if mood == "edge":
            choices = [
                x for x in choices if (low is None or x >= low) and (high is None or x <= high)
            ] or known
        return self.random.choice(choices)

    def _string(self, kind: Any, name: str, mood: Mood) -> Any:
        longest = kind.max_length
        if name in BRANCHES and mood != "wild":
            return self._name(name, mood)
        if mood == "plain":
            return self.random.choice(TEXTS)[: min(longest or 64, 64)] or "x"
        text = self._text(mood)
        reach = self.random.random() < (0.7 if (longest or LARGE) < LARGE else HUGE)
        if longest is not None and isinstance(text, str) and reach:
            most = min(longest, FRAME)
            text = (text or "x") * (most // max(1, len(text)) + 1)
            return text[: most + (mood == "wild")]
        return text

    def _name(self, field: str, mood: Mood) -> str:
        if mood == "edge" and self.random.random() < 0.5:
            return "".join(self.random.choices("abcXYZ09._/-", k=self.random.randint(1, 64)))
        if self.random.random() < 0.1:
            return self.random.choice(NAMES)
        if field in NEW_NAMES:
            self.memory.made += 1
            return f"n{self.memory.made}"
        return self.random.choice(self.memory.names or ["main"])

    def _text(self, mood: Mood) -> Any:
        if mood == "wild" and self.random.random() < 0.3:
            return self.random.choice(
                [
                    Raw(b'"\\ud800"', b"\xa3\xed\xa0\x80"),
                    Raw(b'"\xff\xfe"', b"\xa2\xff\xfe"),
                    Raw(b'"\\u0000"', b"\xa1\x00"),
                    Raw(b'"\x01"', b"\xa1\x01"),
                ]
            )
        if self.random.random() < HUGE:
            return self.random.choice(["a", "é", "🙂", " ", "\n", "x "]) * self.random.choice(
                [5_000, 60_000]
            )
        return self.random.choice(TEXTS) * self.random.choice([1, 1, 1, 10])

    def _list(self, kind: Any, name: str, mood: Mood) -> list[Any]:
        low, high = kind.min_length or 0, kind.max_length
        if mood == "plain":
            count = max(low, self.random.choice([1, 1, 2, 3]))
        elif self.random.random() < HUGE:
            simple = isinstance(kind.item_type, msgspec.inspect.IntType | msgspec.inspect.StrType)
            count = self.random.choice([1000, 5000, 20_000]) if simple else 1000
        else:
            some = high if high is not None and high < LARGE else 20
            count = self.random.choice([low, low, 1, 2, 17, 64, 65, 130, some])
            if mood == "edge":
                count = min(max(count, low), high or count)
        inner: Mood = mood if count < 4 or self.random.random() < 0.2 else "plain"
        if name in BRANCHES and mood != "plain" and self.random.random() < 0.5:
            return [f"n{i}" for i in range(count)]  # all different
        if name in BRANCHES and mood == "plain":
            return list(dict.fromkeys(self._name(name, mood) for _ in range(count)))
        return [self._value(kind.item_type, name, inner) for _ in range(count)]

    def _dict(self, kind: Any, name: str, mood: Mood) -> Any:
        if name in FREE or not isinstance(kind.key_type, msgspec.inspect.StrType):
            return self._free_object(mood, 0)
        if name == "have":
            count = self.random.choice([0, 1, 2] if mood == "plain" else [0, 5, 100])
            return {
                self._name("have", "edge"): self._value(kind.value_type, name, mood)
                for _ in range(count)
            }
        return self._free_object(mood, 0)

    def _free_object(self, mood: Mood, depth: int) -> Any:
        count = self.random.choice([0, 1, 2, 3])
        items: list[tuple[Any, Any]] = [
            (self.random.choice(TEXTS), self._free(mood, depth + 1)) for _ in range(count)
        ]
        if mood == "wild" and self.random.random() < 0.3:
            key = self.random.choice(
                [Raw(b'"a"', b"\xc0"), Raw(b"1", b"\x91\x01"), Raw(b'"a"', b"\x01")]
            )
            items += [(key, 1), ("twice", 1), ("twice", 2)]
        return Pairs(items)

    def _free(self, mood: Mood, depth: int) -> Any:
        """JSON of the client's own: `meta`, `tools`, `tool_calls`."""
        if mood != "plain" and depth < 2 and self.random.random() < 0.15:
            levels = self.random.choice([8, 30, 60, 64, 100, 500, 900, 1100, 20_000])
            kind = self.random.choice([(b"[", b"]", b"\x91"), (b'{"a":', b"}", b"\x81\xa1a")])
            return Raw(kind[0] * levels + b"1" + kind[1] * levels, kind[2] * levels + b"\x01")
        if mood == "wild" and self.random.random() < 0.3:
            return self._anything("")
        match self.random.randrange(6 if depth < 3 else 4):
            case 0:
                return self.random.choice(INTEGERS[:20] if mood != "plain" else [1, 2, 3])
            case 1:
                return self.random.choice(TEXTS)
            case 2:
                return self.random.choice([True, False, None])
            case 3:
                return self.random.choice(FLOATS[:-3])
            case 4:
                return [self._free(mood, depth + 1) for _ in range(self.random.randrange(4))]
            case _:
                return self._free_object(mood, depth)

    def _anything(self, name: str) -> Any:
        """A value of any type at all."""
        options: list[Callable[[], Any]] = [
            lambda: None,
            lambda: self.random.choice(INTEGERS),
            lambda: self.random.choice(FLOATS),
            lambda: self._text("wild"),
            list,
            dict,
            lambda: self._free("edge", 1),
            lambda: Raw(b"1e400", b"\xcb" + struct.pack("!d", math.inf)),
            lambda: Raw(b"-0", b"\xd3" + struct.pack("!q", -(2**63))),
            lambda: Raw(b'"AA=="', b"\xc4\x02\x00\x00"),  # bytes
            lambda: Raw(b"9" * 5000, b"\xd4\x05\x00"),  # an extension type
            lambda: Raw(b"1.0", b"\xd6\xff\x00\x00\x00\x00"),  # a time stamp
            lambda: Raw(b"nul", b"\xc1"),  # not of the codec
        ]
        return self.random.choice(options)()


def _first(a: Any, b: Any) -> Any:
    return a if a is not None else b


# --- encoders: those of the libraries refuse what a hostile client sends -----------------------------


def to_json(value: Any) -> bytes:
    """JSON, with NaN, any integer, repeated keys, and `Raw` as it is."""
    match value:
        case Raw():
            return value.json
        case Pairs():
            return b"{" + b",".join(to_json(k) + b":" + to_json(v) for k, v in value.items) + b"}"
        case dict():
            return to_json(Pairs(list(value.items())))
        case list() | tuple():
            return b"[" + b",".join(map(to_json, value)) + b"]"
        case _:
            return json.dumps(value).encode()


def to_msgpack(value: Any) -> bytes:
    """msgpack, with integers beyond 64 bits as floats, repeated keys, and `Raw` as it is."""
    match value:
        case Raw():
            return value.msgpack
        case Pairs():
            head = b"\xdf" + struct.pack("!I", len(value.items))
            return head + b"".join(to_msgpack(k) + to_msgpack(v) for k, v in value.items)
        case dict():
            return to_msgpack(Pairs(list(value.items())))
        case list() | tuple():
            return b"\xdd" + struct.pack("!I", len(value)) + b"".join(map(to_msgpack, value))
        case int() if not isinstance(value, bool) and not -(2**63) <= value < 2**64:
            return msgspec.msgpack.encode(math.inf if abs(value) > 10**308 else float(value))
        case _:
            return msgspec.msgpack.encode(value)
