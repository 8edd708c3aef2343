"""The AI SDK's WebSocket protocol at /v1/ai, by hand: what its transport sends, and hostile frames."""

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import websockets

SECRET = "conformance-secret"
PATIENCE = 20


class Transport:
    """A socket at /v1/ai. `frames`: all that came, by request."""

    def __init__(self, socket: Any) -> None:
        self.socket = socket
        self.frames: dict[str, list[dict[str, Any]]] = {}

    async def send(self, request_id: str, messages: list[Any], chat: str = "chat", **more: Any) -> None:
        frame = {
            "type": "send",
            "requestId": request_id,
            "id": chat,
            "trigger": "submit-message",
            "messages": messages,
            "headers": {},
            "body": {"temperature": 0, "maxOutputTokens": 8},
        }
        await self.socket.send(json.dumps(frame | more))

    async def resume(self, request_id: str, chat: str = "chat", **more: Any) -> None:
        frame = {"type": "resume", "requestId": request_id, "id": chat, "headers": {}, "body": {}}
        await self.socket.send(json.dumps(frame | more))

    async def abort(self, request_id: str) -> None:
        await self.socket.send(json.dumps({"type": "abort", "requestId": request_id}))

    async def next(self) -> dict[str, Any]:
        frame: dict[str, Any] = json.loads(await asyncio.wait_for(self.socket.recv(), PATIENCE))
        self.frames.setdefault(frame["requestId"], []).append(frame)
        return frame

    async def end(self, request_id: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """The terminal frame of a request, and its chunks."""
        while True:
            frames = self.frames.get(request_id, [])
            ends = [each for each in frames if each["type"] in ("end", "error", "no-active")]
            if ends:
                (end,) = ends
                assert frames[-1] is end
                chunks = [each for each in frames if each["type"] == "chunk"]
                assert [each["sequence"] for each in chunks] == list(range(len(chunks)))
                return end, [each["chunk"] for each in chunks]
            await self.next()

    async def some(self, request_id: str, characters: int) -> None:
        """Wait for so much text."""
        while len(text_of([f.get("chunk", {}) for f in self.frames.get(request_id, [])])) < characters:
            await self.next()


@asynccontextmanager
async def transport(served: Any, **options: Any) -> AsyncIterator[Transport]:
    url = f"ws://127.0.0.1:{served.engine.port}/v1/ai"
    async with websockets.connect(url, **options) as socket:
        yield Transport(socket)


def user(text: str) -> dict[str, Any]:
    return {"id": "u1", "role": "user", "parts": [{"type": "text", "text": text}]}


def text_of(chunks: list[dict[str, Any]]) -> str:
    return "".join(each["delta"] for each in chunks if each.get("type") == "text-delta")


async def test_an_answer_in_chunks(serving: Any) -> None:
    async with serving() as served, transport(served) as client:
        await client.send("r1", [user("Hello.")])
        end, chunks = await client.end("r1")
        assert end == {"type": "end", "requestId": "r1"}
        prompt = served.oracle.turn("Hello.")
        assert text_of(chunks).strip() == served.oracle.text(served.oracle.output(prompt, 8)).strip()
        kinds = [each["type"] for each in chunks if each["type"] != "text-delta"]
        assert kinds == ["start", "start-step", "text-start", "text-end", "finish-step", "finish"]
        assert chunks[0]["messageId"].startswith("msg-")
        usage = chunks[-1]["messageMetadata"]["usage"]
        assert (chunks[-1]["finishReason"], usage["outputTokens"]) == ("length", 8)
        assert usage["inputTokens"] == len(prompt)
        # the history comes again, and is found
        answer = {"id": "a1", "role": "assistant", "parts": [{"type": "text", "text": text_of(chunks)}]}
        await client.send("r2", [user("Hello."), answer, user("And?")])
        _, chunks = await client.end("r2")
        assert chunks[-1]["messageMetadata"]["usage"]["cachedInputTokens"] >= len(prompt) - 1


async def test_requests_run_side_by_side(serving: Any) -> None:
    async with serving() as served, transport(served) as client:
        for i in range(12):
            await client.send(f"r{i}", [user(f"Question {i}?")], chat=f"chat {i}")
        for i in range(12):
            end, chunks = await client.end(f"r{i}")
            tokens = served.oracle.output(served.oracle.turn(f"Question {i}?"), 8)
            assert (end["type"], text_of(chunks).strip()) == ("end", served.oracle.text(tokens).strip())


async def test_a_resume_has_all_of_the_answer_wherever_it_comes(serving: Any) -> None:
    long = {"temperature": 0, "maxOutputTokens": 200}
    async with serving(fake={"step_seconds": 0.005}) as served:
        async with transport(served) as client:
            await client.send("r1", [user("Tell me.")], body=long)
            await client.some("r1", 20)
        async with transport(served) as client, transport(served) as other:
            await client.resume("r2")
            assert (await client.next())["type"] == "start"
            await client.some("r2", 60)
            await other.resume("r3")
            end, chunks = await client.end("r2")
            _, same = await other.end("r3")
            await client.resume("r4")  # after its end, for a while
            _, after = await client.end("r4")
            await client.resume("r5", chat="another")
            none, _ = await client.end("r5")
        whole = served.oracle.text(served.oracle.output(served.oracle.turn("Tell me."), 200))
        assert end["type"] == "end"
        assert text_of(chunks).strip() == whole.strip()
        assert text_of(chunks) == text_of(same) == text_of(after)
        assert chunks[0] == same[0] == after[0]  # the same messageId
        assert none["type"] == "no-active"


async def test_an_abort_ends_the_generation_and_the_request(serving: Any) -> None:
    forever = {"temperature": 0, "maxOutputTokens": 100_000}
    async with serving(fake={"step_seconds": 0.002}) as served, transport(served) as client:
        await client.send("r1", [user("Go.")], body=forever)
        await client.some("r1", 10)
        await client.send("r2", [user("Another one.")])  # one answer at a time in a chat
        refused, _ = await client.end("r2")
        await client.abort("r1")
        end, chunks = await client.end("r1")
        assert (refused["type"], end["type"]) == ("error", "end")
        assert "under way" in refused["errorText"]
        assert [each["type"] for each in chunks][-2:] == ["abort", "finish"]
        await client.send("r3", [user("Another one.")])
        assert (await client.end("r3"))[0]["type"] == "end"
        await client.abort("nobody")


async def test_an_answer_that_nobody_hears_makes_room_for_the_next(serving: Any) -> None:
    forever = {"temperature": 0, "maxOutputTokens": 100_000}
    async with serving(fake={"step_seconds": 0.002}) as served:
        async with transport(served) as client:
            await client.send("r1", [user("Go.")], body=forever)
            await client.some("r1", 10)
        async with transport(served) as client:
            await client.send("r2", [user("Hello.")])
            end, chunks = await client.end("r2")
            assert (end["type"], chunks[-1]["finishReason"]) == ("end", "length")


@pytest.mark.parametrize(
    ("frame", "told"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user"}]}, "parts"),
        ({"messages": [{"id": "a", "role": "assistant", "parts": []}]}, "last message"),
        ({"body": {"temprature": 1}}, "temprature"),
        ({"body": {"topP": 7}}, "topP"),
        ({"body": {"model": "gpt-9"}}, "gpt-9"),
        ({"body": {"maxOutputTokens": 0}}, "maxOutputTokens"),
        ({"body": {"tools": {"look": {"inputSchema": {"properties": 3}}}}}, "properties"),
        ({"body": {"tools": [{"nameless": 1}]}}, "name"),
        ({"trigger": "nonsense"}, "trigger"),
        ({"messages": [user("x" * 60_000)]}, "context"),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "parts": [{"type": "file", "mediaType": "image/png", "url": "data:,x"}],
                    }
                ]
            },
            "messages[0].parts[0]",
        ),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "parts": [{"type": "file", "mediaType": "text/plain", "url": "data:;base64,?"}],
                    }
                ]
            },
            "data URL",
        ),
    ],
)
async def test_what_is_wrong_is_told_to_its_request_alone(serving: Any, frame: Any, told: str) -> None:
    async with serving() as served, transport(served) as client:
        await client.send("good", [user("Hello.")])
        await client.send("bad", **({"messages": [user("Hello.")], "chat": "other"} | frame))
        end, chunks = await client.end("bad")
        assert (end["type"], chunks) == ("error", [])
        assert told in end["errorText"]
        assert (await client.end("good"))[0]["type"] == "end"


