"""A WebSocket of the port: the asyncio shell around the state machine of websockets.

It takes the transport over from `RequestConnection` once the upgrade is accepted, and has it to the end.
This file does not know sessions: `binding.py`; nor what other paths than ramify.v1's speak: `door.py`.
"""

import asyncio

from websockets.frames import Frame, Opcode
from websockets.protocol import State

from ramify.actors.gateway.port.access.limits import SocketLimits
from ramify.actors.gateway.port.access.shares import Share
from ramify.actors.gateway.port.binding import SessionBinding, Stage
from ramify.actors.gateway.port.dialogues.door import Door
from ramify.actors.gateway.port.hub import Hub
from ramify.actors.gateway.port.inflow import Inflow
from ramify.actors.gateway.port.intake import receive
from ramify.actors.gateway.port.pump import FRAME_WORK
from ramify.actors.gateway.port.tcp import Phase, TcpConnection
from ramify.actors.gateway.port.upgrade import Upgrade
from ramify.actors.gateway.port.websocket import Fragments, WebSocket
from ramify.actors.kit.log import get_log
from ramify.protocol.codec import Codec
from ramify.protocol.credentials import Credential
from ramify.protocol.errors import Close, LimitExceeded, RamifyError
from ramify.protocol.json_value import OneFrame
from ramify.protocol.wire import Bye, ClientMessage, Delta, Error, Open, Pong, ServerMessage, StateReply

_LOG = get_log("ramify.gateway")

_DATA = (Opcode.TEXT, Opcode.BINARY, Opcode.CONT)
_CONTROL = (Opcode.PING, Opcode.PONG)
FLOOD_FACTOR = 8  # times queued_bytes beyond what filled the write buffer: the socket is cut off


