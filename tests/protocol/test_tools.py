"""Tools that no session can use are refused, and the fault is named."""

import re
from typing import Any

import pytest

from ramify.protocol.errors import InvalidField
from ramify.protocol.tools import check_tools

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
