"""Free-form JSON: refused with a path, or readable by both codecs and equal."""

import contextlib
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ramify.protocol import json_value, wire
from ramify.protocol.codec import SUBPROTOCOLS, Codec
from ramify.protocol.errors import BadRequest, InvalidField
from ramify.protocol.json_value import MAX_DEPTH, MAX_VALUES, OneFrame, check_json, json_fault
from tests.amount import examples

CODECS = [Codec(name) for name in SUBPROTOCOLS.values()]

TEXT = st.text(max_size=8)
FINE = (
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False) | TEXT
)  # fmt: skip
HOSTILE = (
    st.integers(2**63)
    | st.integers(max_value=-(2**63) - 1)
    | st.sampled_from([float("nan"), float("inf"), msgspec.msgpack.Ext(5, b"x")])
    | st.binary(max_size=4)
    | st.just(datetime.fromtimestamp(1, UTC))
)
KEYS = TEXT | st.sampled_from([None, 1, 1.5, b"k", (1, 2)])


def values(leaves: st.SearchStrategy[Any], keys: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.recursive(
        leaves,
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=4),
        max_leaves=20,
    )


def messages(value: Any) -> list[tuple[str, dict[str, Any]]]:
    """Every place where a client may put it, and what it is called there."""
    return [
        ("meta.v", {"type": "set", "id": 1, "meta": {"v": value}}),
        ("tools[0].v", {"type": "open", "tools": [{"v": value}]}),
        (
            "messages[0].tool_calls[0].v",
            {"type": "append", "id": 1, "messages": [{"role": "user", "tool_calls": [{"v": value}]}]},
        ),
        (
            "constraint.json_schema.v",
            {"type": "generate", "id": 1, "constraint": {"json_schema": {"v": value}}},
        ),
    ]


@given(values(FINE, TEXT))
@settings(derandomize=True, deadline=None, max_examples=examples(50, 100))
def test_what_json_has_survives_both_codecs(value: Any) -> None:
    assert json_fault(value) is None
    for codec in CODECS:
        (op,) = codec.decode_client(codec.encode([wire.Set(id=1, meta={"v": value})]))
        assert isinstance(op, wire.Set)
        assert op.meta == {"v": value}


@given(values(FINE | HOSTILE, KEYS))
@settings(derandomize=True, deadline=None, max_examples=examples(100, 300))
def test_what_one_codec_reads_the_other_can_write(value: Any) -> None:
    """Whatever a client sends, in either codec: a bad request with its path, or a value for all."""
    for encode, codec in ((msgspec.json.encode, CODECS[0]), (msgspec.msgpack.encode, CODECS[1])):
        for path, message in messages(value):
            try:
                data = encode(message)
            except (OverflowError, TypeError):
                continue  # this codec has no way to say it
            try:
                (read,) = codec.decode_client(data)
            except BadRequest as error:
                details = error.details or {}
                where = f"$.{path.removesuffix('.v')}"
                assert details.get("parse") or details["path"].startswith(where)
                continue
            for other in CODECS:
                assert other.decode_client(other.encode([read])) == [read]


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"a": [1, {"b": 2**63}]}, "meta.a[1].b"),
        ({"a": {1: 2}}, "meta.a"),
        ({None: 2}, "meta"),
        ({"a b`\n": b"x"}, 'meta["a b\'\\n"]'),
        ({"x" * 1000: float("inf")}, f'meta["{"x" * 40}"]'),
        ({"a": "\ud800"}, "meta.a"),
        ({"\udc00": 1}, "meta"),
        ({"a": object()}, "meta.a"),
        (float("nan"), "meta"),
    ],
)
def test_the_path_of_the_fault(value: Any, path: str) -> None:
    with pytest.raises(InvalidField) as caught:
        check_json(value, "meta")
    assert caught.value.message.startswith(f"`{path}` ")
    assert caught.value.message.isprintable()


def nested(depth: int) -> Any:
    value: Any = {}
    for i in range(depth - 1):
        value = [value] if i % 2 else {"k": value}
    return value


