"""A WebSocket that costs the load generator next to nothing (RFC 6455).

The load shares a machine with the server, so a frame is split off and handed on, with the time at
which its bytes came, and that is all. Frames go out with a zero mask, which is legal (section 5.3)
and costs nothing. It does not know what is in a frame; extensions are never offered.
"""

import asyncio
import ssl
import struct
import time
from collections.abc import Callable, Iterator
from urllib.parse import urlsplit

CONTINUATION, TEXT, BINARY, CLOSE, PING, PONG = 0x0, 0x1, 0x2, 0x8, 0x9, 0xA
_FIN = 0x80


def client_frame(payload: bytes, opcode: int = TEXT) -> bytes:
    """Make a frame of a client: FIN, and a mask of zeros."""
    length = len(payload)
    first = _FIN | opcode
    if length < 126:
        return struct.pack("!BB4x", first, 0x80 | length) + payload
    if length < 1 << 16:
        return struct.pack("!BBH4x", first, 0x80 | 126, length) + payload
    return struct.pack("!BBQ4x", first, 0x80 | 127, length) + payload


class FrameReader:
    """Splits what a server sends into messages."""

    def __init__(self) -> None:
        self._buffer = b""
        self._parts: list[bytes] = []  # of a fragmented message
        self._opcode = 0

    def feed(self, data: bytes) -> Iterator[tuple[int, bytes]]:
        """Take bytes. Yields (opcode, payload) of each message that is complete now."""
        buffer = self._buffer + data if self._buffer else data
        at, size = 0, len(buffer)
        while size - at >= 2:
            first, length, head = buffer[at], buffer[at + 1], 2
            if length >= 126:
                head = 4 if length == 126 else 10
                if size - at < head:
                    break
                length = int.from_bytes(buffer[at + 2 : at + head])
            end = at + head + length
            if size < end:
                break
            payload = buffer[at + head : end]
            at = end
            opcode = first & 0x0F
            if first & _FIN and opcode:
                yield opcode, payload
            elif (message := self._join(first, payload)) is not None:
                yield message
        self._buffer = buffer[at:]

    def _join(self, first: int, payload: bytes) -> tuple[int, bytes] | None:
        """Add a fragment. Returns the message that it completes, if it does (section 5.4)."""
        if first & 0x0F:
            self._opcode, self._parts = first & 0x0F, []
        self._parts.append(payload)
        return (self._opcode, b"".join(self._parts)) if first & _FIN else None


class ClientWebSocket(asyncio.Protocol):
    """One connection. `receive(now, payload)` gets each message; `lost(reason)` the end."""

    def __init__(self, receive: Callable[[float, bytes], None], lost: Callable[[str], None]) -> None:
        self._receive = receive
        self._lost = lost
        self._reader = FrameReader()
        self._head = b""
        self._upgraded: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._transport: asyncio.Transport
        self._opcode = TEXT
        self._why = "the server closed the connection"

    @classmethod
    async def connect(
        cls,
        url: str,
        *,
        subprotocol: str,
        token: str | None,
        receive: Callable[[float, bytes], None],
        lost: Callable[[str], None],
    ) -> "ClientWebSocket":
        """Connect and upgrade. Raises ConnectionError, with what the server answered instead."""
        parts = urlsplit(url)
        secure = parts.scheme == "wss"
        port = parts.port or (443 if secure else 80)
        context = ssl.create_default_context() if secure else None
        _, self = await asyncio.get_running_loop().create_connection(
            lambda: cls(receive, lost), parts.hostname or "", port, ssl=context
        )
        lines = [
            f"GET {parts.path or '/'} HTTP/1.1",
            f"Host: {parts.netloc}",
            "Connection: Upgrade",
            "Upgrade: websocket",
            "Sec-WebSocket-Version: 13",
            "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==",
            f"Sec-WebSocket-Protocol: {subprotocol}",
        ]
        if token is not None:
            lines.append(f"Authorization: Bearer {token}")
        self._opcode = BINARY if subprotocol.endswith("msgpack") else TEXT
        self._transport.write(("\r\n".join(lines) + "\r\n\r\n").encode("latin-1"))
        await self._upgraded
        return self

    def send(self, payload: bytes) -> None:
        """Send one message."""
        self._transport.write(client_frame(payload, self._opcode))

    def abort(self) -> None:
        self._lost = lambda reason: None
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        if not self._upgraded.done():
            self._head += data
            head, end, data = self._head.partition(b"\r\n\r\n")
            if not end:
                return
            if not head.startswith(b"HTTP/1.1 101 "):
                answer = (head + b" " + data)[:400].decode("latin-1")
                self._upgraded.set_exception(
                    ConnectionError(f"no WebSocket: {' '.join(answer.split())}")
                )
                self._transport.abort()
                return
            self._upgraded.set_result(None)
        for opcode, payload in self._reader.feed(data):
            if opcode in (TEXT, BINARY):
                self._receive(now, payload)
            elif opcode == PING:
                self._transport.write(client_frame(payload, PONG))
            elif opcode == CLOSE:
                code, reason = int.from_bytes(payload[:2]), payload[2:].decode("utf-8", "replace")
                self._why = f"the server closed the WebSocket: {code} {reason}"
                self._transport.write(client_frame(payload[:2], CLOSE))

    def connection_lost(self, exc: Exception | None) -> None:
        why = f"{self._why} ({exc})" if exc is not None else self._why
        if not self._upgraded.done():
            self._upgraded.set_exception(ConnectionError(why))
            return
        self._lost(why)
