"""OpenAI's API over the real engine, with the real `openai` client and a fake model that is known."""

import asyncio
import json
from typing import Any

import openai
import pytest

SECRET = "a key of ours"
PICTURE = {"type": "image_url", "image_url": {"url": "x"}}
HELLO: list[Any] = [{"role": "user", "content": "Hello."}]


async def test_a_chat_whole_and_streamed(serving: Any, openai_of: Any) -> None:
    async with serving(eos_every=20) as served, openai_of(served) as (client, model):
        prompt = served.oracle.turn("Hello.")
        tokens = served.oracle.output(prompt, 64)
        text = served.oracle.text(tokens)
        settings: dict[str, Any] = {
            "model": model,
            "messages": HELLO,
            "temperature": 0,
            "max_tokens": 64,
        }
        answer = await client.chat.completions.create(**settings)
        (choice,) = answer.choices
        assert choice.message.content == text
        assert choice.message.role == "assistant"
        assert choice.finish_reason == ("stop" if tokens[-1] == 2 else "length")
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == len(prompt)
        assert answer.usage.completion_tokens == len(tokens)
        pieces, finish, usage = "", None, None
        stream = await client.chat.completions.create(
            **settings, stream=True, stream_options={"include_usage": True}
        )
        async for chunk in stream:
            for part in chunk.choices:
                pieces += part.delta.content or ""
                finish = part.finish_reason or finish
            usage = chunk.usage or usage
        assert (pieces, finish) == (text, choice.finish_reason)
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        assert usage.prompt_tokens_details.cached_tokens == len(prompt) - 1  # in the same tree
        await served.until_alone(sessions=0)


async def test_several_choices_are_those_of_our_own_protocol(serving: Any, openai_of: Any) -> None:
    async with serving() as served, openai_of(served) as (client, model):
        prompt = served.oracle.turn("Hello.")
        wanted = [served.oracle.text(served.oracle.output(prompt, 12, seed=5 + i)) for i in range(3)]
        settings: dict[str, Any] = {
            "model": model,
            "messages": HELLO,
            "n": 3,
            "seed": 5,
        }
        answer = await client.chat.completions.create(**settings, temperature=1, max_tokens=12)
        assert [choice.message.content for choice in answer.choices] == wanted
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 36
        said = {0: "", 1: "", 2: ""}
        stream = await client.chat.completions.create(
            **settings, temperature=1, max_completion_tokens=12, stream=True
        )
        async for chunk in stream:
            for part in chunk.choices:
                said[part.index] += part.delta.content or ""
        assert list(said.values()) == wanted


async def test_completions_of_texts_and_tokens(serving: Any, openai_of: Any) -> None:
    async with serving() as served, openai_of(served) as (client, model):
        tokenizer = served.oracle.tokenizer
        prompts = ["Once upon a time", "The sun"]
        wanted = [
            served.oracle.text(served.oracle.output(tokenizer.encode(each), 9)) for each in prompts
        ]
        settings: dict[str, Any] = {"model": model, "max_tokens": 9, "temperature": 0}
        answer = await client.completions.create(**settings, prompt=prompts)
        assert [choice.text for choice in answer.choices] == wanted
        encoded = [tokenizer.encode(each) for each in prompts]
        answer = await client.completions.create(**settings, prompt=encoded, logprobs=1)
        assert [choice.text for choice in answer.choices] == wanted
        logprobs = answer.choices[0].logprobs
        assert logprobs is not None
        assert logprobs.tokens is not None
        assert len(logprobs.tokens) == 9
        stream = await client.completions.create(**settings, prompt=encoded[0], stream=True)
        assert "".join([chunk.choices[0].text async for chunk in stream if chunk.choices]) == wanted[0]


async def test_prompts_are_echoed_with_their_log_probabilities(serving: Any, openai_of: Any) -> None:
    """As a harness asks how likely texts are: prompts as tokens, one token or none behind them."""
    async with serving() as served, openai_of(served) as (client, model):
        tokenizer = served.oracle.tokenizer
        prompts = [tokenizer.encode(each) for each in ("Once upon a time", "The sun, 東京")]
        settings: dict[str, Any] = {"model": model, "temperature": 0, "echo": True, "logprobs": 2}
        for most in (1, 0):
            answer = await client.completions.create(**settings, prompt=prompts, max_tokens=most)
            assert answer.usage.completion_tokens == 2 * most
            assert answer.usage.prompt_tokens == sum(map(len, prompts))
            for choice, prompt in zip(answer.choices, prompts, strict=True):
                text, found = served.oracle.text(prompt), choice.logprobs
                assert choice.finish_reason == "length"
                output = served.oracle.text(served.oracle.output(prompt, 1)) if most else ""
                assert choice.text == text + output
                scores = served.oracle.model.expected_scores(prompt, range(len(prompt) - 1), prompt[1:])
                assert found.token_logprobs[0] is found.top_logprobs[0] is None
                assert found.token_logprobs[1 : len(prompt)] == pytest.approx(scores, abs=1e-6)
                parts = found.tokens, found.token_logprobs, found.top_logprobs, found.text_offset
                for shown in parts:
                    assert len(shown) == len(prompt) + most
                assert all(len(top) <= 2 for top in found.top_logprobs[1:])
                assert found.text_offset == sorted(found.text_offset)
                assert found.text_offset[-1] <= len(choice.text)
        answer = await client.completions.create(
            model=model, prompt="The sun", max_tokens=3, temperature=0, echo=True
        )
        wanted = served.oracle.text(served.oracle.output(tokenizer.encode("The sun"), 3))
        assert answer.choices[0].text == "The sun" + wanted
        assert answer.choices[0].logprobs is None
        stream = await client.completions.create(**settings, prompt="The sun", max_tokens=3, stream=True)
        chunks = [chunk.choices[0] async for chunk in stream if chunk.choices]
        assert "".join(chunk.text for chunk in chunks) == "The sun" + wanted
        assert chunks[0].logprobs.token_logprobs[0] is None
        await served.until_alone(sessions=0)


