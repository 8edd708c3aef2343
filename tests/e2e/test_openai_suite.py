"""What programs do with the real `openai` client, against the bundled model: it chats and calls tools.

One server for all cases, which runs in a process of its own. Fields of events are compared with what the
client's own types require.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any, get_args

import httpx2
import openai
import pydantic
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponsesServerEvent, ResponseStreamEvent

from ramify.clients.bench.server import http_url

HELLO: list[Any] = [{"role": "user", "content": "Hello."}]
SUM = "What is 31 + 47?"
EXPRESSION = {
    "type": "object",
    "properties": {"expression": {"type": "string"}},
    "required": ["expression"],
    "additionalProperties": False,
}
FUNCTION: Any = {"name": "calculator", "description": "Work out a sum", "parameters": EXPRESSION}
PICTURE = {"type": "image_url", "image_url": {"url": "x"}}
CALCULATOR: Any = {"type": "function", "function": FUNCTION}
FLAT: Any = {"type": "function", **FUNCTION, "strict": True}


class Person(pydantic.BaseModel):
    """What answers are to be."""

    model_config = pydantic.ConfigDict(extra="forbid")
    name: str = pydantic.Field(max_length=12)
    age: int = pydantic.Field(ge=1, le=99)


@pytest.fixture
def address(bundled: str) -> str:
    return http_url(bundled) + "/v1"


@pytest.fixture
async def client(address: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=address, api_key="none", max_retries=0) as made:
        yield made


MODEL = "default_model"
GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0}


def strictly(event: Any, union: Any) -> None:
    """The event has every field that the client's type for it requires, with the right type."""
    (kind,) = [
        kind
        for kind in get_args(get_args(union)[0])
        if event["type"] in get_args(kind.model_fields["type"].annotation)
    ]
    kind.model_validate(event)


# --- chats ----------------------------------------------------------------------------------------


async def test_raw_answers_and_chunks_have_every_field(client: openai.AsyncOpenAI) -> None:
    raw = await client.chat.completions.with_raw_response.create(**GREEDY, messages=HELLO, max_tokens=9)
    ChatCompletion.model_validate(json.loads(raw.text))
    assert raw.headers["content-type"] == "application/json"
    stream = await client.chat.completions.create(**GREEDY, messages=HELLO, max_tokens=9, stream=True)
    chunks = [chunk async for chunk in stream]
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk.to_dict())
    assert chunks[0].choices[0].delta.role == "assistant"
    assert len({chunk.id for chunk in chunks}) == 1


async def test_a_named_tool_is_called_validly_whatever_strict_says(client: openai.AsyncOpenAI) -> None:
    closed = {"type": "object", "additionalProperties": False}
    schema = closed | {"properties": {"a": {"type": "integer"}}, "required": ["a"]}
    tool: Any = {"type": "function", "function": {"name": "f", "strict": False, "parameters": schema}}
    ids = []
    for _ in range(2):
        answer = await client.chat.completions.create(
            model=MODEL,
            messages=HELLO,
            tools=[tool],
            tool_choice={"type": "function", "function": {"name": "f"}},
            n=4,
        )
        for choice in answer.choices:
            ((call,),) = (choice.message.tool_calls,)
            assert isinstance(json.loads(call.function.arguments)["a"], int)
            ids.append(call.id)
    assert len(set(ids)) == 8
    assert all(len(ident) == 9 and ident.isalnum() for ident in ids)


async def test_a_result_of_no_call_is_refused(client: openai.AsyncOpenAI) -> None:
    messages: list[Any] = [*HELLO, {"role": "tool", "tool_call_id": "nope", "content": "4"}]
    with pytest.raises(openai.BadRequestError) as raised:
        await client.chat.completions.create(**GREEDY, messages=messages)
    assert raised.value.param == "messages[1].tool_call_id"


