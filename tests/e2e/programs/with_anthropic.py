"""The anthropic package: messages, streams, tools, counting, errors. Usage: URL MODEL [KEY]"""

import json
import sys
from functools import partial
from typing import Any

import anthropic

url, model = sys.argv[1].removesuffix("/v1"), sys.argv[2]
key = sys.argv[3] if len(sys.argv) > 3 else "none"
client = anthropic.Anthropic(base_url=url, api_key=key, max_retries=0)
HELLO: list[Any] = [{"role": "user", "content": "Hello."}]
GREEDY = {"temperature": 0}  # which the package has no argument for any more
ASKED: dict[str, Any] = {"model": model, "max_tokens": 24, "extra_body": GREEDY}
SUM: Any = {
    "name": "calculator",
    "description": "Work out a sum",
    "input_schema": {
        "type": "object",
        "properties": {"expression": {"type": "string", "maxLength": 12}},
        "required": ["expression"],
        "additionalProperties": False,
    },
}
CLOCK: Any = {"name": "clock", "input_schema": {"type": "object", "properties": {}}}


def total(usage: Any) -> int:
    return usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens


def messages() -> None:
    answer = client.messages.create(**ASKED, messages=HELLO, system="Be kind.")
    assert answer._request_id.startswith("req_"), answer._request_id
    assert answer.content[0].text
    assert answer.role == "assistant"
    blocks = [{"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}}]
    with client.messages.stream(**ASKED, messages=HELLO, system=blocks) as stream:
        started: list[Any] = [event for event in stream if event.type == "message_start"]
        final = stream.get_final_message()
    assert final.content[0].text == answer.content[0].text
    assert final.stop_reason == answer.stop_reason
    first = started[0].message.usage
    counted = client.messages.count_tokens(model=model, messages=HELLO, system="Be kind.")
    for usage in (first, final.usage, answer.usage):
        assert total(usage) == counted.input_tokens, (usage, counted)
    assert final.usage.cache_read_input_tokens == first.cache_read_input_tokens > 0
    assert final.usage.cache_creation.ephemeral_5m_input_tokens >= 1
    assert final.usage.output_tokens == answer.usage.output_tokens
    stopped = client.messages.create(**ASKED, messages=HELLO, stop_sequences=["o", "a", "e"])
    assert stopped.stop_reason == "stop_sequence"
    assert stopped.stop_sequence in "oae"
    cut = client.messages.create(**{**ASKED, "max_tokens": 1}, messages=HELLO)
    assert cut.stop_reason == "max_tokens"
    assert cut.usage.output_tokens == 1
    begun = [*HELLO, {"role": "assistant", "content": "Once upon a"}]
    told = client.messages.create(**ASKED, messages=begun)
    assert told.content[0].text.startswith(" "), told.content
    warm = client.messages.create(**{**ASKED, "max_tokens": 0}, messages=HELLO, system="Be warm.")
    assert warm.content == []
    assert warm.usage.output_tokens == 0
    again = client.messages.create(**ASKED, messages=HELLO, system="Be warm.")
    assert again.usage.cache_read_input_tokens == total(again.usage) - 1
    parsed = client.messages.create(
        **{**ASKED, "max_tokens": 200},
        messages=HELLO,
        output_config={
            "format": {
                "type": "json_schema",
                "schema": {
                    "type": "object",
                    "properties": {"name": {"type": "string", "maxLength": 9}},
                    "required": ["name"],
                    "additionalProperties": False,
                },
            }
        },
    )
    assert list(json.loads(parsed.content[0].text)) == ["name"]


def inputs(heard: list[Any], answer: Any) -> None:
    """Inputs of calls come in pieces as they are said, block by block, and are whole at the end."""
    pieces: dict[int, list[str]] = {}
    for event in heard:
        if event.type == "content_block_delta" and event.delta.type == "input_json_delta":
            pieces.setdefault(event.index, []).append(event.delta.partial_json)
    for index, said in pieces.items():
        assert json.loads("".join(said)) == answer.content[index].input, said
        assert answer.content[index].name != "calculator" or len(said) > 2, said


def tools(*, stream: bool) -> None:
    """Five turns: each answer is a call, each message of the user its result."""
    said: list[Any] = [{"role": "user", "content": "What is 31 + 47?"}]
    choices: list[Any] = [
        {"type": "any"},
        {"type": "tool", "name": "calculator"},
        {"type": "any", "disable_parallel_tool_use": True},
        {"type": "tool", "name": "clock"},
        {"type": "auto"},
        {"type": "none"},
    ]
    for choice in choices:
        asked: dict[str, Any] = {**ASKED, "max_tokens": 90, "messages": said, "tools": [SUM, CLOCK]}
        asked["output_config"] = {"effort": "medium"}
        if stream:
            with client.messages.stream(**asked, tool_choice=choice) as events:
                heard: list[Any] = list(events)
                answer: Any = events.get_final_message()
            kinds = [event.type for event in heard]
            inputs(heard, answer)
            assert kinds[0] == "message_start"
            assert kinds[-1] == "message_stop"
            assert kinds.count("content_block_start") == len(answer.content)
        else:
            answer = client.messages.create(**asked, tool_choice=choice)
        calls = [block for block in answer.content if block.type == "tool_use"]
        if choice["type"] in ("any", "tool"):
            assert answer.stop_reason == "tool_use", answer
            assert calls, answer
        if choice["type"] == "none":
            assert not calls, answer
        if choice.get("disable_parallel_tool_use"):
            assert len(calls) == 1
        for call in calls:
            assert call.name == choice.get("name", call.name)
            if call.name == "calculator":
                assert list(call.input) == ["expression"]
        said.append({"role": "assistant", "content": answer.content})
        results = [
            {
                "type": "tool_result",
                "tool_use_id": call.id,
                "content": [{"type": "text", "text": "78"}] if call.name == "calculator" else "no clock",
                "is_error": call.name == "clock",
            }
            for call in calls
        ]
        said.append({"role": "user", "content": [*results, {"type": "text", "text": "Go on."}]})


def refusal(kind: type[Any], call: Any) -> Any:
    """The error that a call must raise."""
    try:
        call()
    except anthropic.APIStatusError as error:
        found = error
    else:
        raise AssertionError(f"no {kind.__name__}")
    assert type(found) is kind, found
    assert found.request_id == found.body["request_id"]
    return found


def result(ident: str) -> dict[str, Any]:
    block = {"type": "tool_result", "tool_use_id": ident, "content": "x"}
    return {"role": "user", "content": [block]}


def errors() -> None:
    text = {"role": "user", "content": "x"}
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
    call = {"type": "tool_use", "id": "t", "name": "clock", "input": {}}
    picture = {"type": "tool_result", "tool_use_id": "t", "content": [image]}
    pictured = [text, {"role": "assistant", "content": [call]}, {"role": "user", "content": [picture]}]
    mark = {"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}
    wrong: dict[str, dict[str, Any]] = {
        "messages": {"messages": []},
        "max_tokens": {"max_tokens": -1},
        "role": {"messages": [{"role": "king", "content": ""}]},
        "image": {"messages": [{"role": "user", "content": [image]}]},
        "messages[2].content[0].content[0].type` 'image'": {"messages": pictured},
        "vast": {"output_config": {"effort": "vast"}},
        "too long": {"messages": [{"role": "user", "content": "x " * 9000}]},
        "web_search": {"tools": [{"type": "web_search_20250305", "name": "w", "max_uses": 1}]},
        "tools": {"tool_choice": {"type": "any"}},
        "container": {"extra_body": {"container": "c"}},
        "mcp_servers": {"extra_body": {"mcp_servers": [{}]}},
        "context_management": {
            "extra_body": {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}
        },
        "colour": {"extra_body": {"colour": 1}},
        "budget_tokens": {"thinking": {"type": "enabled", "budget_tokens": 1}},
        "tool_use_id": {"messages": [text, result("t")]},
        "cache_control": {"system": [mark] * 5},
    }
    for stream in (False, True):
        for named, change in wrong.items():
            asked = {**ASKED, "messages": [text], "stream": stream, **change}
            error = refusal(anthropic.BadRequestError, partial(client.messages.create, **asked))
            assert named in error.api_message, error
            assert error.type == "invalid_request_error"
    other = partial(client.messages.create, **{**ASKED, "model": "claude-9"}, messages=HELLO)
    for call in (other, client.messages.batches.list, client.beta.files.list):
        assert refusal(anthropic.NotFoundError, call).type == "not_found_error"
    if key != "none":
        stranger = anthropic.Anthropic(base_url=url, api_key="no", max_retries=0)
        ask = partial(stranger.messages.create, **ASKED, messages=HELLO)
        assert refusal(anthropic.AuthenticationError, ask).type == "authentication_error"
        bearer = anthropic.Anthropic(base_url=url, auth_token=key, max_retries=0)
        bearer.messages.create(**ASKED, messages=HELLO)


(known,) = client.models.list().data
assert (known.id, client.models.retrieve(known.id).type) == (model, "model")
messages()
tools(stream=False)
tools(stream=True)
errors()
print("ok")
