"""Tools and errors over OpenAI's API: the real `openai` client against a local server with a script."""

import asyncio
import json
from collections import deque
from typing import Any

import pytest
from openai import AsyncOpenAI

from ramify.clients.agent import Agent, act, tool
from ramify.clients.errors import ConnectionLost
from ramify.clients.program import AsyncState, assistant, gen, program, user
from ramify.clients.program.api import ApiSession
from ramify.protocol.errors import BadRequest, Forbidden, Overloaded, RamifyError, Unauthorized
from tests.clients.program.endpoints import served

Answer = tuple[str, list[tuple[str, str, str]]]  # words, and calls as (id, name, arguments)


class ScriptedApi:
    """Answers chats with what a test wants, streamed; `status` with an error instead."""

    def __init__(self, *script: Answer, status: int = 200, hangs: bool = False) -> None:
        self.script = deque(script)
        self.status = status
        self.hangs = hangs
        self.requests: list[dict[str, Any]] = []
        self.gone = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(head.split("content-length: ")[1].split("\r\n")[0])
        self.requests.append(json.loads(await reader.readexactly(length)))
        if self.hangs:
            await reader.read()
            self.gone.set()
        elif self.status != 200:
            body = json.dumps({"error": {"message": "not like this", "type": "x"}}).encode()
            writer.write(b"HTTP/1.1 %d X\r\nContent-Type: application/json\r\n" % self.status)
            writer.write(b"Content-Length: %d\r\nConnection: close\r\n\r\n%s" % (len(body), body))
        else:
            writer.write(
                b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
            )
            writer.write("".join(f"data: {event}\n\n" for event in self._events()).encode())
        await writer.drain()
        writer.close()

    def _events(self) -> list[str]:
        """Words in one piece; a call's name first, then its arguments in two."""
        text, calls = self.script.popleft()
        deltas: list[dict[str, Any]] = [{"content": text}] if text else []
        for index, (ident, name, arguments) in enumerate(calls):
            begin = {
                "index": index,
                "id": ident,
                "type": "function",
                "function": {"name": name, "arguments": ""},
            }
            deltas.append({"tool_calls": [begin]})
            for piece in (arguments[:3], arguments[3:]):
                deltas.append({"tool_calls": [{"index": index, "function": {"arguments": piece}}]})
        base = {"id": "x", "created": 0, "model": "m", "object": "chat.completion.chunk"}
        chunks = [{**base, "choices": [{"index": 0, "finish_reason": None, "delta": d}]} for d in deltas]
        end = "tool_calls" if calls else "stop"
        chunks.append({**base, "choices": [{"index": 0, "finish_reason": end, "delta": {}}]})
        return [*map(json.dumps, chunks), "[DONE]"]


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


AGENT = Agent([add], temperature=0.0)


@program
async def ask(s: AsyncState) -> str:
    s += user("Hello.") + assistant(gen("hello", max_tokens=5))
    await act(s, AGENT, "What is 2 + 3, and 4 + 5?", name="sum")
    s += user("Sure?") + assistant(gen("sure", max_tokens=5))
    return await s["sum"]


async def test_an_agents_turn() -> None:
    calls = [("c1", "add", '{"a": 2, "b": 3}'), ("c2", "add", '{"a": 4, "b": 5}')]
    api = ScriptedApi(("Hi", []), ("Both.", calls), ("5 and 9", []), ("Yes", []))
    async with served(api) as client:
        session = ApiSession(client, "m", tools=AGENT.schemas)
        run = await ask.using(session=session).arun()
    assert run.value == run["sum"] == "5 and 9"
    first, second, third, last = api.requests
    assert first["tools"] == AGENT.schemas
    assert first["tool_choice"] == second["tool_choice"] == "auto"
    assert [m["role"] for m in third["messages"]] == [
        *("user", "assistant", "user", "assistant", "tool", "tool")
    ]
    called = third["messages"][3]
    assert [each["function"]["arguments"] for each in called["tool_calls"]] == [c[2] for c in calls]
    assert called["content"] == "Both."
    assert [(m["tool_call_id"], m["content"]) for m in third["messages"][4:]] == [
        ("c1", "5"),
        ("c2", "9"),
    ]
    assert last["messages"][-2:] == [
        {"role": "assistant", "content": "5 and 9"},
        {"role": "user", "content": "Sure?"},
    ]
    assert [m.role for m in run.messages][:6] == [m["role"] for m in third["messages"]]
    assert session.calls == 4


@pytest.mark.parametrize(
    ("choice", "sent"),
    [
        ("none", None),
        ("required", "required"),
        ("add", {"type": "function", "function": {"name": "add"}}),
    ],
)
async def test_tool_choice(choice: str, sent: Any) -> None:
    @program
    async def one(s: AsyncState) -> Any:
        s += user("2 + 3?") + assistant(gen("a", tool_choice=choice))
        return (await s["a"].result()).tool_calls

    api = ScriptedApi(("", [("c1", "add", "{}")] if sent else []))
    async with served(api) as client:
        run = await one.using(session=ApiSession(client, "m", tools=AGENT.schemas)).arun()
        assert bool(run.value) == bool(sent)
        assert run.results["a"].reason == ("tool" if sent else "stop")
        assert api.requests[0].get("tool_choice") == sent
        assert ("tools" in api.requests[0]) == bool(sent)
        if sent:
            with pytest.raises(BadRequest, match="needs tools"):
                await one.using(session=ApiSession(client, "m")).arun()
        with pytest.raises(BadRequest, match="chat=True"):
            ApiSession(client, "m", chat=False, tools=AGENT.schemas)


async def test_an_agent_that_the_session_does_not_know() -> None:
    async with served(ScriptedApi(("Hi", []))) as client:
        with pytest.raises(ValueError, match=r"ApiSession\(\.\.\., tools=agent.schemas\)"):
            await ask.using(session=ApiSession(client, "m")).arun()


async def test_leaving_an_agents_turn_stops_its_call() -> None:
    api = ScriptedApi(hangs=True)

    @program
    async def hanging(s: AsyncState) -> None:
        await act(s, AGENT, "What is 2 + 3?")

    async with served(api) as client:
        session = ApiSession(client, "m", tools=AGENT.schemas)
        task = asyncio.create_task(hanging.using(session=session).arun())
        while not api.requests:
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        async with asyncio.timeout(60):
            await api.gone.wait()


@pytest.mark.parametrize(
    ("status", "kind"),
    [(400, BadRequest), (401, Unauthorized), (403, Forbidden), (429, Overloaded), (500, RamifyError)],
)
async def test_errors_say_what_the_endpoint_said(status: int, kind: type[RamifyError]) -> None:
    async with served(ScriptedApi(status=status)) as client:
        with pytest.raises(kind, match=f"the endpoint answered {status}: not like this"):
            await ask.using(session=ApiSession(client, "m", tools=AGENT.schemas)).arun()


async def test_no_endpoint() -> None:
    async with AsyncOpenAI(api_key="none", base_url="http://127.0.0.1:9/v1", max_retries=0) as client:
        with pytest.raises(ConnectionLost, match="the endpoint was not reached"):
            await ask.using(session=ApiSession(client, "m", tools=AGENT.schemas)).arun()
