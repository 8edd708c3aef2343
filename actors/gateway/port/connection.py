"""One TCP connection: the asyncio shell around the HTTP parser and the WebSocket state machine.

HEAD: reading a request, or waiting for the next one. ASKED: an `Exchange` has the transport, until the
request is answered. LIVE: an accepted WebSocket. CLOSING: a last response or a close frame is under
way and only the end of the connection is awaited, with a deadline.

Requests that come together are answered one after the other: the next one is not looked at while an
answer is under way, or while the client does not read.

Flow control is the transport's: above `queued_bytes` in its write buffer asyncio calls
`pause_writing`, below half `resume_writing`. How fast a client is read: `inflow.py`. This file does
not know sessions: `binding.py`; nor what other paths than ramify.v1's speak: `door.py`.
"""

import asyncio
import codecs
import contextlib
import enum
from collections.abc import Coroutine
from functools import partial
from typing import Any, cast

from websockets.frames import Frame, Opcode
from websockets.protocol import State
from websockets.typing import BytesLike

from ramify.actors.gateway.port.access.limits import SocketLimits
from ramify.actors.gateway.port.access.shares import Share
from ramify.actors.gateway.port.binding import SessionBinding, Stage
from ramify.actors.gateway.port.dialogues.api import Accepted, Api, Apis, may_ask
from ramify.actors.gateway.port.dialogues.door import Door
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
from ramify.actors.gateway.port.intake import receive
from ramify.actors.gateway.port.pump import FRAME_WORK, PLAIN_SLICE, SLICE
from ramify.actors.gateway.port.upgrade import Upgrade, upgrade
from ramify.actors.gateway.port.websocket import WebSocket
from ramify.actors.kit.log import get_log
from ramify.protocol.codec import Codec
from ramify.protocol.credentials import Credential
from ramify.protocol.errors import Close, LimitExceeded, RamifyError
from ramify.protocol.json_value import OneFrame
from ramify.protocol.wire import Bye, ClientMessage, Error, Open, Pong, ServerMessage

_LOG = get_log("ramify.gateway")

HEAD_TIMEOUT_S = 10.0  # from the connection, or the first byte of a later request, to a whole one
REQUESTS = 1000  # on one connection; then a client begins anew, perhaps in another process
REQUEST_WORK = 4_000  # to answer a small one: 160 us, in bytes' worth (`pump.py`)
LATER_S = 90.0  # from a complete request to an answer that others make: they have bounds of their own
CLOSE_TIMEOUT_S = 5.0  # from our close frame or response to the end of the connection
_DATA = (Opcode.TEXT, Opcode.BINARY, Opcode.CONT)
_CONTROL = (Opcode.PING, Opcode.PONG)
FLOOD_FACTOR = 8  # times queued_bytes beyond what filled the write buffer: the socket is cut off


class Phase(enum.Enum):
    """See the module docstring."""

    HEAD = enum.auto()
    ASKED = enum.auto()
    LIVE = enum.auto()
    CLOSING = enum.auto()