@settings(derandomize=True, deadline=None, max_examples=examples(50, 300))
@given(values(FINE | HOSTILE | st.just("\ud800"), KEYS | st.just("\ud800")))
def test_the_quick_look_and_the_one_that_names_the_place_agree(value: Any) -> None:
    fault = json_fault(value)
    with contextlib.nullcontext() if fault is None else pytest.raises(InvalidField):
        check_json(value, "meta")


def test_depth_is_counted_without_recursion() -> None:
    assert json_fault(nested(MAX_DEPTH)) is None
    for depth in (MAX_DEPTH + 1, 900, 100_000):
        fault = json_fault(nested(depth))
        assert fault is not None
        assert "nested" in fault[1]
        assert len(fault[0]) < 200


def test_the_number_of_values_is_bounded() -> None:
    assert json_fault([0] * MAX_VALUES) is None
    for value in ([0] * (MAX_VALUES + 1), [[0] * 1000 for _ in range(100)], {"k": [{}] * MAX_VALUES}):
        fault = json_fault(value)
        assert fault is not None
        assert "values" in fault[1]


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
def test_all_values_of_a_frame_are_bounded_together(codec: Codec) -> None:
    """512 ops of 900 values each took 27 ms of one turn of the loop."""

    def decode(count: int, more: int = 0) -> list[Any]:
        ops = [{"type": "set", "id": i, "meta": {"a": [1] * 1022}} for i in range(1, count + 1)]
        ops.append({"type": "set", "id": count + 1, "meta": {"a": [1] * more}})
        return codec.decode_client(codec.encode(ops))  # type: ignore[arg-type]

    most = MAX_VALUES // 1023  # with the list itself
    rest = MAX_VALUES - most * 1023 - 1
    for _ in range(2):  # the next frame begins anew
        assert len(decode(most, rest)) == most + 1
        with pytest.raises(BadRequest, match="the other JSON of this frame") as caught:
            decode(most, rest + 1)
        assert caught.value.details == {"path": f"$[{most}].meta"}
    check_json([0] * MAX_VALUES, "outside of a frame")
    check_json([0] * MAX_VALUES, "another")
    tokens = {"type": "append", "id": 1, "tokens": [1] * (2 * MAX_VALUES)}
    assert len(codec.decode_client(codec.encode([tokens]))) == 1  # type: ignore[list-item]


def test_a_value_of_several_messages_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 prompts with one schema took 0.3 s of one turn of the loop."""
    walked: list[Any] = []
    left = json_value._left
    monkeypatch.setattr(
        json_value, "_left", lambda value, most: (walked.append(value), left(value, most))[1]
    )
    schema, other = {"enum": [1] * 60_000}, {"enum": [1] * 6_000}
    with OneFrame():
        for _ in range(64):
            check_json(schema, "json_schema")
        assert walked == [schema]
        with pytest.raises(InvalidField, match="the other JSON of this frame"):
            check_json(other, "json_schema")
    check_json(other, "json_schema")


@pytest.mark.parametrize(
    "text", [rb'"\ud800"', rb'"\ud800 and more text"', rb'"\udc00 and more"', rb'"\ud800\u0041 more"']
)
def test_half_a_surrogate_pair_does_not_parse(text: bytes) -> None:
    with pytest.raises(BadRequest, match="does not parse"):
        CODECS[0].decode_client(b'{"type":"append","id":1,"text":' + text + b"}")


def test_msgpack_bytes_that_nothing_reads_are_bad_requests() -> None:
    head = b"\x83\xa4type\xa3set\xa2id\x01\xa4meta\x81\xa1k"
    for tail in (
        b"\xc4\x01x",  # bytes
        b"\xd6\xff\x00\x00\x00\x01",  # a timestamp
        b"\xd4\x05\x01",  # an extension
        b"\x81\xc0\x01",  # a nil key
        b"\x81\x91\x01\x01",  # an array as a key
        b"\x81\x80\x01",  # a map as a key
        b"\xcf" + b"\xff" * 8,  # 2**64 - 1
        b"\xca\x7f\x80\x00\x00",  # infinity
        b"\xdd\xff\xff\xff\xff",  # an array that claims 2**32 - 1 elements
    ):
        with pytest.raises(BadRequest):
            CODECS[1].decode_client(head + tail)
        with contextlib.suppress(BadRequest):
            CODECS[1].ids(head + tail)
