"""Bounds: every number, string and list of a client message has one, and the hostile values meet it."""

import json
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from ramify.protocol import wire
from ramify.protocol.codec import SUBPROTOCOLS, Codec
from ramify.protocol.errors import BadRequest, InvalidField

CODECS = [Codec(name) for name in SUBPROTOCOLS.values()]
inspect: Any = msgspec.inspect


def unbounded(kind: Any, path: str) -> Iterator[str]:
    """The places in a type where a client may write a number or a length without a bound."""
    match kind:
        case inspect.UnionType(types=types):
            for each in types:
                yield from unbounded(each, path)
        case inspect.StructType(fields=fields):
            for field in fields:
                yield from unbounded(field.type, f"{path}.{field.name}")
        case inspect.IntType() | inspect.FloatType():
            low = kind.ge is not None or kind.gt is not None
            if not low or (kind.le is None and kind.lt is None):
                yield path
        case inspect.StrType(max_length=most) | inspect.BytesType(max_length=most):
            if most is None:
                yield path
        case inspect.ListType(item_type=item, max_length=most):
            if most is None:
                yield path
            yield from unbounded(item, f"{path}[]")
        case inspect.DictType(key_type=key, value_type=value, max_length=most):
            if isinstance(value, inspect.AnyType):
                return  # free-form JSON: `json_value`, tested there
            if most is None:
                yield path
            yield from unbounded(key, f"{path}.key")
            yield from unbounded(value, f"{path}[]")
        case inspect.BoolType() | inspect.NoneType() | inspect.LiteralType():
            return
        case _:
            raise AssertionError(f"{path}: {kind}")


def test_every_field_of_every_client_message_is_bounded() -> None:
    kinds = wire.ClientMessage.__args__  # type: ignore[attr-defined]
    assert len(kinds) > 10
    for kind in kinds:
        assert list(unbounded(inspect.type_info(kind), kind.__name__)) == []


def test_every_free_form_field_is_checked() -> None:
    deep: Any = 1
    for _ in range(40):
        deep = [deep]
    value = {"x": deep}
    for make in (
        lambda: wire.Open(tools=[value]),
        lambda: wire.Set(id=1, meta=value),
        lambda: wire.ChatMessage("user", tool_calls=[value]),
        lambda: wire.Constraint(json_schema=value),
    ):
        with pytest.raises(InvalidField, match="nested more than 32 deep"):
            make()


HOSTILE = [
    ({"type": "generate", "top_k": 2**64 - 1}, "top_k"),
    ({"type": "generate", "top_k": 2**31}, "top_k"),
    ({"type": "generate", "max_tokens": 2**63}, "max_tokens"),
    ({"type": "generate", "deadline_ms": 2**31}, "deadline_ms"),
    ({"type": "generate", "n": 1025}, "n"),
    ({"type": "generate", "temperature": 1e-45}, "temperature"),
    ({"type": "generate", "temperature": 5e-324}, "temperature"),
    ({"type": "generate", "repetition_penalty": 1e-45}, "repetition_penalty"),
    ({"type": "generate", "repetition_penalty": 0.0}, "repetition_penalty"),
    ({"type": "generate", "top_p": 1e-300}, "top_p"),
    ({"type": "generate", "seed": 2**63}, "seed"),
    ({"type": "generate", "as": ["x"] * 1025}, "as"),
    ({"type": "generate", "branch": ["x"] * 1025}, "branch"),
    ({"type": "fork", "as": ["x"] * 40_000}, "as"),
    ({"type": "join", "from": ["x"] * 1025}, "from"),
    ({"type": "prune", "from": ["x"], "into": "x", "score_from": ["x"] * 1025}, "score_from"),
    ({"type": "prune", "from": ["x"], "into": "x", "k": 2**40}, "k"),
    ({"type": "cancel", "ops": [1] * 1025}, "ops"),
    ({"type": "cancel", "branch": ["x"] * 1025}, "branch"),
    ({"type": "rollback", "turns": 2**31}, "turns"),
    ({"type": "set", "retain_s": 1e300}, "retain_s"),
    ({"type": "open", "revision": -1}, "revision"),
    ({"type": "open", "key": "x" * 257}, "key"),
    ({"type": "open", "client": "a\nb"}, "client"),
    ({"type": "open", "client": ""}, "client"),
    ({"type": "open", "have": {f"b{i}": 1 for i in range(20_000)}}, "have"),
    ({"type": "ping", "n": 2**53}, "n"),
    ({"type": "ping", "n": -(2**53)}, "n"),
    ({"type": "select", "choices": ["x" * 70_000]}, "choices[0]"),
    ({"type": "set", "meta": {"a": [1, {"b": 2**63}]}}, "meta.a[1].b"),
    ({"type": "cancel", "ops": [1], "subtree": True}, "subtree"),
    ({"type": "open", "tools": [{"name": f"f{i}"} for i in range(1025)]}, "tools"),
    ({"type": "open", "tools": ["f"]}, "tools[0]"),
    ({"type": "open", "tools": [{"name": "f"}, {"name": "f"}]}, "tools[1].name"),
]


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
@pytest.mark.parametrize(
    ("message", "field"), HOSTILE, ids=lambda value: value if type(value) is str else ""
)
def test_hostile_values_are_refused_by_name(codec: Codec, message: Any, field: str) -> None:
    if message["type"] not in ("open", "ping"):
        message = {"id": 1, **message}
    encode = msgspec.msgpack.encode if codec.binary else msgspec.json.encode
    with pytest.raises(BadRequest) as caught:
        codec.decode_client(encode(message))
    assert caught.value.details is not None
    assert caught.value.details["path"] == f"$.{field}"
    assert codec.ids(encode([message, {"id": 7}]))[1] == 7  # the others of its frame are answered


@pytest.mark.parametrize(
    "number",
    ["1" + "0" * 30, "1" + "0" * 310, "1" + "0" * 5000, "1e310", "1e400", "-1" + "0" * 30, "1.5"],
)
@pytest.mark.parametrize(
    "field", ["top_k", "max_tokens", "deadline_ms", "n", "seed", "priority", "logprobs"]
)
def test_integers_of_any_size_are_refused(field: str, number: str) -> None:
    with pytest.raises(BadRequest, match=field):
        Codec("json").decode_client(f'{{"type":"generate","id":1,"{field}":{number}}}')


def test_an_error_repeats_only_the_beginning_of_what_a_client_sent() -> None:
    for frame in ({"type": "open", "x" * 100_000: 1}, {"type": "y" * 100_000}):
        with pytest.raises(BadRequest) as caught:
            Codec("json").decode_client(json.dumps(frame))
        assert len(caught.value.message) < 1000
        assert len(str(caught.value.details)) < 1000


def test_a_frame_that_is_nested_too_deeply_says_so() -> None:
    for codec, data in (
        (CODECS[0], b'{"type":"set","id":1,"meta":{"k":' + b"[" * 500_000),
        (CODECS[1], b"\x82\xa4type\xa3set\xa4meta\x81\xa1k" + b"\x91" * 500_000),
    ):
        with pytest.raises(BadRequest, match="nested too deeply"):
            codec.decode_client(data)
        assert codec.ids(data) == []


def test_only_an_open_that_was_named_says_who() -> None:
    assert wire.Open(client="me").who == "me"
    with pytest.raises(ValueError, match="names no client"):
        _ = wire.Open().who
