"""What is metered of messages: all that a client can make long counts with at least its length."""

from typing import Any

import pytest

from ramify.actors.kit.memory import MESSAGE, NUMBER, OPENED, TARGET, reply_bytes
from ramify.actors.session.ops import op_bytes
from ramify.protocol.wire import (
    Append,
    Cancel,
    ChatMessage,
    ClientMessage,
    Constraint,
    Delta,
    Done,
    Drop,
    Fork,
    Generate,
    Join,
    Ok,
    Ping,
    Pong,
    Prune,
    Select,
    ServerMessage,
    Set,
    Tree,
)
from tests.messages import usage

LONG = "x" * 10_000
NAMES = [f"b{i}" for i in range(100)]
SHORT_CALL = {"name": "f", "arguments": {}}
SHORT_CALL_TEXT = '[{"name":"f","arguments":{}}]'
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": LONG}}


def chat(**fields: Any) -> list[ChatMessage]:
    return [ChatMessage(role="assistant", **({"content": ""} | fields))]


OPS: dict[str, tuple[ClientMessage, int]] = {
    "text": (Append(id=1, text=LONG), 10_000),
    "tokens": (Append(id=1, tokens=[1] * 100), 100 * NUMBER),
    "branches": (Append(id=1, branch=NAMES, text="x"), 100 * TARGET),
    "content": (Append(id=1, messages=chat(content=LONG)), 10_000),
    "reasoning": (Append(id=1, messages=chat(reasoning=LONG)), 10_000),
    "calls": (Append(id=1, messages=chat(tool_calls=[CALL])), 10_000),
    "messages": (Append(id=1, messages=chat() * 100), 100 * MESSAGE),
    "children": (Generate(id=1, n=100, as_=NAMES), 200 * TARGET),
    "stop": (Generate(id=1, stop=["x" * 250] * 16), 4_000),
    "stop tokens": (Generate(id=1, stop_token_ids=[1] * 64), 64 * NUMBER),
    "constraint": (Generate(id=1, constraint=Constraint(regex=LONG)), 10_000),
    "fork": (Fork(id=1, as_=NAMES), 100 * TARGET),
    "meta": (Set(id=1, meta={"a": LONG}), 10_000),
    "choices": (Select(id=1, choices=["x" * 100] * 100), 100 * (NUMBER + 100)),
    "prefix": (Join(id=1, from_=["a"], prefix=LONG), 10_000),
    "each": (Join(id=1, from_=["a"], each=LONG), 10_000),
    "suffix": (Join(id=1, from_=["a"], suffix=LONG), 10_000),
    "sources": (Join(id=1, from_=NAMES), 100 * TARGET),
    "pruned": (Prune(id=1, from_=NAMES), 100 * TARGET),
    "score_from": (Prune(id=1, from_=["a"], score_from=NAMES), 100 * TARGET),
    "into": (Prune(id=1, from_=["a"], into=NAMES), 100 * TARGET),
    "drop": (Drop(id=1, branch=NAMES), 100 * TARGET),
    "cancelled": (Cancel(id=1, branch=NAMES), 100 * TARGET),
    "cancelled ops": (Cancel(id=1, ops=list(range(1, 101))), 100 * NUMBER),
}


@pytest.mark.parametrize("name", OPS)
def test_an_op_counts_with_all_that_can_be_long(name: str) -> None:
    op, least = OPS[name]
    assert least + MESSAGE <= op_bytes(op) <= 10 * least + 4 * MESSAGE


@pytest.mark.parametrize("op", [Ping(n=1), Tree(id=1), Set(id=1), Fork(id=1, as_=["a"])])
def test_a_short_message_counts_as_one(op: ClientMessage) -> None:
    assert MESSAGE <= op_bytes(op) <= MESSAGE + 2 * TARGET


def done(**fields: Any) -> Done:
    used = usage()
    return Done(id=1, branch="main", position=2, reason="stop", usage=used, **fields)


