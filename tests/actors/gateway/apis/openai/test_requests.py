"""What requests may hold, and what is said of those that hold something else."""

import json
import sys
from types import FrameType
from typing import Any

import msgspec
import pytest

from ramify.actors.gateway.apis.openai.chat import Heading
from ramify.actors.gateway.apis.openai.completions import CompletionAnswers
from ramify.actors.gateway.apis.openai.requests import ChatRequest, CompletionRequest, decode
from ramify.actors.gateway.apis.openai.response_requests import LaneRequest, ResponseRequest
from ramify.protocol.errors import BadRequest
from ramify.protocol.wire import ChatMessage

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def chat(**fields: Any) -> ChatRequest:
    return decode(json.dumps(CHAT | fields).encode(), ChatRequest)


def test_messages_become_those_of_templates() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    request = chat(
        messages=[
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "why"},
            {"role": "tool", "tool_call_id": "c1", "content": "42"},
            {"role": "assistant", "refusal": "no"},
        ]
    )
    messages = [message.chat() for message in request.messages]
    assert [message.role for message in messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert [message.content for message in messages] == ["Be brief.", "ab", "", "42", "no"]
    assert (messages[2].tool_calls, messages[2].reasoning) == ([call], "why")
    assert messages[3].tool_call_id == "c1"


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"nothing_like_it": 1}, "nothing_like_it"),
        ({"messages": [{"role": "user", "content": "x", "mood": 1}]}, "messages[0].mood"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}] * 2}, None),
        ({"logit_bias": {"5": 1.0}}, "logit_bias"),
        ({"temperature": 1e-40}, "temperature"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": ""}, "stop"),
        ({"n": 65}, "n"),
        ({"seed": 2**70}, "seed"),
        ({"max_tokens": 2**40}, "max_tokens"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"metadata": {"a": 2**90}}, None),
    ],
)
def test_what_is_refused_is_named(fields: dict[str, Any], field: str | None) -> None:
    with pytest.raises(BadRequest) as raised:
        for message in chat(**fields).messages:
            message.chat()
    if field is not None:
        assert raised.value.details == {"field": field}


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        (
            ResponseRequest,
            {"conversation": "c"},
            r"unknown parameter: `conversation`: use `previous_response_id`",
        ),
        (ResponseRequest, {"truncation": "auto"}, r"at `truncation`: only `disabled` is served"),
        (ResponseRequest, {"max_tokens": 5}, r"`max_tokens`: use `max_output_tokens`"),
        (
            LaneRequest,
            {"type": "response.create", "prompt": {"id": "p"}},
            r"`prompt`: no prompts are stored",
        ),
        (ChatRequest, {"input": "x"}, r"`input`: use `messages`, or POST /v1/responses"),
        (CompletionRequest, {"messages": []}, r"`messages`: use `prompt`, or POST /v1/chat/completions"),
        (CompletionRequest, {"prompt": "x", "suffix": "y"}, r"at `suffix`: text goes on at its end"),
        (CompletionRequest, {"nothing_like_it": 1}, r"unknown parameter: `nothing_like_it`$"),
    ],
)
def test_what_to_do_instead_is_said(kind: type[Any], fields: dict[str, Any], message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        decode(msgspec.json.encode(fields), kind)


def test_a_bias_of_logits_is_refused_in_words() -> None:
    with pytest.raises(
        BadRequest, match=r"`logit_bias` is not served: constrain the output with `structured_outputs`"
    ):
        chat(logit_bias={"5": 1.0})
    assert chat(logit_bias={}).logit_bias == {}


def test_a_schema_is_asked_for() -> None:
    constraint = chat(response_format={"type": "json_object"}).constraint()
    assert constraint is not None
    assert constraint.json_schema == {"type": "object"}
    with pytest.raises(BadRequest, match="json_schema"):
        chat(response_format={"type": "json_schema"})


@pytest.mark.parametrize(
    ("fields", "kind", "value"),
    [
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "choices", ["yes", "no"]),
        ({"structured_outputs": {"json": {"type": "integer"}}}, "json_schema", {"type": "integer"}),
        ({"structured_outputs": {"json_object": True}}, "json_schema", {"type": "object"}),
        ({"structured_outputs": {"regex": "[0-9]+"}}, "regex", "[0-9]+"),
        ({"guided_json": {"type": "integer"}}, "json_schema", {"type": "integer"}),
        ({"guided_regex": "[0-9]+"}, "regex", "[0-9]+"),
        ({"guided_choice": ["yes"]}, "choices", ["yes"]),
        ({"guided_grammar": "start: /a/"}, "grammar", "start: /a/"),
    ],
)
@pytest.mark.parametrize("completes", [False, True])
def test_constraints_of_other_servers_are_read(
    fields: dict[str, Any], kind: str, value: Any, completes: bool
) -> None:
    asked = {"prompt": "x", **fields} if completes else {"messages": [], **CHAT, **fields}
    request = decode(json.dumps(asked).encode(), CompletionRequest if completes else ChatRequest)
    constraint = request.constraint()
    assert constraint is not None
    assert getattr(constraint, kind) == value


