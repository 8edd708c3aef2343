"""Finds tool calls in finished text. Pure; does not know how the text came about.

Shapes, as the models' own templates ask for them:

* Hermes, Qwen: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, once or several times
  (the last end tag may be missing: some models stop on it);
* Mistral: `[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]`;
* Llama 3: the whole text is `{"name": ..., "parameters": {...}}`, several joined by ";".

Where the opening marker is a control token, it has no text and only the JSON is left: the whole
text may be a list as well. A call counts only if its name is one of the session's tools.
"""

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from ramify.protocol.json_value import json_fault
from ramify.protocol.wire import JsonObject

_BLOCK = re.compile(r"<tool_call>\s*")
_BLOCK_END = re.compile(r"\s*(?:</tool_call>|\Z)")
_MISTRAL = "[TOOL_CALLS]"
_SEPARATOR = re.compile(r"\s*;?\s*")
_DECODER = json.JSONDecoder(strict=False)  # models write line breaks inside strings
_ALPHABET = "0123456789abcdefghijklmnopqrstuvwxyz"


class Parsed(NamedTuple):
    """`calls`: as in OpenAI's API. `text`: what is left of the text, stripped."""

    calls: list[JsonObject]
    text: str


class _Call(NamedTuple):
    name: str
    arguments: str


def tool_names(tools: Sequence[JsonObject] | None) -> frozenset[str]:
    """The names in a session's `tools`: OpenAI's shape, or the bare function."""
    found: set[str] = set()
    for tool in tools or ():
        function = tool.get("function", tool)
        name = function.get("name") if isinstance(function, dict) else None
        if isinstance(name, str):
            found.add(name)
    return frozenset(found)


def parse(text: str, names: frozenset[str], position: int) -> Parsed | None:
    """The tool calls in an output that started at `position` of its branch; None without any.

    Ids follow from `position`: a replay gives the same ones, two turns never do.
    """
    if not names:
        return None
    calls, left = _blocks(text, names)
    if not calls:
        calls, left = _bare(text, names)
    if not calls:
        return None
    shaped: list[JsonObject] = [
        {
            "id": call_id(position, index),
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for index, call in enumerate(calls)
    ]
    return Parsed(shaped, left.strip())


def call_id(position: int, index: int) -> str:
    """Nine letters and digits (what Mistral's templates insist on), unique in the branch."""
    return f"c{_base36(position, 6)}{_base36(index, 2)}"


def _base36(number: int, width: int) -> str:
    digits: list[str] = []
    while number or len(digits) < width:
        number, digit = divmod(number, 36)
        digits.append(_ALPHABET[digit])
    return "".join(reversed(digits))


def _blocks(text: str, names: frozenset[str]) -> tuple[list[_Call], str]:
    """Hermes blocks. One that is no valid call stays in the text."""
    calls: list[_Call] = []
    left: list[str] = []
    done = 0
    for opening in _BLOCK.finditer(text):
        if opening.start() < done:  # inside a string of the call before
            continue
        value, end = _json_at(text, opening.end())
        call = _as_call(value, names)
        closing = _BLOCK_END.match(text, end)
        if call is None or closing is None:
            continue
        left.append(text[done : opening.start()])
        calls.append(call)
        done = closing.end()
    left.append(text[done:])
    return calls, "".join(left)


def _bare(text: str, names: frozenset[str]) -> tuple[list[_Call], str]:
    """JSON to the end of the text: behind Mistral's marker, or from the beginning."""
    before, marker, rest = text.partition(_MISTRAL)
    if not marker:
        before, rest = "", text
    calls: list[_Call] = []
    for value in _values(rest):
        for item in value if isinstance(value, list) else [value]:
            call = _as_call(item, names)
            if call is None:  # prose, or an answer that happens to be JSON
                return [], text
            calls.append(call)
    return calls, before


def _values(text: str) -> Iterator[Any]:
    """JSON values, with blanks or ";" between them. Yields None for what is no JSON."""
    at = len(text) - len(text.lstrip())
    while at < len(text):
        value, end = _json_at(text, at)
        yield value
        if end == at:
            return
        separator = _SEPARATOR.match(text, end)
        at = separator.end() if separator else end


def _json_at(text: str, at: int) -> tuple[Any, int]:
    """The JSON object or list that starts at `at`, and where it ends; (None, at) if there is none."""
    if text[at : at + 1] not in ("{", "["):
        return None, at
    try:
        return _DECODER.raw_decode(text, at)
    except (ValueError, RecursionError):
        return None, at


def _as_call(value: Any, names: frozenset[str]) -> _Call | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        arguments, _ = _json_at(arguments, 0)
    if value["name"] not in names or not isinstance(arguments, dict):
        return None
    if json_fault(arguments) is not None:  # nobody could read the call, or send it back
        return None
    return _Call(value["name"], json.dumps(arguments, ensure_ascii=False))
