"""The HTTP/1.1 side of the port: one request in, one response out; the connection may carry others.

Pure: bytes in, values out. h11 parses (websockets' own parser knows only GET), but only a head that is
complete and has few enough lines; a request that asks for a WebSocket is handed back with its raw bytes.
What a request may send behind its head is asked once the head is known: nothing of a body is read for a
client that has shown no token. Responses are rendered by hand, because h11
refuses to send one after a request that it could not parse.
This file does not know routes.
"""

import re
from collections.abc import Callable, Mapping
from email.utils import formatdate
from http import HTTPStatus

import h11
import msgspec

from ramify.protocol.errors import Code
from ramify.protocol.wire import Error

HEAD_BYTES = 16 << 10  # request line and headers
HEAD_LINES = 100  # h11 takes 1.6 us for each, however short it is
FRAMING_BYTES = 2 << 10  # a chunk's size with its extensions; the trailers behind the last one
IDLE_S = 75  # that a connection may wait for its next request: more than the 60 of common proxies
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_HEAD_END = re.compile(rb"\n\r?\n")
_PHRASES = {529: "Overloaded"}  # of statuses that are no standard's
_ORIGIN = re.compile(r"https?://([^/?#]*)(.*)", re.IGNORECASE)  # of a target in absolute form

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
        return self.method == "GET" and "websocket" in self.headers.get("upgrade", "").lower()


class Response(msgspec.Struct, frozen=True):
    """A response: status, headers and body."""

    status: int
    body: bytes = b""
    content_type: str = "application/json"
    headers: dict[str, str] = {}

    def within(self, headers: Mapping[str, str]) -> "Response":
        """Add headers to the response; its own win where both have one."""
        return msgspec.structs.replace(self, headers={**headers, **self.headers}) if headers else self

    def render(self, *, keeps: bool, head_only: bool = False) -> bytes:
        """Make the bytes on the wire. `keeps`: another request may follow; `head_only`: for HEAD."""
        length = {} if self.status in (204, 304) else {"Content-Length": str(len(self.body))}
        head = _head(self.status, self.content_type, {**length, **self.headers}, keeps)
        return head if head_only else head + self.body


def _head(status: int, content_type: str, more: dict[str, str], keeps: bool) -> bytes:
    headers = {
        "Date": formatdate(usegmt=True),
        **({"Content-Type": content_type} if status != 204 else {}),  # nothing has no type
        "Cache-Control": "no-store",
        **({"Keep-Alive": f"timeout={IDLE_S}"} if keeps else {"Connection": "close"}),
        **SECURITY_HEADERS,
        **more,
    }
    lines = [f"HTTP/1.1 {status} {_PHRASES.get(status) or HTTPStatus(status).phrase}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def stream_head(
    content_type: str, headers: Mapping[str, str], *, keeps: bool, chunked: bool = True
) -> bytes:
    """Make the head of a response whose body follows in chunks, or until the connection ends."""
    framing = {"Transfer-Encoding": "chunked"} if chunked else {}
    return _head(200, content_type, {**framing, "X-Accel-Buffering": "no", **headers}, keeps)


def json_response(status: int, value: object, **headers: str) -> Response:
    """Make a response with a JSON body. Header names are given with underscores: `Retry_After="1"`."""
    named = {name.replace("_", "-"): text for name, text in headers.items()}
    return Response(status, msgspec.json.encode(value), headers=named)


def error_response(status: int, code: Code, message: str, **headers: str) -> Response:
    """Make a response with the object of a WebSocket `error`: clients have one shape to read."""
    return json_response(status, Error(code=code, message=message), **headers)


def error_in(response: Response) -> Error | None:
    """Read our error from a response, for APIs with other shapes of errors; None: there is none."""
    if response.status < 400:
        return None
    try:
        return msgspec.json.decode(response.body, type=Error)
    except msgspec.DecodeError:
        return None


