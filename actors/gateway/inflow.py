"""Bytes of one socket that wait to be parsed, and whether more of them are read.

Reading stops while anything waits here, while the socket or its credential has to wait for having
sent too much, and while too many frames wait for the directory. Then the bytes wait in the client's
kernel, and in the end the client does: nothing is lost, and what a socket holds here is bounded by
one read.

This file does not know WebSockets.
"""

import asyncio
from collections.abc import Callable

from ramify.actors.gateway.limits import SocketLimits
from ramify.actors.gateway.pump import SLICE, Pump
from ramify.actors.kit.clock import Clock, Timer


class Inflow:
    """A `Source` of the pump.

    `parse` takes a slice, and says how much work it was. `congested`: what else stops reading; `pace`
    is to be called when it changes.
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
        self._parse = parse
        self._congested = congested
        self._waiting = bytearray()
        self._queued = False  # in the pump
        self._rest: Timer | None = None  # until what was received too fast is paid off
        self._ended = False

    @property
    def stopped(self) -> bool:
        """True while nothing is read: silence says nothing about the client then."""
        return not self._transport.is_reading()

    def receive(self, data: bytes) -> None:
        """What the transport has read."""
        self._waiting += data
        little = len(self._waiting) <= SLICE and self._pump.room
        if little and not (self._queued or self._rest or self._congested()):
            self._pump.direct(self.advance())
        else:
            self.pace()

    def advance(self) -> int:
        self._queued = False
        if self._ended:
            return 0
        piece = bytes(self._waiting[:SLICE])
        del self._waiting[:SLICE]
        work = self._parse(piece)
        self.pace()
        return work

    def pace(self) -> None:
        """Read, parse or rest, as it is now."""
        transport = self._transport
        if self._ended or transport.is_closing():
            return
        now = self._clock.now()
        if self._rest is None and (wait := self._guard.wait(now)):
            self._rest = self._clock.call_at(now + wait, self._rested)
        stopped = self._rest is not None or self._congested()
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
        """The connection is gone."""
        self._ended = True
        self._waiting.clear()
        if self._rest is not None:
            self._rest.cancel()
            self._rest = None

    def _rested(self) -> None:
        self._rest = None
        self.pace()
