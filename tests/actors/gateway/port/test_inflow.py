"""Whose bytes are parsed when, and when a socket is not read. No sockets here."""

from typing import Any, cast

from ramify.actors.gateway.port.access.limits import SocketLimits
from ramify.actors.gateway.port.inflow import Inflow
from ramify.actors.gateway.port.pump import PLAIN_SLICE, SLICE, TURN_WORK, Pump
from ramify.protocol.config import Limits
from tests.manual_clock import ManualClock


class Transport:
    def __init__(self) -> None:
        self.reading = True

    def is_closing(self) -> bool:
        return False

    def is_reading(self) -> bool:
        return self.reading

    def pause_reading(self) -> None:
        assert self.reading
        self.reading = False

    def resume_reading(self) -> None:
        assert not self.reading
        self.reading = True


class Turns(Pump):
    """A pump whose turns the test takes."""

    def add(self, source: Any) -> None:
        self._waiting.append(source)

    def direct(self, work: int) -> None:
        self._direct += work

    def turn(self) -> None:
        self._turned()
        work = 0
        while self._waiting and work < TURN_WORK:
            work += self._waiting.popleft().advance()


class Client:
    def __init__(self, pump: Pump, clock: ManualClock, work: int = 0, **limits: int) -> None:
        self.transport = Transport()
        self.parsed: list[int] = []
        self.congested = False
        self.guard = SocketLimits(Limits(**limits), clock.now())
        self._work = work
        self.inflow = Inflow(
            cast(Any, self.transport), self.guard, clock, pump, self._parse, lambda: self.congested
        )
        self._clock = clock

    def _parse(self, data: bytes) -> int:
        self.parsed.append(len(data))
        self.guard.received(len(data), 0, self._clock.now())
        return self._work or len(data)


def test_little_is_parsed_at_once() -> None:
    client = Client(Turns(), ManualClock())
    client.inflow.receive(b"x" * SLICE)
    assert client.parsed == [SLICE]
    assert client.transport.reading


def test_much_is_parsed_in_slices_and_in_turn() -> None:
    pump, clock = Turns(), ManualClock()
    one, two = Client(pump, clock), Client(pump, clock)
    one.inflow.receive(b"x" * 40 * SLICE)
    two.inflow.receive(b"y" * 2 * SLICE)
    assert not one.parsed
    assert not one.transport.reading  # at most one read waits
    pump.turn()
    assert (sum(two.parsed), two.transport.reading) == (2 * SLICE, True)
    assert sum(one.parsed) + sum(two.parsed) == TURN_WORK
    turns = 1
    while not one.transport.reading:
        pump.turn()
        turns += 1
    assert (sum(one.parsed), turns) == (40 * SLICE, 3)


def test_what_is_only_gathered_is_taken_in_larger_slices() -> None:
    pump = Turns()
    client = Client(pump, ManualClock())
    client.inflow.slice = PLAIN_SLICE
    client.inflow.receive(b"x" * (2 * PLAIN_SLICE + 1))
    for _ in range(3):
        pump.turn()
    assert client.parsed == [PLAIN_SLICE, PLAIN_SLICE, 1]


def test_an_expensive_slice_ends_the_turn() -> None:
    pump, clock = Turns(), ManualClock()
    one, two = Client(pump, clock, work=TURN_WORK), Client(pump, clock)
    one.inflow.receive(b"x" * 2 * SLICE)
    two.inflow.receive(b"y" * 2 * SLICE)
    pump.turn()
    assert (len(one.parsed), len(two.parsed)) == (1, 0)
    pump.turn()
    pump.turn()
    assert (len(one.parsed), len(two.parsed)) == (2, 2)


def test_bytes_over_the_rate_stop_reading_until_they_are_paid_off() -> None:
    pump, clock = Turns(), ManualClock()
    client = Client(pump, clock, bytes_per_second=1000, bytes_burst=SLICE)
    client.inflow.receive(b"x" * SLICE)
    assert client.transport.reading
    client.inflow.receive(b"x" * 500)
    assert not client.transport.reading
    assert client.inflow.stopped
    clock.advance(0.4)
    assert not client.transport.reading
    clock.advance(0.2)
    assert client.transport.reading


def test_what_was_read_before_a_rest_is_parsed_after_it() -> None:
    pump, clock = Turns(), ManualClock()
    client = Client(pump, clock, bytes_per_second=SLICE, bytes_burst=1)
    client.inflow.receive(b"x" * 3 * SLICE)
    for seconds in range(1, 4):
        pump.turn()
        assert sum(client.parsed) == seconds * SLICE
        pump.turn()  # nothing: it rests
        assert sum(client.parsed) == seconds * SLICE
        clock.advance(1.0)
    assert client.transport.reading


def test_congestion_stops_parsing_too() -> None:
    pump, clock = Turns(), ManualClock()
    client = Client(pump, clock)
    client.congested = True
    client.inflow.receive(b"x" * 10)
    pump.turn()
    assert not client.parsed
    assert not client.transport.reading
    client.congested = False
    client.inflow.pace()
    pump.turn()
    assert client.parsed == [10]
    assert client.transport.reading


def test_nothing_happens_after_the_end() -> None:
    pump, clock = Turns(), ManualClock()
    client = Client(pump, clock, bytes_per_second=1000, bytes_burst=1)
    client.inflow.receive(b"x" * 10 * SLICE)
    client.inflow.end()
    pump.turn()
    clock.advance(60)
    assert not client.parsed


def test_what_many_sockets_send_a_little_of_is_bounded_too() -> None:
    pump, clock = Turns(), ManualClock()
    clients = [Client(pump, clock) for _ in range(40)]
    for client in clients:
        client.inflow.receive(b"x" * SLICE)
    at_once = TURN_WORK // SLICE
    assert [len(client.parsed) for client in clients] == [1] * at_once + [0] * (40 - at_once)
    for _ in range(2):
        pump.turn()
    assert all(client.parsed for client in clients)


def test_a_little_does_not_wait_behind_much() -> None:
    pump, clock = Turns(), ManualClock()
    flood, client = Client(pump, clock), Client(pump, clock)
    flood.inflow.receive(b"x" * 100 * SLICE)
    client.inflow.receive(b"hello")
    assert client.parsed == [5]
