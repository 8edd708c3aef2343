"""What a session says, as a client of OpenAI's API reads it."""

import json
from typing import Any

import msgspec

from ramify.actors.gateway.apis.openai.chat import ChatAnswers, Heading
from ramify.actors.gateway.apis.openai.dialogue import count_tokens, noted
from ramify.actors.gateway.apis.openai.requests import ChatRequest, decode
from ramify.actors.gateway.port.http import Response
from ramify.protocol.errors import Overloaded
from ramify.protocol.wire import Delta, Done, Error, Miss, Ok, Part, ServerMessage, TokenLogprob
from tests.messages import usage

USAGE = usage(prompt=7, cached=3, computed=4, output=5, ttft_ms=1, total_ms=2)
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
SAID: list[ServerMessage] = [
    Ok(id=1, branch="main"),
    Delta(branch="main", position=9, text="hm", parts=[Part(kind="reasoning", text="hm")]),
    Delta(
        branch="main",
        position=10,
        text="So: <call>",
        parts=[
            Part(kind="text", text="So: "),
            Part(kind="markup", text="<call>"),
            Part(kind="call", text="", call=0, id="c1", name="add"),
        ],
    ),
    Delta(
        branch="main",
        position=11,
        text="",
        parts=[Part(kind="call", text='{"a": 1}', call=0, arguments='{"a": 1}')],
    ),
    Done(id=2, branch="main", position=12, reason="tool", usage=USAGE, tool_calls=[CALL]),
]


def dialogue(**fields: Any) -> ChatAnswers:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}
    request = decode(json.dumps(body).encode(), ChatRequest)
    return ChatAnswers(request, Heading("chatcmpl-1", 5, "m"), [b"a", b"\xf0\x9f"])


def events(data: object) -> list[Any]:
    assert isinstance(data, bytes)
    lines = data.decode().split("\n\n")
    return [msgspec.json.decode(line.removeprefix("data: ")) for line in lines if line[6:7] == "{"]


def test_thoughts_and_calls_in_a_stream() -> None:
    chat = dialogue(stream=True)
    made = events(chat.receive(SAID))
    assert chat.over
    deltas = [each["choices"][0]["delta"] for each in made]
    assert deltas[0] == {"role": "assistant", "content": "", "reasoning_content": "hm"}
    assert deltas[1] == {"content": "So: "}
    named = {"index": 0, "id": "c1", "type": "function", "function": {"name": "add", "arguments": ""}}
    assert deltas[2] == {"tool_calls": [named]}
    assert deltas[3] == {"tool_calls": [{"index": 0, "function": {"arguments": '{"a": 1}'}}]}
    assert made[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_thoughts_and_calls_in_one_answer() -> None:
    answer = dialogue().receive(SAID)
    assert isinstance(answer, Response)
    body = json.loads(answer.body)
    assert body["choices"][0]["message"] == {
        "role": "assistant",
        "content": "So: ",
        "refusal": None,
        "reasoning_content": "hm",
        "tool_calls": [CALL],
    }
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}


def test_part_of_a_character_among_logprobs() -> None:
    chat = dialogue(stream=True, logprobs=True, top_logprobs=1)
    entry = TokenLogprob(token=1, logprob=-1.5, top=[(0, -0.5), (1, -1.5)])
    (chunk,) = events(chat.receive([Delta(branch="main", position=1, text="", logprobs=[entry])]))
    (content,) = chunk["choices"][0]["logprobs"]["content"]
    assert (content["bytes"], content["logprob"]) == ([0xF0, 0x9F], -1.5)
    assert content["top_logprobs"] == [{"token": "a", "bytes": [97], "logprob": -0.5}]


def test_an_error_before_and_after_the_first_words() -> None:
    chat = dialogue(stream=True)
    refused = chat.receive(
        [Error(code="too_long", message="no", id=1), Error(code="skipped", message="")]
    )
    assert isinstance(refused, Response)
    assert (refused.status, json.loads(refused.body)["error"]["code"]) == (
        400,
        "context_length_exceeded",
    )
    chat = dialogue(stream=True)
    chat.receive(SAID[:3])
    (event,) = events(chat.receive([Error(code="internal", message="oh", id=2)]))
    assert event["error"]["message"] == "oh"
    assert chat.over
    assert chat.receive(SAID) is None
    chat = dialogue()
    assert chat.receive(SAID[:3]) is None
    ended = chat.fail(Overloaded("bye", retry_ms=1500))
    assert isinstance(ended, Response)
    assert (ended.status, ended.headers["Retry-After"]) == (503, "2")


def test_tokens_of_thoughts_are_counted_where_there_are_some() -> None:
    assert "completion_tokens_details" not in count_tokens(3, 0, [usage(output=5)])
    told = count_tokens(3, 0, [usage(output=5, thought=2), usage(output=1, thought=1)])
    assert told["completion_tokens_details"] == {"reasoning_tokens": 3}


def test_usage_says_how_long_the_longest_choice_waited() -> None:
    first = usage(prompt=5, cached=4, computed=1, output=2, queue_ms=3.5)
    told = count_tokens(5, 4, [first, msgspec.structs.replace(first, queue_ms=7.25)])
    assert (told["queue_ms"], told["completion_tokens"]) == (7.25, 4)
    assert count_tokens(5, 0, [])["queue_ms"] == 0.0


def test_the_first_miss_of_the_choices_is_told() -> None:
    done = Done(id=2, branch="main", position=9, reason="stop", usage=usage(prompt=5))
    missed = msgspec.structs.replace(done, miss=Miss(reason="edited", message=2, tokens=70))
    assert noted([done]) == {}
    told = {"reason": "edited", "message": 2, "tokens": 70}
    assert noted([done, missed, done]) == {"ramify_cache_miss": told}
