"""Tools and calls that no template can show are refused, and the fault is named."""

import re
from typing import Any

import msgspec
import pytest

from ramify.protocol.codec import Codec
from ramify.protocol.errors import BadRequest, InvalidField
from ramify.protocol.tools import check_calls, check_tools

FAULTY: list[tuple[Any, str]] = [
    ({}, ".name"),
    ({"name": ""}, ".name"),
    ({"name": "x" * 257}, ".name"),
    ({"name": ["f"]}, ".name"),
    ({"type": "function"}, ".name"),
    ({"type": "function", "function": {}}, ".function.name"),
    ({"type": "function", "function": "f"}, ".function"),
    ({"type": "retrieval", "name": "f"}, ".type"),
    ({"type": ["function"], "name": "f"}, ".type"),
    ({"name": "good"}, ".name"),
    ({"type": "function", "function": {"name": "good"}}, ".function.name"),
    ({"name": "f", "description": 1}, ".description"),
    ({"name": "f", "parameters": "none"}, ".parameters"),
    ({"function": {"name": "f", "parameters": []}}, ".function.parameters"),
    ({"name": "f", "parameters": {"properties": [1]}}, ".parameters.properties"),
]


@pytest.mark.parametrize(("tool", "place"), FAULTY)
def test_a_faulty_tool_is_refused_by_name(tool: Any, place: str) -> None:
    with pytest.raises(InvalidField, match=re.escape(f"`tools[1]{place}`")):
        check_tools([{"name": "good"}, tool], "tools")


def test_tools_of_both_shapes_pass() -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    check_tools([], "tools")
    check_tools(
        [
            {"type": "function", "function": {"name": "a", "parameters": schema, "strict": True}},
            {"function": {"name": "b", "description": None, "parameters": None}},
            {"name": "c", "description": "C.", "parameters": {}},
            {"type": "function", "name": "d", "parameters": {"type": "object"}},
        ],
        "tools",
    )


FAULTY_CALLS: list[tuple[Any, str]] = [
    ({}, ".name"),
    ({"function": 5}, ".function"),
    ({"function": {}}, ".function.name"),
    ({"function": {"name": 5, "arguments": {}}}, ".function.name"),
    ({"function": {"name": "f"}}, ".function.arguments"),
    ({"function": {"name": "f", "arguments": [1]}}, ".function.arguments"),
    ({"name": "f", "arguments": None}, ".arguments"),
    ({"type": "custom", "name": "f", "arguments": {}}, ".type"),
    ({"id": 7, "name": "f", "arguments": {}}, ".id"),
]


@pytest.mark.parametrize(("call", "place"), FAULTY_CALLS)
def test_a_faulty_call_is_refused_by_name(call: Any, place: str) -> None:
    good = {"name": "f", "arguments": {}}
    with pytest.raises(InvalidField, match=re.escape(f"`tool_calls[1]{place}`")):
        check_calls([good, call], "tool_calls")
    message = {"role": "assistant", "tool_calls": [good, call]}
    with pytest.raises(BadRequest) as raised:
        Codec("json").decode_client(
            msgspec.json.encode({"type": "append", "id": 1, "messages": [message]})
        )
    assert raised.value.details is not None
    assert raised.value.details["path"] == f"$.messages[0].tool_calls[1]{place}"


def test_calls_of_both_shapes_pass() -> None:
    check_calls(
        [
            {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}},
            {"id": None, "function": {"name": "f", "arguments": {"x": 1}}},
            {"name": "f", "arguments": "{broken"},
        ],
        "tool_calls",
    )
