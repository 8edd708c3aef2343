"""Frames and UI messages: what they become as turns, and what is refused."""

from typing import Any

import msgspec
import pytest

from ramify.actors.gateway.apis.ai.requests import (
    CallSettings,
    SendRequest,
    UiMessage,
    answers_to,
    chat_messages,
)
from ramify.actors.gateway.apis.openai.requests import decode
from ramify.actors.gateway.apis.pictures import RequestPictures
from ramify.protocol.errors import BadRequest
from ramify.protocol.wire import ChatMessage


def turns(*messages: dict[str, Any], **settings: Any) -> list[ChatMessage]:
    given = [msgspec.convert(message, UiMessage) for message in messages]
    return chat_messages(given, msgspec.convert(settings, CallSettings))


def user(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"id": "u", "role": "user", "parts": list(parts)}


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said, "state": "done"}


def call(state: str = "output-available", **more: Any) -> dict[str, Any]:
    return {"type": "tool-look", "toolCallId": "c", "state": state, "input": {"at": 1}} | more


def test_a_conversation() -> None:
    answer = {"id": "a", "role": "assistant", "parts": [text("He"), {"type": "data-x"}, text("llo")]}
    found = turns(
        user(text("Hi")), answer, user(text("More"), {"type": "source-url"}), system="Be brief."
    )
    assert [(turn.role, turn.content) for turn in found] == [
        ("system", "Be brief."),
        ("user", "Hi"),
        ("assistant", "Hello"),
        ("user", "More"),
    ]


@pytest.mark.parametrize(
    ("part", "result"),
    [
        (call(output={"b": [1]}), '{"b":[1]}'),
        (call(output="as it is"), "as it is"),
        (call(), "null"),
        (call("output-error", errorText="broken"), "broken"),
        (call("output-denied"), "The user did not allow this call."),
        (call(type="dynamic-tool", toolName="look", output=1), "1"),
    ],
)
def test_calls_and_their_results(part: dict[str, Any], result: str) -> None:
    steps = [
        {"type": "step-start"},
        {"type": "reasoning", "text": "hm"},
        text("Wait."),
        part,
        {"type": "step-start"},
    ]
    _, said, told = turns(user(text("?")), {"id": "a", "role": "assistant", "parts": steps})
    assert (said.content, said.reasoning) == ("Wait.", "hm")
    assert said.tool_calls == [
        {"id": "c", "type": "function", "function": {"name": "look", "arguments": '{"at":1}'}}
    ]
    assert (told.role, told.content, told.name, told.tool_call_id) == ("tool", result, "look", "c")


def test_calls_without_a_result_are_left_out() -> None:
    parts = [text("Wait."), call("input-available"), call("input-streaming")]
    found = turns(user(text("?")), {"role": "assistant", "parts": parts}, user(text("Well?")))
    assert [(turn.role, turn.tool_calls) for turn in found[1:]] == [("assistant", None), ("user", None)]


def test_an_answer_goes_on_with_the_message_that_called() -> None:
    messages = [user(text("?")), {"id": "a7", "role": "assistant", "parts": [call()]}]
    assert answers_to([msgspec.convert(each, UiMessage) for each in messages]) == "a7"
    assert answers_to([msgspec.convert(messages[0], UiMessage)]) is None


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("data:text/plain;base64,w6k=", "\n\nn.txt:\né"),
        ("data:text/plain,a%20b", "\n\nn.txt:\na b"),
    ],
)
def test_text_files(url: str, said: str) -> None:
    file = {"type": "file", "mediaType": "text/plain", "filename": "n.txt", "url": url}
    assert turns(user(text("See"), file))[0].content == f"See{said}"


@pytest.mark.parametrize(
    "file",
    [
        {"mediaType": "image/png", "url": "data:image/png;base64,AA"},
        {"mediaType": "text/plain", "url": "https://somewhere/else.txt"},
        {"mediaType": "text/plain", "url": "data:;base64,!"},
        {"mediaType": "text/plain", "url": "data:;base64,/w=="},
        {"mediaType": "text/plain", "url": "data:nothing"},
    ],
)
def test_files_that_are_no_text(file: dict[str, Any]) -> None:
    with pytest.raises(BadRequest, match=r"messages\[1\]\.parts\[0\]"):
        turns(user(text("a")), user({"type": "file", **file}))


def test_pictures_for_a_model_that_sees() -> None:
    pictures = RequestPictures(True)
    file = {"type": "file", "mediaType": "image/png", "url": "data:image/png;base64,AAEC"}
    said = msgspec.convert([user(text("See \ufffc"), file)], list[UiMessage])
    (turn,) = chat_messages(said, CallSettings(), pictures)
    assert (turn.content, pictures.images) == ("See \ufffd\ufffc", [b"\0\1\2"])


@pytest.mark.parametrize("last", [[], [text("I said so.")], [call("input-available")]])
def test_there_must_be_something_to_answer(last: list[Any]) -> None:
    said = {"role": "assistant", "parts": [text("I said so."), *last]}
    with pytest.raises(BadRequest, match="last message"):
        turns(user(text("?")), said)


def test_tools_by_name_and_in_a_list() -> None:
    schema = {"type": "object", "properties": {}}
    by_name = msgspec.convert(
        {"tools": {"look": {"description": "d", "inputSchema": schema}}, "toolChoice": "required"},
        CallSettings,
    )
    assert by_name.functions == [{"name": "look", "description": "d", "parameters": schema}]
    assert by_name.choice_of_tool == "required"
    listed = msgspec.convert(
        {"tools": [{"name": "look"}], "toolChoice": {"type": "tool", "toolName": "look"}}, CallSettings
    )
    assert (listed.functions, listed.choice_of_tool) == ([{"name": "look"}], "look")
    assert CallSettings().functions is None


def test_settings_become_fields_of_generate() -> None:
    given = {"temperature": 0.5, "topP": 0, "topK": 3, "stopSequences": ["x"], "seed": -1}
    fields = msgspec.convert(given, CallSettings).sampling()
    assert fields == {
        "temperature": 0.5,
        "top_p": 1e-20,
        "top_k": 3,
        "stop": ["x"],
        "seed": 2**63 - 1,
    }
    json = msgspec.convert(
        {"responseFormat": {"type": "json", "schema": {"type": "array"}}}, CallSettings
    )
    assert json.constraint is not None
    assert json.constraint.json_schema == {"type": "array"}
    assert msgspec.convert({"responseFormat": {"type": "text"}}, CallSettings).constraint is None


@pytest.mark.parametrize(
    "body", ['{"colour": 1}', '{"temperature": 1e400}', '{"topK": -1}', '{"seed": 99999999999999999999}']
)
def test_settings_are_bounded(body: str) -> None:
    frame = (
        '{"type":"send","requestId":"r","id":"c","trigger":"submit-message","body":%s,"messages":[{"role":'
        '"user","parts":[]}]}'
    )
    with pytest.raises(BadRequest):
        decode((frame % body).encode(), SendRequest)


def test_json_that_is_nested_without_end_is_refused() -> None:
    for deep in ("[" * 100_000, '{"parts":' * 50_000):
        with pytest.raises(BadRequest):
            decode(deep.encode(), SendRequest)
