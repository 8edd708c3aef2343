"""One TCP connection: the asyncio shell around the HTTP parser and the WebSocket state machine.

HEAD: reading a request. LIVE: an accepted WebSocket. CLOSING: a response or a close frame is under
way and only the end of the connection is awaited, with a deadline.

Flow control is the transport's: above `queued_bytes` in its write buffer asyncio calls
`pause_writing`, below half `resume_writing`. This file does not know sessions: `attachment.py`.
"""

import asyncio
import contextlib
import enum
import logging
from functools import partial
from typing import cast

from websockets.frames import Frame, Opcode

from ramify.actors.gateway.attachment import Attachment, Stage
from ramify.actors.gateway.http import RequestParser, Response, error_response
from ramify.actors.gateway.hub import Hub
from ramify.actors.gateway.intake import receive
from ramify.actors.gateway.limits import Guard
from ramify.actors.gateway.upgrade import Upgrade, upgrade
from ramify.actors.gateway.websocket import WebSocket
from ramify.protocol.codec import Codec
from ramify.protocol.errors import Close
from ramify.protocol.wire import Bye, ClientMessage, Error, Open, Pong, ServerMessage

_LOG = logging.getLogger("ramify.gateway")

HEAD_TIMEOUT_S = 10.0  # from the connection to a complete request
CLOSE_TIMEOUT_S = 5.0  # from our close frame or response to the end of the connection
FLOOD_FACTOR = 8  # times queued_bytes beyond what filled the write buffer: the socket is cut off


class Phase(enum.Enum):
    """See the module docstring."""

    HEAD = enum.auto()
    LIVE = enum.auto()
    CLOSING = enum.auto()


