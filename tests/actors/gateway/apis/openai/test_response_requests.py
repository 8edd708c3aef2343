"""Items of a request for a response, and the ids of responses."""

import json
from typing import Any

import pytest

from ramify.actors.gateway.apis.openai.requests import decode
from ramify.actors.gateway.apis.openai.response_requests import ResponseRequest, checksum
from ramify.protocol.errors import BadRequest
from ramify.protocol.stored_response import Stored
from ramify.protocol.wire import ChatMessage

CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}


def asked(**fields: Any) -> ResponseRequest:
    return decode(json.dumps({"model": "m", "input": "hi", **fields}).encode(), ResponseRequest)


def test_items_of_a_turn_become_one_message() -> None:
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "add"}]},
        {"type": "reasoning", "id": "rs", "summary": [], "content": [
            {"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "status": "completed", "id": "msg", "content": [
            {"type": "output_text", "text": "I add.", "annotations": []}]},
        CALL,
        CALL | {"call_id": "c2"},
        {"type": "function_call_output", "call_id": "c1", "output": "4"},
        {"type": "function_call_output", "call_id": "c2", "output": [
            {"type": "input_text", "text": "5"}]},
        {"role": "developer", "content": "Be brief."},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
    ]  # fmt: skip
    messages = asked(input=items, instructions="Be kind.").messages(instructed=False)
    function = {"name": "f", "arguments": "{}"}
    calls = [{"id": ident, "type": "function", "function": function} for ident in ("c1", "c2")]
    assert messages == [
        ChatMessage(role="system", content="Be kind."),
        ChatMessage(role="user", content="add"),
        ChatMessage(role="assistant", content="I add.", tool_calls=calls, reasoning="hm"),
        ChatMessage(role="tool", content="4", tool_call_id="c1"),
        ChatMessage(role="tool", content="5", tool_call_id="c2"),
        ChatMessage(role="system", content="Be brief."),
        ChatMessage(role="assistant", content="No."),
    ]
    assert asked(input="x", instructions="Be kind.").messages(instructed=True) == [
        ChatMessage(role="user", content="x")
    ]


@pytest.mark.parametrize(
    ("item", "field"),
    [
        ({"type": "computer_call"}, "input[0].type"),
        ({"role": "user", "content": [{"type": "input_image"}]}, "input[0].content[0].type"),
        ({"type": "function_call", "name": "f"}, "input[0].call_id"),
        ({"role": "user", "content": "x", "mood": 1}, "input[0].mood"),
        (5, "input[0]"),
    ],
)
def test_other_items_are_refused_by_name(item: Any, field: str) -> None:
    with pytest.raises(BadRequest) as raised:
        asked(input=[item]).messages(instructed=False)
    assert raised.value.details == {"field": field}


def test_an_id_says_where_a_response_is() -> None:
    stored = Stored("s_1", "key", "r1", checksum("Be kind."))
    assert Stored.of(stored.ident) == stored
    assert checksum(None) == 0
    for ident in ("", "resp_", "resp_abc", "resp_\u00e4", stored.ident[:-9], "resp_" + "A" * 500):
        assert Stored.of(ident) is None


def test_tools_of_a_namespace_are_told_with_both_names() -> None:
    """As Codex declares those of its agents."""
    tool = {
        "type": "function", "name": "close", "description": None, "parameters": {}, "strict": False,
    }  # fmt: skip
    space = {"type": "namespace", "name": "agents", "description": "Agents.", "tools": [tool]}
    call = {**CALL, "name": "close", "namespace": "agents"}
    output = {"type": "function_call_output", "call_id": "c1", "output": "4"}
    request = asked(tools=[tool, space], input=[call, output], client_metadata={"session": "s"})
    declared = request.declared() or []
    assert [each["function"]["name"] for each in declared] == ["close", "agents__close"]
    assert request.namespaces() == {"agents__close": ("agents", "close")}
    called = request.messages(instructed=False)[0].tool_calls or []
    assert called[0]["function"]["name"] == "agents__close"
    assert request.tools is not None
    assert request.tools[1].shown() == space


def test_a_picture_in_the_input_is_refused_with_a_way_to_go() -> None:
    part = {"type": "input_image", "image_url": "data:image/png;base64,"}
    asked = {"input": [{"role": "user", "content": "x"}, {"role": "user", "content": [part]}]}
    request = decode(json.dumps(asked).encode(), ResponseRequest)
    with pytest.raises(
        BadRequest, match=r"`input\[1\].content\[0\].type` 'input_image': this server reads no images"
    ):
        request.messages(instructed=False)


def test_an_output_is_of_a_call() -> None:
    output = {"type": "function_call_output", "call_id": "c2", "output": "4"}
    with pytest.raises(BadRequest, match=r"`input\[1\].call_id` 'c2' is the id of no call") as raised:
        asked(input=[CALL, output]).messages(instructed=False)
    assert raised.value.details == {"field": "input[1].call_id"}
    assert asked(input=[CALL | {"call_id": "c2"}, output]).messages(instructed=False)
    assert asked(input=[output], previous_response_id="resp_1").messages(instructed=True)
