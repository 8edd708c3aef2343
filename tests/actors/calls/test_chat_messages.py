"""Chat messages as templates read them, and how the shape that one wants is found out."""

import json
from collections.abc import Sequence
from typing import Any

import pytest

from ramify.actors.calls.templates import Shape, as_dicts, shape_of
from ramify.protocol.errors import BadRequest
from ramify.protocol.wire import ChatMessage, JsonObject


def call(arguments: Any) -> JsonObject:
    return {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}


def shaped(message: ChatMessage, shape: Shape = Shape()) -> JsonObject:  # noqa: B008
    (data,) = as_dicts([message], shape)
    return data


def arguments_of(arguments: Any, shape: Shape = Shape()) -> Any:  # noqa: B008
    data = shaped(ChatMessage(role="assistant", tool_calls=[call(arguments)]), shape)
    return data["tool_calls"][0]["function"]["arguments"]


def test_fields_that_are_absent_are_left_out() -> None:
    assert shaped(ChatMessage(role="user", content="x")) == {"role": "user", "content": "x"}
    told = ChatMessage(role="tool", content="x", name="f", tool_call_id="c")
    assert shaped(told) == {"role": "tool", "content": "x", "name": "f", "tool_call_id": "c"}
    thought = shaped(ChatMessage(role="assistant", content="x", reasoning="y"))
    assert (thought["reasoning_content"], thought["thinking"]) == ("y", "y")
    assert "tool_calls" not in shaped(ChatMessage(role="assistant", content="x", tool_calls=[]))


def test_arguments_are_objects_unless_the_template_wants_text() -> None:
    text = Shape(text_arguments=True)
    assert arguments_of({"a": 1}) == {"a": 1}
    assert arguments_of('{"a": 1}') == {"a": 1}
    assert json.loads(arguments_of({"a": "ü"}, text)) == {"a": "ü"}
    assert "ü" in arguments_of({"a": "ü"}, text)
    assert arguments_of('{"a":  1}', text) == '{"a":  1}'  # as it was written


@pytest.mark.parametrize("broken", ["{", "[" * 100_000, '"\\ud800"', "[" * 500 + "]" * 500])
def test_arguments_that_no_template_can_read_stay_text(broken: str) -> None:
    assert arguments_of(broken) == broken


def test_a_call_without_a_function_stays_what_it_is() -> None:
    odd = {"id": "c", "name": "f", "arguments": "{}"}
    assert shaped(ChatMessage(role="assistant", tool_calls=[odd]))["tool_calls"] == [odd]
    assert call({"a": 1}) == call({"a": 1})  # what came is not changed


@pytest.mark.parametrize(
    ("content", "calls", "null"),
    [("", True, True), ("x", True, False), ("", False, False)],
)
def test_only_a_call_without_content_has_null(content: str, calls: bool, null: bool) -> None:
    message = ChatMessage(
        role="assistant", content=content, tool_calls=[call({"a": 1})] if calls else None
    )
    assert shaped(message, Shape(null_content=True))["content"] == (None if null else content)
    assert shaped(message)["content"] == content


def asked(data: Sequence[JsonObject]) -> tuple[Any, Any]:
    """(content, arguments) of the call in a trial."""
    message = data[1]
    return message["content"], message["tool_calls"][0]["function"]["arguments"]


def test_a_template_that_takes_both_gets_the_usual_shape() -> None:
    assert shape_of(lambda data: json.dumps(data[1]["tool_calls"])[:150].ljust(500)) == Shape()


def test_a_template_that_shows_no_calls_gets_the_usual_shape() -> None:
    assert shape_of(lambda data: "nothing") == Shape()
    assert shape_of(lambda data: str(data[1]["tool_calls"][0]["function"]["name"])) == Shape()
    assert shape_of(lambda data: str(asked(data)[1])) == Shape()


def test_the_shortest_rendering_wins() -> None:
    def quoted(data: Sequence[JsonObject]) -> str:  # quotes text twice
        return data[1]["tool_calls"][0]["function"]["name"] + json.dumps(asked(data)[1])

    def objects_twice(data: Sequence[JsonObject]) -> str:
        text = data[1]["tool_calls"][0]["function"]["name"] + str(asked(data)[1])
        return text if isinstance(asked(data)[1], str) else text * 2

    def empty_turn(data: Sequence[JsonObject]) -> str:  # writes a turn for a content of ""
        return quoted(data) + ("" if asked(data)[0] is None else "<turn>")

    assert shape_of(quoted) == Shape()
    assert shape_of(objects_twice) == Shape(text_arguments=True)
    assert shape_of(empty_turn) == Shape(null_content=True)


def test_what_a_template_refuses_is_no_candidate() -> None:
    def strict(data: Sequence[JsonObject]) -> str:
        content, arguments = asked(data)
        if content is not None or not isinstance(arguments, str):
            raise BadRequest("no")
        return data[1]["tool_calls"][0]["function"]["name"] + arguments

    def never(data: Sequence[JsonObject]) -> str:
        raise BadRequest("no calls")

    assert shape_of(strict) == Shape(text_arguments=True, null_content=True)
    assert shape_of(never) == Shape()
