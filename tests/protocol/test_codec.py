"""Both codecs over every message type, and what they refuse."""

import json

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ramify.protocol import wire
from ramify.protocol.codec import SUBPROTOCOLS, Codec
from ramify.protocol.errors import BadRequest
from tests.messages import usage

CODECS = [Codec(name) for name in SUBPROTOCOLS.values()]
USAGE = usage(prompt=5, cached=4, output=2, hit=wire.Hit(gpu=4), queue_ms=0.5, total_ms=3.0)
CLIENT: list[wire.ClientMessage] = [
    wire.Open(client="c", have={"main": 3}, ttl_s=1.5, detach="pause", tokens=True, template="strict"),
    wire.Append(
        id=1, messages=[wire.ChatMessage("user", "hé"), wire.ChatMessage("tool", "x", tool_call_id="t")]
    ),
    wire.Append(id=2, branch=["a", "b"], tokens=[1, 2], expect=0),
    wire.Generate(
        id=3,
        temperature=0.0,
        seed=2**63 - 1,
        stop=["\n"],
        n=2,
        as_=["x", "y"],
        constraint=wire.Constraint("a+"),
    ),
    wire.Select(id=4, choices=["yes", "no"]),
    wire.Fork(id=5, branch=None, as_=["r"]),
    wire.Join(id=6, from_=["a"], keep=True),
    wire.Prune(id=7, from_=["a", "b"], into="main", by="vote", k=2),
    wire.Rollback(id=8, to=0),
    wire.Set(id=9, branch="a", meta={"k": [1, None]}),
    wire.Drop(id=10, branch="a"),
    wire.Tree(id=11, text=True),
    wire.Export(id=11),
    wire.Cancel(id=12, ops=[3]),
    wire.Credit(branch="main", upto=2**53 - 1),
    wire.Ping(n=-1),
    wire.CloseSession(id=13, keep=True),
]
SERVER: list[wire.ServerMessage] = [
    wire.StateReply(
        session="s",
        op=3,
        revision=4,
        branches=[
            wire.BranchState(
                branch="main",
                position=7,
                turns=[wire.SegmentState(kind="output", start=1, end=7, tokens=[1])],
            )
        ],
        server=wire.ServerInfo(version=1, epoch="e", model="m"),
    ),
    wire.Ok(id=1, branch="main", position=3, result={"rebased": 2}),
    wire.Delta(
        branch="main",
        position=3,
        text="é",
        tokens=[1],
        logprobs=[wire.TokenLogprob(token=1, logprob=-0.5, top=[(1, -0.5)])],
        truncate=0,
    ),
    wire.Done(id=1, branch="main", position=3, reason="stop", usage=USAGE, stop=2),
    wire.Error(code="limit", message="m", details={"max": 1}),
    wire.Event(revision=1, op="fork"),
    wire.Bye(reason="r", after_ms=1),
    wire.Pong(n=0, load={"queue": 1.0}),
]


def test_every_message_type_is_covered() -> None:
    assert {type(message) for message in CLIENT} == set(wire.ClientMessage.__args__)  # type: ignore[attr-defined]
    assert {type(message) for message in SERVER} == set(wire.ServerMessage.__args__)  # type: ignore[attr-defined]


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
def test_round_trip(codec: Codec) -> None:
    for message in CLIENT:
        assert codec.decode_client(codec.encode([message])) == [message]
    for message in SERVER:
        assert codec.decode_server(codec.encode([message])) == [message]
    assert codec.decode_client(codec.encode(CLIENT)) == CLIENT
    assert codec.decode_server(codec.encode(SERVER)) == SERVER
    assert codec.decode_client(codec.encode([])) == []


def test_one_message_is_an_object_and_defaults_are_left_out() -> None:
    codec = Codec("json")
    assert json.loads(codec.encode([wire.Generate(id=1)])) == {"type": "generate", "id": 1}
    assert json.loads(codec.encode([wire.Fork(id=1, as_=["x"])])) == {
        "type": "fork",
        "id": 1,
        "as": ["x"],
    }
    assert json.loads(codec.encode([wire.CloseSession(id=1)])) == {"type": "close", "id": 1}
    assert len(json.loads(codec.encode(CLIENT[:2]))) == 2


