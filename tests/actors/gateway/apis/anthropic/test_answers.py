"""What a session says, as a client of Anthropic's API reads it."""

import json
from typing import Any

from ramify.actors.gateway.apis.anthropic.answers import LEASES, CountAnswers, MessageAnswers
from ramify.actors.gateway.apis.anthropic.conversation import conversation_of
from ramify.actors.gateway.apis.anthropic.requests import CountRequest, MessagesRequest
from ramify.actors.gateway.apis.anthropic.signatures import Signer
from ramify.actors.gateway.apis.openai.requests import decode
from ramify.actors.gateway.port.http import Response
from ramify.actors.gateway.port.interfaces import Served
from ramify.protocol.errors import Overloaded
from ramify.protocol.wire import Delta, Done, Error, Ok, Part, ServerMessage
from tests.messages import usage

SIGNER = Signer(b"secret", "ann")
USAGE = usage(prompt=7, cached=3, computed=4, output=5, ttft_ms=1, total_ms=2)
FUNCTION = {"name": "add", "arguments": '{"a": 1}'}
CALL = {"id": "c1", "type": "function", "function": FUNCTION}
TOOL = {"name": "add", "input_schema": {"type": "object"}}


def delta(*parts: Part, **fields: Any) -> Delta:
    text = "".join(part.text for part in parts)
    return Delta(branch="main", position=9, text=text, parts=list(parts), **fields)


SAID: list[ServerMessage] = [
    Ok(id=1, branch="main"),
    delta(Part(kind="markup", text="<think>"), prompt=7, cached=3),
    delta(Part(kind="reasoning", text="\n"), Part(kind="reasoning", text="hm")),
    delta(Part(kind="markup", text="</think>"), Part(kind="text", text="\n\n")),
    delta(Part(kind="text", text="So: ")),
    delta(Part(kind="markup", text="<call>"), Part(kind="call", text="", call=0, id="c1", name="add")),
    delta(Part(kind="call", text='{"a"', call=0, arguments='{"a"')),
    delta(Part(kind="call", text=": 1}", call=0, arguments=": 1}")),
    delta(Part(kind="text", text="\n")),
    Done(id=4, branch="main", position=12, reason="tool", usage=USAGE, tool_calls=[CALL]),
]


def dialogue(**fields: Any) -> MessageAnswers:
    body = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}], **fields}
    request = decode(json.dumps(body).encode(), MessagesRequest)
    told = conversation_of(request.system, request.messages, SIGNER)
    return MessageAnswers(request, told, SIGNER, Served(64), "req_1")


def events(data: object) -> list[Any]:
    assert isinstance(data, bytes)
    made = []
    for each in data.decode().split("\n\n")[:-1]:
        name, line = each.split("\n")
        made.append(json.loads(line.removeprefix("data: ")))
        assert name == f"event: {made[-1]['type']}"
    return made


def body_of(answer: object, status: int = 200) -> Any:
    assert isinstance(answer, Response)
    assert (answer.status, answer.headers["request-id"]) == (status, "req_1")
    return json.loads(answer.body)


def ended(reason: Any, **fields: Any) -> Done:
    return Done(**{"id": 4, "branch": "main", "position": 12, "usage": USAGE, **fields}, reason=reason)


def test_a_stream_of_blocks() -> None:
    chat = dialogue(stream=True)
    made = events(chat.receive(SAID))
    assert chat.over
    kinds = [each["type"] for each in made]
    assert kinds[:2] == ["message_start", "ping"]
    assert kinds[-2:] == ["message_delta", "message_stop"]
    opened = [each["content_block"] for each in made if each["type"] == "content_block_start"]
    assert opened == [
        {"type": "thinking", "thinking": "", "signature": ""},
        {"type": "text", "text": ""},
        {"type": "tool_use", "id": "c1", "name": "add", "input": {}},
    ]
    deltas = [(e["index"], e["delta"]) for e in made if e["type"] == "content_block_delta"]
    assert deltas == [
        (0, {"type": "thinking_delta", "thinking": "\nhm"}),
        (0, {"type": "signature_delta", "signature": SIGNER.sign("\nhm")}),
        (1, {"type": "text_delta", "text": "\n\nSo: "}),
        (2, {"type": "input_json_delta", "partial_json": '{"a"'}),
        (2, {"type": "input_json_delta", "partial_json": ": 1}"}),
    ]
    assert [e["index"] for e in made if e["type"] == "content_block_stop"] == [0, 1, 2]
    assert made[-2]["delta"]["stop_reason"] == "tool_use"
    start, end = made[0]["message"]["usage"], made[-2]["usage"]
    assert (start["input_tokens"], start["cache_read_input_tokens"]) == (4, 3)
    assert end == {**start, "output_tokens": 5, "queue_ms": 0}


def test_one_answer_has_the_same_blocks() -> None:
    message = body_of(dialogue().receive(SAID))
    assert message["content"] == [
        {"type": "thinking", "thinking": "\nhm", "signature": SIGNER.sign("\nhm")},
        {"type": "text", "text": "\n\nSo: "},
        {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 1}},
    ]
    assert (message["stop_reason"], message["role"], message["model"]) == ("tool_use", "assistant", "m")