class Connection(asyncio.Protocol):
    """A socket of the gateway. `id` is its number in mailbox messages."""

    __slots__ = (
        "_attachment",
        "_authorized",
        "_bye",
        "_codec",
        "_deadline",
        "_flood",
        "_guard",
        "_heard",
        "_hub",
        "_message",
        "_out",
        "_parser",
        "_phase",
        "_throttled",
        "_transport",
        "_ws",
        "id",
    )

    def __init__(self, hub: Hub) -> None:
        self.id = next(hub.ids)
        self._hub = hub
        self._transport = cast(asyncio.Transport, None)  # set by connection_made
        self._phase = Phase.HEAD
        self._deadline = 0.0  # of the phase; LIVE: the next ping
        self._heard = 0.0
        self._parser: RequestParser | None = RequestParser()
        self._ws: WebSocket | None = None
        self._codec: Codec = hub.codecs["json"]
        self._guard = cast(Guard, None)  # this and the attachment: from the upgrade on
        self._attachment: Attachment | None = None
        self._authorized = False
        self._message: bytearray | None = None  # a fragmented message, as far as received
        self._out: list[bytes] = []
        self._throttled = False
        self._flood = 0  # bytes in the write buffer of a throttled socket that end it
        self._bye = False

    # --- asyncio.Protocol ---------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        high = self._hub.limits.queued_bytes
        self._transport.set_write_buffer_limits(high=high, low=high // 2)
        self._hub.connections[self.id] = self
        self._set_deadline(self._hub.clock.now() + HEAD_TIMEOUT_S)

    def data_received(self, data: bytes) -> None:
        try:
            if self._ws is not None:
                self._receive(self._ws, data)
            elif self._phase is Phase.HEAD:
                self._receive_head(data)
            # else: the response is on its way; what else the client says is not read
        except Exception:
            _LOG.exception("socket %d: a bug in the gateway", self.id)
            self.close(Close.SERVER_BUG, "internal error")

    def eof_received(self) -> bool | None:
        if self._ws is not None:
            self._ws.receive_eof()
            self._flush_websocket(self._ws)
        if self._phase is not Phase.CLOSING:
            self._closing()
        return None  # asyncio closes the transport once its buffer is empty

    def connection_lost(self, exc: Exception | None) -> None:
        self._phase = Phase.CLOSING
        self._hub.connections.pop(self.id, None)
        self._hub.timers.forget(self.id)
        self._out.clear()
        self._parser = None
        if self._attachment is not None:
            self._attachment.end()
        if self._ws is not None:
            self._ws.dispose()
            self._ws = None
            self._hub.metrics.sockets(-1)

    def pause_writing(self) -> None:
        self._throttled = True
        # One merged delta can be long; it is what comes on top, unread, that must have an end.
        waiting = self._transport.get_write_buffer_size()
        self._flood = waiting + FLOOD_FACTOR * self._hub.limits.queued_bytes
        if self._attachment is not None:
            self._attachment.throttle(True)

    def resume_writing(self) -> None:
        self._throttled = False
        if self._attachment is not None:
            self._attachment.throttle(False)

    # --- from the actor -----------------------------------------------------------------------

    @property
    def websocket(self) -> bool:
        """True from the accepted upgrade to the end of the connection."""
        return self._ws is not None

    @property
    def attached(self) -> bool:
        """True while it has a session, or the directory is asked for one."""
        return self._attachment is not None and self._attachment.stage in (
            Stage.OPENING,
            Stage.ATTACHED,
        )

    def opened(self, session: int) -> None:
        """The directory's answer: the socket belongs to `session`."""
        if self._attachment is not None:
            self._reply(self._attachment.opened(session))
            self._pace_reading()

    def deliver(self, messages: list[ServerMessage]) -> bool:
        """Queue one frame until `flush`. True if this is the first one queued."""
        ws = self._ws
        if ws is None or self._phase is not Phase.LIVE or not ws.open:
            return False
        idle, first = not self._out, messages[0]
        if type(first) is Bye:
            if self._bye:  # a session and `drain` both say it
                return False
            self._bye = True
        self._out.append(ws.data_frame(self._codec, self._codec.encode(messages)))
        if type(first) is Error and first.id is None:
            self._refused()
        return idle

    def _refused(self) -> None:
        """An error without an id, while the directory is asked, is its answer to `open`."""
        attachment = self._attachment
        if attachment is not None and attachment.stage is Stage.OPENING:
            self._reply(attachment.failed())
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
                _LOG.warning("socket %d reads nothing: %d bytes wait, cut off", self.id, waiting)
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
        open_by = self._attachment.open_by if self._attachment is not None else None
        if open_by is not None and now >= open_by:
            self.close(Close.TIMEOUT, f"no open within {self._hub.limits.open_timeout_s} s")
        elif now < self._deadline:
            self._set_deadline(self._deadline)
        elif self._phase is Phase.HEAD:
            self._respond(error_response(408, "deadline", "the request did not arrive in time"))
        elif self._phase is Phase.LIVE:
            self._heartbeat(now)
        else:
            self._transport.abort()

    # --- HTTP and the upgrade -----------------------------------------------------------------

    def _receive_head(self, data: bytes) -> None:
        parser = cast(RequestParser, self._parser)
        request = parser.feed(data)
        if parser.fault is not None:
            self._respond(parser.fault)
        elif request is None:
            return
        elif request.websocket and request.method == "GET":
            answer = upgrade(request, parser, self._hub)
            if isinstance(answer, Response):
                self._respond(answer)
            else:
                self._go_live(answer)
        else:
            send = partial(self._respond, head_only=request.method == "HEAD")
            self._hub.routes.respond(request, self._hub.clock.now(), send)

    def _respond(self, response: Response, *, head_only: bool = False) -> None:
        if self._phase is not Phase.HEAD:  # it took too long, or the peer has gone
            return
        self._transport.write(response.render(head_only=head_only))
        self._half_close()
        self._closing()

    def _go_live(self, accepted: Upgrade) -> None:
        hub = self._hub
        now = hub.clock.now()
        self._phase = Phase.LIVE
        self._parser = None
        self._ws = ws = accepted.ws
        self._codec = accepted.codec
        self._authorized = accepted.authorized
        self._guard = Guard(hub.limits, now)
        self._attachment = Attachment(hub, self.id)
        self._heard = now
        self._set_deadline(now + hub.config.ping_interval_s)
        hub.metrics.sockets(1)
        self._flush_websocket(ws)
        if accepted.rest:
            self._receive(ws, accepted.rest)

    # --- frames from the client ---------------------------------------------------------------

    def _receive(self, ws: WebSocket, data: bytes) -> None:
        self._heard = now = self._hub.clock.now()
        ws.receive_data(data)
        for event in ws.events_received():
            if self._phase is not Phase.LIVE:
                break
            if not isinstance(event, Frame):
                continue
            if event.opcode is Opcode.PING:
                self._guard.control(now)
                if self._guard.abusive:
                    self.close(Close.RATE, "too many pings")
            elif event.opcode in (Opcode.TEXT, Opcode.BINARY, Opcode.CONT):
                self._fragment(event, now)
        self._flush_websocket(ws)

    def _fragment(self, frame: Frame, now: float) -> None:
        """Put a message together. Its size is bounded by websockets, in bytes and not in frames."""
        wanted = Opcode.BINARY if self._codec.binary else Opcode.TEXT
        if frame.opcode is not Opcode.CONT and frame.opcode is not wanted:
            kind = "binary" if self._codec.binary else "text"
            self.close(Close.WRONG_TYPE, f"{self._codec.name} messages travel in {kind} frames")
        elif frame.fin and self._message is None:
            self._receive_message(bytes(frame.data), now)
        else:
            if self._message is None:
                self._message = bytearray()
            self._message += frame.data
            if frame.fin:
                data, self._message = bytes(self._message), None
                self._receive_message(data, now)

    def _receive_message(self, data: bytes, now: float) -> None:
        if not self._codec.binary and not _is_utf8(data):
            self.close(Close.BAD_UTF8, "a text frame must be UTF-8")
            return
        taken = receive(data, self._codec, self._guard, self._hub.limits, now)
        if not self._authorized and not self._authorize(taken.ops, now):
            message = "this server needs a token: a bearer header, subprotocol, or `open.token`"
            self._reply([Error(code="unauthorized", message=message)])
            self.close(Close.UNAUTHORIZED, "auth missing or bad")
            return
        self._reply(taken.replies)
        for n in taken.pings:
            self._reply([Pong(n=n, load=self._hub.status.load())])
        if taken.close is not None:
            self.close(*taken.close)
        elif taken.ops and self._attachment is not None:
            self._reply(self._attachment.route(taken.ops, len(data)))
            self._pace_reading()

    def _authorize(self, ops: list[ClientMessage], now: float) -> bool:
        """The first message of a socket without a token must be an `open` that carries one."""
        first = ops[0] if ops else None
        token = first.token if isinstance(first, Open) else None
        self._authorized = token is not None and self._hub.tokens.admit(token, now)
        return self._authorized

    def _reply(self, messages: list[ServerMessage]) -> None:
        if messages:
            self.deliver(messages)

    # --- the end ------------------------------------------------------------------------------

    def _heartbeat(self, now: float) -> None:
        ws, config = self._ws, self._hub.config
        if now - self._heard >= config.ping_timeout_s:
            self.close(Close.TIMEOUT, "heartbeat lost")
        elif ws is not None and ws.open:
            ws.send_ping(b"")
            self._flush_websocket(ws)
            self._set_deadline(now + config.ping_interval_s)

    def _flush_websocket(self, ws: WebSocket) -> None:
        """Write queued frames, then what websockets has to send (pongs, close, handshake)."""
        writes = ws.data_to_send()
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
        if self._attachment is not None:
            self._attachment.end()
        self._pace_reading()  # else the peer's close would not be seen
        self._set_deadline(self._hub.clock.now() + CLOSE_TIMEOUT_S)

    def _pace_reading(self) -> None:
        """Stop reading while too many frames wait for the directory."""
        transport, attachment = self._transport, self._attachment
        if transport.is_closing() or attachment is None:
            return
        if attachment.congested == transport.is_reading():
            if attachment.congested:
                transport.pause_reading()
            else:
                transport.resume_reading()

    def _set_deadline(self, when: float) -> None:
        self._deadline = when
        self._hub.timers.schedule(self.id, when)


def _is_utf8(data: bytes) -> bool:
    if data.isascii():
        return True
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True
