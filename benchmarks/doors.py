"""What a streamed token costs at each door: ramify.v1, chats, Responses over HTTP and over WebSocket.

    python benchmarks/doors.py [--json FILE] [--repeat 5] [--streams 64 256] [--tokens 200] [--step-ms 4]

A real engine with the fake executor (a step gives each stream one token) runs in a process of its own.
This process is its load: raw sockets that all begin at once and throw away what they read. The doors
take turns in each repetition, so that what else the machine does meets all of them.

    cpu/token    CPU time of the server's process (user + system, the fake's thread included) over the
                 tokens, from the first request to the last end: the request itself is in it
    events       of text, over the tokens: less than 1 where several tokens came in one
    over v1      how much more than ramify.v1, by the medians

Each run checks that every stream ended and that no session is left. It does not know what is said.
"""

import argparse
import asyncio
import http.client
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from fake_server import FakeServer
from report import headline, machine, spread, table, write_json

PROMPT = "abcd " * 16
LANES = 32  # of a socket, where Responses share them
HANDSHAKE = (
    "GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)
POST = (
    "POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
    "Connection: close\r\nContent-Length: {length}\r\n\r\n"
)


@dataclass
class BenchedDoor:
    """`request(index, tokens, model)`: what one stream asks. `each`: streams on a socket.

    `ends`, `event`: bytes that stand once in the end of a stream, and in an event of text.
    """

    name: str
    path: str
    websocket: bool
    ends: bytes
    event: bytes
    request: Callable[[int, int, str], Any]
    each: int = 1


def _v1(index: int, tokens: int, model: str) -> Any:
    return [
        {"type": "open", "client": "load", "ttl_s": 0},
        {"type": "append", "id": 1, "text": f"{index} {PROMPT}"},
        {"type": "generate", "id": 2, "max_tokens": tokens, "temperature": 0},
    ]


def _chat(index: int, tokens: int, model: str) -> Any:
    messages = [{"role": "user", "content": f"{index} {PROMPT}"}]
    asked = {"model": model, "messages": messages, "max_tokens": tokens, "temperature": 0}
    return {**asked, "stream": True}


def _response(index: int, tokens: int, model: str) -> Any:
    asked = {"model": model, "input": f"{index} {PROMPT}", "max_output_tokens": tokens}
    return {**asked, "temperature": 0, "store": False, "stream": True}


def _lane(index: int, tokens: int, model: str) -> Any:
    asked = _response(index, tokens, model)
    del asked["stream"]
    return {"type": "response.create", "stream_id": str(index), **asked}


CHUNK = b'"object":"chat.completion.chunk"'
TEXT = b'"type":"response.output_text.delta"'
OVER = b'"type":"response.incomplete"'
DOORS = [
    BenchedDoor("ramify.v1", "/v1/ws", True, b'"type":"done"', b'"type":"delta"', _v1),
    BenchedDoor("chat, SSE", "/v1/chat/completions", False, b"data: [DONE]", CHUNK, _chat),
    BenchedDoor("Responses, SSE", "/v1/responses", False, OVER, TEXT, _response),
    BenchedDoor("Responses, WebSocket", "/v1/responses", True, OVER, TEXT, _lane),
    BenchedDoor(f"Responses, {LANES} lanes a socket", "/v1/responses", True, OVER, TEXT, _lane, LANES),
]


@dataclass
class DoorRun:
    """One run of one door."""

    cpu_us: float
    events: float
    tokens_per_s: float
    load: float = field(default_factory=lambda: os.getloadavg()[0])


class CountingReader(asyncio.Protocol):
    """Counts, and forgets."""

    def __init__(self, door: BenchedDoor, streams: int) -> None:
        self.door = door
        self.left = streams
        self.events = 0
        self.ready = asyncio.get_running_loop().create_future()
        self.over = asyncio.get_running_loop().create_future()
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        if not self.door.websocket:
            self.ready.set_result(None)

    def data_received(self, data: bytes) -> None:
        if not self.ready.done():
            self.ready.set_result(data)
            return
        keep = max(len(self.door.ends), len(self.door.event)) - 1
        text = self._tail + data
        self.events += text.count(self.door.event) - self._tail.count(self.door.event)
        self.left -= text.count(self.door.ends) - self._tail.count(self.door.ends)
        self._tail = text[-keep:]
        if self.left == 0 and not self.over.done():
            self.over.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.over.done():
            self.over.set_exception(RuntimeError(f"{self.door.name}: the server closed the connection"))


def frame(payload: bytes) -> bytes:
    """A text frame of a client, masked with zeros."""
    length = len(payload)
    head = bytes((0x81, 0x80 | length)) if length < 126 else bytes((0x81, 0xFE)) + length.to_bytes(2)
    return head + bytes(4) + payload


async def run(server: FakeServer, door: BenchedDoor, streams: int, tokens: int, model: str) -> DoorRun:
    """All streams at once, once."""
    loop = asyncio.get_running_loop()
    readers: list[CountingReader] = []
    for _ in range(streams // door.each):
        _, reader = await loop.create_connection(
            lambda: CountingReader(door, door.each), "127.0.0.1", server.port
        )
        if door.websocket:
            reader.transport.write(HANDSHAKE.format(path=door.path, port=server.port).encode())
        await reader.ready
        readers.append(reader)
    before = server.snapshot(collect=True)
    begin = time.perf_counter()
    for i, reader in enumerate(readers):
        for j in range(door.each):
            body = json.dumps(door.request(i * door.each + j, tokens, model)).encode()
            head = POST.format(path=door.path, port=server.port, length=len(body)).encode()
            reader.transport.write(frame(body) if door.websocket else head + body)
    await asyncio.gather(*(reader.over for reader in readers))
    elapsed = time.perf_counter() - begin
    after = server.snapshot()
    for reader in readers:
        reader.transport.close()
    while (left := server.snapshot())["sessions"] or left["running"]:  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    total = streams * tokens
    cpu = after["cpu"] - before["cpu"] + sum(after["gateways"]) - sum(before["gateways"])
    return DoorRun(cpu / total * 1e6, sum(r.events for r in readers) / total, total / elapsed)


def model_of(port: int) -> str:
    """The name of what is served."""
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("GET", "/v1/models")
    return str(json.loads(connection.getresponse().read())["data"][0]["id"])


def small(server: FakeServer, count: int, path: str, asked: Any, headers: dict[str, str]) -> float:
    """CPU of the server for a small request, in us: the mean of `count`."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port)
    before = server.snapshot(collect=True)["cpu"]
    for _ in range(count):
        connection.request("POST" if asked else "GET", path, asked, headers)
        connection.getresponse().read()
    return float(server.snapshot()["cpu"] - before) / count * 1e6


def compare_small(count: int, repeat: int) -> None:
    """Small requests on a connection each, and on one for all."""
    chat = json.dumps({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1})
    ways: tuple[dict[str, str], ...] = {"Connection": "close"}, {}
    with FakeServer(step_ms=4) as server:
        for path, asked in ("/healthz", None), ("/v1/models", None), ("/v1/chat/completions", chat):
            runs = [[small(server, count, path, asked, way) for way in ways] for _ in range(repeat)]
            each, one = (spread(list(way))["median"] for way in zip(*runs, strict=True))
            print(f"{path}: {each:.0f} us, on one connection {one:.0f} us, ratio {one / each:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", help="write all runs to this file")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--streams", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--step-ms", type=float, default=4.0)
    parser.add_argument("--small", type=int, default=0, help="so many small requests instead")
    options = parser.parse_args()
    if options.small:
        compare_small(options.small, options.repeat)
        return
    about = machine()
    print(headline(about), flush=True)
    results: list[dict[str, Any]] = []
    rows: list[list[str]] = []
    with FakeServer(step_ms=options.step_ms) as server:
        model = model_of(server.port)
        for door in DOORS:  # warm-up
            asyncio.run(run(server, door, LANES, 20, model))
        for streams in options.streams:
            runs: dict[str, list[DoorRun]] = {door.name: [] for door in DOORS}
            for _ in range(options.repeat):
                for door in DOORS:
                    made = asyncio.run(run(server, door, streams, options.tokens, model))
                    runs[door.name].append(made)
            base = spread([each.cpu_us for each in runs[DOORS[0].name]])["median"]
            for name, each in runs.items():
                cpu = spread([one.cpu_us for one in each])
                events = spread([one.events for one in each])["median"]
                speed = spread([one.tokens_per_s for one in each])["median"]
                cell = f"{cpu['median']:.1f} ({cpu['min']:.1f}-{cpu['max']:.1f})"
                over = f"{cpu['median'] - base:+.1f}"
                rows.append([str(streams), name, cell, over, f"{events:.2f}", f"{speed:.0f}"])
                results.append({"streams": streams, "door": name, "runs": [asdict(one) for one in each]})
    print(table(["streams", "door", "cpu/token us", "over v1", "events", "tokens/s"], rows))
    write_json(options.json, about, results)


if __name__ == "__main__":
    main()
