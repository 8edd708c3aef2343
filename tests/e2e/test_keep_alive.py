"""Clients of the HTTP doors ask again on the connection that they have, whatever was answered on it."""

import asyncio
import json
import shutil
from collections.abc import Iterator
from typing import Any

import httpx2
import ollama
import pytest

from ramify.actors.gateway.port.connection import RequestConnection

HELLO: list[Any] = [{"role": "user", "content": "Hello."}]
PROGRAM = """
const [base, model] = process.argv.slice(-2)
const ask = (stream) => fetch(`${base}/v1/chat/completions`, {method: "POST", body: JSON.stringify(
  {model, stream, max_tokens: 8, messages: [{role: "user", content: "Hello."}]})})
for (let i = 0; i < 3; i++) {
  if (!(await (await ask(true)).text()).endsWith("data: [DONE]\\n\\n")) process.exit(1)
  if ((await (await ask(false)).json()).choices.length != 1) process.exit(2)
}
"""


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[RequestConnection]]:
    """The connections that a gateway in this process accepts."""
    connections: list[RequestConnection] = []
    begin = RequestConnection.connection_made

    def counted(it: RequestConnection, transport: asyncio.BaseTransport) -> None:
        connections.append(it)
        begin(it, transport)

    monkeypatch.setattr(RequestConnection, "connection_made", counted)
    yield connections
    connections.clear()


async def run(*command: str) -> str:
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    told, _ = await process.communicate()
    assert process.returncode == 0, told.decode()
    return told.decode()


async def test_the_client_of_openai(serving: Any, openai_of: Any, made: Any) -> None:
    """It leaves a chat's stream at [DONE] and closes; all else goes over one connection."""
    async with serving() as served, openai_of(served) as (client, model):
        told: dict[str, Any] = {"model": model, "temperature": 0}
        for _ in range(3):
            whole = await client.chat.completions.create(**told, messages=HELLO, max_tokens=8)
            stream = await client.chat.completions.create(
                **told, messages=HELLO, max_tokens=8, stream=True
            )
            text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
            assert text == whole.choices[0].message.content
            response = await client.responses.create(
                **told, input="Hello.", background=True, max_output_tokens=8
            )
            while response.status in ("queued", "in_progress"):
                response = await client.responses.retrieve(response.id)
            events = await client.responses.create(
                **told, input="Hello.", max_output_tokens=8, store=False, stream=True
            )
            assert [event.type async for event in events][-1].startswith("response.")
            with pytest.raises(Exception, match="nothing"):
                await client.chat.completions.create(**told, messages=HELLO, nothing=1)
        assert len(made) <= 4


async def test_clients_side_by_side_are_answered_on_their_own(
    serving: Any, openai_of: Any, made: Any
) -> None:
    async with serving() as served, openai_of(served) as (client, model):

        async def ask(i: int) -> None:
            for turn in range(4):
                content = f"Question {i} {turn}?"
                answer = await client.chat.completions.create(
                    model=model,
                    messages=[{"role": "user", "content": content}],
                    temperature=0,
                    max_tokens=8,
                )
                wanted = served.oracle.text(served.oracle.output(served.oracle.turn(content), 8))
                assert answer.choices[0].message.content == wanted

        await asyncio.gather(*(ask(i) for i in range(12)))
        assert len(made) <= 13
        await served.until_alone(sessions=0)


async def test_a_stream_that_is_left_ends_its_connection_only(serving: Any, made: Any) -> None:
    async with serving(fake={"step_seconds": 0.02}) as served:
        async with httpx2.AsyncClient(base_url=served.http) as client:
            (model,) = [each["id"] for each in (await client.get("/v1/models")).json()["data"]]
            body = {"model": model, "messages": HELLO, "max_tokens": 3000, "stream": True}
            async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
                async for _ in answer.aiter_bytes():
                    break
            await served.until_alone(sessions=0)
            assert (await client.get("/healthz")).status_code == 200
        assert len(made) == 2


async def test_the_client_of_ollama(serving: Any, made: Any) -> None:
    async with serving() as served:
        async with ollama.AsyncClient(served.http) as client:
            (model,) = (await client.list()).models
            told: dict[str, Any] = {"messages": HELLO, "options": {"num_predict": 4}}
            for _ in range(2):
                await client.chat(model.model, **told)
                parts = [part async for part in await client.chat(model.model, **told, stream=True)]
                assert parts[-1].done
        assert len(made) == 1


@pytest.mark.parametrize("gateways", [0, 2])
async def test_the_fetch_of_node(serving: Any, openai_of: Any, made: Any, gateways: int) -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed")
    async with serving(gateways=gateways) as served, openai_of(served) as (_, model):
        before = len(made)
        await run(node, "--input-type=module", "-e", PROGRAM, served.http, model)
        assert len(made) - before <= 2  # it may ask before it knows that a connection is free


async def test_curl(serving: Any, openai_of: Any, made: Any) -> None:
    curl = shutil.which("curl")
    if curl is None:
        pytest.skip("curl is not installed")
    async with serving() as served, openai_of(served) as (_, model):
        before = len(made)
        body = json.dumps({"model": model, "messages": HELLO, "max_tokens": 4, "stream": True})
        chat = ("-d", body, f"{served.http}/v1/chat/completions")
        told = await run(curl, "-sv", *chat, "--next", "-sv", *chat, "--next", "-sv", served.http)
        assert told.lower().count("re-using existing") == 2
        assert told.count("data: [DONE]") == 2
        assert len(made) - before == 1
