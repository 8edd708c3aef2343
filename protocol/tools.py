"""What `open.tools` must look like: functions as OpenAI's API has them, or bare.

    {"type": "function", "function": {"name": ..., "description"?: ..., "parameters"?: {...}}}
    {"name": ..., "description"?: ..., "parameters"?: {...}}

More keys may stand there; what they mean is the chat template's business. Pure; the values themselves
are JSON already (`json_value`).
"""

from collections.abc import Sequence
from typing import Any

from ramify.protocol.errors import InvalidField

LONGEST_NAME = 256  # characters: as long as a `tool_choice` may be


def check_tools(tools: Sequence[dict[str, Any]], field: str) -> None:
    """Raise InvalidField, which names the place in `field`, if one is no function. O(tools)."""
    seen: dict[str, int] = {}
    for i, tool in enumerate(tools):
        where = f"{field}[{i}]"
        kind = tool.get("type", "function")
        if kind != "function":
            raise InvalidField(f'`{where}.type` must be "function": this server calls nothing else')
        function: Any = tool
        if "function" in tool:
            where, function = f"{where}.function", tool["function"]
        if not isinstance(function, dict):
            raise InvalidField(f"`{where}` must be an object with a `name`")
        name = function.get("name")
        if not isinstance(name, str) or not 1 <= len(name) <= LONGEST_NAME:
            raise InvalidField(f"`{where}.name` must be a string of 1 to {LONGEST_NAME} characters")
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
