"""HTTP/1.1 with server-sent events, for engines that stream tokens over it.

One request at a time on a connection that is kept; h11 parses, asyncio's streams carry. It does
not know what the events say.
"""

import asyncio
import ssl
import time
from collections.abc import AsyncIterator
from urllib.parse import urlsplit

import h11

from ramify.clients.bench.session import BenchFailed, seen

READ_BYTES = 1 << 16


class SseReader:
    """Splits a body into events (WHATWG HTML, "Server-sent events"): the `data` of each.

    Lines may end in LF or CRLF, and may come in any pieces. A lone CR is not taken for a line end;
    comments and fields other than `data` are skipped.
    """

    def __init__(self) -> None:
        self._buffer = b""
        self._data: list[bytes] = []

    def feed(self, chunk: bytes) -> list[bytes]:
        """The events that are complete now."""
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
        self._h11 = h11.Connection(h11.CLIENT)
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter | None = None

    async def connect(self) -> None:
        """Raises OSError."""
        context = ssl.create_default_context() if self._secure else None
        self._h11 = h11.Connection(h11.CLIENT)
        self._reader, self._writer = await asyncio.open_connection(
            self._host, self._port, ssl=context, limit=READ_BYTES
        )

    async def post(self, path: str, body: bytes) -> AsyncIterator[tuple[float, bytes]]:
        """POST JSON; gives (time, data) of each event of the answer as it comes.

        Raises BenchFailed for any other answer, and where the connection breaks off.
        """
        if self._writer is None:
            await self.connect()
        writer = self._writer
        assert writer is not None
        head = [*self._headers, ("Content-Length", str(len(body)))]
        request = h11.Request(method="POST", target=self._base + path, headers=head)
        parts = [self._h11.send(request), self._h11.send(h11.Data(data=body))]
        parts.append(self._h11.send(h11.EndOfMessage()))
        writer.write(b"".join(part for part in parts if part))
        await self._status(path)
        sse = SseReader()
        while True:
            now, event = await self._next()
            if isinstance(event, h11.EndOfMessage):
                break
            if isinstance(event, h11.Data):
                for data in sse.feed(bytes(event.data)):
                    yield now, data
        if not sse.clean:
            raise BenchFailed(f"{path}: the answer ends inside an event")
        if self._h11.our_state is h11.DONE and self._h11.their_state is h11.DONE:
            self._h11.start_next_cycle()
        else:
            self.close()

    async def _status(self, path: str) -> None:
        """Read the head. Raises BenchFailed unless it is 200 with events."""
        _, event = await self._next()
        while isinstance(event, h11.InformationalResponse):
            _, event = await self._next()
        if not isinstance(event, h11.Response):
            raise BenchFailed(f"{path}: no answer but {type(event).__name__}")
        kind = dict(event.headers).get(b"content-type", b"")
        if event.status_code == 200 and kind.startswith(b"text/event-stream"):
            return
        body = b""
        while isinstance(part := (await self._next())[1], h11.Data):
            body += bytes(part.data)
        raise BenchFailed(
            f"{path} answered HTTP {event.status_code} ({kind.decode('latin-1')}): {seen(body)}"
        )

    async def _next(self) -> tuple[float, h11.Event]:
        """The next event and when its bytes came."""
        now = time.perf_counter()
        try:
            while (event := self._h11.next_event()) is h11.NEED_DATA:
                data = await self._reader.read(READ_BYTES)
                now = time.perf_counter()
                self._h11.receive_data(data)
        except h11.RemoteProtocolError as error:
            raise BenchFailed(f"the server's answer is no HTTP, or breaks off: {error}") from None
        if isinstance(event, h11.ConnectionClosed):
            raise BenchFailed("the server closed the connection")
        assert not isinstance(event, type)  # PAUSED is for servers
        return now, event

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
