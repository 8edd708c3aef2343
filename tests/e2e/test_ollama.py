"""Ollama's API, with the real `ollama` client: a fake model, and the bundled one, which calls tools."""

import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any

import httpx
import ollama
import pytest

SECRET = "a key of ours"
HELLO = [{"role": "user", "content": "Hello."}]
BUNDLED: dict[str, Any] = {
    "real": True,
    "model": {
        "path": Path(str(files("ramify.gpu") / "default_model")),
        "device": "cpu",
        "dtype": "float32",
        "threads": 1,
    },
}

ClientOf = Callable[..., AbstractAsyncContextManager[tuple[ollama.AsyncClient, str]]]


@pytest.fixture
def ollama_of() -> ClientOf:
    @asynccontextmanager
    async def client_of(served: Any, **headers: str) -> AsyncIterator[tuple[ollama.AsyncClient, str]]:
        client = ollama.AsyncClient(host=served.http, headers=headers)
        try:
            (model,) = (await client.list()).models
            assert model.model is not None
            yield client, model.model
        finally:
            await client._client.aclose()

    return client_of


def greedy(**more: Any) -> dict[str, Any]:
    return {"temperature": 0, "num_predict": 24, **more}


async def test_a_chat_whole_and_streamed(serving: Any, ollama_of: ClientOf) -> None:
    async with serving(eos_every=20) as served, ollama_of(served) as (client, model):
        prompt = served.oracle.turn("Hello.")
        tokens = served.oracle.output(prompt, 24)
        text = served.oracle.text(tokens)
        answer = await client.chat(model, HELLO, options=greedy())
        assert (answer.message.content, answer.done) == (text, True)
        assert answer.done_reason == ("stop" if tokens[-1] == 2 else "length")
        assert (answer.prompt_eval_count, answer.eval_count) == (len(prompt), len(tokens))
        assert answer.total_duration is not None
        assert answer.eval_duration is not None
        assert answer.total_duration >= answer.eval_duration >= 0
        pieces = [part async for part in await client.chat(model, HELLO, options=greedy(), stream=True)]
        assert "".join(part.message.content or "" for part in pieces) == text
        assert [part.done for part in pieces] == [False] * (len(pieces) - 1) + [True]
        tagged = await client.chat(f"{model}:latest", HELLO, options=greedy())
        assert tagged.message.content == text
        await served.until_alone(sessions=0)


async def test_generate(serving: Any, ollama_of: ClientOf) -> None:
    async with serving() as served, ollama_of(served) as (client, model):
        oracle = served.oracle
        answer = await client.generate(model, "Hello.", options=greedy())
        assert answer.response == oracle.text(oracle.output(oracle.turn("Hello."), 24))
        answer = await client.generate(model, "Hello.", system="Be kind.", options=greedy())
        prompt = oracle.tokenizer.encode(
            "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHello.<|im_end|>\n"
            "<|im_start|>assistant\n"
        )
        assert answer.response == oracle.text(oracle.output(prompt, 24))
        raw = await client.generate(model, "Once upon", raw=True, options=greedy())
        assert raw.response == oracle.text(oracle.output(oracle.tokenizer.encode("Once upon"), 24))
        stream = await client.generate(model, "Hello.", options=greedy(), stream=True, logprobs=True)
        parts = [part async for part in stream]
        assert sum(len(part.logprobs or ()) for part in parts) == 24
        loaded = await client.generate(model, "")
        assert (loaded.done, loaded.done_reason) == (True, "load")


async def test_what_is_there(serving: Any, ollama_of: ClientOf) -> None:
    async with serving() as served, ollama_of(served) as (client, model):
        shown = await client.show(model)
        assert shown.details is not None
        assert shown.details.parameter_size
        assert shown.modelinfo
        assert "completion" in (shown.capabilities or [])
        (running,) = (await client.ps()).models
        assert running.model == model
        assert running.context_length
        status, body = await served.request("GET", "/api/version")
        assert (status, list(body)) == (200, ["version"])
        status, body = await served.request("POST", "/api/pull")
        assert (status, list(body)) == (404, ["error"])
        status, body = await served.request("GET", "/api/chat")
        assert (status, list(body)) == (405, ["error"])


