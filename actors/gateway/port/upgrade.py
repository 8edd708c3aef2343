"""From an upgrade request to an accepted WebSocket, or to the HTTP response that refuses it."""

import msgspec
from websockets.http11 import Request as Handshake

from ramify.actors.gateway.port.access.auth import bearer_header, bearer_subprotocol
from ramify.actors.gateway.port.access.shares import Share
from ramify.actors.gateway.port.dialogues.api import Apis
from ramify.actors.gateway.port.dialogues.door import DoorKind
from ramify.actors.gateway.port.http import HttpRequest, RequestParser, Response, error_response
from ramify.actors.gateway.port.hub import Hub
from ramify.actors.gateway.port.routes import WEBSOCKET_PATH
from ramify.actors.gateway.port.websocket import WebSocket
from ramify.protocol.codec import SUBPROTOCOLS, Codec
from ramify.protocol.credentials import NOBODY, Credential
from ramify.protocol.errors import LimitExceeded

LISTS = "connection", "upgrade", "sec-websocket-extensions", "sec-websocket-protocol"
MOST_ITEMS = 32  # in each of these headers: websockets takes 2 us for one


class Upgrade(msgspec.Struct, frozen=True):
    """An accepted handshake. The 101 is waiting in `ws.data_to_send()`.

    `credential`: None if the client still has to send `open.token`; its share counts the socket.
    `rest`: bytes after the head. `door`: what speaks there; None: ramify.v1.
    """

    ws: WebSocket
    codec: Codec
    credential: Credential | None
    share: Share | None
    rest: bytes
    door: DoorKind | None = None


def upgrade(request: HttpRequest, parser: RequestParser, hub: Hub, apis: Apis) -> Upgrade | Response:
    """Accept or refuse a handshake."""
    answer = _upgrade(request, parser, hub, apis.doors.get(request.path))
    api = apis.at(request.path, request.headers) if isinstance(answer, Response) else None
    return api.reshaped(answer) if api is not None and isinstance(answer, Response) else answer


def _upgrade(
    request: HttpRequest, parser: RequestParser, hub: Hub, door: DoorKind | None
) -> Upgrade | Response:
    if door is None and request.path != WEBSOCKET_PATH:
        return error_response(404, "bad_request", f"the WebSocket is at {WEBSOCKET_PATH}")
    refusal = hub.routes.unavailable() if hub.draining else hub.routes.upgrade(request)
    if refusal is not None:
        return refusal
    now = hub.clock.now()
    for name in LISTS:
        value = request.headers.get(name, "")
        if value.count(",") + value.count(";") >= MOST_ITEMS:
            message = f"the header {name} has more than {MOST_ITEMS} items"
            return error_response(400, "bad_request", message)
    if hub.busy + hub.shares.elsewhere > hub.config.max_sockets:
        message = f"{hub.config.max_sockets} sockets are open, which is this server's --max-sockets"
        return error_response(503, "overloaded", message, Retry_After="5")
    offered = [name.strip() for name in request.headers.get("sec-websocket-protocol", "").split(",")]
    header = bearer_header(request.headers.get("authorization"))
    token = header if header is not None else bearer_subprotocol(offered)
    needed = hub.tokens.required
    if needed and token is not None and not hub.tokens.accepts(token, now):
        return hub.routes.unauthorized()
    limits = hub.limits
    ws = WebSocket(
        max_size=limits.frame_bytes,
        first_max_size=(
            min(limits.frame_bytes_before_open, limits.frame_bytes)
            if needed and token is None
            else limits.frame_bytes
        ),
        deflate=hub.config.deflate,
        subprotocols=door is None,
    )
    answer = _shake_hands(ws, parser, hub, door, token, now)
    if isinstance(answer, Response):
        ws.dispose()
    return answer


def _shake_hands(
    ws: WebSocket, parser: RequestParser, hub: Hub, door: DoorKind | None, token: str | None, now: float
) -> Upgrade | Response:
    """Do the handshake, then use the token up."""
    head, rest = parser.handshake()
    ws.receive_data(head)
    events = ws.events_received()
    if not events or not isinstance(events[0], Handshake):  # websockets is stricter than h11
        return error_response(400, "bad_request", f"not a valid handshake: {ws.handshake_exc}")
    answer = ws.accept(events[0])
    if answer.status_code != 101:
        message = (answer.body or b"").decode().strip()
        return error_response(answer.status_code, "bad_request", message)
    # Only now, so that a handshake that fails otherwise does not use up a single-use token.
    needed = hub.tokens.required
    if needed and token is None and door is not None and not door.late_tokens:
        return hub.routes.unauthorized()
    credential = NOBODY if not needed else None
    if needed and token is not None:
        credential = hub.tokens.admit(token, now)
        if credential is None:
            return hub.routes.unauthorized()
    share = None
    if credential is not None:
        share = hub.shares.of(credential, now)
        try:
            share.enter(now)
        except LimitExceeded as error:
            return error_response(429, error.code, error.message, Retry_After="5")
    ws.send_response(answer)
    codec = hub.codecs[SUBPROTOCOLS.get(ws.subprotocol or "", "json")]
    return Upgrade(ws, codec, credential, share, rest, door)
