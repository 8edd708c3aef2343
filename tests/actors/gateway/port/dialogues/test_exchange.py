"""The end of an HTTP answer: that its last byte goes out, however slowly the client reads."""

import itertools
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest

from ramify.actors.gateway.port.access.shares import Share
from ramify.actors.gateway.port.dialogues.api import Accepted
from ramify.actors.gateway.port.dialogues.exchange import CLOSE_TIMEOUT_S, STALLED_S, Exchange
from ramify.actors.gateway.port.http import Response
from ramify.protocol.credentials import NOBODY
from ramify.protocol.errors import RamifyError
from ramify.protocol.wire import ClientMessage, Ok, ServerMessage

HIGH_WATER = 1000


class Dialogue:
    """Says what each `Ok` names, and ends with an `Ok` without a branch."""

    ops: list[ClientMessage] = []
    streams, keeps, saves, outlives = True, True, False, False
    over = False
    pictures: tuple[str, ...] = ()

    def receive(self, messages: list[ServerMessage]) -> bytes | Response | None:
        self.over = any(cast(Ok, message).branch is None for message in messages)
        return "".join(cast(Ok, message).branch or "" for message in messages).encode() or b"end"

    def take_ops(self) -> list[ClientMessage]:
        return []

    def fail(self, error: RamifyError) -> bytes:
        return error.message.encode()


class Transport:
    """Has asyncio's flow control; `read` is the client reading."""

    def __init__(self) -> None:
        self.buffer = self.got = b""
        self.ended = self.aborted = False
        self.protocol: Any = None

    def write(self, data: bytes) -> None:
        assert not self.ended
        short = len(self.buffer) <= HIGH_WATER
        self.buffer += data
        if short and len(self.buffer) > HIGH_WATER:
            self.protocol.pause_writing()

    def read(self) -> None:
        paused = len(self.buffer) > HIGH_WATER
        self.got, self.buffer = self.got + self.buffer, b""
        if paused:
            self.protocol.resume_writing()

    def write_eof(self) -> None:
        self.ended = True

    def is_closing(self) -> bool:
        return self.aborted

    def abort(self) -> None:
        self.aborted = True


class Timers:
    """The deadline of the only connection."""

    at = 0.0

    def schedule(self, number: int, when: float) -> None:
        self.at = when

    def forget(self, number: int) -> None:
        self.at = 0.0


class Home:
    """The connection, and what it got back."""

    def __init__(self) -> None:
        self.got: bytes | None = None

    def returned(self, behind: bytes) -> None:
        self.got = behind


def made_with(home: Home, *, keeps: bool, old: bool = False) -> tuple[Exchange, Transport, Any]:
    """An exchange that has no session yet, its transport, and its hub."""
    hub: Any = SimpleNamespace(
        clock=SimpleNamespace(now=lambda: 10.0, call_at=lambda when, act: Mock()),
        timers=Timers(),
        connections={},
        ids=itertools.count(1),
        draining=False,
        limits=SimpleNamespace(open_timeout_s=5.0),
    )
    transport = Transport()
    inflow = SimpleNamespace(parse=None, count=lambda size: None)
    share = SimpleNamespace(leave=lambda now: None)
    made = Exchange(
        hub,
        cast(Any, home),
        cast(Any, transport),
        cast(Any, inflow),
        Accepted(cast(Any, Dialogue()), NOBODY, cast(Share, share)),
        size=0,
        keeps=keeps,
        old=old,
    )
    transport.protocol = made
    return made, transport, hub


@pytest.fixture
def exchange() -> tuple[Exchange, Transport, Any]:
    return made_with(Home(), keeps=False)


def said(text: str | None) -> ServerMessage:
    return Ok(id=1, branch=text)


@pytest.mark.parametrize("full", ["before", "by the end"])
def test_a_stream_is_whole_where_the_buffer_is_full_at_its_end(exchange: Any, full: str) -> None:
    it, transport, hub = exchange
    if full == "before":
        it.deliver([said("x" * 2000)])
        it.flush()
        it.deliver([said(None)])
    else:
        it.deliver([said("x" * 2000), said(None)])
    it.flush()
    assert hub.timers.at == 10 + STALLED_S  # there is something to read yet
    transport.read()
    assert transport.got.endswith(b"\r\n0\r\n\r\n")
    assert transport.ended
    assert hub.timers.at == 10 + CLOSE_TIMEOUT_S


def test_who_reads_all_at_once_has_the_usual_time_to_close(exchange: Any) -> None:
    it, transport, hub = exchange
    it.deliver([said("hello"), said(None)])
    it.flush()
    it.flush()  # a second one adds nothing
    transport.read()
    assert transport.got.count(b"0\r\n\r\n") == 1
    assert transport.ended
    assert hub.timers.at == 10 + CLOSE_TIMEOUT_S


@pytest.mark.parametrize("slow", [False, True])
def test_a_connection_that_is_kept_goes_back_once_the_client_has_the_answer(slow: bool) -> None:
    home = Home()
    it, transport, hub = made_with(home, keeps=True)
    it.deliver([said("x" * 2000 if slow else "hello"), said(None)])
    it.flush()
    if slow:
        assert home.got is None
        assert hub.timers.at == 10 + STALLED_S
    transport.read()
    assert home.got == b""
    assert transport.got.endswith(b"\r\n0\r\n\r\n")
    it.abort()
    assert not transport.ended
    assert not transport.aborted


def test_a_server_that_stops_keeps_no_connection() -> None:
    home = Home()
    it, transport, hub = made_with(home, keeps=True)
    it.deliver([said("hello")])
    it.flush()
    hub.draining = True
    it.deliver([said(None)])
    it.flush()
    assert transport.ended
    assert home.got is None


def test_http_1_0_gets_neither_chunks_nor_100() -> None:
    it, transport, _ = made_with(Home(), keeps=False, old=True)
    it.deliver([said("x")])
    it.deliver([said("y"), said(None)])
    it.flush()
    transport.read()
    half, silent, _ = made_with(Home(), keeps=False, old=True)
    half.eof_received()
    silent.read()
    assert silent.got == b""
    head, _, body = bytes(transport.got).partition(b"\r\n\r\n")
    assert b"Transfer-Encoding" not in head
    assert body == b"xy"