async def test_a_blocking_client(address: str) -> None:
    def ask() -> str:
        with openai.OpenAI(base_url=address, api_key="none") as client:
            answer = client.chat.completions.create(**GREEDY, messages=HELLO, max_tokens=12)
            with client.chat.completions.stream(**GREEDY, messages=HELLO, max_tokens=12) as stream:
                final = stream.get_final_completion()
            assert final.choices[0].message.content == answer.choices[0].message.content
            return answer.choices[0].message.content or ""

    assert await asyncio.to_thread(ask)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_tool_is_called_and_its_result_read(client: openai.AsyncOpenAI, stream: bool) -> None:
    messages: list[Any] = [{"role": "user", "content": SUM}]
    asked: dict[str, Any] = {**GREEDY, "messages": messages, "tools": [CALCULATOR]}
    if stream:
        async with client.chat.completions.stream(**asked) as events:
            kinds = [event.type async for event in events]
            answer: Any = await events.get_final_completion()
        assert "tool_calls.function.arguments.done" in kinds
    else:
        answer = await client.chat.completions.create(**asked)
    (choice,) = answer.choices
    (call,) = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls"
    assert (call.function.name, json.loads(call.function.arguments)) == (
        "calculator",
        {"expression": "31 + 47"},
    )
    messages += [choice.message, {"role": "tool", "tool_call_id": call.id, "content": "78"}]
    last = await client.chat.completions.create(**GREEDY, messages=messages, tools=[CALCULATOR])
    assert "78" in (last.choices[0].message.content or "")
    assert last.choices[0].finish_reason == "stop"


async def test_two_calls_and_their_results_may_be_sent(client: openai.AsyncOpenAI) -> None:
    calls = [
        {
            "id": f"c{i}",
            "type": "function",
            "function": {"name": "calculator", "arguments": json.dumps({"expression": each})},
        }
        for i, each in enumerate(("1 + 2", "3 + 4"))
    ]
    messages: list[Any] = [
        {"role": "user", "content": "What is 1 + 2 and what is 3 + 4?"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c0", "content": "3"},
        {"role": "tool", "tool_call_id": "c1", "content": "7"},
    ]
    answer = await client.chat.completions.create(
        **GREEDY, messages=messages, tools=[CALCULATOR], parallel_tool_calls=True, max_tokens=30
    )
    assert answer.choices[0].message.content


@pytest.mark.parametrize(
    "choice", ["none", "required", {"type": "function", "function": {"name": "calculator"}}]
)
async def test_whether_a_tool_is_called_can_be_said(client: openai.AsyncOpenAI, choice: Any) -> None:
    answer = await client.chat.completions.create(
        **GREEDY,
        messages=[{"role": "user", "content": SUM}],
        tools=[CALCULATOR],
        tool_choice=choice,
        max_tokens=60,
    )
    assert bool(answer.choices[0].message.tool_calls) == (choice != "none")


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_is_parsed(client: openai.AsyncOpenAI, stream: bool) -> None:
    asked: dict[str, Any] = {**GREEDY, "messages": HELLO, "response_format": Person, "max_tokens": 200}
    if stream:
        async with client.chat.completions.stream(**asked) as events:
            final: Any = await events.get_final_completion()
    else:
        final = await client.chat.completions.parse(**asked)
    assert isinstance(final.choices[0].message.parsed, Person)


@pytest.mark.parametrize(
    "more",
    [
        {"n": 3, "temperature": 1.0, "seed": 5},
        {"stop": ["!", "?"]},
        {"stop": "."},
        {"logprobs": True, "top_logprobs": 3},
        {"presence_penalty": 0.5, "frequency_penalty": 0.5},
        {"top_p": 0.5, "temperature": 0.7, "seed": 1},
        {"max_completion_tokens": 3},
        {"user": "me", "metadata": {"a": "b"}, "store": False, "service_tier": "auto"},
        {"reasoning_effort": "low", "prompt_cache_key": "k", "safety_identifier": "s"},
        {"extra_body": {"top_k": 5, "min_p": 0.1, "ignore_eos": True}},
        {"response_format": {"type": "text"}, "modalities": ["text"]},
    ],
    ids=lambda more: "-".join(more),
)
@pytest.mark.parametrize("stream", [False, True])
async def test_settings(client: openai.AsyncOpenAI, more: dict[str, Any], stream: bool) -> None:
    asked = {**GREEDY, "messages": HELLO, "max_tokens": 12, **more}
    if not stream:
        answer = await client.chat.completions.create(**asked)
        assert len(answer.choices) == more.get("n", 1)
        texts = [choice.message.content for choice in answer.choices]
        if "logprobs" in more:
            assert answer.choices[0].logprobs is not None
            assert {len(each.top_logprobs) for each in answer.choices[0].logprobs.content or ()} == {3}
    else:
        said: dict[int, str] = {}
        async for chunk in await client.chat.completions.create(**asked, stream=True):
            for choice in chunk.choices:
                said[choice.index] = said.get(choice.index, "") + (choice.delta.content or "")
        texts = [said[i] for i in sorted(said)]
        assert len(texts) == more.get("n", 1)
    for stop in more.get("stop", ()):
        assert all(stop not in (text or "") for text in texts)


async def test_a_timeout_is_the_clients_and_cancels(client: openai.AsyncOpenAI, address: str) -> None:
    asked: dict[str, Any] = {**GREEDY, "messages": HELLO, "max_tokens": 3000}
    with pytest.raises(openai.APITimeoutError):
        await client.with_options(timeout=0.2).chat.completions.create(
            **asked, extra_body={"ignore_eos": True}
        )
    async with asyncio.timeout(60):
        while await running(address):
            await asyncio.sleep(0.02)


async def test_a_deadline_ends_an_answer(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        **GREEDY,
        messages=HELLO,
        max_tokens=3000,
        extra_body={"ignore_eos": True, "deadline_ms": 200},
    )
    assert answer.choices[0].finish_reason == "length"


async def test_an_answer_that_is_closed_is_cancelled(client: openai.AsyncOpenAI, address: str) -> None:
    asked: dict[str, Any] = {**GREEDY, "messages": HELLO, "max_tokens": 3000}
    stream = await client.chat.completions.create(**asked, stream=True, extra_body={"ignore_eos": True})
    async for _ in stream:
        break
    await stream.close()
    async with asyncio.timeout(60):
        while await running(address):
            await asyncio.sleep(0.02)


async def running(address: str) -> int:
    """Generations that run or wait."""
    async with httpx2.AsyncClient() as http:
        text = (await http.get(address.removesuffix("/v1") + "/metrics")).text
    wanted = ("ramify_requests_running ", "ramify_requests_waiting ")
    found = [line for line in text.splitlines() if line.startswith(wanted)]
    assert len(found) == 2, text
    return sum(int(float(line.split()[-1])) for line in found)


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"model": "gpt-9"}, openai.NotFoundError),
        ({"messages": [{"role": "king", "content": ""}]}, openai.BadRequestError),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
                ]
            },
            openai.BadRequestError,
        ),
        ({"messages": [{"role": "user", "content": "x " * 9000}]}, openai.BadRequestError),
        ({"logit_bias": {"5": 1}}, openai.BadRequestError),
        ({"response_format": {"type": "json_schema"}}, openai.BadRequestError),
        ({"tools": [{"type": "web_search"}]}, openai.BadRequestError),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, openai.BadRequestError),
        ({"n": 0}, openai.BadRequestError),
        ({"stream_options": {"include_usage": True}}, openai.BadRequestError),
    ],
)
async def test_what_cannot_be_served_is_refused(
    client: openai.AsyncOpenAI, change: dict[str, Any], kind: type[openai.APIStatusError]
) -> None:
    with pytest.raises(kind) as raised:
        await client.chat.completions.create(**{**GREEDY, "messages": HELLO, **change})
    assert raised.value.code
    assert raised.value.type


