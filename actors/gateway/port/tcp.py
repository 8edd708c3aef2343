"""One TCP connection to the port: what it is while HTTP is spoken on it, and as a WebSocket.

HEAD: reading a request, or waiting for the next one. ASKED: an `Exchange` has the transport, until the
request is answered. LIVE: an accepted WebSocket. CLOSING: a last response or a close frame is under
way and only the end of the connection is awaited, with a deadline.

Flow control is the transport's: above `queued_bytes` in its write buffer asyncio calls
`pause_writing`, below half `resume_writing`. How fast a client is read: `inflow.py`.
"""

import asyncio
import contextlib
import enum
from abc import ABC, abstractmethod
from collections.abc import Callable

from ramify.actors.gateway.port.access.limits import SocketLimits
from ramify.actors.gateway.port.access.strangers import network_of
from ramify.actors.gateway.port.access.unfinished import COUNTED
from ramify.actors.gateway.port.hub import Hub
from ramify.actors.gateway.port.inflow import Inflow

CLOSE_TIMEOUT_S = 5.0  # from our close frame or response to the end of the connection


class Phase(enum.Enum):
    """The state of a connection: see the module docstring."""

    HEAD = enum.auto()
    ASKED = enum.auto()
    LIVE = enum.auto()
    CLOSING = enum.auto()


class TcpConnection(asyncio.Protocol, ABC):
    """The transport, and what ends it. `id` is its number in mailbox messages."""

    __slots__ = ("_deadline", "_guard", "_hub", "_inflow", "_phase", "_throttled", "_transport", "id")

    _transport: asyncio.Transport
    _guard: SocketLimits
    _inflow: Inflow

    def __init__(self, hub: Hub, ident: int, phase: Phase) -> None:
        self.id = ident
        self._hub = hub
        self._phase = phase
        self._deadline = 0.0  # of the phase; LIVE: the next ping
        self._throttled = False

    def data_received(self, data: bytes) -> None:
        try:
            self._inflow.receive(data)
        except Exception:
            self._broken()

    def abort(self) -> None:
        """End the connection now; nothing more is sent."""
        self._closing()
        self._transport.abort()

    @abstractmethod
    def _broken(self) -> None:
        """Log a bug in what handles the peer's bytes, and end this connection."""

    def _closing(self) -> None:
        self._phase = Phase.CLOSING
        self._pace_reading()  # else the peer's close would not be seen
        self._set_deadline(self._hub.clock.now() + CLOSE_TIMEOUT_S)

    def _forget(self) -> None:
        """Forget a connection that is gone."""
        self._phase = Phase.CLOSING
        self._hub.connections.pop(self.id, None)
        self._hub.timers.forget(self.id)
        self._hub.unfinished.leave(self.id)
        self._inflow.end()

    def _hold(self, size: int, shed: Callable[[], None]) -> None:
        """Note how much has come of a message or request that is not whole. `shed`: gives it up."""
        unfinished = self._hub.unfinished
        if size >= COUNTED:
            share, peer = self._guard.share, self._transport.get_extra_info("peername")
            client = share.name if share and share.name else network_of(peer[0] if peer else "")
            unfinished.note(client, self.id, size, shed)
        elif self.id in unfinished.parts:
            unfinished.leave(self.id)

    def _half_close(self) -> None:
        """Say that nothing follows, and wait for the peer to close.

        Closing at once would reset the connection if bytes of the peer are still unread, and the
        reset can overtake our close frame or response.
        """
        if not self._transport.is_closing():
            with contextlib.suppress(OSError):  # the peer has gone already
                self._transport.write_eof()

    def _pace_reading(self) -> None:
        self._inflow.pace()

    def _set_deadline(self, when: float) -> None:
        self._deadline = when
        self._hub.timers.schedule(self.id, when)
