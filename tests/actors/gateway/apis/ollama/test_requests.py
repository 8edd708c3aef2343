"""Requests of Ollama's API: what each asks a session for, and what is refused before any work."""

from typing import Any

import msgspec
import pytest

from ramify.actors.gateway.apis.ollama.requests import (
    NO_LIMIT,
    GenerateRequest,
    OllamaChatRequest,
    OllamaMessage,
)
from ramify.protocol.errors import InvalidField


def chat(**fields: Any) -> OllamaChatRequest:
    return msgspec.convert({"model": "m", **fields}, OllamaChatRequest)


def generate(**fields: Any) -> GenerateRequest:
    return msgspec.convert({"model": "m", **fields}, GenerateRequest)


@pytest.mark.parametrize(
    ("options", "limit", "sampling"),
    [
        ({}, NO_LIMIT, {}),
        ({"num_predict": -1}, NO_LIMIT, {}),
        ({"num_predict": 7, "num_ctx": 4096, "mirostat_eta": 0.1}, 7, {}),
        ({"stop": "x", "top_p": 0.0}, NO_LIMIT, {"stop": ["x"], "top_p": 1e-20}),
        ({"repeat_penalty": 1.1, "seed": 3}, NO_LIMIT, {"repetition_penalty": 1.1, "seed": 3}),
    ],
)
def test_options(options: dict[str, Any], limit: int, sampling: dict[str, Any]) -> None:
    settings = chat(options=options).settings
    assert (settings.limit, settings.sampling()) == (limit, sampling)


@pytest.mark.parametrize(
    ("fields", "schema"),
    [
        ({}, None),
        ({"format": ""}, None),
        ({"format": "json"}, {"type": "object"}),
        ({"format": {"type": "array"}}, {"type": "array"}),
    ],
)
def test_format(fields: dict[str, Any], schema: Any) -> None:
    constraint = chat(**fields).constraint
    assert (constraint.json_schema if constraint else None) == schema


@pytest.mark.parametrize(
    ("fields", "ranks"),
    [
        ({}, 0),
        ({"top_logprobs": 3}, 0),
        ({"logprobs": True}, 1),
        ({"logprobs": True, "top_logprobs": 3}, 3),
    ],
)
def test_log_probabilities(fields: dict[str, Any], ranks: int) -> None:
    assert generate(**fields).ranks == ranks


def test_a_message_is_one_of_the_templates() -> None:
    given = {"role": "tool", "content": None, "tool_name": "f", "thinking": "hm", "tool_calls": []}
    said = msgspec.convert(given, OllamaMessage).chat()
    assert (said.content, said.name, said.reasoning, said.tool_calls) == ("", "f", "hm", None)


def test_a_prompt_is_a_chat_unless_it_is_raw() -> None:
    messages = generate(prompt="Hi", system="Be.").messages()
    assert [(message.role, message.content) for message in messages] == [
        ("system", "Be."),
        ("user", "Hi"),
    ]
    with pytest.raises(InvalidField, match="put it into the prompt"):
        GenerateRequest(model="m", prompt="Hi", system="Be.", raw=True)


@pytest.mark.parametrize(
    "fields",
    [
        {"images": [1]},
        {"context": [1]},
        {"suffix": "x"},
        {"options": {"num_predict": -3}},
        {"options": {"stop": ["x"] * 17}},
        {"top_logprobs": 21},
        {"frobnicate": 1},
    ],
)
def test_what_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError):
        generate(**fields)