async def test_models_and_what_is_no_path(client: openai.AsyncOpenAI) -> None:
    assert (await client.models.retrieve(MODEL)).id == MODEL
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("other")
    with pytest.raises(openai.NotFoundError):
        await client.embeddings.create(model=MODEL, input="x")


async def test_completions_go_on(client: openai.AsyncOpenAI) -> None:
    stream = await client.completions.create(
        **GREEDY, prompt="Once upon a time", max_tokens=8, stream=True, logprobs=2
    )
    text = "".join([chunk.choices[0].text async for chunk in stream])
    answer = await client.completions.create(**GREEDY, prompt="Once upon a time", max_tokens=8)
    assert answer.choices[0].text == text


# --- responses --------------------------------------------------------------------------------------


@pytest.mark.parametrize("door", ["http", "websocket"])
@pytest.mark.parametrize(
    "more",
    [
        {"input": "Hello."},
        {"input": SUM, "tools": [FLAT]},
        {"input": "Hello.", "max_output_tokens": 2},
        {"input": "Hello.", "include": ["message.output_text.logprobs"], "top_logprobs": 2},
        {"input": "Hello.", "instructions": "Be kind.", "metadata": {"a": "b"}, "store": False},
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": "Hello."}]}]},
        {"input": "Hello.", "reasoning": {"effort": "low"}, "parallel_tool_calls": False, "user": "me"},
    ],
    ids=["text", "tool", "cut", "logprobs", "instructions", "items", "reasoning"],
)
async def test_every_event_has_its_fields(
    client: openai.AsyncOpenAI, more: dict[str, Any], door: str
) -> None:
    events: list[dict[str, Any]] = []
    if door == "http":
        async for event in await client.responses.create(**GREEDY, **more, stream=True):
            events.append(event.to_dict())
            strictly(events[-1], ResponseStreamEvent)
    else:
        async with client.responses.connect() as connection:
            await connection.response.create(**GREEDY, **more, stream_id="a lane")
            while not events or events[-1]["type"] not in ("response.completed", "response.incomplete"):
                events.append(json.loads(await connection.recv_bytes()))
                strictly(events[-1], ResponsesServerEvent)
        assert {event["stream_id"] for event in events} == {"a lane"}
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    final = Response.model_validate(events[-1]["response"])
    deltas = "".join(e["delta"] for e in events if e["type"] == "response.output_text.delta")
    assert deltas == final.output_text
    if "tools" in more:
        (call,) = [item for item in final.output if item.type == "function_call"]
        assert json.loads(call.arguments) == {"expression": "31 + 47"}
    if "include" in more:
        (message,) = final.output
        assert message.type == "message"
        assert message.content[0].type == "output_text"
        logprobs = message.content[0].logprobs or []
        assert "".join(each.token for each in logprobs) == final.output_text
        said = [each for e in events for each in e.get("logprobs", ()) if e["type"].endswith("delta")]
        assert len(said) == len(logprobs)