class Connection(asyncio.Protocol):
    """A socket of the gateway. `id` is its number in mailbox messages."""

    __slots__ = (
        "_address",
        "_answering",
        "_apis",
        "_binding",
        "_bye",
        "_codec",
        "_cors",
        "_credential",
        "_deadline",
        "_door",
        "_flood",
        "_guard",
        "_heard",
        "_hub",
        "_idle",
        "_inflow",
        "_later",
        "_message",
        "_opened_at",
        "_out",
        "_parser",
        "_phase",
        "_served",
        "_throttled",
        "_transport",
        "_utf8",
        "_ws",
        "id",
    )

    def __init__(self, hub: Hub, apis: Apis) -> None:
        self.id = next(hub.ids)
        self._hub = hub
        self._apis = apis
        self._transport = cast(asyncio.Transport, None)  # set by connection_made
        self._phase = Phase.HEAD
        self._deadline = 0.0  # of the phase; LIVE: the next ping
        self._heard = 0.0
        self._opened_at = 0.0  # the WebSocket, where it has a door
        self._parser: RequestParser | None = RequestParser(self._wants)
        self._cors: dict[str, str] = {}  # headers of the answer, for a page of another site
        self._address = ""
        self._served = 0  # requests
        self._answering = False  # a request was read whole, and its answer comes later
        self._idle = False  # it waits for another request, of which nothing has come
        self._ws: WebSocket | None = None
        self._codec: Codec = hub.codecs["json"]
        self._guard = cast(SocketLimits, None)  # this and the next: set by connection_made
        self._inflow = cast(Inflow, None)
        self._binding: SessionBinding | None = None  # of ramify.v1; another path has a door
        self._door: Door | None = None
        self._later: asyncio.Task[None] | None = None  # makes the answer to an HTTP request
        self._credential: Credential | None = None  # None: it has not shown a token that it needs
        self._message: bytearray | None = None  # a fragmented message, as far as received
        self._utf8 = cast(codecs.IncrementalDecoder, None)  # of a fragmented text message
        self._out: list[bytes] = []
        self._throttled = False
        self._flood = 0  # bytes in the write buffer of a throttled socket that end it
        self._bye = False

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

    def data_received(self, data: bytes) -> None:
        try:
            self._inflow.receive(data)
        except Exception:
            self._broken()

    def eof_received(self) -> bool | None:
        if self._ws is not None:
            self._ws.receive_eof()
            self._flush_websocket(self._ws)
        if self._phase is not Phase.CLOSING:
            self._closing()
        return None  # asyncio closes the transport once its buffer is empty

    def connection_lost(self, exc: Exception | None) -> None:
        self._phase = Phase.CLOSING
        self._hub.idle.leave(self._address, self.id)
        self._hub.connections.pop(self.id, None)
        self._hub.timers.forget(self.id)
        self._out.clear()
        self._parser = None
        self._end_speaking()
        if self._later is not None:
            self._later.cancel()
        self._door = None  # it knows this connection
        self._inflow.end()
        if self._ws is not None:
            self._ws.dispose()
            self._ws = None
            self._hub.metrics.sockets(-1)
            if self._guard.share is not None:
                self._guard.share.leave(self._hub.clock.now())

    def pause_writing(self) -> None:
        self._throttled = True
        # One merged delta can be long; it is what comes on top, unread, that must have an end.
        waiting = self._transport.get_write_buffer_size()
        self._flood = waiting + FLOOD_FACTOR * self._hub.limits.queued_bytes
        self._throttle(True)

    def resume_writing(self) -> None:
        self._throttled = False
        self._throttle(False)
        self._pace_reading()

    # --- from the actor -----------------------------------------------------------------------

    @property
    def websocket(self) -> bool:
        """True from the accepted upgrade to the end of the connection."""
        return self._ws is not None

    @property
    def attached(self) -> bool:
        """True while it has a session, or the directory is asked for one."""
        if self._door is not None:
            return self._door.busy
        return self._binding is not None and self._binding.stage in (
            Stage.OPENING,
            Stage.ATTACHED,
        )

    def opened(self, session: int) -> None:
        """The directory's answer: the socket belongs to `session`."""
        if self._binding is not None:
            self._reply(self._binding.opened(session))
            self._pace_reading()

    def recheck(self) -> None:
        """The accepted tokens have changed: this socket's may not be among them any more."""
        if self._credential is not None and self._hub.tokens.required:
            found = self._hub.tokens.current(self._credential)
            if found is None:
                self.close(Close.UNAUTHORIZED, "the token was withdrawn")
            else:
                self._admitted(found)

    def deliver(self, messages: list[ServerMessage]) -> bool:
        """Queue one frame until `flush`. True if this is the first one queued."""
        ws = self._ws
        if self._idle:  # what the gateway itself says: that it stops
            self.close(Close.DRAINING, "")
        if ws is None or self._phase is not Phase.LIVE or ws.state is not State.OPEN:
            return False
        if self._door is not None:  # only the gateway itself says something: that it stops
            self._drain_door(self._door, messages)
            return False
        idle, first = not self._out, messages[0]
        if type(first) is Bye:
            if self._bye:  # a session and `drain` both say it
                return False
            self._bye = True
        self._out.append(ws.data_frame(self._codec, self._codec.encode(messages)))
        return idle

    def refused(self, error: Error) -> None:
        """The directory's other answer, or the session's: the client may `open` anew."""
        self._reply([error])
        if self._binding is not None and self._binding.stage in (Stage.OPENING, Stage.ATTACHED):
            self._reply(self._binding.failed(error))
            self._pace_reading()

    def retry(self) -> None:
        """The session may have room again for the frames that wait."""
        if self._binding is not None:
            self._reply(self._binding.retry())
            self.flush()
            self._pace_reading()

    def flush(self) -> None:
        """Write what was queued. A peer that does not read at all is cut off here."""
        out = self._out
        if not out:
            return
        self._transport.write(out[0] if len(out) == 1 else b"".join(out))
        out.clear()
        if self._throttled:
            waiting = self._transport.get_write_buffer_size()
            if waiting > self._flood:
                _LOG.warning("a socket reads nothing and is cut off", socket=self.id, waiting=waiting)
                self.abort()

    def close(self, code: int, reason: str) -> None:
        """Send what is queued and a close frame; the connection ends within CLOSE_TIMEOUT_S."""
        if self._phase is Phase.CLOSING:
            return
        if self._ws is None:
            self._transport.close()
        elif self._ws.open:
            self.flush()
            if not self._transport.is_closing():  # else cut off by the flush
                self._ws.send_close(code, reason.encode()[:123].decode(errors="ignore"))
                self._flush_websocket(self._ws)
        self._closing()

    def abort(self) -> None:
        """End the connection now; nothing more is sent."""
        self._closing()
        self._transport.abort()

    def on_timer(self, now: float) -> None:
        """A deadline may have come; sets the next one."""
        open_by = self._open_by
        if open_by is not None and now >= open_by:
            self.close(Close.TIMEOUT, f"no open within {self._hub.limits.open_timeout_s} s")
        elif now < self._deadline:
            self._set_deadline(self._deadline)
        elif self._phase is Phase.HEAD:
            if self._served and self._parser is not None and not self._parser.begun:
                self.close(Close.TIMEOUT, "")
                return
            late = error_response(408, "deadline", "the request did not arrive in time")
            self._respond(self._shaped(late, self._parser), last=True)
        elif self._phase is Phase.LIVE:
            self._heartbeat(now)
        else:
            self._transport.abort()

    # --- HTTP and the upgrade -----------------------------------------------------------------

    def _receive_head(self, data: bytes) -> int:
        """A slice of a request. Returns the work that it was."""
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
        self._answer(parser, request)
        return size + FRAME_WORK * events

    def _take_up(self) -> bool:
        """Another request begins. To strangers it costs what a connection does. True: it has to wait."""
        self._idle = False
        self._hub.idle.leave(self._address, self.id)
        now = self._hub.clock.now()
        self._set_deadline(now + HEAD_TIMEOUT_S)
        self._guard.enter(self._hub.guest(self._address, now))
        return self._guard.wait(now) > 0

    def _await_next(self) -> None:
        """A request is answered: wait for another one."""
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
        """An exchange is over, and gives the transport back, with what came behind its request."""
        self._hub.connections[self.id] = self
        self._transport.set_protocol(self)
        self._inflow.parse = self._parse
        self._inflow.unread(behind)
        self._await_next()

    def _answer(self, parser: RequestParser, request: HttpRequest | None) -> None:
        """Answer what is complete, or cannot be answered otherwise."""
        if parser.fault is not None:
            self._respond(self._shaped(parser.fault, parser))
        elif request is None:
            return
        elif request.websocket:
            answer = upgrade(request, parser, self._hub, self._apis)
            if isinstance(answer, Response):
                self._respond(answer)
            else:
                self._go_live(answer)
        elif (api := self._apis.at(request.path, request.headers)) is not None:
            self._exchange(request, api)
        else:
            self._answering = True
            send = partial(self._respond, head_only=request.method == "HEAD")
            self._hub.routes.respond(request, self._hub.clock.now(), send)

    def _shaped(self, fault: Response, parser: RequestParser | None) -> Response:
        """An error as the API has it that is asked for."""
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
        """See `RequestParser`. Only the APIs take bodies."""
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
        """A request to an API that sessions answer: answered here, or by a session."""
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

    def _go_live(self, accepted: Upgrade) -> None:
        hub = self._hub
        now = hub.clock.now()
        self._phase = Phase.LIVE
        self._parser = None
        self._ws = ws = accepted.ws
        self._codec = accepted.codec
        self._guard.share = accepted.share
        self._credential = accepted.credential
        if accepted.door is None:
            self._binding = SessionBinding(hub, self.id)
        else:
            self._door = accepted.door.make(hub, self)
            self._opened_at = now
        if accepted.credential is not None:
            self._admitted(accepted.credential)
        self._heard = now
        self._set_deadline(now + hub.config.ping_interval_s)
        hub.metrics.sockets(1)
        self._flush_websocket(ws)
        self._inflow.unread(accepted.rest)

    # --- frames from the client ---------------------------------------------------------------

    def _parse(self, data: bytes) -> int:
        """A slice of what came. Returns the work that it was (see `pump.py`)."""
        try:
            if self._ws is not None:
                return self._receive(self._ws, data)
            return self._receive_head(data) if self._phase is Phase.HEAD else 0
        except Exception:
            self._broken()
            return 0

    def _broken(self) -> None:
        """A bug of ours is this socket's end only."""
        _LOG.exception("socket %d: a bug in the gateway", self.id)
        if self._phase is Phase.HEAD:
            fault = error_response(500, "internal", "internal error")
            self._respond(self._shaped(fault, self._parser), last=True)
        self.close(Close.SERVER_BUG, "internal error")

    def _receive(self, ws: WebSocket, data: bytes) -> int:
        self._heard = now = self._hub.clock.now()
        ws.receive_data(data)
        events = ws.events_received()
        size = len(data)
        if ws.extensions:  # what it was before it was compressed is what it costs
            size += sum(len(event.data) for event in events if isinstance(event, Frame))
        work = size + FRAME_WORK * len(events)
        self._guard.received(size, len(events), now)
        if ws.open:  # a pong overtakes the replies to what came with its ping
            self._out += ws.data_to_send()
        for event in events:
            if self._phase is not Phase.LIVE:
                break
            if not isinstance(event, Frame):
                continue
            if event.opcode in _DATA:
                work += self._fragment(event, now)
            if event.opcode in _CONTROL or (not event.fin and not event.data):
                self._guard.control(now)
                if self._guard.abusive:
                    self._abused("too many control frames or empty fragments")
        self._flush_websocket(ws)
        return work

    def _fragment(self, frame: Frame, now: float) -> int:
        """Put a message together; returns the size of one that is complete.

        Its size is bounded by websockets in bytes, its frames by the guard. Text that is no UTF-8
        ends the connection with the fragment that shows it.
        """
        wanted = Opcode.BINARY if self._codec.binary else Opcode.TEXT
        if frame.opcode is not Opcode.CONT and frame.opcode is not wanted:
            kind = "binary" if self._codec.binary else "text"
            self.close(Close.WRONG_TYPE, f"{self._codec.name} messages travel in {kind} frames")
            return 0
        if frame.fin and self._message is None:
            self._receive_message(bytes(frame.data), now, self._codec.binary or _is_utf8(frame.data))
            return len(frame.data)
        if self._message is None:
            self._message = bytearray()
            self._utf8 = codecs.getincrementaldecoder("utf-8")()
        self._message += frame.data
        valid = self._codec.binary or _continues(self._utf8, frame)
        if frame.fin or not valid:
            data, self._message = bytes(self._message), None
            self._receive_message(data, now, valid)
            return len(data)
        return 0

    def _receive_message(self, data: bytes, now: float, valid: bool) -> None:
        if not valid:
            self.close(Close.BAD_UTF8, "a text frame must be UTF-8")
            return
        if self._door is not None:
            self._receive_for(self._door, data, now)
            return
        taken = receive(data, self._codec, self._guard, self._hub.limits, now)
        if self._credential is None and not self._authorize(taken.ops, now):
            return
        self._reply(taken.replies)
        for n in taken.pings:
            self._reply([Pong(n=n, load=self._hub.status.load())])
        if taken.close is not None:
            code, reason = taken.close
            if code == Close.RATE:
                self._abused(reason)
            else:
                self.close(code, reason)
        elif taken.ops and self._binding is not None:
            self._reply(self._binding.route(taken.ops, len(data), taken.place, taken.limit))

    def _authorize(self, ops: list[ClientMessage], now: float) -> bool:
        """The first message of a socket without a token must be an `open` that carries one.

        Else the socket is closed.
        """
        first = ops[0] if ops else None
        token = first.token if isinstance(first, Open) else None
        return self._accept(token, now)

    def _accept(self, token: str | None, now: float) -> bool:
        """Whether the token that came in a message is accepted; else the socket is closed."""
        found = self._hub.tokens.admit(token, now) if token is not None else None
        if found is None:
            message = "this server needs a token: a bearer header, subprotocol, or `open.token`"
            self._reply([Error(code="unauthorized", message=message)])
            self.close(Close.UNAUTHORIZED, "auth missing or bad")
            return False
        share = self._hub.shares.of(found, now)
        try:
            share.enter(now)
        except LimitExceeded as error:
            self._reply([Error(code=error.code, message=error.message, details=error.details)])
            self.close(Close.RATE, "too many sockets")
            return False
        self._guard.share = share
        self._admitted(found)
        return True

    def _admitted(self, credential: Credential) -> None:
        self._credential = credential
        self._guard.known(self._hub.clock.now())
        if self._binding is not None:
            self._binding.credential = credential

    def _abused(self, why: str) -> None:
        """Close a socket that asks for too much again and again."""
        if self._phase is Phase.LIVE:
            share = self._guard.share
            if share is not None:
                share.usage.abuses += 1
            owner = share.name if share is not None else ""
            self._hub.log_abuse(why, socket=self.id, owner=owner)
        self.close(Close.RATE, why)

    def _reply(self, messages: list[ServerMessage]) -> None:
        if messages and self._door is None:
            self.deliver(messages)

    # --- a door: see `Line` -------------------------------------------------------------------

    @property
    def credential(self) -> Credential | None:
        return self._credential

    @property
    def share(self) -> Share | None:
        return self._guard.share

    def admit(self, token: str | None) -> bool:
        return self._credential is not None or self._accept(token, self._hub.clock.now())

    def frame(self, payload: bytes) -> bytes:
        ws = self._ws
        return ws.data_frame(self._codec, payload) if ws is not None and ws.open else b""

    def write(self, frames: bytes) -> None:
        if frames and self._phase is Phase.LIVE:
            self._out.append(frames)

    def _receive_for(self, door: Door, data: bytes, now: float) -> None:
        try:
            self._guard.admit(1, now)
        except RamifyError as error:
            door.refuse(error)
        else:
            with OneFrame():
                understood = door.receive(data)
            if not understood and self._guard.strike():
                self.close(Close.UNPARSEABLE, "unparseable messages")
        if self._guard.abusive:
            self._abused("too many messages")

    def _drain_door(self, door: Door, messages: list[ServerMessage]) -> None:
        for message in messages:
            if isinstance(message, Bye):
                door.drain(message.reason)

    @property
    def _open_by(self) -> float | None:
        """When the client must have said who it is, or what it wants."""
        if self._door is not None:
            waits = self._credential is None and self._phase is Phase.LIVE
            return self._opened_at + self._hub.limits.open_timeout_s if waits else None
        return self._binding.open_by if self._binding is not None else None

    def _throttle(self, throttled: bool) -> None:
        if self._door is not None:
            self._door.throttle(throttled)
        elif self._binding is not None:
            self._binding.throttle(throttled)

    def _end_speaking(self) -> None:
        if self._door is not None:
            self._door.end()
        elif self._binding is not None:
            self._binding.end()

    # --- the end ------------------------------------------------------------------------------

    def _heartbeat(self, now: float) -> None:
        ws, config = self._ws, self._hub.config
        if self._inflow.stopped:
            self._heard = now  # a pong may have come, and nobody has read it
        if now - self._heard >= config.ping_timeout_s:
            self.close(Close.TIMEOUT, "heartbeat lost")
        elif ws is not None and ws.open:
            ws.send_ping(b"")
            self._flush_websocket(ws)
            self._set_deadline(now + config.ping_interval_s)

    def _flush_websocket(self, ws: WebSocket) -> None:
        """Write queued frames, then what websockets has to send (pongs, close, handshake)."""
        writes = ws.data_to_send()
        if writes:
            self._out += [data for data in writes if data]
        self.flush()
        if b"" in writes:  # websockets' mark for the end of the stream
            self._half_close()
        if ws.close_expected() and self._phase is not Phase.CLOSING:
            self._closing()

    def _half_close(self) -> None:
        """Say that nothing follows, and wait for the peer to close.

        Closing at once would reset the connection if bytes of the peer are still unread, and the
        reset can overtake our close frame or response.
        """
        if not self._transport.is_closing():
            with contextlib.suppress(OSError):  # the peer has gone already
                self._transport.write_eof()

    def _closing(self) -> None:
        self._phase = Phase.CLOSING
        self._idle = False
        self._hub.idle.leave(self._address, self.id)
        self._inflow.deaf = self._ws is None  # a WebSocket has a close frame to read
        self._end_speaking()
        self._pace_reading()  # else the peer's close would not be seen
        self._set_deadline(self._hub.clock.now() + CLOSE_TIMEOUT_S)

    def _congested(self) -> bool:
        """A request waits for its answer, or its client does not read; of a WebSocket, too many frames
        wait for the directory, or one for the session."""
        if self._phase is Phase.HEAD:
            return self._answering or self._throttled
        return self._binding is not None and self._binding.congested

    def _pace_reading(self) -> None:
        self._inflow.pace()

    def _set_deadline(self, when: float) -> None:
        self._deadline = when
        self._hub.timers.schedule(self.id, when)


def _is_utf8(data: BytesLike) -> bool:
    raw = bytes(data)
    if raw.isascii():
        return True
    try:
        raw.decode()
    except UnicodeDecodeError:
        return False
    return True


def _continues(decoder: codecs.IncrementalDecoder, frame: Frame) -> bool:
    """True if the text may go on after this fragment, or end if it is the last."""
    try:
        decoder.decode(bytes(frame.data), frame.fin)
    except UnicodeDecodeError:
        return False
    return True
