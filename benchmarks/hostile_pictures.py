"""200 hostile pictures at each door of a running server whose model sees.

    python benchmarks/hostile_pictures.py --pid PID [--host 127.0.0.1] [--port 8765]

Each is sent to our own protocol, to OpenAI's chats and responses, Anthropic's messages, Ollama's and the
AI SDK's, eight at a time. It must be refused by the field that has it, or be seen. Beside that a text is
said again and again, which shows how long somebody else waits. Memory is that of the server's process
(`--pid`) and of those below it, the most at any time. The exit code is 1 if a request ends otherwise, or
the text ever waits for a second.
"""

import argparse
import asyncio
import base64
import http.client
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import websockets

import ramify
from ramify.protocol.errors import RamifyError

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.actors.tokenizer.test_pictures import file, hostile

AT_ONCE = 8
MOST_WAIT_S = 1.0
TEXT = "what?"


def requests(model: str, data: str) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Path, body, and the field that has the picture, of the doors that speak HTTP."""
    url, text = f"data:image/png;base64,{data}", {"type": "text", "text": TEXT}
    source = {"type": "base64", "media_type": "image/png", "data": data}
    base = {"model": model, "max_tokens": 1, "temperature": 0}

    def said(*parts: Any) -> list[Any]:
        return [{"role": "user", "content": list(parts)}]

    shown = {"type": "image_url", "image_url": {"url": url}}
    place = "messages[0].content[0]"
    yield "/v1/chat/completions", {**base, "messages": said(shown, text)}, f"{place}.image_url.url"
    part = {"type": "input_image", "image_url": url}
    yield "/v1/responses", {"input": said(part), "max_output_tokens": 1}, "input[0].content[0].image_url"
    block = {"type": "image", "source": source}
    yield "/v1/messages", {**base, "messages": said(block, text)}, f"{place}.source.data"
    options = {"model": model, "stream": False, "options": {"num_predict": 1}}
    message = {"role": "user", "content": TEXT, "images": [data]}
    yield "/api/chat", {**options, "messages": [message]}, "messages[0].images[0]"
    yield "/api/generate", {**options, "prompt": TEXT, "images": [data]}, "images[0]"


def posted(place: tuple[str, int], path: str, body: Any) -> tuple[int, str]:
    connection = http.client.HTTPConnection(*place, timeout=60)
    try:
        headers = {"content-type": "application/json", "anthropic-version": "2023-06-01"}
        connection.request("POST", path, json.dumps(body), headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


class Campaign:
    """`ends`: how requests ended, by door. `slowest`: in seconds. `wrong`: what may not be."""

    def __init__(self, place: tuple[str, int], model: str) -> None:
        self._place, self._model = place, model
        self.ends: dict[str, Counter[str]] = {}
        self.slowest = 0.0
        self.wrong: list[str] = []

    async def send(self, number: int, picture: bytes) -> None:
        data = base64.b64encode(picture).decode()
        for path, body, field in requests(self._model, data):
            begin = time.perf_counter()
            status, said = await asyncio.to_thread(posted, self._place, path, body)
            self._note(
                path, number, begin, seen=status == 200, named=status == 400 and f"`{field}`" in said
            )
        await self._ai(number, data)
        await self._own(number, picture)

    async def _ai(self, number: int, data: str) -> None:
        begin, file = time.perf_counter(), {"type": "file", "mediaType": "image/png"}
        parts = [file | {"url": f"data:image/png;base64,{data}"}, {"type": "text", "text": TEXT}]
        frame = {"type": "send", "requestId": "r", "id": f"c{number}", "trigger": "submit-message"}
        frame |= {
            "messages": [{"id": "u", "role": "user", "parts": parts}],
            "body": {"maxOutputTokens": 1},
        }
        async with websockets.connect(f"ws://{self._place[0]}:{self._place[1]}/v1/ai") as socket:
            await socket.send(json.dumps(frame))
            while (said := json.loads(await socket.recv()))["type"] == "chunk":
                pass
        named = "`messages[0].parts[0].url`" in said.get("errorText", "")
        self._note("/v1/ai", number, begin, seen=said["type"] == "end", named=named)

    async def _own(self, number: int, picture: bytes) -> None:
        begin, why = time.perf_counter(), ""
        async with ramify.connect(f"ws://{self._place[0]}:{self._place[1]}/v1/ws") as session:
            try:
                await session.main.chat(TEXT, images=[picture], max_tokens=1)
            except RamifyError as error:
                why = error.message
        self._note("/v1/ws", number, begin, seen=not why, named="`images[0]`" in why)

    def _note(self, door: str, number: int, begin: float, *, seen: bool, named: bool) -> None:
        self.slowest = max(self.slowest, time.perf_counter() - begin)
        self.ends.setdefault(door, Counter())["seen" if seen else "refused" if named else "wrong"] += 1
        if not (seen or named):
            self.wrong.append(f"{door}: picture {number}")


async def bystander(url: str, waits: list[float]) -> None:
    """Says a text again and again; how long each takes."""
    async with ramify.connect(url) as session:
        while True:
            begin = time.perf_counter()
            await session.main.chat(TEXT, max_tokens=1)
            waits.append(time.perf_counter() - begin)
            await session.main.rollback(to=0)
            await asyncio.sleep(0.02)


async def memory(pid: int, most: dict[str, int]) -> None:
    """The most that the server and its processes have held, in bytes."""
    server = psutil.Process(pid)
    while True:
        sizes = [server.memory_info().rss]
        sizes += [
            each.memory_info().rss for each in server.children(recursive=True) if each.is_running()
        ]
        most["server"] = max(most.get("server", 0), sizes[0])
        most["all"] = max(most.get("all", 0), sum(sizes))
        most.setdefault("at first", sum(sizes))
        await asyncio.sleep(0.05)


async def main(options: argparse.Namespace) -> int:
    place = (options.host, options.port)
    url = f"ws://{options.host}:{options.port}/v1/ws"
    async with ramify.connect(url) as session:
        model = session.model
        await session.main.chat(TEXT, images=[file("PNG")], max_tokens=1)
    campaign, waits, most = Campaign(place, model or ""), list[float](), dict[str, int]()
    beside = [asyncio.create_task(bystander(url, waits)), asyncio.create_task(memory(options.pid, most))]
    queue = list(zip(range(200), (data for _, data in hostile()), strict=False))

    async def work() -> None:
        while queue:
            await campaign.send(*queue.pop())

    begin = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(AT_ONCE)))
    took = time.perf_counter() - begin
    for task in beside:
        task.cancel()
    for door, ends in campaign.ends.items():
        print(f"{door:24}{dict(ends)}")
    waits.sort()
    middle, last = waits[len(waits) // 2], waits[-1]
    print(f"{took:.1f} s; slowest request {campaign.slowest:.2f} s")
    print(
        f"a text beside it: {len(waits)} times, median {middle * 1e3:.0f} ms, most {last * 1e3:.0f} ms"
    )
    print(", ".join(f"{name}: {size >> 20} MiB" for name, size in most.items()))
    print("\n".join(campaign.wrong[:20]))
    return int(bool(campaign.wrong) or last > MOST_WAIT_S)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--pid", type=int, required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8765)
    sys.exit(asyncio.run(main(parser.parse_args())))
