"""/v1/mcp/NAME: an MCP server (`--mcp NAME=URL`), which this server calls for its clients.

What a client sends over streamable HTTP goes there without its token; what comes back is bounded in
bytes and time. This file knows no JSON-RPC: clients do (the page's `model/mcp.js`, the package `mcp`).
"""

import asyncio
import os
import ssl
from collections import Counter
from collections.abc import Coroutine, Mapping
from typing import Any
from urllib.parse import urlsplit

import h11

from ramify.actors.gateway.port.dialogues.api import credential_of, may_ask
from ramify.actors.gateway.port.http import HttpRequest, Response, error_response
from ramify.actors.gateway.port.hub import Hub
from ramify.protocol.credentials import Credential
from ramify.protocol.errors import LimitExceeded

PATH = "/v1/mcp/"
MOST_BYTES, MOST_S = 1 << 20, 60.0  # of an answer
MOST_CALLS, MOST_OF_ONE = 64, 8  # under way: of all clients, of one credential
_PIECE = 4096  # bytes that are parsed in a turn of the loop
# what streamable HTTP means; others are between the two servers
_PASSED = (200, 202, 204, 400, 404, 405)
_TYPES = ("application/json", "text/event-stream")


class McpApi:
    """See `Api`."""

    def __init__(self) -> None:
        self._calls: Counter[str] = Counter()  # under way, by credential

    def spoken_at(self, path: str, headers: Mapping[str, str]) -> bool:
        """Whether the path names a server."""
        return path.startswith(PATH)

    def refuse(self, request: HttpRequest, hub: Hub) -> Response | None:
        """Refuse a request by its head; None: its body is wanted."""
        name = request.path.removeprefix(PATH)
        if (refusal := hub.routes.refuse(request)) is not None:
            return refusal
        if not may_ask(request, hub):
            return hub.routes.unauthorized()
        if name not in hub.config.mcp_servers:
            message = f"there is no MCP server {name[:64]!r} here: `--mcp NAME=URL` adds one"
            return error_response(404, "bad_request", message)
        if request.method not in ("POST", "DELETE"):
            message = f"{request.path} answers POST and DELETE, not {request.method}"
            return error_response(405, "bad_request", message, Allow="POST, DELETE")
        return None

    def respond(self, request: HttpRequest, hub: Hub) -> Response | Coroutine[Any, Any, Response]:
        """Ask the server that the request names."""
        credential = credential_of(request, hub, hub.clock.now(), spends=True)
        return hub.routes.unauthorized() if credential is None else self._call(request, hub, credential)

    async def _call(self, request: HttpRequest, hub: Hub, credential: Credential) -> Response:
        now, owner, name = hub.clock.now(), credential.name, request.path.removeprefix(PATH)
        if self._calls.total() >= MOST_CALLS or self._calls[owner] >= MOST_OF_ONE:
            message = f"{MOST_OF_ONE} calls of MCP servers are under way, or {MOST_CALLS} of all clients"
            return error_response(503, "overloaded", message, Retry_After="1")
        share = hub.shares.of(credential, now)
        share.received(len(request.body), 1, now)
        self._calls[owner] += 1
        try:
            share.admit(1, now)
            async with asyncio.timeout(MOST_S):
                found = await _ask(name, hub.config.mcp_servers[name], request)
        except LimitExceeded as error:
            return error_response(429, error.code, error.message, Retry_After="1")
        except TimeoutError:
            return error_response(504, "deadline", f"{name} did not answer within {MOST_S:.0f} s")
        except (OSError, h11.RemoteProtocolError) as error:
            return error_response(502, "internal", f"{name} cannot be asked: {type(error).__name__}")
        finally:
            self._calls[owner] -= 1
            if not self._calls[owner]:
                del self._calls[owner]
        if found.status not in _PASSED:
            message = f"{name} answered {found.status}, which is for who runs this server (--mcp)"
            return error_response(502, "internal", message)
        if len(found.body) > MOST_BYTES:
            return error_response(502, "limit", f"{name} answered more than {MOST_BYTES} bytes")
        return found


async def _ask(name: str, url: str, request: HttpRequest) -> Response:
    """Send a request. Returns the answer, cut if too long. Raises OSError, RemoteProtocolError."""
    place = urlsplit(url)
    secure = ssl.create_default_context() if place.scheme == "https" else None
    reader, writer = await asyncio.open_connection(
        place.hostname, place.port or (443 if secure else 80), ssl=secure, limit=_PIECE
    )
    try:
        peer = h11.Connection(h11.CLIENT)
        target = (place.path or "/") + (f"?{place.query}" if place.query else "")
        headers = _headers(name, place.netloc, request)
        head = h11.Request(method=request.method, target=target, headers=headers)
        for event in (head, h11.Data(data=request.body), h11.EndOfMessage()):
            writer.write(peer.send(event) or b"")
        await writer.drain()
        return await _answer(peer, reader)
    finally:
        writer.close()


def _headers(name: str, host: str, request: HttpRequest) -> list[tuple[bytes, bytes]]:
    """Make the headers: those of MCP as they came, and the token of whoever runs this server."""
    sent = {each: value for each, value in request.headers.items() if each.startswith("mcp-")}
    if token := os.environ.get(f"RAMIFY_MCP_{name.upper()}_TOKEN"):
        sent["authorization"] = f"Bearer {token}"
    sent |= {"host": host, "content-type": _TYPES[0], "accept": ", ".join(_TYPES), "connection": "close"}
    sent["content-length"] = str(len(request.body))
    return [(each.encode("latin-1"), value.encode("latin-1")) for each, value in sent.items()]


async def _answer(peer: h11.Connection, reader: asyncio.StreamReader) -> Response:
    head, body = None, bytearray()
    while len(body) <= MOST_BYTES:
        event = peer.next_event()
        if event is h11.NEED_DATA:
            peer.receive_data(await reader.read(_PIECE))
            await asyncio.sleep(0)
        elif isinstance(event, h11.Response):
            head = event
        elif isinstance(event, h11.Data):
            body += event.data
        elif isinstance(event, h11.EndOfMessage):
            break
    assert head is not None  # nothing else comes first
    told = {each.decode(): value.decode("latin-1") for each, value in head.headers}
    kind = told.get("content-type", "").partition(";")[0].strip().lower()
    passed = {"Mcp-Session-Id": told["mcp-session-id"]} if "mcp-session-id" in told else {}
    return Response(head.status_code, bytes(body), kind if kind in _TYPES else "text/plain", passed)
