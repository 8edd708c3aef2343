"""A connection on which HTTP is spoken: requests are read and answered, or one becomes a WebSocket.

Requests that come together are answered one after the other: the next one is not looked at while an
answer is under way, or while the client does not read. This file does not know what the paths of APIs
speak: `dialogues/api.py`; nor WebSockets: `websocket_connection.py`.
"""

import asyncio
from collections.abc import Coroutine
from functools import partial
from typing import Any, cast

from ramify.actors.gateway.port.access.limits import SocketLimits
from ramify.actors.gateway.port.dialogues.api import Accepted, Api, Apis, may_ask
from ramify.actors.gateway.port.dialogues.exchange import Exchange
from ramify.actors.gateway.port.http import (
    CONTINUE,
    IDLE_S,
    HttpRequest,
    RequestParser,
    Response,
    error_response,
)
from ramify.actors.gateway.port.hub import Hub
from ramify.actors.gateway.port.inflow import Inflow
from ramify.actors.gateway.port.pump import FRAME_WORK, PLAIN_SLICE, SLICE
from ramify.actors.gateway.port.tcp import Phase, TcpConnection
from ramify.actors.gateway.port.upgrade import upgrade
from ramify.actors.gateway.port.websocket_connection import WebSocketConnection
from ramify.actors.kit.log import get_log
from ramify.protocol.errors import Close
from ramify.protocol.json_value import OneFrame
from ramify.protocol.wire import Error, ServerMessage

_LOG = get_log("ramify.gateway")

HEAD_TIMEOUT_S = 10.0  # from the connection, or the first byte of a later request, to a whole one
REQUESTS = 1000  # on one connection; then a client begins anew, perhaps in another process
REQUEST_WORK = 4_000  # to answer a small one: 160 us, in bytes' worth (`pump.py`)
LATER_S = 90.0  # from a complete request to an answer that others make: they have bounds of their own