@pytest.mark.parametrize(
    "fields",
    [
        {"structured_outputs": {}},
        {"structured_outputs": {"regex": "a", "choice": ["a"]}},
        {"guided_regex": "a", "guided_choice": ["a"]},
        {"guided_regex": "a", "structured_outputs": {"regex": "a"}},
        {"guided_regex": "a", "response_format": {"type": "json_object"}},
    ],
)
def test_one_constraint_is_enough(fields: dict[str, Any]) -> None:
    with pytest.raises(BadRequest, match=r"one of (them|json)"):
        chat(**fields)


@pytest.mark.parametrize("kind", ["input_image", "input_audio", "file"])
def test_parts_that_no_model_reads_are_refused_in_words(kind: str) -> None:
    with pytest.raises(BadRequest, match=r"`messages\[0\].content\[0\].type` '.*: .*send"):
        chat(messages=[{"role": "user", "content": [{"type": kind, kind: {}}]}])


def test_settings_that_are_not_given_are_left_to_the_model() -> None:
    assert chat().sampling() == {"ignore_eos": False, "priority": 0}
    given = chat(temperature=0, top_p=0, stop="x", seed=-1).sampling()
    assert given["top_p"] > 0
    assert (given["temperature"], given["stop"], given["seed"]) == (0, ["x"], 2**63 - 1)


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [("a", ["a"]), ([1, 2], [[1, 2]]), (["a", "b"], ["a", "b"]), ([[1], [2, 3]], [[1], [2, 3]])],
)
def test_prompts(prompt: Any, prompts: list[Any]) -> None:
    body = json.dumps({"model": "m", "prompt": prompt}).encode()
    assert decode(body, CompletionRequest).prompts == prompts


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": []},
        {"prompt": ["a", 1]},
        {"prompt": ["a"] * 33, "n": 2},
        {"prompt": "a", "best_of": 3},
        {"prompt": "a", "echo": 1},
        {"prompt": "a", "max_tokens": -1},
    ],
)
def test_prompts_that_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(BadRequest):
        decode(json.dumps({"model": "m", **fields}).encode(), CompletionRequest)


def test_what_a_client_made_of_an_answer_is_not_read() -> None:
    """340,000 lists in it took 18 ms."""
    said = {"role": "assistant", "content": "{}", "parsed": {"a": [[], {}]}}
    message = chat(messages=[CHAT["messages"][0], said]).messages[1]
    assert message.chat() == ChatMessage(role="assistant", content="{}")
    assert isinstance(message.parsed, msgspec.Raw)


def test_half_a_million_token_ids_are_looked_at_without_a_line_for_each() -> None:
    """1 MiB of them took 84 ms of one turn of the loop."""
    body = json.dumps({"prompt": [5] * 100_000, "max_tokens": 1}).encode()
    lines = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal lines
        lines += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        dialogue = CompletionAnswers(decode(body, CompletionRequest), Heading("x", 1, "m"), ())
    finally:
        sys.settrace(before)
    assert lines < 2000
    assert len(dialogue.ops) == 3


CALLED: dict[str, Any] = {
    "role": "assistant",
    "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
}
RESULT: dict[str, Any] = {"role": "tool", "tool_call_id": "c1", "content": "4"}


@pytest.mark.parametrize(
    ("messages", "place"),
    [
        ([RESULT], 0),
        ([CALLED, RESULT | {"tool_call_id": "c2"}], 1),
        ([RESULT, CALLED], 0),
        ([CALLED, RESULT, RESULT], None),
        ([CALLED, {"role": "user", "content": "Well?"}, RESULT], None),
        ([CALLED, {"role": "tool", "content": "4"}], None),
        ([CALLED, {"role": "user", "content": "No result."}], None),
        ([{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}, RESULT], None),
        ([{"role": "user", "content": "x", "tool_call_id": "c2"}], None),
    ],
)
def test_a_result_is_of_a_call(messages: list[dict[str, Any]], place: int | None) -> None:
    if place is None:
        assert len(chat(messages=messages).messages) == len(messages)
        return
    with pytest.raises(BadRequest, match="is the id of no call before it") as raised:
        chat(messages=messages)
    assert raised.value.details == {"field": f"messages[{place}].tool_call_id"}