def test_thoughts_may_be_kept_back_and_input_told_at_once() -> None:
    tools = [{**TOOL, "eager_input_streaming": False}]
    thinking = {"type": "adaptive", "display": "omitted"}
    made = events(dialogue(stream=True, tools=tools, thinking=thinking).receive(SAID))
    deltas = [e["delta"] for e in made if e["type"] == "content_block_delta"]
    assert deltas[0] == {"type": "signature_delta", "signature": SIGNER.sign("")}
    assert deltas[-1] == {"type": "input_json_delta", "partial_json": '{"a": 1}'}
    message = body_of(dialogue(thinking=thinking).receive(SAID))
    assert message["content"][0] == {"type": "thinking", "thinking": "", "signature": SIGNER.sign("")}


def test_a_call_that_only_the_end_tells_is_told() -> None:
    end = ended("tool", tool_calls=[CALL])
    made = events(dialogue(stream=True).receive([end]))
    assert [e["delta"]["partial_json"] for e in made if "partial_json" in e.get("delta", {})] == [
        '{"a": 1}'
    ]
    assert body_of(dialogue().receive([end]))["content"][0]["input"] == {"a": 1}


def test_a_call_that_was_cut_is_in_no_whole_answer() -> None:
    message = body_of(dialogue().receive([*SAID[:7], ended("length")]))
    assert [block["type"] for block in message["content"]] == ["thinking", "text"]
    assert message["stop_reason"] == "max_tokens"


def test_why_it_ended() -> None:
    def why(end: Done, **fields: Any) -> tuple[str, str | None]:
        message = body_of(dialogue(**fields).receive([end]))
        return message["stop_reason"], message["stop_sequence"]

    assert why(ended("stop")) == ("end_turn", None)
    assert why(ended("stop", stop=2)) == ("end_turn", None)
    assert why(ended("stop", stop="x"), stop_sequences=["x"]) == ("stop_sequence", "x")
    assert why(ended("length")) == ("max_tokens", None)
    assert why(ended("length", position=64)) == ("model_context_window_exceeded", None)
    assert why(ended("length"), max_tokens=0) == ("max_tokens", None)


def test_what_is_written_is_told_where_it_was_asked_for() -> None:
    def written(*ttls: str) -> tuple[int, ...]:
        system = [
            {"type": "text", "text": "s", "cache_control": {"type": "ephemeral", "ttl": ttl}}
            for ttl in ttls
        ]
        told = body_of(dialogue(system=system).receive([ended("stop"), Ok(id=LEASES)]))["usage"]
        assert told["cache_read_input_tokens"] == 3
        names = ("input_tokens", "cache_creation_input_tokens")
        return *(told[name] for name in names), *told["cache_creation"].values()

    assert written() == (4, 0, 0, 0)
    assert written("5m") == (0, 4, 4, 0)
    assert written("1h", "1h") == (0, 4, 0, 4)
    assert written("1h", "5m") == (0, 4, 4, 0)


def test_an_error_before_and_behind_the_first_word() -> None:
    full = Error(code="limit", message="too many", retry_ms=1500)
    answer = dialogue(stream=True).receive([full])
    told = {"type": "rate_limit_error", "message": "too many"}
    assert body_of(answer, 429) == {"type": "error", "error": told, "request_id": "req_1"}
    assert isinstance(answer, Response)
    assert answer.headers["Retry-After"] == "2"
    chat = dialogue(stream=True)
    chat.receive(SAID[:5])
    (event,) = events(chat.fail(Overloaded("busy")))
    assert event["error"] == {"type": "overloaded_error", "message": "busy"}
    assert (event["request_id"], chat.over) == ("req_1", True)
    assert body_of(dialogue().fail(Overloaded("busy")), 529)["error"]["type"] == "overloaded_error"


def test_a_prompt_that_is_too_long() -> None:
    long = Error(code="too_long", message="no", details={"max": 64, "tokens": 90, "position": 1})
    told = body_of(dialogue().receive([long]), 400)["error"]["message"]
    assert told == "prompt is too long: at least 91 tokens > 64 maximum"
    full = Error(code="too_long", message="no", details={"max": 64, "position": 64})
    told = body_of(dialogue().receive([full]), 400)["error"]["message"]
    assert told == "prompt is too long: 64 tokens > 63 maximum"


def test_tokens_are_counted_at_the_end_of_the_prompt() -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "a"}]}
    begun = [*body["messages"], {"role": "assistant", "content": "b"}]
    for messages, last in ((body["messages"], 1), (begun, 3)):
        request = decode(json.dumps({**body, "messages": messages}).encode(), CountRequest)
        count = CountAnswers(request, conversation_of(None, request.messages, SIGNER), Served(), "req_1")
        assert count.receive([Ok(id=0)]) is None
        assert body_of(count.receive([Ok(id=last, position=17)])) == {"input_tokens": 17}
        assert count.over
