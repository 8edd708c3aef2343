"""An HTTP request that a session answers: one dialogue.

It takes the transport over from `RequestConnection` once the request has been read, and gives it back
when the client has the answer, if it may ask again. The answer is one response, or server-sent events in
chunks (RFC 9112, section 7.1), so that a client can tell a whole stream from one that broke off. A
client that goes away cancels its request, unless the dialogue outlives it: then this goes on without a
connection until the dialogue is over.

The end of what a client sends is no sign that it has gone: it may have closed its half, and read on.
What is written to one that has gone comes back as a reset, so something is written until there is an
answer: interim responses (RFC 9110, section 15.2), which clients pass over, or comments in a stream.

Flow control is that of a WebSocket: while the write buffer is full the session holds its text back. Who
reads nothing for `STALLED_S` is cut off.
"""

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Protocol

from ramify.actors.gateway.port.binding import Stage
from ramify.actors.gateway.port.dialogues.api import EVENTS, Accepted
from ramify.actors.gateway.port.dialogues.dialogue_run import DialogueRun
from ramify.actors.gateway.port.http import CONTINUE, Response, stream_head
from ramify.actors.gateway.port.hub import Hub
from ramify.actors.gateway.port.inflow import Inflow
from ramify.actors.kit.clock import Timer
from ramify.actors.kit.log import get_log
from ramify.protocol.wire import ServerMessage

_LOG = get_log("ramify.gateway")

STALLED_S = 60.0  # that a client may read nothing while there is something to read
CLOSE_TIMEOUT_S = 5.0  # from the end of the response to that of the connection
PROBES_S = (0.0, 0.05, 0.2)  # after the end of what a client sends; then each
PROBE_S = 1.0  # ... until it has an answer
COMMENT = b":\n\n"  # nothing, for who reads server-sent events
SURPLUS = 64 << 10  # bytes that a client may send behind its request


class Home(Protocol):
    """The connection that the request came on: takes the transport back, or hears that it is gone."""

    def returned(self, behind: bytes) -> None: ...
    def connection_lost(self, exc: Exception | None) -> None: ...