async def test_a_tool_in_a_conversation_that_is_kept(client: openai.AsyncOpenAI) -> None:
    asked = await client.responses.create(**GREEDY, input=SUM, tools=[FLAT])
    (call,) = asked.output
    assert call.type == "function_call"
    output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "78"}
    answer = await client.responses.create(
        **GREEDY, input=[output], tools=[FLAT], previous_response_id=asked.id
    )
    assert "78" in answer.output_text
    # the same without what the server keeps
    history: list[Any] = [{"role": "user", "content": SUM}, call.to_dict(), output]
    again = await client.responses.create(**GREEDY, input=history, tools=[FLAT], store=False)
    assert again.output_text == answer.output_text


async def test_the_input_of_a_response_is_kept_with_it(client: openai.AsyncOpenAI) -> None:
    items: Any = [{"role": "user", "content": f"Number {i}"} for i in range(5)]
    made = await client.responses.create(**GREEDY, input=items, max_output_tokens=4)
    page = await client.responses.input_items.list(made.id, order="asc", limit=2)
    found = [item async for item in page]  # page after page
    assert [item.content[0].text for item in found] == [f"Number {i}" for i in range(5)]  # type: ignore[union-attr]
    newest = await client.responses.input_items.list(made.id, limit=1)
    assert newest.data[0].id == found[-1].id
    with pytest.raises(openai.BadRequestError):
        await client.responses.input_items.list(made.id, after="nothing")
    with pytest.raises(openai.NotFoundError):
        await client.responses.input_items.list("resp_nothing")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_response_is_parsed(client: openai.AsyncOpenAI, stream: bool) -> None:
    asked: dict[str, Any] = {**GREEDY, "input": "Hello.", "text_format": Person}
    if stream:
        async with client.responses.stream(**asked) as events:
            final: Any = await events.get_final_response()
    else:
        final = await client.responses.parse(**asked)
    assert isinstance(final.output_parsed, Person)


async def test_many_lanes_at_once(client: openai.AsyncOpenAI) -> None:
    async with client.responses.connect() as connection:
        for i in range(16):
            await connection.response.create(
                **GREEDY, input=f"Hello {i}.", max_output_tokens=6, stream_id=str(i)
            )
        ends: dict[str, str] = {}
        while len(ends) < 16:
            event = await connection.recv()
            assert event.type != "error", event
            if event.type in ("response.completed", "response.incomplete"):
                assert event.stream_id is not None
                ends[event.stream_id] = event.response.output_text
    alone = await client.responses.create(**GREEDY, input="Hello 7.", max_output_tokens=6)
    assert ends["7"] == alone.output_text
