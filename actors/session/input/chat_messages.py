"""Chat messages in the shape that a model's template reads them. Pure.

Templates differ in two things, which a trial with a small conversation finds out: whether the arguments
of a tool call are an object or its JSON text (DeepSeek-V3), and whether a call without a content has
"" or null there (null: DeepSeek-V3 and R1, which else lose the call, or write an empty turn).
"""

import json
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ramify.protocol.errors import BadRequest
from ramify.protocol.json_value import json_fault
from ramify.protocol.wire import ChatMessage, JsonObject

_NAME, _KEY = "ramifyf3a9c1f", "ramifyf3a9c1x"
_TRIAL = (
    ChatMessage(role="user", content="Q"),
    ChatMessage(
        role="assistant",
        tool_calls=[
            {
                "id": "call00001",
                "type": "function",
                "function": {"name": _NAME, "arguments": {_KEY: 1}},
            }
        ],
    ),
)


class Shape(NamedTuple):
    """How a template wants tool calls."""

    text_arguments: bool = False
    null_content: bool = False


def shape_of(render: Callable[[Sequence[JsonObject]], str]) -> Shape:
    """The shape in which a template shows a call, the shortest way if there are several.

    `render` raises BadRequest for what the template refuses. The usual shape, if it shows no calls.
    """
    best, least = Shape(), 0
    for text_arguments in (False, True):
        for null_content in (False, True):
            shape = Shape(text_arguments, null_content)
            try:
                text = render(as_dicts(_TRIAL, shape))
            except BadRequest:
                continue
            if _NAME in text and _KEY in text and (not least or len(text) < least):
                best, least = shape, len(text)
    return best


def as_dicts(messages: Sequence[ChatMessage], shape: Shape = Shape()) -> list[JsonObject]:  # noqa: B008
    """Messages as chat templates read them: no absent fields, tool arguments as `shape` says."""
    return [_as_dict(message, shape) for message in messages]


def _as_dict(message: ChatMessage, shape: Shape) -> JsonObject:
    content = (
        None if shape.null_content and message.tool_calls and not message.content else message.content
    )
    data: JsonObject = {"role": message.role, "content": content}
    if message.name is not None:
        data["name"] = message.name
    if message.tool_call_id is not None:
        data["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        data["tool_calls"] = [_with_arguments(call, shape) for call in message.tool_calls]
    if message.reasoning is not None:
        data["reasoning_content"] = data["thinking"] = message.reasoning
    return data


def _with_arguments(call: JsonObject, shape: Shape) -> JsonObject:
    """OpenAI's `arguments` are a JSON string; most templates write objects and would quote it twice."""
    function = call.get("function")
    if not isinstance(function, dict):
        return call
    arguments = function.get("arguments")
    if shape.text_arguments and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    elif not shape.text_arguments and isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return call
        if json_fault(arguments) is not None:  # too deep for a template, or half a surrogate pair
            return call
    return {**call, "function": {**function, "arguments": arguments}}
