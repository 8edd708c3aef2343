"""The HTTP/1.1 side of the port: one request in, one response out, then the connection closes.

Pure: bytes in, values out. h11 parses (websockets' own parser knows only GET); a request that asks
for a WebSocket is handed back with its raw bytes. Responses are rendered by hand, because h11
refuses to send one after a request that it could not parse.
This file does not know routes.
"""

from collections.abc import Callable
from email.utils import formatdate
from http import HTTPStatus

import h11
import msgspec

from ramify.protocol.errors import Code
from ramify.protocol.wire import Error

HEAD_BYTES = 16 << 10  # request line and headers
BODY_BYTES = 64 << 10

SECURITY_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; connect-src 'self' ws: wss: http: https:; img-src 'self' data:; "
        "object-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class HttpRequest(msgspec.Struct, frozen=True):
    """A complete request. `headers`: lower-case names, repeated ones joined by a comma."""

    method: str
    path: str  # without the query
    headers: dict[str, str]
    body: bytes = b""
    query: str = ""  # as it came, without the question mark

    @property
    def websocket(self) -> bool:
        """True if it asks for an upgrade to a WebSocket."""
        return "websocket" in self.headers.get("upgrade", "").lower()


class Response(msgspec.Struct, frozen=True):
    """What goes back."""

    status: int
    body: bytes = b""
    content_type: str = "application/json"
    headers: dict[str, str] = {}

    def render(self, *, head_only: bool = False) -> bytes:
        """The bytes on the wire; `head_only` for a HEAD request."""
        length = {"Content-Length": str(len(self.body))}
        head = _head(self.status, self.content_type, {**length, **self.headers})
        return head if head_only else head + self.body


def _head(status: int, content_type: str, more: dict[str, str]) -> bytes:
    headers = {
        "Date": formatdate(usegmt=True),
        "Content-Type": content_type,
        "Cache-Control": "no-store",
        "Connection": "close",
        **SECURITY_HEADERS,
        **more,
    }
    lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def stream_head(content_type: str) -> bytes:
    """The head of a response whose body follows in chunks, as they come."""
    return _head(200, content_type, {"Transfer-Encoding": "chunked", "X-Accel-Buffering": "no"})


def json_response(status: int, value: object, **headers: str) -> Response:
    """A JSON body. Header names are given with underscores: `Retry_After="1"`."""
    named = {name.replace("_", "-"): text for name, text in headers.items()}
    return Response(status, msgspec.json.encode(value), headers=named)


def error_response(status: int, code: Code, message: str, **headers: str) -> Response:
    """The same object as a WebSocket `error`, so that clients have one shape to read."""
    return json_response(status, Error(code=code, message=message), **headers)


def error_in(response: Response) -> Error | None:
    """The error of ours that a response tells, for APIs that tell it otherwise; None: none."""
    if response.status < 400:
        return None
    try:
        return msgspec.json.decode(response.body, type=Error)
    except msgspec.DecodeError:
        return None


class RequestParser:
    """Reads one request. `fault` is set, instead of a request returned, when it is unusable."""

    def __init__(self, body_bytes: Callable[[HttpRequest], int] = lambda _: BODY_BYTES) -> None:
        """`body_bytes`: how long a body may be, by the head of its request."""
        self._body_bytes = body_bytes
        self._most = BODY_BYTES
        self._h11 = h11.Connection(h11.SERVER, max_incomplete_event_size=HEAD_BYTES)
        self._raw = bytearray()
        self._head: h11.Request | None = None
        self._body = bytearray()
        self.fault: Response | None = None

    def feed(self, data: bytes) -> HttpRequest | None:
        """Take received bytes; the request once it is complete, else None."""
        if self._head is None:
            self._raw += data  # a handshake is parsed again by websockets
        try:
            self._h11.receive_data(data)
            return self._next()
        except h11.RemoteProtocolError as error:
            status = error.error_status_hint if error.error_status_hint >= 400 else 400
            self.fault = error_response(status, "bad_request", f"not a valid HTTP/1.1 request: {error}")
            return None

    @property
    def path(self) -> str:
        """What is asked for, as far as it is known, of a head that cannot be read too; else ""."""
        if self._head is not None:
            return self._request().path
        words = bytes(self._raw[:HEAD_BYTES]).partition(b"\r\n")[0].split(b" ")
        return words[1].decode("latin-1").partition("?")[0] if len(words) == 3 else ""

    def handshake(self) -> tuple[bytes, bytes]:
        """The raw bytes of an upgrade request's head, and what came after it."""
        rest = bytes(self._h11.trailing_data[0])
        return bytes(self._raw[: len(self._raw) - len(rest)]), rest

    def _next(self) -> HttpRequest | None:
        while True:
            event = self._h11.next_event()
            if isinstance(event, h11.Request):
                self._head = event
                request = self._request()
                if request.websocket:
                    return request
                self._raw.clear()
                self._most = self._body_bytes(request)
            elif isinstance(event, h11.Data):
                self._body += event.data
                if len(self._body) > self._most:
                    self.fault = error_response(413, "limit", f"the body exceeds {self._most} bytes")
                    return None
            elif isinstance(event, h11.EndOfMessage):
                return self._request()
            else:
                return None  # needs more data

    def _request(self) -> HttpRequest:
        assert self._head is not None
        headers: dict[str, str] = {}
        for name, value in self._head.headers:
            key, text = name.decode("ascii"), value.decode("latin-1")
            headers[key] = f"{headers[key]}, {text}" if key in headers else text
        path, _, query = self._head.target.decode("latin-1").partition("?")
        method = self._head.method.decode("ascii")
        return HttpRequest(method, path, headers, bytes(self._body), query)