class RequestParser:
    """Reads one request. `fault` is set, instead of a request returned, when it is unusable or refused.

    `events`: lines of the head and pieces of the body so far, each of which costs what a frame costs.
    `waits`: whether the client waits for 100 (Continue) before it sends its body. `plain`: the rest of
    the body is only gathered: it has no chunks.
    `keeps`: whether another request may follow: it is known where this one ends. `rest`: what came
    behind it. `old`: HTTP/1.0, which has neither chunks nor 100 (Continue).
    """

    def __init__(self, wants: Callable[[HttpRequest], "int | Response | None"]) -> None:
        """`wants`: asked once, with a head. The most bytes of its body; None: the body is not looked at,
        and the head is the request; or the response that refuses it."""
        self._wants = wants
        self._most = 0
        self._follows = False
        self._h11 = h11.Connection(h11.SERVER, max_incomplete_event_size=FRAMING_BYTES)
        self._raw = bytearray()  # the head, as far as it has come
        self._head: HttpRequest | None = None
        self._body = bytearray()
        self.events = 0
        self.waits = self.plain = self.keeps = self.old = False
        self.rest = b""
        self.fault: Response | None = None

    def feed(self, data: bytes) -> HttpRequest | None:
        """Take received bytes. Returns the request once it is complete, else None."""
        if not self._raw:  # RFC 9112, section 2.2: some clients end a body with an empty line
            data = data.lstrip(b"\r\n")
        try:
            if self._head is not None:
                self._h11.receive_data(data)
                return self._next()
            return self._feed_head(data)
        except h11.RemoteProtocolError as error:
            error.__traceback__ = None  # a frame of h11 in it has the error: a ring
            status = error.error_status_hint if error.error_status_hint >= 400 else 400
            self.fault = error_response(status, "bad_request", f"not a valid HTTP/1.1 request: {error}")
            return None

    @property
    def begun(self) -> bool:
        """Whether anything of the request has come."""
        return bool(self._raw)

    @property
    def received(self) -> int:
        """Bytes of the request that have come."""
        return len(self._raw) + len(self._body)

    @property
    def path(self) -> str:
        """The path of the request, also of a head that is faulty; "" if it is not known."""
        if self._head is not None:
            return self._head.path
        words = bytes(self._raw[:HEAD_BYTES]).partition(b"\r\n")[0].split(b" ")
        return words[1].decode("latin-1").partition("?")[0] if len(words) == 3 else ""

    @property
    def headers(self) -> Mapping[str, str]:
        """The request's headers; none of a head that is faulty or incomplete."""
        return self._head.headers if self._head is not None else {}

    def handshake(self) -> tuple[bytes, bytes]:
        """Return the raw bytes of an upgrade request's head, and what came after it."""
        return bytes(self._raw), self.rest

    def _feed_head(self, data: bytes) -> HttpRequest | None:
        begin = max(0, len(self._raw) - 2)  # the end may have begun in what came before
        self._raw += data
        end = _HEAD_END.search(self._raw, begin)
        size = end.end() if end is not None else len(self._raw)
        if size > HEAD_BYTES:
            self.fault = error_response(431, "limit", f"the head exceeds {HEAD_BYTES} bytes")
            return None
        if not self._raw:
            return None
        if self._raw[0] <= 0x20 or self._raw[0] >= 0x7F:  # TLS, perhaps: its end may never come
            raise h11.RemoteProtocolError("illegal request line")
        if end is None:
            return None
        lines = self._raw.count(b"\n", 0, size)
        if lines > HEAD_LINES:
            message = f"the head has {lines} lines, at most {HEAD_LINES} are read"
            self.fault = error_response(431, "limit", message)
            return None
        self.events += lines
        rest = bytes(self._raw[size:])
        del self._raw[size:]
        return self._headed(rest)

    def _headed(self, rest: bytes) -> HttpRequest | None:
        """Handle a complete head; `rest` came behind it."""
        self._h11.receive_data(bytes(self._raw))
        event = self._h11.next_event()
        if not isinstance(event, h11.Request):
            raise h11.RemoteProtocolError("no request line received")
        head = self._head = _request(event)
        if event.http_version[:2] != b"1.":
            version = event.http_version.decode()
            self.fault = error_response(
                505, "bad_request", f"HTTP/{version} is not spoken here: use HTTP/1.1"
            )
            return None
        self.rest = rest
        if head.websocket:
            return head
        wanted = self._wants(head)
        self.old = event.http_version < b"1.1"
        follows = (
            event.http_version == b"1.1" and "close" not in head.headers.get("connection", "").lower()
        )
        if wanted is None or isinstance(wanted, Response):
            empty = head.headers.get("content-length", "0") == "0"
            self.keeps = follows and empty and "transfer-encoding" not in head.headers
            self.fault = wanted
            return head if wanted is None else None
        # Proxies may read a request with both otherwise than we do (RFC 9112, section 6.3).
        self._follows = follows and not {"content-length", "transfer-encoding"} <= head.headers.keys()
        self._most = wanted
        if "content-length" in head.headers and int(head.headers["content-length"]) > wanted:
            self.fault = self._too_long()
            return None
        self.plain = "transfer-encoding" not in head.headers
        if rest:
            self._h11.receive_data(rest)
            self.rest = b""
        self.waits = not rest and self._h11.they_are_waiting_for_100_continue
        return self._next()

    def _next(self) -> HttpRequest | None:
        while True:
            event = self._h11.next_event()
            self.events += 1
            if isinstance(event, h11.Data):
                self._body += event.data
                if len(self._body) > self._most:
                    self.fault = self._too_long()
                    return None
            elif isinstance(event, h11.EndOfMessage):
                self.waits = False
                self.keeps, self.rest = self._follows, self._h11.trailing_data[0]
                assert self._head is not None
                return msgspec.structs.replace(self._head, body=bytes(self._body))
            else:
                return None  # needs more data

    def _too_long(self) -> Response:
        return error_response(413, "limit", f"the body exceeds {self._most} bytes")


def _request(event: h11.Request) -> HttpRequest:
    """Make a request of its head. Raises RemoteProtocolError."""
    headers: dict[str, str] = {}
    for name, value in event.headers:
        key, text = name.decode("ascii"), value.decode("latin-1")
        headers[key] = f"{headers[key]}, {text}" if key in headers else text
    target = event.target.decode("latin-1")
    if (absolute := _ORIGIN.fullmatch(target)) is not None:  # RFC 9112, section 3.2.2
        headers["host"], target = absolute[1], absolute[2]
        if not target.startswith("/"):
            target = "/" + target
    path, _, query = target.partition("?")
    return HttpRequest(event.method.decode("ascii"), path, headers, query=query)