class WebSocketConnection(TcpConnection):
    """An accepted WebSocket; on ramify.v1 it has a `SessionBinding`, on other paths a `Door`."""

    __slots__ = (
        "_binding",
        "_bye",
        "_codec",
        "_credential",
        "_door",
        "_flood",
        "_fragments",
        "_heard",
        "_opened_at",
        "_out",
        "_ws",
    )

    def __init__(
        self, hub: Hub, ident: int, transport: asyncio.Transport, guard: SocketLimits, accepted: Upgrade
    ) -> None:
        super().__init__(hub, ident, Phase.LIVE)
        now = hub.clock.now()
        self._transport = transport
        self._guard = guard
        self._guard.share = accepted.share
        self._ws: WebSocket | None = accepted.ws  # None: it has ended
        self._codec: Codec = accepted.codec
        self._heard = self._opened_at = now
        self._credential: Credential | None = None  # None: it has not shown a token that it needs
        self._fragments = Fragments(binary=accepted.codec.binary)
        self._out: list[bytes] = []
        self._flood = 0  # bytes in the write buffer of a throttled socket that end it
        self._bye = False
        self._binding: SessionBinding | None = None  # of ramify.v1; another path has a door
        self._door: Door | None = None
        if accepted.door is None:
            self._binding = SessionBinding(hub, self.id)
        else:
            self._door = accepted.door.make(hub, self)
        if accepted.credential is not None:
            self._admitted(accepted.credential)

    def start(self, inflow: Inflow, rest: bytes) -> None:
        """Take the transport over and answer the upgrade. `rest`: bytes behind the request."""
        hub, self._inflow = self._hub, inflow
        self._transport.set_protocol(self)
        inflow.parse, inflow.congested = self._parse, self._congested
        hub.connections[self.id] = self
        self._set_deadline(self._heard + hub.config.ping_interval_s)
        hub.metrics.sockets(1)
        assert self._ws is not None
        self._flush_websocket(self._ws)
        inflow.unread(rest)

    # --- asyncio.Protocol ---------------------------------------------------------------------

    def eof_received(self) -> bool | None:
        if self._ws is not None:
            self._ws.receive_eof()
            self._flush_websocket(self._ws)
        if self._phase is not Phase.CLOSING:
            self._closing()
        return None  # asyncio closes the transport once its buffer is empty

    def connection_lost(self, exc: Exception | None) -> None:
        self._out.clear()
        self._end_speaking()
        self._door = None  # it knows this connection
        self._forget()
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
        """Attach the socket to `session`, which the directory has found."""
        if self._binding is not None:
            self._reply(self._binding.opened(session))
            self._pace_reading()

    def recheck(self) -> None:
        """Check whether this socket's token is still accepted: the tokens have changed."""
        if self._credential is not None and self._hub.tokens.required:
            found = self._hub.tokens.current(self._credential)
            if found is None:
                self.close(Close.UNAUTHORIZED, "the token was withdrawn")
            else:
                self._admitted(found)

    def deliver(self, messages: list[ServerMessage]) -> bool:
        """Queue one frame until `flush`. True if this is the first one queued."""
        ws = self._ws
        if ws is None or self._phase is not Phase.LIVE or ws.state is not State.OPEN:
            return False
        if self._door is not None:  # only the gateway itself says something: that it stops
            for message in messages:
                if isinstance(message, Bye):
                    self._door.drain(message.reason)
            return False
        idle, kind = not self._out, type(messages[0])
        if kind is not Delta:
            if kind is StateReply and self._binding is not None:
                self._binding.answer_by = None
            elif kind is Bye and self._bye:  # `drain` says it again
                return False
            self._bye = self._bye or kind is Bye
        self._out.append(ws.data_frame(self._codec, self._codec.encode(messages)))
        return idle

    def refused(self, error: Error) -> None:
        """Say that directory or session refused the socket. The client may `open` anew."""
        self._reply([error])
        if self._binding is not None and self._binding.stage in (Stage.OPENING, Stage.ATTACHED):
            self._reply(self._binding.failed(error))
            self._pace_reading()

    def retry(self) -> None:
        """Tell the waiting frames again: the session may have room."""
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

    def on_timer(self, now: float) -> None:
        """Check the deadlines, and set the next one."""
        if (late := self._late(now)) is not None:
            self.close(*late)
        elif now < self._deadline:
            self._set_deadline(self._deadline)
        elif self._phase is Phase.LIVE:
            self._heartbeat(now)
        else:
            self._transport.abort()

    # --- frames from the client ---------------------------------------------------------------

    def _parse(self, data: bytes) -> int:
        """Parse a slice of what came. Returns the work that it was (see `pump.py`)."""
        try:
            return self._receive(self._ws, data) if self._ws is not None else 0
        except Exception:
            self._broken()
            return 0

    def _broken(self) -> None:
        """End one socket because of a bug of ours."""
        _LOG.exception("socket %d: a bug in the gateway", self.id)
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
        self._hold(len(self._fragments) + ws.received, self._shed)
        return work

    def _shed(self) -> None:
        """Give up a message that does not end, and the socket."""
        self._abused("too much is kept of messages that do not end")
        self._fragments.clear()
        if self._ws is not None:
            self._ws.reader.discard()
        self._inflow.deaf = True  # its answer to the close frame, too
        self._half_close()

    def _fragment(self, frame: Frame, now: float) -> int:
        """Handle a message that the frame completes, or shows to be none. Returns its size."""
        wanted = Opcode.BINARY if self._codec.binary else Opcode.TEXT
        if frame.opcode is not Opcode.CONT and frame.opcode is not wanted:
            kind = "binary" if self._codec.binary else "text"
            self.close(Close.WRONG_TYPE, f"{self._codec.name} messages travel in {kind} frames")
            return 0
        if (whole := self._fragments.add(frame)) is None:
            return 0
        self._receive_message(whole[0], now, whole[1])
        return len(whole[0])

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
        """Check the first message of a socket without a token: it must be an `open` that carries one.

        Else the socket is closed.
        """
        first = ops[0] if ops else None
        token = first.token if isinstance(first, Open) else None
        return self._accept(token, now)

    def _accept(self, token: str | None, now: float) -> bool:
        """Accept a token that came in a message. False: it is wrong, and the socket is closed."""
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

    def _late(self, now: float) -> tuple[int, str] | None:
        """Return how to close if a token, an `open` or its answer has not come in time."""
        if self._binding is not None:
            return self._binding.late(now)
        most = self._hub.limits.open_timeout_s
        waits = self._credential is None and self._phase is Phase.LIVE
        late = waits and self._door is not None and now >= self._opened_at + most
        return (Close.TIMEOUT, f"no token within {most} s") if late else None

    def _throttle(self, throttled: bool) -> None:
        speaker = self._door or self._binding
        if speaker is not None:
            speaker.throttle(throttled)

    def _end_speaking(self) -> None:
        speaker = self._door or self._binding
        if speaker is not None:
            speaker.end()

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

    def _closing(self) -> None:
        self._end_speaking()
        super()._closing()

    def _congested(self) -> bool:
        """Whether too many frames wait for the directory, or one waits for the session."""
        return self._binding is not None and self._binding.congested
