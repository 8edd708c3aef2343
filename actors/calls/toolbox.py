"""The tools of a session, and what counts as a call of one of them. Pure."""

import json
import string
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

from ramify.actors.kit.memory import json_size
from ramify.protocol.json_value import json_fault
from ramify.protocol.wire import JsonObject

MAX_CALLS = 1024  # in one output: a message may carry as many back
_ALPHABET = string.digits + string.ascii_letters
_PYTHON = {"True": True, "False": False, "None": None}  # as templates in Jinja write them
_DECODER = json.JSONDecoder(strict=False)  # models write line breaks inside strings


class Call(NamedTuple):
    """A complete call. `arguments`: JSON text of an object. `ident`: its id, if the model gave one."""

    name: str
    arguments: str
    ident: str | None = None


class DeclaredTool(NamedTuple):
    """A tool that was declared. `schema`: of its arguments, an object's; `place`: where it was given.

    `strict`: as the client says, in OpenAI's way: true: calls have to be exact; false: need not be.
    """

    name: str
    schema: Any
    place: str
    strict: bool | None


class Toolbox:
    """The tools that `open` declared, as `protocol.tools` allows them. `size`: of their JSON text."""

    def __init__(self, tools: Sequence[JsonObject] | None) -> None:
        self.size = json_size(tools)
        self._properties: dict[str, Mapping[str, Any]] = {}
        self.tools: list[DeclaredTool] = []
        for i, tool in enumerate(tools or ()):
            function = tool.get("function", tool)
            parameters = function.get("parameters")
            self._properties[function["name"]] = _properties(parameters)
            place = f"tools[{i}].parameters of {function['name']!r}"
            strict = function.get("strict", tool.get("strict"))
            schema = {"type": "object", **(parameters or {})}
            self.tools.append(
                DeclaredTool(
                    function["name"], schema, place, strict if isinstance(strict, bool) else None
                )
            )

    def __bool__(self) -> bool:
        return bool(self._properties)

    def __contains__(self, name: object) -> bool:
        return name in self._properties

    @property
    def names(self) -> list[str]:
        """In the order in which they were declared."""
        return list(self._properties)

    def typed(self, name: str, parameter: str, text: str) -> Any:
        """The value of a parameter that a model wrote as plain text, by the type that is declared.

        Text that is no such value stays text.
        """
        schema = self._properties[name].get(parameter)
        kind = schema.get("type") if isinstance(schema, dict) else None
        if kind == "string":
            return text
        if text in _PYTHON and kind is not None:
            return _PYTHON[text]
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            return text

    def as_call(self, value: Any) -> Call | None:
        """The call that an object like `{"name": ..., "arguments": {...}}` stands for, if it is one."""
        if not isinstance(value, dict):
            return None
        return self.call(value.get("name"), value.get("arguments", value.get("parameters", {})))

    def call(self, name: Any, arguments: Any) -> Call | None:
        """A call of one of the tools that anybody can read, and send back; else None."""
        if isinstance(arguments, str):
            arguments = decode(arguments)
        if not isinstance(name, str) or name not in self or not isinstance(arguments, dict):
            return None
        if json_fault(arguments) is not None:
            return None
        return Call(name, json.dumps(arguments, ensure_ascii=False))


def decode(text: str) -> Any:
    """The JSON value that `text` is, with blanks around it; None if it is none."""
    try:
        value, end = _DECODER.raw_decode(text, len(text) - len(text.lstrip()))
    except (ValueError, RecursionError):
        return None
    return None if text[end:].strip() else value


def shaped(call: Call, ident: str) -> JsonObject:
    """As in OpenAI's API."""
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": ident, "type": "function", "function": function}


def call_id(output: str, position: int, index: int) -> str:
    """Nine letters and digits, which is what Mistral's templates insist on: one of 10^16.

    `output`: what tells it from all others of the server; `position`: where it starts. A replay gives
    the same ids, and nobody learns `output` from them.
    """
    number = int.from_bytes(blake2b(f"{output} {position} {index}".encode(), digest_size=8).digest())
    digits: list[str] = []
    for _ in range(9):
        number, digit = divmod(number, len(_ALPHABET))
        digits.append(_ALPHABET[digit])
    return "".join(digits)


def _properties(parameters: JsonObject | None) -> Mapping[str, Any]:
    """The schemas of a tool's parameters."""
    return (parameters or {}).get("properties") or {}
