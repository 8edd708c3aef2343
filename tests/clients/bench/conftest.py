"""A small HTTP server that streams tokens in SGLang's and in OpenAI's dialect, badly cut.

It answers with tokens that depend on the prompt, keeps a prefix cache of its own to say how many
prompt tokens were cached, and can be told to misbehave.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import pytest


class FakeHttp:
    """`cut`: body bytes in a chunk. `fault`: see `_events`. `bodies`: what was asked."""

    def __init__(self, **settings: Any) -> None:
        self.cut: int = settings.get("cut", 7)
        self.fault: str = settings.get("fault", "")
        self.incremental: bool = settings.get("incremental", False)
        self.counts: bool = settings.get("counts", True)  # continuous_usage_stats
        self.group: int = settings.get("group", 1)  # tokens in an event
        self.bodies: list[dict[str, Any]] = []
        self.heads: list[str] = []
        self.connections = 0
        self.port = 0
        self._known: set[tuple[int, ...]] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                self.heads.append(head)
                length = [
                    line for line in head.split("\r\n") if line.lower().startswith("content-length")
                ]
                body = await reader.readexactly(int(length[0].partition(":")[2]) if length else 0)
                await self._answer(head.split()[1], body, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _answer(self, path: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        if path == "/get_model_info":
            return self._json(writer, 200, {"model_path": "/models/tiny"})
        if path == "/v1/models":
            return self._json(writer, 200, {"data": [{"id": "tiny"}]})
        if path == "/metrics":
            return self._json(writer, 200, {})
        if self.fault == "status":
            return self._json(writer, 400, {"error": "no such thing"})
        self.bodies.append(json.loads(body))
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n")
        writer.write(b"Transfer-Encoding: chunked\r\n\r\n")
        text = b"".join(b"data: " + event + b"\n\n" for event in self._events(path, self.bodies[-1]))
        if self.fault == "broken":
            text = text[: len(text) // 2]
        for at in range(0, len(text), self.cut):
            piece = text[at : at + self.cut]
            writer.write(b"%x\r\n%s\r\n" % (len(piece), piece))
            await writer.drain()
            await asyncio.sleep(0)
        if self.fault == "broken":
            raise ConnectionError
        writer.write(b"0\r\n\r\n")
        return None

    def _json(self, writer: asyncio.StreamWriter, status: int, value: Any) -> None:
        data = json.dumps(value).encode()
        writer.write(b"HTTP/1.1 %d X\r\nContent-Type: application/json\r\n" % status)
        writer.write(b"Content-Length: %d\r\n\r\n%s" % (len(data), data))

    def _events(self, path: str, body: dict[str, Any]) -> list[bytes]:
        openai = path == "/v1/completions"
        prompt = body["prompt" if openai else "input_ids"]
        count = body["max_tokens"] if openai else body["sampling_params"]["max_new_tokens"]
        if self.fault == "short":
            count -= 1
        output = [(sum(prompt) + i) % 97 for i in range(count)]
        cached = self._cached(prompt, output)
        spans = [(at, min(at + self.group, count)) for at in range(0, count, self.group)]
        make = self._openai if openai else self._sglang
        events = [make(body, output, span, cached) for span in spans]
        if openai:
            last = {"choices": [], "usage": self._usage(prompt, count, cached)}
            events.append(last)
        if self.fault == "error":
            events[1:] = [{"error": {"message": "out of memory"}}]
        return [*(json.dumps(event).encode() for event in events), b"[DONE]"]

    def _sglang(
        self, body: dict[str, Any], output: list[int], span: tuple[int, int], cached: int
    ) -> dict[str, Any]:
        start, end = span
        reason = {"type": "stop" if self.fault == "stop" else "length", "length": len(output)}
        meta = {
            "id": "x",
            "finish_reason": reason if end == len(output) else None,
            "prompt_tokens": len(body["input_ids"]),
            "completion_tokens": end,
            "cached_tokens": cached,
        }
        ids = output[start if self.incremental else 0 : end]
        return {"text": "ä" * end, "output_ids": ids, "meta_info": meta}

    def _openai(
        self, body: dict[str, Any], output: list[int], span: tuple[int, int], cached: int
    ) -> dict[str, Any]:
        start, end = span
        reason = ("stop" if self.fault == "stop" else "length") if end == len(output) else None
        choice: dict[str, Any] = {"index": 0, "text": "ä" * (end - start), "finish_reason": reason}
        if body.get("return_token_ids") and self.fault != "no ids":
            choice["token_ids"] = output[start:end]
        event: dict[str, Any] = {"id": "x", "choices": [choice]}
        if self.counts:
            event["usage"] = self._usage(body["prompt"], end, cached)
        return event

    def _usage(self, prompt: list[int], count: int, cached: int) -> dict[str, Any]:
        details = {"cached_tokens": cached}
        return {
            "prompt_tokens": len(prompt), "completion_tokens": count, "prompt_tokens_details": details,
        }  # fmt: skip

    def _cached(self, prompt: list[int], output: list[int]) -> int:
        """Tokens of the longest known prefix; all but the last output token is known from now on."""
        found = [at for at in range(len(prompt)) if tuple(prompt[:at]) in self._known]
        line = prompt + output
        self._known |= {tuple(line[:at]) for at in range(len(line))}
        return max(found, default=0)


HttpServing = Callable[..., AbstractAsyncContextManager[FakeHttp]]


@pytest.fixture
def http_serving() -> HttpServing:
    """`async with http_serving(...) as server`: keywords are settings of `FakeHttp`."""

    @asynccontextmanager
    async def run(**settings: Any) -> AsyncIterator[FakeHttp]:
        fake = FakeHttp(**settings)
        server = await asyncio.start_server(fake.handle, "127.0.0.1", 0)
        fake.port = server.sockets[0].getsockname()[1]
        try:
            yield fake
        finally:
            server.close()
            await server.wait_closed()

    return run