REPLIES: dict[str, tuple[ServerMessage, int]] = {
    "text": (done(text=LONG), 10_000),
    "content": (done(content=LONG), 10_000),
    "reasoning": (done(reasoning=LONG), 10_000),
    "calls": (done(tool_calls=[CALL]), 10_000),
    "scores": (done(scores=[0.5] * 100), 100 * NUMBER),
    "delta": (Delta(branch="main", position=1, text=LONG), 10_000),
    "delta tokens": (Delta(branch="main", position=1, text="", tokens=[1] * 100), 100 * NUMBER),
    "result": (Ok(id=1, result={"a": LONG}), 10_000),
}


@pytest.mark.parametrize("name", REPLIES)
def test_a_reply_counts_with_all_that_can_be_long(name: str) -> None:
    message, least = REPLIES[name]
    assert least + MESSAGE <= reply_bytes(message) <= 10 * least + 4 * MESSAGE


def test_short_replies_and_opens() -> None:
    assert reply_bytes(Ok(id=1)) == MESSAGE
    assert MESSAGE <= reply_bytes(done()) <= 4 * MESSAGE
    assert OPENED >= MESSAGE


# What limits on bytes mean is fixed by these sums: 600 for a message, 400 for a branch that it names, 40
# for a number of a list, 8 for a byte of JSON, and the length of each text.
SUMS: dict[str, tuple[ClientMessage, int]] = {
    "ping": (Ping(n=1), 600),
    "tree": (Tree(id=1), 1000),
    "text": (Append(id=1, text="four"), 1004),
    "tokens": (Append(id=1, tokens=[1, 2, 3]), 1120),
    "three branches": (Append(id=1, branch=["a", "b", "c"], text="x"), 1801),
    "message": (Append(id=1, messages=chat(content="ab", reasoning="cde")), 1605),
    "call": (Append(id=1, messages=chat(tool_calls=[SHORT_CALL])), 1600 + 8 * len(SHORT_CALL_TEXT)),
    "generate": (Generate(id=1), 1400),
    "children": (Generate(id=1, n=3, as_=["a", "b", "c"]), 1000 + 6 * 400),
    "stops": (Generate(id=1, stop=["ab", "c"], stop_token_ids=[1, 2]), 1400 + 80 + 3),
    "fork": (Fork(id=1, as_=["a", "b"]), 1800),
    "set": (Set(id=1, meta={"a": 1}), 1000 + 8 * len('{"a":1}')),
    "select": (Select(id=1, choices=["ab", "cde"]), 1000 + 80 + 5),
    "join": (Join(id=1, from_=["a", "b"], prefix="p", each="ea", suffix="suf"), 1800 + 6),
    "prune": (Prune(id=1, from_=["a", "b"], score_from=["c", "d"]), 1000 + 400 * 4),
    "prune into": (Prune(id=1, from_=["a", "b"], into=["c", "d"]), 1000 + 400 * 4),
}


@pytest.mark.parametrize("name", SUMS)
def test_the_sum_of_a_message(name: str) -> None:
    op, size = SUMS[name]
    assert op_bytes(op) == size


def test_the_sum_of_a_reply_and_of_an_open() -> None:
    assert reply_bytes(done()) == 1200
    assert reply_bytes(done(text="ab", content="cde", reasoning="f")) == 1206
    assert reply_bytes(done(notes=["ab", "c"])) == 1203
    assert reply_bytes(done(scores=[0.5, 0.25], tool_calls=[{"a": 1}])) == 1200 + 80 + 72
    assert reply_bytes(Delta(branch="main", position=1, text="ab", tokens=[1, 2])) == 682
    assert reply_bytes(Delta(branch="main", position=1, text="ab")) == 602
    assert reply_bytes(Ok(id=1, result={"a": 1})) == 656
    assert reply_bytes(Pong(n=1, load={})) == 600
    assert OPENED == 2400