async def test_what_open_webui_sends(serving: Any) -> None:
    """The requests that its back end makes, read from its source: it was not run here."""
    settings = {
        "temperature": 0.0,
        "top_p": 0.9,
        "seed": 1,
        "min_p": 0.0,
        "top_k": 40,
        "repeat_penalty": 1.1,
    }
    engine: dict[str, Any] = {
        "num_ctx": 4096,
        "num_batch": 512,
        "num_keep": 4,
        "num_thread": 2,
        "num_gpu": 1,
    }
    engine |= {"use_mmap": True, "use_mlock": False, "mirostat": 0, "repeat_last_n": 64, "tfs_z": 1.0}
    async with serving() as served, httpx.AsyncClient(base_url=served.http) as client:
        post = client.post
        assert (await client.get("/api/version")).json()["version"]
        [listed] = (await client.get("/api/tags")).json()["models"]
        named = {listed[key] for key in ("name", "model")}
        assert {each["name"] for each in (await client.get("/api/ps")).json()["models"]} <= named
        chat = {"model": listed["model"], "messages": HELLO, "stream": True, "keep_alive": "5m"}
        options = settings | engine | {"num_predict": 8, "stop": ["###"]}
        answer = await post("/api/chat", json=chat | {"options": options})
        assert [json.loads(line)["done"] for line in answer.text.splitlines()][-1:] == [True]
        title = chat | {"stream": False, "options": {"num_predict": 5}}  # titles, tags, follow-ups
        assert (await post("/api/chat", json=title)).json()["eval_count"] == 5
        body = {"prompt": "Hello.", "options": {"num_predict": 3}, "stream": False}
        assert (await post("/api/generate", json={"model": listed["model"]} | body)).json()["done"]
        openai = {
            "messages": HELLO,
            "stream": True,
            "max_tokens": 4,
            "frequency_penalty": 0.1,
            "seed": 3,
        }
        openai |= {
            "temperature": 0.5,
            "top_p": 0.9,
            "stop": ["###"],
            "stream_options": {"include_usage": True},
        }
        answer = await post("/v1/chat/completions", json={"model": listed["model"]} | openai)
        assert answer.text.rstrip().endswith("data: [DONE]")


async def test_an_answer_by_schema(serving: Any, ollama_of: ClientOf) -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer", "minimum": 1, "maximum": 3}},
        "required": ["n"],
        "additionalProperties": False,
    }
    async with serving() as served, ollama_of(served) as (client, model):
        answer = await client.chat(model, HELLO, format=schema, options={"num_predict": 60})
        assert json.loads(answer.message.content or "")["n"] in (1, 2, 3)
        answer = await client.chat(model, HELLO, format="json", options={"num_predict": 300})
        if answer.done_reason == "stop":
            assert isinstance(json.loads(answer.message.content or ""), dict)


async def test_a_tool_is_called_and_answers(serving: Any, ollama_of: ClientOf) -> None:
    def calculator(expression: str) -> str:
        """Work out a sum

        Args:
          expression: what to work out
        """
        return expression

    async with serving(**BUNDLED) as served, ollama_of(served) as (client, model):
        messages: list[Any] = [{"role": "user", "content": "What is 31 + 47?"}]
        for stream in (False, True):
            said: Any = await client.chat(
                model, messages, tools=[calculator], options=greedy(num_predict=80), stream=stream
            )
            parts = [part async for part in said] if stream else [said]
            calls = [call for part in parts for call in part.message.tool_calls or ()]
            assert [call.function.name for call in calls] == ["calculator"]
            assert calls[0].function.arguments == {"expression": "31 + 47"}
        messages += [parts[-1].message, {"role": "tool", "content": "78", "tool_name": "calculator"}]
        answer = await client.chat(model, messages, tools=[calculator], options=greedy())
        assert "78" in (answer.message.content or "")


@pytest.mark.parametrize(
    ("change", "status", "words"),
    [
        ({"model": "llama99"}, 404, "not served here"),
        ({"options": {"frobnicate": 1}}, 400, "options.frobnicate"),
        ({"options": {"temperature": 9}}, 400, "options.temperature"),
        ({"options": {"mirostat": 2}}, 400, "options.mirostat"),
        ({"messages": [{"role": "robot", "content": ""}]}, 400, "messages[0].role"),
        ({"messages": [{"role": "user", "content": "x " * 9000}]}, 400, "maximum context length"),
        ({"format": {"type": "nothing"}}, 400, "type"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_errors(
    serving: Any, ollama_of: ClientOf, change: dict[str, Any], status: int, words: str, stream: bool
) -> None:
    async with (
        serving() as served,
        ollama_of(served) as (_, model),
        httpx.AsyncClient(base_url=served.http) as client,
    ):
        body = {"model": model, "messages": HELLO, "stream": stream} | change
        answer = await client.post("/api/chat", json=body)
        assert (answer.status_code, list(answer.json())) == (status, ["error"])
        assert words in answer.json()["error"]
        await served.until_alone(sessions=0)


async def test_keys(serving: Any, ollama_of: ClientOf) -> None:
    async with serving(server={"tokens": (SECRET,)}) as served:
        async with ollama_of(served, Authorization=f"Bearer {SECRET}") as (client, model):
            answer = await client.chat(model, HELLO, options=greedy())
            assert answer.done
        with pytest.raises(ollama.ResponseError) as raised:
            async with ollama_of(served):
                pass
        assert raised.value.status_code == 401


async def test_who_goes_away_cancels(serving: Any, ollama_of: ClientOf) -> None:
    async with serving(fake={"step_seconds": 0.01}) as served, ollama_of(served) as (client, model):
        stream = await client.chat(model, HELLO, options={"num_predict": 3000}, stream=True)
        async for _ in stream:
            break
        await stream.aclose()  # type: ignore[attr-defined]  # it is a generator
        await served.until_alone(sessions=0)
        await served.quiet()
