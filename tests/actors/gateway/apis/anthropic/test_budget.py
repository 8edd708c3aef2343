"""A thought ends with its budget, and the answer follows in a second generation."""

import json
from typing import Any

from ramify.actors.gateway.apis.anthropic.answers import MessageAnswers
from ramify.actors.gateway.apis.anthropic.conversation import conversation_of
from ramify.actors.gateway.apis.anthropic.requests import MessagesRequest
from ramify.actors.gateway.apis.anthropic.signatures import Signer
from ramify.actors.gateway.apis.openai.requests import decode
from ramify.actors.gateway.port.http import Response
from ramify.actors.gateway.port.interfaces import Served
from ramify.protocol.wire import Append, Constraint, Delta, Done, Generate, Part
from tests.messages import usage

SIGNER = Signer(b"secret", "ann")
TOOL = {"name": "add", "input_schema": {"type": "object"}}
SCHEMA = {"type": "object"}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{}"}}


def dialogue(end: str | None = "</think>", **fields: Any) -> MessageAnswers:
    body = {
        "model": "m",
        "max_tokens": 2000,
        "messages": [{"role": "user", "content": "hi"}],
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        **fields,
    }
    request = decode(json.dumps(body).encode(), MessagesRequest)
    told = conversation_of(request.system, request.messages, SIGNER)
    return MessageAnswers(request, told, SIGNER, Served(4096, end), "req_1")


def said(kind: Any, text: str, **fields: Any) -> Delta:
    return Delta(branch="main", position=9, text=text, parts=[Part(kind=kind, text=text, **fields)])


def ended(output: int, reason: Any = "length", **fields: Any) -> Done:
    used = usage(prompt=7, cached=3, computed=4, output=output)
    return Done(
        **{"id": 4, "branch": "main", "position": 7 + output, **fields}, reason=reason, usage=used
    )


def test_a_thought_is_ended_and_an_answer_follows() -> None:
    chat = dialogue()
    (first,) = [op for op in chat.ops if isinstance(op, Generate)]
    assert first.max_tokens == 1024
    assert chat.receive([said("reasoning", "hm"), ended(1024)]) is None
    assert not chat.over
    close, rest = chat.take_ops()
    assert close == Append(id=5, text="\n</think>\n\n")
    assert isinstance(rest, Generate)
    assert (rest.id, rest.max_tokens) == (6, 976)
    assert chat.take_ops() == []
    answer = chat.receive([said("text", "So."), ended(6, "stop", id=6)])
    assert isinstance(answer, Response)
    message = json.loads(answer.body)
    assert [block["type"] for block in message["content"]] == ["thinking", "text"]
    assert (message["stop_reason"], message["usage"]["output_tokens"]) == ("end_turn", 1030)
    assert message["usage"]["cache_read_input_tokens"] == 3


def test_an_answer_that_has_begun_goes_on_where_it_was() -> None:
    form = {"format": {"type": "json_schema", "schema": SCHEMA}}
    chat = dialogue(output_config=form)
    chat.receive([said("reasoning", "hm"), said("markup", "</think>"), said("text", "{"), ended(1024)])
    (rest,) = chat.take_ops()
    assert isinstance(rest, Generate)
    assert rest.constraint == Constraint(continue_=True)
    chat = dialogue(output_config=form)
    chat.receive([said("reasoning", "hm"), ended(1024)])
    rest = chat.take_ops()[1]
    assert isinstance(rest, Generate)
    assert rest.constraint == Constraint(json_schema=SCHEMA, after_thought=True)


def test_a_call_that_has_begun_is_not_forced_again() -> None:
    chat = dialogue(tools=[TOOL], tool_choice={"type": "any"}, stream=True)
    begun = said("call", "", call=0, id="c1", name="add")
    chat.receive([said("reasoning", "hm"), begun, ended(1024, tool_calls=[CALL])])
    (rest,) = chat.take_ops()
    assert isinstance(rest, Generate)
    assert rest.tool_choice == "auto"
    events = chat.receive([ended(3, "stop", id=6)])
    assert isinstance(events, bytes)
    assert b'"stop_reason":"tool_use"' in events


def test_nothing_follows_where_there_is_nothing_to_end() -> None:
    for chat, done in (
        (dialogue(end=None), ended(2000)),  # a model that does not think
        (dialogue(), ended(500, "stop")),
        (dialogue(), ended(1024, position=4096)),  # the context is full
    ):
        assert isinstance(chat.receive([said("reasoning", "hm"), done]), Response)
        assert chat.take_ops() == []
    plain = dialogue(end=None).ops[-1]
    assert isinstance(plain, Generate)
    assert plain.max_tokens == 2000