@pytest.mark.parametrize(
    ("change", "kind", "param", "code"),
    [
        ({"model": "gpt-9"}, openai.NotFoundError, "model", "model_not_found"),
        ({"messages": []}, openai.BadRequestError, "messages", "bad_request"),
        ({"extra_body": {"frobnicate": 1}}, openai.BadRequestError, "frobnicate", "bad_request"),
        ({"temperature": 3}, openai.BadRequestError, "temperature", "bad_request"),
        ({"top_logprobs": 2}, openai.BadRequestError, "top_logprobs", "bad_request"),
        ({"n": 65}, openai.BadRequestError, "n", "bad_request"),
        ({"max_tokens": 0}, openai.BadRequestError, "max_tokens", "bad_request"),
        ({"tool_choice": "required"}, openai.BadRequestError, "tool_choice", "bad_request"),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
                ]
            },
            openai.BadRequestError,
            "messages[0].content[0].type",
            "bad_request",
        ),
        (
            {"messages": [{"role": "user", "content": "x " * 9000}]},
            openai.BadRequestError,
            None,
            "context_length_exceeded",
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_errors_are_the_clients_exceptions(
    serving: Any,
    openai_of: Any,
    change: dict[str, Any],
    kind: type[Exception],
    param: str | None,
    code: str,
    stream: bool,
) -> None:
    async with serving() as served, openai_of(served) as (client, model):
        settings = {"model": model, "messages": HELLO, "stream": stream} | change
        with pytest.raises(kind) as raised:
            await client.chat.completions.create(**settings)
        error: Any = raised.value
        assert (error.param, error.code) == (param, code)
        await served.until_alone(sessions=0)


async def test_keys(serving: Any, openai_of: Any) -> None:
    async with serving(server={"tokens": (SECRET,)}) as served:
        async with openai.AsyncOpenAI(base_url=f"{served.http}/v1", api_key="wrong") as client:
            with pytest.raises(openai.AuthenticationError):
                await client.models.list()
            with pytest.raises(openai.AuthenticationError):
                await client.chat.completions.create(model="x", messages=HELLO)
        async with openai_of(served, SECRET) as (client, model):
            answer = await client.chat.completions.create(model=model, messages=HELLO, max_tokens=3)
            assert answer.choices[0].finish_reason == "length"


async def test_who_goes_away_cancels(serving: Any, openai_of: Any) -> None:
    async with serving(fake={"step_seconds": 0.01}) as served, openai_of(served) as (client, model):
        stream = await client.chat.completions.create(
            model=model, messages=HELLO, max_tokens=3000, stream=True
        )
        async for _ in stream:
            break
        await stream.close()
        await served.until_alone(sessions=0)
        await served.quiet()


async def test_a_broken_connection_ends_the_session(serving: Any, openai_of: Any) -> None:
    async with serving(fake={"step_seconds": 0.01}) as served, openai_of(served) as (client, model):
        stream = await client.chat.completions.create(
            model=model, messages=HELLO, max_tokens=3000, stream=True
        )
        with pytest.raises(openai.APIError):  # not a stream that ends as if it were whole
            async for _ in stream:
                served.drop_connections()
        await served.until_alone(sessions=0)


async def test_bodies_that_are_none(serving: Any) -> None:
    async with serving() as served:
        for body, status in ((b"{", 400), (b"[]", 400), (b"\xff", 400), (b"[" * 5000, 400)):
            head = (
                f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:{served.engine.port}\r\n"
                f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n"
            )
            answer = await served.tcp(head.encode() + body)
            assert int(answer.split(b" ", 2)[1]) == status, answer
            assert (
                json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["type"] == "invalid_request_error"
            )
        status, body = await served.request("GET", "/v1/chat/completions")
        assert (status, body["error"]["code"]) == (405, "method_not_allowed")


@pytest.mark.parametrize("gateways", [0, 2])
async def test_many_at_once_get_their_own_answers(serving: Any, openai_of: Any, gateways: int) -> None:
    async with serving(gateways=gateways) as served, openai_of(served) as (client, model):

        async def ask(i: int) -> None:
            content = f"Question {i}?"
            answer = await client.chat.completions.create(
                model=model, messages=[{"role": "user", "content": content}], temperature=0, max_tokens=8
            )
            wanted = served.oracle.text(served.oracle.output(served.oracle.turn(content), 8))
            assert answer.choices[0].message.content == wanted

        await asyncio.gather(*(ask(i) for i in range(24)))
        await served.until_alone(sessions=0)


async def test_an_answer_in_json_is_valid(serving: Any, openai_of: Any) -> None:
    schema = {
        "type": "object",
        "properties": {
            "sign": {"enum": ["a", "bb"]},
            "count": {"type": "integer", "minimum": 7, "maximum": 9},
        },
        "required": ["sign", "count"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    async with serving() as served, openai_of(served) as (client, model):
        settings = {"model": model, "messages": HELLO, "max_tokens": 100, "response_format": form}
        answer = await client.chat.completions.create(**settings)
        value = json.loads(answer.choices[0].message.content)
        assert value["sign"] in ("a", "bb")
        assert value["count"] in (7, 8, 9)
        assert answer.choices[0].finish_reason == "stop"
        form["json_schema"]["schema"] = {"type": "nothing"}
        with pytest.raises(openai.BadRequestError) as raised:
            await client.chat.completions.create(**settings)
        assert raised.value.code == "bad_constraint"
        await served.until_alone(sessions=0)


def raw(served: Any, path: str, body: Any, **headers: str) -> bytes:
    """A request as bytes."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.1", f"Host: 127.0.0.1:{served.engine.port}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, f"Content-Length: {len(data)}", "", ""]).encode() + data


@pytest.mark.parametrize("stream", [False, True])
async def test_who_closes_its_half_still_reads(serving: Any, openai_of: Any, stream: bool) -> None:
    async with serving(fake={"step_seconds": 0.02}) as served, openai_of(served) as (_, model):
        body = {"model": model, "messages": HELLO, "max_tokens": 16, "temperature": 0}
        request = raw(served, "/v1/chat/completions", body | {"stream": stream})
        answer = await served.tcp(request, half_close=True)
        while answer.startswith(b"HTTP/1.1 100 "):  # as RFC 9110 has it
            answer = answer.partition(b"\r\n\r\n")[2]
        assert answer.startswith(b"HTTP/1.1 200 OK"), answer
        assert answer.endswith(b"\r\n0\r\n\r\n") == stream
        assert (b"[DONE]" in answer) == stream
        await served.until_alone(sessions=0)


async def test_who_goes_without_a_word_is_noticed(serving: Any, openai_of: Any) -> None:
    """Nothing is written to it for long: the reset comes back all the same."""
    async with serving(fake={"step_seconds": 0.05}) as served, openai_of(served) as (_, model):
        body = {"model": model, "messages": HELLO, "max_tokens": 3000}
        _, writer = await asyncio.open_connection("127.0.0.1", served.engine.port)
        writer.write(raw(served, "/v1/chat/completions", body))
        await writer.drain()
        while not served.engine.metrics.running:
            await asyncio.sleep(0.01)
        writer.close()
        await served.until_alone(sessions=0)
        assert not served.engine.front.gateway.hub.busy  # the client's own waits for a request


async def test_a_body_that_is_too_long_is_told_so(serving: Any) -> None:
    async with serving() as served:
        answer = await served.tcp(raw(served, "/v1/chat/completions", b"x" * (5 << 20)))
        head, _, body = answer.partition(b"\r\n\r\n")
        error = json.loads(body)["error"]
        assert head.startswith(b"HTTP/1.1 413 ")
        assert (error["type"], error["code"]) == ("invalid_request_error", "limit")


async def test_the_context_is_spoken_of_as_openai_does(serving: Any, openai_of: Any) -> None:
    async with serving() as served, openai_of(served) as (client, model):
        long: Any = [{"role": "user", "content": "x " * 9000}]
        with pytest.raises(openai.BadRequestError) as raised:
            await client.chat.completions.create(model=model, messages=long)
        assert raised.value.code == "context_length_exceeded"
        assert "This model's maximum context length is " in raised.value.message
        assert "branch" not in raised.value.message


async def test_what_a_schema_was_read_as_is_noted(serving: Any, openai_of: Any) -> None:
    schema = {"type": "string", "maxLength": 3, "format": "colour"}
    form: Any = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    async with serving() as served, openai_of(served) as (client, model):
        settings: dict[str, Any] = {"model": model, "messages": HELLO, "response_format": form}
        answer = await client.chat.completions.create(**settings, max_tokens=9)
        assert isinstance(answer.notes, list), answer
        stream = await client.chat.completions.create(**settings, max_tokens=9, stream=True)
        noted = [chunk.notes async for chunk in stream if getattr(chunk, "notes", None)]
        assert noted == [answer.notes]
