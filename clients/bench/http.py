"""HTTP/1.1 with server-sent events, for engines that stream tokens over it.

One request at a time on a connection that is kept. h11 makes requests and parses heads; bodies,
where all the tokens are, are split here (in a profile of a chat h11 took half of the client's time).
It does not know what the events say.
"""

import asyncio
import re
import ssl
import time
from collections.abc import AsyncIterator
from urllib.parse import urlsplit

import h11

from ramify.clients.bench.session import BenchFailed, seen

READ_BYTES = 1 << 16

_CHUNK_SIZE = re.compile(rb"[0-9A-Fa-f]{1,8}[ \t]*")


class SseReader:
    """Splits a body into events (WHATWG HTML, "Server-sent events"): the `data` of each.

    Lines may end in LF or CRLF, and may come in any pieces. A lone CR is not taken for a line end;
    comments and fields other than `data` are skipped.
    """

    def __init__(self) -> None:
        self._buffer = b""
        self._data: list[bytes] = []

    def feed(self, chunk: bytes) -> list[bytes]:
        """Take a piece of the body. Returns the events that are complete now."""
        events = []
        *lines, self._buffer = (self._buffer + chunk).split(b"\n")
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                events.append(b"\n".join(self._data))
                self._data = []
        return events

    @property
    def clean(self) -> bool:
        """Whether the body may end here: no event is half done."""
        return not self._buffer and not self._data


class ChunkedBody:
    """Splits a chunked body (RFC 9112 section 7.1), whole chunks only. Trailers are refused."""

    def __init__(self) -> None:
        self._buffer = b""
        self.done = False

    def feed(self, data: bytes) -> bytes:
        """Take bytes. Returns the content of the chunks that are complete now. Raises BenchFailed."""
        buffer, at, found = self._buffer + data, 0, []
        while not self.done and (line := buffer.find(b"\r\n", at)) >= 0:
            digits = buffer[at:line].partition(b";")[0]
            if not _CHUNK_SIZE.fullmatch(digits):  # `int` takes a minus: the end before the begin
                raise BenchFailed(f"no chunk size: {seen(buffer[at:line])!r}")
            size = int(digits, 16)
            end = line + 2 + size
            if len(buffer) < end + 2:
                break
            if buffer[end : end + 2] != b"\r\n":
                raise BenchFailed(f"no end of a chunk: {seen(buffer[end : end + 40])!r}")
            found.append(buffer[line + 2 : end])
            self.done = not size
            at = end + 2
        self._buffer = buffer[at:]
        return b"".join(found)


class HttpConnection:
    """A connection to one server."""

    def __init__(self, url: str, token: str | None) -> None:
        parts = urlsplit(url)
        self._secure = parts.scheme == "https"
        self._host = parts.hostname or ""
        self._port = parts.port or (443 if self._secure else 80)
        self._base = parts.path.rstrip("/")
        self._headers = [("Host", parts.netloc), ("Content-Type", "application/json")]
        if token is not None:
            self._headers.append(("Authorization", f"Bearer {token}"))
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter | None = None

    async def connect(self) -> None:
        """Raises OSError."""
        context = ssl.create_default_context() if self._secure else None
        self._reader, self._writer = await asyncio.open_connection(
            self._host, self._port, ssl=context, limit=READ_BYTES
        )

    async def post(self, path: str, body: bytes) -> AsyncIterator[tuple[float, list[bytes]]]:
        """POST JSON; gives (time, events) of the answer as they come.

        Raises BenchFailed for any other answer, and where the connection breaks off.
        """
        if self._writer is None or self._reader.at_eof():  # servers end idle connections
            self.close()
            await self.connect()
        assert self._writer is not None
        http = h11.Connection(h11.CLIENT)  # for one request: it never sees the body's end
        head = [*self._headers, ("Content-Length", str(len(body)))]
        request = h11.Request(method="POST", target=self._base + path, headers=head)
        self._writer.write((http.send(request) or b"") + body)
        now, keep = await self._head(http, path)
        sse, chunks = SseReader(), ChunkedBody()
        data = bytes(http.trailing_data[0])
        while True:
            if events := sse.feed(chunks.feed(data)):
                yield now, events
            if chunks.done:
                break
            data = await self._read()
            now = time.perf_counter()
        if not sse.clean:
            raise BenchFailed(f"{path}: the answer ends inside an event")
        if not keep:
            self.close()

    async def _head(self, http: h11.Connection, path: str) -> tuple[float, bool]:
        """Read the head. Returns its time, and whether the connection stays. Raises BenchFailed."""
        event = await self._event(http)
        while isinstance(event, h11.InformationalResponse):
            event = await self._event(http)
        now = time.perf_counter()
        if not isinstance(event, h11.Response):
            raise BenchFailed(f"{path}: no answer but {type(event).__name__}")
        fields = {name: value.lower() for name, value in event.headers}
        kind = fields.get(b"content-type", b"")
        stream = kind.startswith(b"text/event-stream") and fields.get(b"transfer-encoding") == b"chunked"
        if event.status_code == 200 and stream:
            return now, fields.get(b"connection") != b"close"
        body = b""
        while isinstance(part := await self._event(http), h11.Data):
            body += bytes(part.data)
        raise BenchFailed(
            f"{path} answered HTTP {event.status_code}, not a chunked stream of events "
            f"({kind.decode('latin-1')}): {seen(body)}"
        )

    async def _event(self, http: h11.Connection) -> h11.Event:
        try:
            while (event := http.next_event()) is h11.NEED_DATA:
                http.receive_data(await self._read())
        except h11.RemoteProtocolError as error:
            raise BenchFailed(f"the server's answer is no HTTP: {error}") from None
        assert not isinstance(event, type)  # PAUSED is for servers
        return event

    async def _read(self) -> bytes:
        """Raises BenchFailed at the end of the connection."""
        try:
            data = await self._reader.read(READ_BYTES)
        except OSError as error:
            raise BenchFailed(f"the server's answer breaks off: {error}") from None
        if not data:
            raise BenchFailed("the server's answer breaks off: it closed the connection")
        return data

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