@pytest.mark.parametrize(
    "transcript",
    [
        '[{"type":"open","client":"web-1"},{"type":"append","id":1,"messages":[{"role":"user","content":"Q?"}]},'
        '{"type":"generate","id":2,"max_tokens":64,"temperature":0}]',
        '[{"type":"fork","id":6,"as":["a","b","c"]},{"type":"generate","id":7,"branch":["a","b","c"],"seed":1},'
        '{"type":"join","id":8,"from":["a","b","c"],"prefix":"Three:\\n","each":"{i}: {text}\\n",'
        '"suffix":"Merge."}]',
        '[{"type":"open","client":"web-1","session":"s_8fK2","key":"k_Qm","have":{"main":512}}]',
    ],
)
def test_the_protocol_pages_transcripts_decode(transcript: str) -> None:
    assert Codec("json").decode_client(transcript)


def test_clients_ignore_what_servers_may_add() -> None:
    added = '{"type":"ok","id":1,"new_field":{"x":1}}'
    assert Codec("json").decode_server(added) == [wire.Ok(id=1)]


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"type": "append"}, "$.id"),
        ({"type": "generate", "id": 1, "foo": 2}, "$.foo"),
        ([{"type": "generate", "id": 1, "top_p": 0.0}], "$[0].top_p"),
        ([{"type": "generate", "id": 1, "temperature": -0.5}], "$[0].temperature"),
        ([{"type": "generate", "id": 1, "n": 0}], "$[0].n"),
        ([{"type": "generate", "id": 2**53}], "$[0].id"),
        ([{"type": "generate", "id": -1}], "$[0].id"),
        ([{"type": "generate", "id": True}], "$[0].id"),
        ([{"type": "drop", "id": 1, "branch": "a b"}], "$[0].branch"),
        ([{"type": "drop", "id": 1, "branch": "a\n"}], "$[0].branch"),
        ([{"type": "drop", "id": 1, "branch": []}], "$[0].branch"),
        ([{"type": "open", "client": "a", "have": {"a": -1}}], "$[0].have[...]"),
        ([{"type": "open", "client": "a", "have": {"a b": 1}}], "$[0].have"),
        ([{"type": "generate", "id": 1}, {"type": "nope", "id": 3}], "$[1].type"),
        ([{"id": 2}], "$[0].type"),
        ([3], "$[0]"),
        ("x", "$"),
    ],
)
def test_the_path_of_the_fault(codec: Codec, value: object, path: str) -> None:
    data = msgspec.msgpack.encode(value) if codec.binary else msgspec.json.encode(value)
    with pytest.raises(BadRequest) as caught:
        codec.decode_client(data)
    assert caught.value.details == {"path": path}
    assert caught.value.message.endswith(f" - at `{path}`")


@pytest.mark.parametrize(
    "data", [b"", b"{", b"\xff", b"nope", b'{"type":"append","id":1,"text":"\xff"}', b"[" * 100_000]
)
def test_what_is_not_json(data: bytes) -> None:
    codec = Codec("json")
    with pytest.raises(BadRequest) as caught:
        codec.decode_client(data)
    if data[:2] != b"[[":  # an array in an array is a fault of type, found before the depth
        assert caught.value.details == {"parse": True}
    assert codec.ids(data) == []


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x82\xa4type", b"\x81\xa4type\xa1\xff"])
def test_what_is_not_msgpack(data: bytes) -> None:
    with pytest.raises(BadRequest):
        Codec("msgpack").decode_client(data)
    assert Codec("msgpack").ids(data) == []


@pytest.mark.parametrize(
    "field", ["temperature", "top_p", "min_p", "frequency_penalty", "repetition_penalty"]
)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_msgpack_floats_that_json_cannot_say(field: str, value: float) -> None:
    data = msgspec.msgpack.encode({"type": "generate", "id": 1, field: value})
    with pytest.raises(BadRequest):
        Codec("msgpack").decode_client(data)


def test_ids_of_a_refused_frame() -> None:
    codec = Codec("json")
    frame = [
        {"id": 1},
        {"id": "x"},
        5,
        {"type": "tree"},
        {"id": True},
        {"id": -1},
        {"id": 2**53},
        {"id": 9},
    ]
    assert codec.ids(json.dumps(frame)) == [1, None, None, None, None, None, None, 9]
    assert codec.ids('{"id":4,"bad":1}') == [4]


@given(st.binary(max_size=60))
@settings(derandomize=True, deadline=None)
def test_any_bytes_decode_or_raise_bad_request(data: bytes) -> None:
    for codec in CODECS:
        for decode in (codec.decode_client, codec.decode_server):
            try:
                assert isinstance(decode(data), list)
            except BadRequest as error:
                assert error.details  # noqa: PT017
        codec.ids(data)