class RequestConnection(TcpConnection):
    """A connection of the port, until it has become a WebSocket."""

    __slots__ = (
        "_address",
        "_answering",
        "_apis",
        "_cors",
        "_idle",
        "_later",
        "_parser",
        "_served",
    )

    def __init__(self, hub: Hub, apis: Apis) -> None:
        super().__init__(hub, next(hub.ids), Phase.HEAD)
        self._apis = apis
        self._parser: RequestParser | None = RequestParser(self._wants)
        self._cors: dict[str, str] = {}  # headers of the answer, for a page of another site
        self._address = ""
        self._served = 0  # requests
        self._answering = False  # a request was read whole, and its answer comes later
        self._idle = False  # it waits for another request, of which nothing has come
        self._later: asyncio.Task[None] | None = None  # makes the answer to an HTTP request

    # --- asyncio.Protocol ---------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        hub, now = self._hub, self._hub.clock.now()
        peer = transport.get_extra_info("peername")
        self._address = peer[0] if peer else ""
        self._guard = SocketLimits(hub.limits, now, guest=hub.guest(self._address, now))
        self._inflow = Inflow(
            self._transport, self._guard, hub.clock, hub.pump, self._parse, self._congested
        )
        high = hub.limits.queued_bytes
        self._transport.set_write_buffer_limits(high=high, low=high // 2)
        hub.connections[self.id] = self
        self._set_deadline(now + HEAD_TIMEOUT_S)

    def eof_received(self) -> bool | None:
        if self._phase is not Phase.CLOSING:
            self._closing()
        return None  # asyncio closes the transport once its buffer is empty

    def connection_lost(self, exc: Exception | None) -> None:
        self._hub.idle.leave(self._address, self.id)
        self._parser = None
        if self._later is not None:
            self._later.cancel()
        self._forget()

    def pause_writing(self) -> None:
        self._throttled = True

    def resume_writing(self) -> None:
        self._throttled = False
        self._pace_reading()

    # --- from the actor: nothing is said to it, but that the gateway stops ----------------------

    websocket = False
    attached = False

    def opened(self, session: int) -> None: ...

    def refused(self, error: Error) -> None: ...

    def retry(self) -> None: ...

    def recheck(self) -> None: ...

    def flush(self) -> None: ...

    def deliver(self, messages: list[ServerMessage]) -> bool:
        if self._idle:
            self.close(Close.DRAINING, "")
        return False

    def close(self, code: int, reason: str) -> None:
        """End the connection within CLOSE_TIMEOUT_S."""
        if self._phase is not Phase.CLOSING:
            self._transport.close()
            self._closing()

    def on_timer(self, now: float) -> None:
        """Check the deadlines, and set the next one."""
        if now < self._deadline:
            self._set_deadline(self._deadline)
        elif self._phase is not Phase.HEAD:
            self._transport.abort()
        elif self._served and self._parser is not None and not self._parser.begun:
            self.close(Close.TIMEOUT, "")
        else:
            late = error_response(408, "deadline", "the request did not arrive in time")
            self._respond(self._shaped(late, self._parser), last=True)

    # --- requests -----------------------------------------------------------------------------

    def _parse(self, data: bytes) -> int:
        """Parse a slice of what came. Returns the work that it was (see `pump.py`)."""
        try:
            return self._receive_head(data) if self._phase is Phase.HEAD else 0
        except Exception:
            self._broken()
            return 0

    def _broken(self) -> None:
        """End one socket because of a bug of ours."""
        _LOG.exception("socket %d: a bug in the gateway", self.id)
        if self._phase is Phase.HEAD:
            fault = error_response(500, "internal", "internal error")
            self._respond(self._shaped(fault, self._parser), last=True)
        self.close(Close.SERVER_BUG, "internal error")

    def _receive_head(self, data: bytes) -> int:
        """Parse a slice of a request. Returns the work that it was."""
        parser = cast(RequestParser, self._parser)
        if self._idle and self._take_up():
            self._inflow.unread(data)
            return 0
        events = parser.events
        request = parser.feed(data)
        events = parser.events - events
        size = len(data) - len(parser.rest)
        self._inflow.count(size, events)
        self._inflow.slice = PLAIN_SLICE if parser.plain else SLICE
        if parser.waits:
            parser.waits = False
            self._transport.write(CONTINUE)
        if parser.fault is not None or (request is not None and not request.websocket):
            self._inflow.unread(parser.rest)
            size += REQUEST_WORK
        self._hold(parser.received if request is None else 0, self._shed)
        self._answer(parser, request)
        return size + FRAME_WORK * events

    def _shed(self) -> None:
        """Give up a request that does not end, and the connection."""
        parser, self._parser = self._parser, None
        message = "too much is kept of requests that do not end: send this one again"
        fault = error_response(503, "overloaded", message, Retry_After="5")
        self._respond(self._shaped(fault, parser), last=True)

    def _take_up(self) -> bool:
        """Begin another request, which costs strangers what a connection does. True: it has to wait."""
        self._idle = False
        self._hub.idle.leave(self._address, self.id)
        now = self._hub.clock.now()
        self._set_deadline(now + HEAD_TIMEOUT_S)
        self._guard.enter(self._hub.guest(self._address, now))
        return self._guard.wait(now) > 0

    def _await_next(self) -> None:
        """Wait for another request: one is answered."""
        hub, now = self._hub, self._hub.clock.now()
        self._phase = Phase.HEAD
        self._parser = RequestParser(self._wants)
        self._cors = {}
        self._served += 1
        self._answering, self._idle = False, True
        self._inflow.slice = SLICE
        self._guard.end(now)
        self._set_deadline(now + IDLE_S)
        hub.idle.enter(self._address, self.id, self)
        self._pace_reading()

    @property
    def _keeps(self) -> bool:
        """Whether another request may follow the one that is answered."""
        parser = self._parser
        few = self._served + 1 < REQUESTS
        return few and parser is not None and parser.keeps and not self._hub.draining

    def returned(self, behind: bytes) -> None:
        """Take the transport back from an exchange that is over, with what came behind its request."""
        self._hub.connections[self.id] = self
        self._transport.set_protocol(self)
        self._inflow.parse = self._parse
        self._inflow.unread(behind)
        self._await_next()

    def _answer(self, parser: RequestParser, request: HttpRequest | None) -> None:
        """Answer a request that is complete, or refused by its head."""
        if parser.fault is not None:
            self._respond(self._shaped(parser.fault, parser))
        elif request is None:
            return
        elif request.websocket:
            answer = upgrade(request, parser, self._hub, self._apis)
            if isinstance(answer, Response):
                self._respond(answer)
            else:
                self._parser = None
                live = WebSocketConnection(self._hub, self.id, self._transport, self._guard, answer)
                live.start(self._inflow, answer.rest)
        elif (api := self._apis.at(request.path, request.headers)) is not None:
            self._exchange(request, api)
        else:
            self._answering = True
            send = partial(self._respond, head_only=request.method == "HEAD")
            self._hub.routes.respond(request, self._hub.clock.now(), send)

    def _shaped(self, fault: Response, parser: RequestParser | None) -> Response:
        """Bring an error into the shape of the API that was asked for."""
        api = self._apis.at(parser.path, parser.headers) if parser is not None else None
        return api.reshaped(fault) if api is not None else fault

    def _respond(self, response: Response, *, head_only: bool = False, last: bool = False) -> None:
        if self._phase is not Phase.HEAD:  # it took too long, or the peer has gone
            return
        keeps = self._keeps and not last
        self._transport.write(response.within(self._cors).render(keeps=keeps, head_only=head_only))
        if keeps:
            self._await_next()
            return
        self._half_close()
        self._closing()

    def _wants(self, head: HttpRequest) -> int | Response | None:
        """Decide about a request's body: see `RequestParser`. Only the APIs take bodies."""
        if may_ask(head, self._hub):
            self._guard.known(self._hub.clock.now())
        self._cors = self._hub.routes.cors(head)
        if (preflight := self._hub.routes.preflight(head)) is not None:
            return preflight
        api = self._apis.at(head.path, head.headers)
        if api is None:
            return None
        refusal = api.refuse(head, self._hub)
        return self._hub.body_bytes if refusal is None else refusal

    def _exchange(self, request: HttpRequest, api: Api) -> None:
        """Answer a request to an API, here or by a session."""
        with OneFrame():
            answer = api.respond(request, self._hub)
        if isinstance(answer, Response):
            self._respond(answer, head_only=request.method == "HEAD")
            return
        if not isinstance(answer, Accepted):
            self._inflow.deaf = True
            self._set_deadline(self._hub.clock.now() + LATER_S)
            self._later = asyncio.get_running_loop().create_task(self._respond_later(answer))
            return
        keeps, old = self._keeps, self._parser is not None and self._parser.old
        self._phase = Phase.ASKED
        self._parser = None
        del self._hub.connections[self.id]  # the exchange has a number of its own
        size = len(request.body)
        Exchange(
            self._hub,
            self,
            self._transport,
            self._inflow,
            answer,
            size,
            self._cors,
            keeps=keeps,
            old=old,
        ).start()

    async def _respond_later(self, answer: Coroutine[Any, Any, Response]) -> None:
        try:
            self._respond(await answer, last=True)  # what came behind it is gone
        except Exception:
            self._broken()

    # --- the end ------------------------------------------------------------------------------

    def _closing(self) -> None:
        self._idle = False
        self._hub.idle.leave(self._address, self.id)
        self._inflow.deaf = True
        super()._closing()

    def _congested(self) -> bool:
        """Whether a request waits for its answer, or its client does not read."""
        return self._phase is Phase.HEAD and (self._answering or self._throttled)
