"""Frames to messages or refusals, without a socket."""

import json

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ramify.actors.gateway.port.access.limits import SocketLimits
from ramify.actors.gateway.port.intake import Intake, receive, refuse
from ramify.protocol.codec import Codec
from ramify.protocol.config import Limits
from ramify.protocol.errors import Overloaded
from ramify.protocol.wire import Credit, Generate, Open, Ping

CODEC = Codec("json")
LIMITS = Limits(ops_per_frame=4)


def take(value: object, guard: SocketLimits | None = None) -> Intake:
    data = value if isinstance(value, bytes) else json.dumps(value).encode()
    return receive(data, CODEC, guard or SocketLimits(LIMITS, 0.0), LIMITS, 0.0)


def test_pings_are_answered_and_what_follows_keeps_its_place() -> None:
    ping, generate = {"type": "ping", "n": 3}, {"type": "generate", "id": 1}
    assert take([ping, generate, ping]) == Intake(ops=[Generate(id=1), Ping(n=3)], place=1, pings=[3, 3])
    assert take([ping, ping]) == Intake(pings=[3, 3])
    assert take(generate).place is None
    assert take(b'\n\t [{"type": "generate", "id": 1}]').place == 0


@pytest.mark.parametrize("count", [1, 2, 15, 16, 70_000])
def test_an_array_of_messages_is_told_from_one_message(count: int) -> None:
    for name in ("json", "msgpack"):
        codec = Codec(name)
        data = codec.encode([Ping(n=0)] * count)
        assert codec.is_array(data) == (count > 1)
    assert Codec("msgpack").is_array(msgspec.msgpack.encode([Ping()]))


@pytest.mark.parametrize(
    ("frame", "ident", "path"),
    [
        ({"type": "generate", "id": 1, "foo": 2}, 1, "$.foo"),
        ({"type": "generate", "id": "x"}, None, "$.id"),
        ({"type": "append", "text": "x"}, None, "$.id"),
        ([{"type": "nope", "id": 3}], 3, "$[0].type"),
        ([{"type": "ping"}, {"id": 3}], 3, "$[1].type"),
        ([{"type": "open", "client": "c", "have": {"a b": 1}}], None, "$[0].have"),
        (
            [{"type": "append", "id": 2, "messages": [{"role": "user", "content": 1}]}],
            2,
            "$[0].messages[0].content",
        ),
        ([[]], None, "$[0]"),
        (5, None, "$"),
        ([], None, "$"),
    ],
)
def test_the_fault_is_named(frame: object, ident: int | None, path: str) -> None:
    taken = take(frame)
    assert taken.ops == []
    assert taken.close is None
    error = taken.replies[0]
    assert (error.code, error.id, error.details) == ("bad_request", ident, {"path": path})
    assert path in error.message


def test_each_op_of_an_invalid_frame_is_answered_but_not_without_bound() -> None:
    frame = [{"type": "tree", "id": i} for i in range(9)]
    frame[1]["bad"] = True
    codes = [(reply.id, reply.code) for reply in take(frame).replies]
    assert codes == [(1, "bad_request"), (0, "skipped"), (2, "skipped"), (3, "skipped")]


def test_strikes_and_violations_close() -> None:
    guard = SocketLimits(LIMITS, 0.0)
    assert [take(b"{", guard).close for _ in range(3)] == [None, None, (4400, "unparseable frames")]
    guard = SocketLimits(LIMITS, 0.0)
    big = [{"type": "tree", "id": i} for i in range(5)]
    assert [take(big, guard).close for _ in range(11)][9:] == [None, (4429, "too many refused frames")]
    guard = SocketLimits(Limits(ops_per_second=1, ops_burst=1), 0.0)
    invalid = {"type": "nope"}
    assert {reply.code for _ in range(12) for reply in take(invalid, guard).replies} == {
        "bad_request",
        "limit",
    }
    assert take(invalid, guard).close is not None


def test_what_comes_too_fast_goes_on_to_be_refused_by_its_session() -> None:
    guard = SocketLimits(Limits(ops_per_second=1, ops_burst=1), 0.0)
    assert take({"type": "tree", "id": 1}, guard).limit is None
    taken = take({"type": "tree", "id": 2}, guard)
    assert taken.limit is not None
    assert ([op.id for op in taken.ops], taken.limit.code, taken.replies) == ([2], "limit", [])
    many = take([{"type": "tree", "id": i} for i in range(50)])
    assert len(many.ops) == LIMITS.ops_per_frame  # no more are answered


def test_refuse_answers_ops_and_open_but_not_credit() -> None:
    error = Overloaded("busy", retry_ms=5)
    replies = refuse([Open(client="c"), Credit(branch="a", upto=1), Generate(id=7)], error, 10)
    assert [(reply.id, reply.retry_ms) for reply in replies] == [(None, 5), (7, 5)]
    assert [reply.id for reply in refuse([Ping()], error, 10)] == [None]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["type", "id", "branch", "x"]), inner)
    ),
    max_leaves=10,
)


@given(st.binary(max_size=40) | JSON.map(lambda value: json.dumps(value).encode()))
@settings(derandomize=True, deadline=None)
def test_any_bytes_give_ops_or_a_refusal(data: bytes) -> None:
    for codec in (CODEC, Codec("msgpack")):
        taken = receive(data, codec, SocketLimits(LIMITS, 0.0), LIMITS, 0.0)
        assert bool(taken.ops or taken.pings) != bool(taken.replies)
        codec.encode(taken.replies)