async def test_frames_that_name_no_request_end_the_socket_in_the_end(serving: Any) -> None:
    async with serving() as served, transport(served) as client:
        for text in ("{", "[]", '{"type":"send"}'):
            await client.socket.send(text)
        with pytest.raises(websockets.ConnectionClosed) as closed:
            await client.next()
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 4400


async def test_text_files_and_results_of_tools_are_read(serving: Any) -> None:
    data = base64.b64encode(b"a note").decode()
    file = {
        "type": "file",
        "mediaType": "text/plain",
        "filename": "n.txt",
        "url": f"data:;base64,{data}",
    }
    call = {
        "type": "tool-look",
        "toolCallId": "c1",
        "state": "output-available",
        "input": {"at": "it"},
        "output": {"seen": True},
    }
    messages = [
        {"id": "u", "role": "user", "parts": [{"type": "text", "text": "Look"}, file]},
        {"id": "a7", "role": "assistant", "parts": [{"type": "step-start"}, call]},
    ]
    tools = {"look": {"description": "Looks.", "inputSchema": {"type": "object"}}}
    async with serving() as served, transport(served) as client:
        await client.send(
            "r", messages, body={"tools": tools, "maxOutputTokens": 3, "system": "Be brief."}
        )
        end, chunks = await client.end("r")
    assert end["type"] == "end"
    assert chunks[0]["messageId"] == "a7"  # the answer goes on with the message that called


async def test_a_token_comes_with_the_first_request(serving: Any) -> None:
    async with serving(server={"tokens": (SECRET,)}) as served:
        async with transport(served) as client:
            await client.send("r", [user("Hi")], headers={"authorization": f"Bearer {SECRET}"})
            assert (await client.end("r"))[0]["type"] == "end"
            await client.send("r2", [user("Hi")])  # the socket is known now
            assert (await client.end("r2"))[0]["type"] == "end"
        for headers in ({}, {"authorization": "Bearer wrong"}):
            async with transport(served) as client:
                await client.send("r", [user("Hi")], headers=headers)
                with pytest.raises(websockets.ConnectionClosed) as closed:
                    await client.next()
                assert closed.value.rcvd is not None
                assert closed.value.rcvd.code == 4401
        header = {"Authorization": f"Bearer {SECRET}"}
        async with transport(served, additional_headers=header) as client:
            await client.send("r", [user("Hi")])
            assert (await client.end("r"))[0]["type"] == "end"
