"""Bytes of one socket that wait to be parsed, and whether more of them are read.

Every read of every socket comes through here and is counted before anything is done with it, whether the
socket speaks HTTP or WebSocket, and whether its client is known or not.

Reading stops while anything waits here, while the socket or its credential has to wait for having
sent too much, and while too many frames wait for the directory. Then the bytes wait in the client's
kernel, and in the end the client does: nothing is lost, and what a socket holds here is bounded by
one read.

This file does not know HTTP or WebSockets.
"""

import asyncio
from collections.abc import Callable

from ramify.actors.gateway.port.access.limits import SocketLimits
from ramify.actors.gateway.port.pump import SLICE, Pump
from ramify.actors.kit.clock import Clock, Timer

TRANSPORTS_OWN = "_read_ready_cb", "_write_ready"  # methods of its own that asyncio's transport keeps


class Inflow:
    """A `Source` of the pump.

    `parse` takes a slice of `slice` bytes, and says how much work it was. `congested`: what else stops
    reading; `pace` is to be called when it changes. `deaf`: nothing that still comes is wanted; it is
    only counted.
    """

    def __init__(
        self,
        transport: asyncio.Transport,
        guard: SocketLimits,
        clock: Clock,
        pump: Pump,
        parse: Callable[[bytes], int],
        congested: Callable[[], bool],
    ) -> None:
        self._transport = transport
        self._guard = guard
        self._clock = clock
        self._pump = pump
        self.parse = parse
        self.deaf = False
        self.slice = SLICE
        self.congested = congested
        self._waiting = bytearray()
        self._queued = False  # in the pump
        self._rest: Timer | None = None  # until what was received too fast is paid off
        self._ended = False

    @property
    def stopped(self) -> bool:
        """True while nothing is read: silence says nothing about the client then."""
        return not self._transport.is_reading()

    def receive(self, data: bytes) -> None:
        """Take bytes that the transport has read."""
        now = self._clock.now()
        self._guard.read(now)
        if self.deaf:
            self.count(len(data))
            self.pace()
            return
        self._waiting += data
        self._rest_if_due(now)  # others on the same account may have used it up
        little = len(self._waiting) <= self.slice and self._pump.room
        if little and not (self._queued or self._rest or self.congested()):
            self._pump.direct(self.advance())
        else:
            self.pace()

    def count(self, size: int, frames: int = 0) -> None:
        """Count bytes that were taken, and the pieces found in them."""
        self._guard.received(size, frames, self._clock.now())

    def unread(self, data: bytes) -> None:
        """Put the end of a slice back, while it is parsed: another parser is to have it."""
        self._waiting[:0] = data

    def advance(self) -> int:
        self._queued = False
        if self._ended or self._rest is not None:
            return 0
        if self.deaf:
            self._waiting.clear()
            self.pace()
            return 0
        piece = bytes(self._waiting[: self.slice])
        del self._waiting[: self.slice]
        work = self.parse(piece)
        self.pace()
        return work

    def pace(self) -> None:
        """Go on reading, parsing or resting, whichever is due now."""
        transport = self._transport
        if self._ended or transport.is_closing():
            return
        self._rest_if_due(self._clock.now())
        stopped = self._rest is not None or self.congested()
        if self._waiting and not (stopped or self._queued):
            self._queued = True
            self._pump.add(self)
        reads = not stopped and not self._waiting
        if reads != transport.is_reading():
            if reads:
                transport.resume_reading()
            else:
                transport.pause_reading()

    def end(self) -> None:
        """Stop: the connection is gone."""
        self._ended = True
        self._guard.end(self._clock.now())
        self._waiting.clear()
        self.parse = _pass_over  # no cycle with the connection is left, so memory is freed at once
        self.congested = lambda: False
        known = getattr(self._transport, "__dict__", {})  # uvloop's has none
        for method in TRANSPORTS_OWN:
            known.pop(method, None)
        if self._rest is not None:
            self._rest.cancel()
            self._rest = None

    def _rest_if_due(self, now: float) -> None:
        if self._rest is None and (wait := self._guard.wait(now)):
            self._rest = self._clock.call_at(now + wait, self._rested)

    def _rested(self) -> None:
        self._rest = None
        self.pace()


def _pass_over(_: bytes) -> int:
    return 0
