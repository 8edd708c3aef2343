"""Cheap WebSocket clients: raw sockets that keep what they receive and read it later.

A load generator shares the machine with the server, so while the clock runs a socket only notes
when which bytes came and counts the ends of generations; `messages` parses afterwards.

It does not know what is measured.
"""

import asyncio
import json
import time
from typing import Any

from ramify.clients.bench.websocket import TEXT, FrameReader, client_frame

_UPGRADE = (
    b"GET /v1/ws HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
    b"Sec-WebSocket-Protocol: ramify.v1+json\r\n\r\n"
)
_DONE = b'"type":"done"'


def upgrade_request(port: int) -> bytes:
    """The HTTP request that asks for a WebSocket."""
    return _UPGRADE % port


class ChunkRecorder(asyncio.Protocol):
    """One socket. `chunks`: (time, bytes) as they came; `dones`: ends of generations among them."""

    def __init__(self) -> None:
        self.chunks: list[tuple[float, bytes]] = []
        self.dones = 0
        self.sent_at = 0.0
        self._tail = b""
        self._transport: asyncio.Transport
        self._waiter: asyncio.Future[None] | None = None
        self._wanted: tuple[bytes, int] = (b"", 0)

    @classmethod
    async def connect(cls, port: int) -> "ChunkRecorder":
        """Connect and upgrade."""
        loop = asyncio.get_running_loop()
        _, self = await loop.create_connection(cls, "127.0.0.1", port)
        self._transport.write(upgrade_request(port))
        await self.until(b"\r\n\r\n")
        head = b"".join(data for _, data in self.chunks)
        if not head.startswith(b"HTTP/1.1 101"):
            raise ConnectionError(f"no upgrade: {head[:200]!r}")
        self.chunks.clear()
        return self

    def send(self, *messages: dict[str, Any]) -> None:
        """One frame."""
        self.write(json.dumps(messages).encode())

    def write(self, payload: bytes) -> None:
        """One frame that is made."""
        self.sent_at = time.perf_counter()
        self._transport.write(client_frame(payload))

    async def until(self, mark: bytes, count: int = 1) -> None:
        """Wait until `mark` has come `count` times from now on."""
        self._wanted = (mark, count)
        self._tail = b""
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter

    async def until_done(self, count: int) -> None:
        """Wait for so many `done` messages from now on."""
        await self.until(_DONE, count)

    async def end_session(self) -> None:
        """Close the session, then the connection."""
        waiting = asyncio.ensure_future(self.until(b'"type":"ok"'))
        await asyncio.sleep(0)
        self.send({"type": "close", "id": 1 << 20})
        await waiting
        self._transport.abort()

    def messages(self) -> list[tuple[float, dict[str, Any]]]:
        """What came since the last call, in order, each with its time."""
        reader = FrameReader()
        out: list[tuple[float, dict[str, Any]]] = []
        for when, data in self.chunks:
            for opcode, payload in reader.feed(data):
                if opcode == TEXT:
                    frame = json.loads(payload)
                    out += [(when, m) for m in (frame if isinstance(frame, list) else [frame])]
        self.chunks.clear()
        return out

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self.chunks.append((time.perf_counter(), data))
        if self._waiter is None:
            return
        mark, missing = self._wanted
        found = (self._tail + data).count(mark)
        if found:  # the end of what was counted must not be counted again
            self._tail = b""
            missing -= found
            self._wanted = (mark, missing)
        self._tail = (self._tail + data)[-(len(mark) - 1) :]
        if found and mark in data[-len(mark) :]:
            self._tail = b""
        if missing <= 0:
            waiter, self._waiter = self._waiter, None
            if not waiter.done():
                waiter.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(ConnectionError("the server closed the socket"))
