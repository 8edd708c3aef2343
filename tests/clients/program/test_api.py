"""Programs over OpenAI's API: the real `openai` client against a local server that counts."""

import asyncio
import json
from typing import Any, Literal

import msgspec
import pytest
from openai import AsyncOpenAI

from ramify.clients.program import AsyncState, assistant, gen, program, system, user
from ramify.clients.program.api import ApiSession, first_stop
from ramify.protocol.errors import RamifyError
from tests.clients.program.endpoints import served

PROFILE = "Name: Ada Lovelace\nBorn: 1815 in London\nJob: mathematician\n"
FIELDS = ("Name", "Born", "Job")
VALUES = ["Ada Lovelace", "1815 in London", "mathematician"]


class FakeApi:
    """A model that knows one text: it goes on wherever the prompt ends in it. A token is a letter."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.requests: list[dict[str, Any]] = []

    def answer(self, request: dict[str, Any]) -> tuple[str, str]:
        """The text and the finish reason."""
        prompt = request.get("prompt")
        if prompt is None:
            last = request["messages"][-1]
            prompt = last["content"] if last["role"] == "assistant" else ""
        begun = max((n for n in range(len(self.text) + 1) if prompt.endswith(self.text[:n])), default=0)
        text, reason = self.text[begun:], "stop"
        if len(text) > request["max_tokens"]:
            text, reason = text[: request["max_tokens"]], "length"
        found = first_stop(text, request.get("stop") or [])
        return (text[: found[0]], "stop") if found else (text, reason)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(head.split("content-length: ")[1].split("\r\n")[0])
        request = json.loads(await reader.readexactly(length))
        self.requests.append(request)
        text, reason = self.answer(request)
        chat = "messages" in request
        base = {"id": "x", "created": 0, "model": "m"}
        base["object"] = "chat.completion.chunk" if chat else "text_completion"
        chunks: list[dict[str, Any]] = []
        for at in [*range(0, len(text), 3), None]:
            said = "" if at is None else text[at : at + 3]
            shown = {"delta": {"content": said}} if chat else {"text": said}
            end = reason if at is None else None
            chunks.append({**base, "choices": [{"index": 0, "finish_reason": end, **shown}]})
        usage = {"prompt_tokens": 7, "completion_tokens": len(text), "total_tokens": 7 + len(text)}
        chunks.append({**base, "choices": [], "usage": usage})
        body = "".join(f"data: {json.dumps(c)}\n\n" for c in chunks) + "data: [DONE]\n\n"
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
            + body.encode()
        )
        await writer.drain()
        writer.close()
        await writer.wait_closed()


@program
async def profile(s: AsyncState) -> list[str]:
    for field in FIELDS:
        s += f"{field}: " + gen(field, max_tokens=30, stop="\n") + "\n"
    return [await s["Name"], await s["Born"], await s["Job"]]


@program
async def profile_in_a_turn(s: AsyncState) -> list[str]:
    s += user("Who was she?")
    s += assistant(
        *(
            part
            for f in ("Name", "Born", "Job")
            for part in (f"{f}: ", gen(f, max_tokens=30, stop="\n"), "\n")
        )
    )
    return [await s["Name"], await s["Born"], await s["Job"]]


@pytest.mark.parametrize(("speculate", "calls"), [(0, 3), (64, 1), (20, 2)])
async def test_guessing_ahead_saves_calls_and_changes_nothing(speculate: int, calls: int) -> None:
    api = FakeApi(PROFILE)
    async with served(api) as client:
        session = ApiSession(client, "m", chat=False, speculate=speculate)
        run = await profile.using(session=session, temperature=0.0).arun()
    assert run.value == VALUES
    assert len(api.requests) == session.calls == calls
    assert session.prompt_tokens == 7 * calls


async def test_a_chat_turn_is_guessed_where_the_endpoint_goes_on_in_it() -> None:
    api = FakeApi(PROFILE)
    async with served(api) as client:
        session = ApiSession(client, "m", speculate=64, continues=True)
        run = await profile_in_a_turn.using(session=session, temperature=0.0).arun()
        assert run.value == VALUES
        assert session.calls == 1
        with pytest.raises(RamifyError, match="cannot go on in an assistant's turn"):
            await profile_in_a_turn.using(session=ApiSession(client, "m")).arun()
    (request,) = api.requests
    assert request["messages"] == [
        {"role": "user", "content": "Who was she?"},
        {"role": "assistant", "content": "Name: "},
    ]
    assert request["continue_final_message"] is True


async def test_a_guess_that_the_program_contradicts_is_forgotten() -> None:
    @program
    async def other(s: AsyncState) -> tuple[str, str]:
        s += "Name: " + gen("name", max_tokens=30, stop="\n") + "\nShort: " + gen("rest", max_tokens=4)
        return await s["name"], await s["rest"]

    api = FakeApi(PROFILE)
    async with served(api) as client:
        session = ApiSession(client, "m", chat=False, speculate=64)
        run = await other.using(session=session).arun()
    assert run.value == ("Ada Lovelace", "Name")
    assert session.calls == 2


async def test_a_gap_that_finds_no_stop_keeps_its_limit() -> None:
    api = FakeApi("Name: " + "x" * 200)
    async with served(api) as client:
        session = ApiSession(client, "m", chat=False, speculate=10)
        run = await profile.using(session=session).arun()
    assert run.value[0] == "x" * 30
    assert run.results["Name"].reason == "length"


async def test_forks_are_independent_requests_and_text_streams() -> None:
    @program
    async def both(s: AsyncState) -> list[str]:
        s += system("S") + user("Q")
        forks = s.fork(2)
        for fork in forks:
            fork += assistant(gen("a", max_tokens=4)) + user("again") + assistant(gen("b", max_tokens=3))
        return [*await forks.values("a"), *await forks.values("b")]

    api = FakeApi(PROFILE)
    async with served(api) as client:
        session = ApiSession(client, "m")
        pieces = [piece async for piece in both.using(session=session).astream()]
        run = await both.using(session=session).arun()
    assert run.value == ["Name", "Name", "Nam", "Nam"]
    assert "".join(p.text for p in pieces if p.name == "a") == "NameName"
    last = [m["role"] for m in api.requests[-1]["messages"]]
    assert last == ["system", "user", "assistant", "user"]


async def test_what_the_endpoint_does_not_know_is_refused() -> None:
    async with served(FakeApi("x")) as client:
        with pytest.raises(RamifyError, match="turns need"):
            await profile_in_a_turn.using(session=ApiSession(client, "m", chat=False)).arun()
        with pytest.raises(RamifyError, match="no 'top_k'"):
            await profile.using(session=ApiSession(client, "m", chat=False), top_k=3).arun()
        gone = AsyncOpenAI(api_key="none", base_url="http://127.0.0.1:9/v1", max_retries=0)
        with pytest.raises(Exception, match="onnection"):
            await profile.using(session=ApiSession(gone, "m", chat=False)).arun()
        await gone.close()


@program
async def merged(s: AsyncState, by: Any) -> list[str]:
    s += user("Q")
    forks = s.fork(3, hidden=by is None)
    for i, fork in enumerate(forks):
        fork += assistant(gen("a", max_tokens=4 + i // 2))
    if by is None:
        forks.join(prefix="All: ", each="{i}={text};", suffix="!")
    else:
        forks.adopt(by=by)
    s += user("More") + assistant(gen("b", max_tokens=3))
    return [m.content for m in await s.messages()] + [await s["b"]]


async def test_joins_and_prunes_are_done_by_the_client() -> None:
    api = FakeApi(PROFILE)
    async with served(api) as client:
        session = ApiSession(client, "m")
        run = await merged.using(session=session).arun("vote")
        assert run.value == ["Q", "Name", "More", "Nam", "Nam"]
        run = await merged.using(session=session).arun(None)
        sent = [m["content"] for m in api.requests[-1]["messages"]]
        assert sent == ["Q", "All: 1=Name;2=Name;3=Name:;!", "More"]
        assert run["b"] == "Nam"
        await merged.using(session=session).arun("first")
        with pytest.raises(RamifyError, match="has an answer that counts"):
            await merged.using(session=session).arun("number")
        with pytest.raises(RamifyError, match=r"logprobs=1|log-probability"):
            await merged.using(session=session).arun("logprob")
        with pytest.raises(RamifyError, match="compiled=False"):
            await merged.using(session=session, compiled=True).arun("vote")


async def test_leaving_a_program_early_stops_its_calls() -> None:
    api = FakeApi(PROFILE)
    going, closed = asyncio.Event(), asyncio.Event()

    async def hangs(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        going.set()
        while await reader.read(1000):
            pass
        closed.set()
        writer.close()

    api.serve = hangs  # type: ignore[method-assign]
    async with served(api) as client:
        task = asyncio.create_task(merged.using(session=ApiSession(client, "m")).arun("vote"))
        await going.wait()
        task.cancel()
        await asyncio.wait_for(closed.wait(), 60)
        await asyncio.gather(task, return_exceptions=True)


class Person(msgspec.Struct):
    """What a gap is read as."""

    name: str
    born: int


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        (" 12\n", int, 12),
        ("1.5", float, 1.5),
        ("true", bool, True),
        ("Rome", str, "Rome"),
        ("Rome", Literal["Rome", "Oslo"], "Rome"),
        ('{"name": "Ada", "born": 1815}', Person, Person("Ada", 1815)),
        ("twelve", int, None),
        ("Lima", Literal["Rome", "Oslo"], None),
        ('{"name": "Ada"}', Person, None),
    ],
)
async def test_texts_are_read_as_values(text: str, kind: Any, value: Any) -> None:
    @program
    async def reads(s: AsyncState) -> Any:
        s += gen("x", max_tokens=99)
        return await s.read("x", kind)

    async with served(FakeApi(text)) as client:
        here = reads.using(session=ApiSession(client, "m", chat=False))
        if value is None:
            with pytest.raises(ValueError, match="the gap 'x' got"):
                await here.arun()
        else:
            assert (await here.arun()).value == value
