"""The forms of `open.tools` and of a message's `tool_calls`: as in OpenAI's API, or bare.

    {"type": "function", "function": {"name": ..., "description"?: ..., "parameters"?: {...}}}
    {"name": ..., "description"?: ..., "parameters"?: {...}}
    {"id"?: ..., "type": "function", "function": {"name": ..., "arguments": {...}}}
    {"name": ..., "arguments": {...}}

More keys may stand there; they are the chat template's business. Pure; the values themselves are JSON
already (`json_value`).
"""

from collections.abc import Sequence
from typing import Any

from ramify.protocol.errors import InvalidField

LONGEST_NAME = 256  # characters: as long as a `tool_choice` may be


def check_tools(tools: Sequence[dict[str, Any]], field: str) -> None:
    """Raise InvalidField, which names the place in `field`, if one is no function. O(tools)."""
    seen: dict[str, int] = {}
    for i, tool in enumerate(tools):
        where, function = _place(tool, field, i), _function(tool, field, i)
        name = function["name"]
        if name in seen:
            raise InvalidField(f"`{where}.name` is that of tool {seen[name]} too: each needs its own")
        seen[name] = i
        if not isinstance(function.get("description"), str | None):
            raise InvalidField(f"`{where}.description` must be a string")
        parameters = function.get("parameters")
        if not isinstance(parameters, dict | None):
            raise InvalidField(f"`{where}.parameters` must be an object: a JSON schema")
        if parameters and not isinstance(parameters.get("properties"), dict | None):
            raise InvalidField(f"`{where}.parameters.properties` must be an object")


def check_calls(calls: Sequence[dict[str, Any]], field: str) -> None:
    """Raise InvalidField, which names the place in `field`, if one is no call. O(calls).

    A text of `arguments` may be broken: a model wrote it, and templates can show it as it is.
    """
    for i, call in enumerate(calls):
        if not isinstance(call.get("id"), str | None):
            raise InvalidField(f"`{field}[{i}].id` must be a string")
        function = _function(call, field, i)
        if not isinstance(function.get("arguments"), dict | str):
            where = _place(call, field, i)
            raise InvalidField(f"`{where}.arguments` must be an object, or its JSON text")


def _function(value: dict[str, Any], field: str, index: int) -> dict[str, Any]:
    """The object in `value` that names a function."""
    if value.get("type", "function") != "function":
        where = f"{field}[{index}]"
        raise InvalidField(f'`{where}.type` must be "function": this server calls nothing else')
    function: Any = value.get("function", value)
    if not isinstance(function, dict):
        raise InvalidField(f"`{_place(value, field, index)}` must be an object with a `name`")
    name = function.get("name")
    if not isinstance(name, str) or not 1 <= len(name) <= LONGEST_NAME:
        where = _place(value, field, index)
        raise InvalidField(f"`{where}.name` must be a string of 1 to {LONGEST_NAME} characters")
    return function


def _place(value: dict[str, Any], field: str, index: int) -> str:
    """The path of that object: made for errors only, as a frame may hold thousands of calls."""
    where = f"{field}[{index}]"
    return f"{where}.function" if "function" in value else where