class Exchange(DialogueRun, asyncio.Protocol):
    """An HTTP request that a session answers."""

    def __init__(
        self,
        hub: Hub,
        home: Home,
        transport: asyncio.Transport,
        inflow: Inflow,
        accepted: Accepted,
        size: int,
        cors: Mapping[str, str] = {},
        *,
        keeps: bool = False,
        old: bool = False,
    ) -> None:
        """`cors`: headers of any answer. `keeps`: whether the client may ask again. `old`: see
        `RequestParser`."""
        super().__init__(hub, next(hub.ids), accepted.dialogue, accepted.credential, size)
        self._home = home
        self._transport = transport
        self._inflow = inflow
        self._accepted = accepted
        self._streaming = False
        self._cors = cors
        self._keeps = keeps
        self._old = old
        self._out: list[bytes] = []
        self._answered = False  # the last byte of the response is written or queued
        self._finished = False  # ... and what tells its end
        self._gone = False  # the connection, or it was given back
        self._deadline = 0.0  # 0: none
        self._behind = bytearray()  # the request
        self._probing: Timer | None = None
        self._heard_all = False  # the client sends nothing more

    def start(self) -> None:
        """Take the transport over and send the ops."""
        self._transport.set_protocol(self)
        self._inflow.parse = self._pass_over
        super().start()

    # --- asyncio.Protocol ---------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        self._inflow.receive(data)

    def eof_received(self) -> bool | None:
        if self._answered:
            return None  # asyncio closes the transport once its buffer is empty
        self._heard_all = True
        self._probe(0)
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        self._gone = True
        self._home.connection_lost(exc)
        self._stop_probing()
        self._out.clear()
        outlived = self._dialogue.outlives and (self._answered or self._streaming)
        if outlived and not self._over:
            self._binding.throttle(False)
        elif not self._over:
            self._over = True
            if self._binding.stage is Stage.ATTACHED and (ops := self._dialogue.abandon()):
                self._binding.route(ops, 0)
        if self._over:
            self._leave()

    def pause_writing(self) -> None:
        self._set_deadline(self._hub.clock.now() + STALLED_S)
        self._binding.throttle(True)

    def resume_writing(self) -> None:
        self._deadline = 0.0
        self._binding.throttle(False)
        if self._finished:
            self._part()

    # --- from the actor -----------------------------------------------------------------------

    def deliver(self, messages: list[ServerMessage]) -> bool:
        """Queue what the dialogue makes of `messages`. True if that is the first that is queued."""
        idle = not self._out
        self._reply(messages)
        return idle and bool(self._out)

    def flush(self) -> None:
        """Write what was queued."""
        if self._out and not self._transport.is_closing():
            self._transport.write(b"".join(self._out))
        self._out.clear()
        if self._answered:
            self._finish()
        if self._over:
            self._binding.end()
            if self._gone:
                self._leave()

    def abort(self) -> None:
        """End the connection now; nothing more is sent."""
        self._over = True
        self._stop_probing()
        if self._gone:
            self._leave()
        else:
            self._transport.abort()

    def on_timer(self, now: float) -> None:
        """Check the deadlines."""
        if self._deadline and now >= self._deadline:
            if not self._answered:
                _LOG.warning("a client reads nothing and is cut off", socket=self.id)
            self._deadline = 0.0
            self._transport.abort()
            return
        if self._deadline:
            self._set_deadline(self._deadline)
        super().on_timer(now)

    # ---

    def _pass_over(self, data: bytes) -> int:
        """Keep bytes that come behind the request: perhaps the next one."""
        self._inflow.count(len(data))
        self._behind += data
        if len(self._behind) > SURPLUS:
            self.abort()
        return len(data)

    def _probe(self, count: int) -> None:
        """See whether a client that sends nothing more is still there."""
        self._probing = None
        if self._answered or self._transport.is_closing():
            return
        if not self._streaming:
            self._transport.write(b"" if self._old else CONTINUE)
        elif (
            self._accepted.media == EVENTS and not self._deadline
        ):  # else enough is written that it does not read
            self._transport.write(self._piece(COMMENT))
        pause = PROBES_S[count + 1] - PROBES_S[count] if count + 1 < len(PROBES_S) else PROBE_S
        clock = self._hub.clock
        self._probing = clock.call_at(clock.now() + pause, lambda: self._probe(count + 1))

    def _stop_probing(self) -> None:
        if self._probing is not None:
            self._probing.cancel()
            self._probing = None

    def _ended(self) -> None:
        self._answered = True
        self._stop_probing()

    def _queue(self, made: bytes | Response | None) -> None:
        if made is None or self._answered:
            return
        if isinstance(made, Response):
            self._answered = True
            self._out.append(made.within(self._cors).render(keeps=self._keeps))
            return
        if not self._streaming:
            self._streaming = True
            headers = {**self._cors, **self._accepted.headers}
            media, chunked = self._accepted.media, not self._old
            self._out.append(stream_head(media, headers, keeps=self._keeps, chunked=chunked))
        self._out.append(self._piece(made))

    def _piece(self, made: bytes) -> bytes:
        return made if self._old else b"%x\r\n%b\r\n" % (len(made), made)

    def _finish(self) -> None:
        """End the answer: its last byte is written."""
        if self._finished or self._transport.is_closing():
            return
        self._finished = True
        self._stop_probing()
        if self._streaming and not self._old:
            self._transport.write(b"0\r\n\r\n")
        if self._heard_all:
            self._transport.close()
            return
        self._keeps = self._keeps and not self._hub.draining
        if not self._keeps:
            with contextlib.suppress(OSError):  # the client has gone already
                self._transport.write_eof()
        if not self._deadline:  # else it has not read all yet: see `resume_writing`
            self._part()

    def _part(self) -> None:
        """Give the connection back, or wait for it to close: the client has the whole answer."""
        if not self._keeps:
            self._set_deadline(self._hub.clock.now() + CLOSE_TIMEOUT_S)
            return
        self._gone = True
        if self._over:
            self._leave()
        self._home.returned(bytes(self._behind))

    def _leave(self) -> None:
        """Give back what it holds: connection and dialogue are over."""
        self._binding.end()
        if self._hub.connections.pop(self.id, None) is not None:
            self._hub.timers.forget(self.id)
            self._accepted.share.leave(self._hub.clock.now())

    def _set_deadline(self, when: float) -> None:
        self._deadline = when
        self._hub.timers.schedule(self.id, when)
