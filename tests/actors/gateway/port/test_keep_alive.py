"""HTTP connections that carry one request after the other."""

import asyncio
import contextlib
import itertools
import json
from typing import Any

import pytest

from ramify.actors.gateway.port import connection as port
from ramify.actors.gateway.port.access.strangers import (
    BURST_S,
    CONNECTION_WORK,
    LEAST_SOCKETS,
    WORK_PER_S,
    Idle,
)
from ramify.actors.gateway.port.connection import HEAD_TIMEOUT_S, REQUESTS
from ramify.actors.gateway.port.dialogues.exchange import SURPLUS
from ramify.actors.gateway.port.http import IDLE_S, RequestParser
from ramify.actors.gateway.port.pump import TURN_WORK
from ramify.actors.gateway.port.static import StaticFiles
from ramify.protocol.messages import Deliver, Opened
from ramify.protocol.wire import Error
from tests.actors.gateway.conftest import response

INFO = {"model": {"model": "stub", "context": 100}, "started": 0.0}


async def settle(turns: int = 300) -> None:
    """Let the loop do all that it can do without time."""
    for _ in range(turns):
        await asyncio.sleep(0)


class Client:
    """One connection to a gateway."""

    def __init__(self, gateway: Any, reader: Any, writer: Any) -> None:
        self.gateway, self.reader, self.writer = gateway, reader, writer

    @classmethod
    async def to(cls, gateway: Any) -> "Client":
        return cls(gateway, *await asyncio.open_connection("127.0.0.1", gateway.port))

    def bytes_of(self, path: str, more: str = "", method: str = "GET", body: bytes = b"") -> bytes:
        length = f"Content-Length: {len(body)}\r\n" if body else ""
        head = f"{method} {path} HTTP/1.1\r\nHost: {self.gateway.address}\r\n{more}{length}\r\n"
        return head.encode() + body

    def ask(self, path: str, more: str = "", method: str = "GET", body: bytes = b"") -> None:
        self.writer.write(self.bytes_of(path, more, method, body))

    async def got(self, **options: Any) -> tuple[int, dict[str, str], bytes]:
        return await response(self.reader, **options)

    async def ended(self) -> bool:
        return await self.reader.read() == b""


@pytest.fixture
def talk(serve):
    """`async with talk() as client:` one connection to a gateway of its own."""

    @contextlib.asynccontextmanager
    async def talking(**config):
        async with serve(**config) as gateway:
            gateway.status.info = lambda: INFO
            made = await Client.to(gateway)
            try:
                yield made
            finally:
                made.writer.close()

    return talking


async def test_requests_follow_each_other_on_a_connection(talk) -> None:
    async with talk() as client:
        for path, method, status in (
            ("/healthz", "GET", 200),
            ("/metrics", "GET", 200),
            ("/nope", "GET", 404),
            ("/v1/models", "GET", 200),
            ("/v1/info", "HEAD", 200),
            ("/v1/models/other", "GET", 404),
            ("/healthz", "DELETE", 405),
            ("/v1/models", "OPTIONS", 405),
        ):
            client.ask(path, method=method)
            got, headers, _ = await client.got(head_only=method == "HEAD")
            assert got == status
            assert headers["keep-alive"] == f"timeout={IDLE_S}"
            assert "connection" not in headers
        assert len(client.gateway.actor.hub.connections) == 1
        client.ask("/healthz", "Connection: foo, Close\r\n")
        assert (await client.got())[1]["connection"] == "close"
        assert await client.ended()


async def test_a_body_that_was_read_whole_ends_where_the_next_request_begins(talk) -> None:
    async with talk() as client:
        for path, body in (("/v1/chat/completions", b"{" * 50), ("/api/chat", b"[" * 5000)):
            client.ask(path, method="POST", body=body)
            chunks = b"".join(b"%x\r\n%b\r\n" % (1, body[i : i + 1]) for i in range(50)) + b"0\r\n\r\n"
            client.ask(path, "Transfer-Encoding: chunked\r\n", "POST")
            client.writer.write(chunks + b"\r\n\r\n")  # as some clients do
            client.ask("/healthz")
            assert (await client.got())[0] == 400
            assert (await client.got())[0] == 400
            assert (await client.got())[0] == 200


@pytest.mark.parametrize(
    ("head", "status"),
    [
        ("POST /v1/tokens HTTP/1.1\r\nHost: {}\r\nContent-Length: 99\r\n\r\n", 404),  # no body is read
        ("GET /healthz HTTP/1.1\r\nHost: {}\r\nTransfer-Encoding: chunked\r\n\r\n", 200),
        ("GET /healthz HTTP/1.0\r\nHost: {}\r\n\r\n", 200),
        ("GET /healthz HTTP/1.1\r\nHost: {}\r\nHost: b\r\n\r\n", 400),
        (
            # a proxy may read the length, and take what is behind it for the next request
            "POST /v1/chat/completions HTTP/1.1\r\nHost: {}\r\nContent-Length: 44\r\n"
            "Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
            400,
        ),
        ("GET /v1/ws HTTP/1.1\r\nHost: {}\r\nUpgrade: websocket\r\n\r\n", 426),
    ],
)
async def test_where_a_request_ends_must_be_known(talk, head, status) -> None:
    async with talk() as client:
        client.writer.write(head.format(client.gateway.address).encode())
        client.ask("/smuggled")
        got, headers, _ = await client.got()
        assert (got, headers["connection"]) == (status, "close")
        assert await client.ended()


async def test_a_websocket_may_follow_a_request(talk) -> None:
    async with talk() as client:
        client.ask("/healthz")
        client.ask(
            "/v1/ws",
            "Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
            "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n",
        )
        client.writer.write(b"\x89\x80\0\0\0\0")  # a ping
        assert (await client.got())[0] == 200
        assert (await client.got())[0] == 101
        assert await client.reader.readexactly(2) == b"\x8a\x00"
        assert client.gateway.metrics.open == 1


async def test_nothing_of_a_request_is_left_to_the_next(talk) -> None:
    async with talk(tokens=("k",), allowed_origins=("http://a.example",)) as client:
        client.ask("/v1/models", "Origin: http://a.example\r\nAuthorization: Bearer k\r\n")
        client.ask("/v1/models", "Authorization: Bearer k\r\n")
        client.ask("/v1/models")
        status, headers, _ = await client.got()
        assert (status, headers["access-control-allow-origin"]) == (200, "http://a.example")
        status, headers, _ = await client.got()
        assert (status, "access-control-allow-origin" in headers) == (200, False)
        assert (await client.got())[0] == 401
        client.writer.close()


async def test_a_preflight_and_what_it_asks_for_take_one_connection(talk) -> None:
    async with talk(tokens=("k",), allowed_origins=("http://a.example",)) as client:
        origin = "Origin: http://a.example\r\n"
        client.ask("/v1/chat/completions", f"{origin}Access-Control-Request-Method: POST\r\n", "OPTIONS")
        more = f"{origin}Authorization: Bearer k\r\n"
        client.ask("/v1/chat/completions", more, "POST", b"{}")
        assert [(await client.got())[0] for _ in range(2)] == [200, 400]
        client.writer.close()


def answers(gateway: Any) -> list[str]:
    """The paths that are answered from now on."""
    told: list[str] = []
    respond = gateway.actor.hub.routes.respond

    def counted(request: Any, *more: Any) -> None:
        told.append(request.path)
        respond(request, *more)

    gateway.actor.hub.routes.respond = counted
    return told


async def test_requests_that_come_together_are_answered_in_order(talk) -> None:
    """Whoever else waits: what a turn of the loop does is bounded."""
    async with talk() as client:
        answered, turns = answers(client.gateway), [0]
        client.writer.write(b"".join(client.bytes_of(path) for path in ("/healthz", "/nope") * 100))
        while len(answered) < 200:
            await asyncio.sleep(0)
            turns.append(len(answered))
        most = max(now - before for before, now in itertools.pairwise(turns))
        assert most <= 2 * TURN_WORK // port.REQUEST_WORK + 2  # what waited, and what did not
        for _ in range(100):
            assert (await client.got())[0] == 200
            assert (await client.got())[0] == 404


async def test_a_late_answer_keeps_its_place(talk) -> None:
    async with talk() as client:
        waiting: list[Any] = []
        client.gateway.metrics.scrape = waiting.append
        client.ask("/metrics")
        client.ask("/healthz")
        await settle()
        waiting.pop()(b"numbers")
        assert (await client.got())[2] == b"numbers"
        assert json.loads((await client.got())[2]) == {"ok": True}
        client.ask("/metrics")
        while not waiting:  # they were read a moment ago
            await asyncio.sleep(0.01)
        client.gateway.clock.advance(HEAD_TIMEOUT_S + 1)
        assert (await client.got())[0] == 408
        waiting.pop()(b"too late")
        assert await client.ended()


async def test_a_client_that_does_not_read_gets_no_other_answer(serve, tmp_path) -> None:
    (tmp_path / "big.txt").write_bytes(b"x" * 3_000_000)
    async with serve(static=StaticFiles({"/": tmp_path})) as gateway:
        client, answered = await Client.to(gateway), answers(gateway)
        for _ in range(50):
            client.ask("/big.txt")
        await settle()
        assert len(answered) < 10  # the kernel took a part of it
        for _ in range(50):
            assert len((await client.got())[2]) == 3_000_000
        for _ in range(2):
            client.ask("/big.txt")
        await settle()
        gateway.clock.advance(IDLE_S + 1)
        await settle()
        gateway.clock.advance(IDLE_S + 1)
        await gateway.until_gone()
        client.writer.close()


async def test_idle_connections_end(talk) -> None:
    async with talk() as client:
        client.ask("/healthz")
        await client.got()
        client.gateway.clock.advance(IDLE_S - 1)
        await settle()
        client.ask("/healthz")
        await client.got()
        client.gateway.clock.advance(IDLE_S - 1)
        await settle()
        client.ask("/healthz")
        assert (await client.got())[0] == 200
        client.gateway.clock.advance(IDLE_S + 1)
        assert await client.ended()  # and no 408, which would be taken for the next answer
        await client.gateway.until_gone()
        assert len(client.gateway.actor.hub.idle) == 0


async def test_a_later_request_must_come_in_time_too(talk) -> None:
    async with talk() as client:
        client.ask("/healthz")
        await client.got()
        client.writer.write(b"GET /he")
        await settle()
        assert len(client.gateway.actor.hub.idle) == 0
        client.gateway.clock.advance(HEAD_TIMEOUT_S + 1)
        assert (await client.got())[0] == 408


async def test_a_connection_carries_so_many_requests(talk, monkeypatch) -> None:
    async with talk() as client:
        assert REQUESTS == 1000
        monkeypatch.setattr(port, "REQUESTS", 3)
        for last in (False, False, True):
            client.ask("/healthz")
            assert ((await client.got())[1].get("connection") == "close") == last
        assert await client.ended()


async def test_a_server_that_stops_ends_idle_connections_at_once(talk) -> None:
    async with talk() as client:
        client.ask("/healthz")
        await client.got()
        busy = await Client.to(client.gateway)
        busy.ask("/healthz")
        await busy.got()
        busy.writer.write(b"GET /healthz HTTP/1.1\r\n")
        await settle()
        stopping = asyncio.ensure_future(client.gateway.actor.drain(30.0))
        assert await client.ended()
        busy.writer.write(f"Host: {client.gateway.address}\r\n\r\n".encode())
        status, headers, _ = await busy.got()
        assert (status, headers["connection"]) == (200, "close")
        busy.writer.close()
        while not stopping.done():
            client.gateway.clock.advance(0.1)
            await settle(10)


async def test_idle_connections_take_no_place(serve) -> None:
    """Neither of sockets, nor of what an address may have before it shows a token."""
    async with serve(tokens=("k",), max_sockets=1) as gateway:
        hub = gateway.actor.hub
        clients = [await Client.to(gateway) for _ in range(LEAST_SOCKETS)]
        await settle()
        assert not hub.admits("127.0.0.1")
        for client in clients:
            client.ask("/healthz")
            await client.got()
        assert (hub.busy, len(hub.idle)) == (0, LEAST_SOCKETS)
        assert hub.admits("127.0.0.1")
        async with gateway.connect(additional_headers={"Authorization": "Bearer k"}):
            assert hub.busy == 1
        for client in clients:
            client.writer.close()


@pytest.mark.parametrize("known", [True, False])
async def test_to_strangers_a_request_costs_what_a_connection_does(talk, known: bool) -> None:
    async with talk(tokens=("k",)) as client:
        answered = answers(client.gateway)
        more = "Authorization: Bearer k\r\n" if known else ""
        client.writer.write(client.bytes_of("/healthz", more) * 250)
        await settle(1000)
        assert (len(answered) == 250) == known
        assert len(answered) >= WORK_PER_S * BURST_S // CONNECTION_WORK - 30


def test_who_has_most_idle_connections_loses_the_oldest() -> None:
    closed: list[int] = []
    idle = Idle(5)

    class Idler:
        def __init__(self, address: str, number: int) -> None:
            self.address, self.number = address, number

        def close(self, code: int, reason: str) -> None:
            closed.append(self.number)
            idle.leave(self.address, self.number)
            idle.leave(self.address, self.number)

    for number, address in enumerate(("a", "b", "b", "b", "a", "c", "a", "::1", "::2")):
        idle.enter(address, number, Idler(address, number))
    assert closed == [1, 0, 4, 2]
    assert len(idle) == 5


CHAT = json.dumps({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}).encode()


async def refused(client: Client) -> int:
    """The next chat is opened, and its session says no. The socket's number."""
    opened = await client.gateway.next_open()
    client.gateway.mailbox.tell(Opened(opened.socket, 1))
    await settle()
    error = Error(code="overloaded", message="the queue is full", id=None)
    client.gateway.mailbox.tell(Deliver(opened.socket, [error]))
    return opened.socket


async def test_each_request_that_a_session_answers_is_a_socket_of_its_own(talk) -> None:
    """What a session still says to an earlier one reaches no later one."""
    async with talk() as client:
        client.gateway.session()
        numbers = []
        for _ in range(3):
            client.ask("/v1/chat/completions", method="POST", body=CHAT)
            client.ask("/healthz")
            numbers.append(await refused(client))
            assert (await client.got())[0] == 503
            assert (await client.got())[0] == 200
            late = Error(code="overloaded", message="late", id=None)
            client.gateway.mailbox.tell(Deliver(numbers[-1], [late]))
            client.gateway.mailbox.tell(Opened(numbers[-1], 1))
            await settle()
        assert len(set(numbers)) == 3
        assert len(client.gateway.actor.hub.connections) == 1
        assert client.gateway.actor.hub.shares.usage()[""].sockets == 0


async def test_a_client_that_goes_while_it_is_answered_leaves_nothing(talk) -> None:
    async with talk() as client:
        client.ask("/v1/chat/completions", method="POST", body=CHAT)
        await client.gateway.next_open()
        client.writer.transport.abort()
        while client.gateway.actor.hub.connections:  # it is noticed by what is written to it
            client.gateway.clock.advance(0.1)
            await settle(10)
        assert client.gateway.actor.hub.shares.usage()[""].sockets == 0


async def test_too_much_behind_a_request_ends_the_connection(talk) -> None:
    async with talk() as client:
        client.ask("/v1/chat/completions", method="POST", body=CHAT)
        await client.gateway.next_open()
        client.writer.write(b"x" * (SURPLUS + 1))
        with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
            await client.got()
        await client.gateway.until_gone()


def test_a_parser_says_where_a_request_ends() -> None:
    head = b"POST /x HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\n\r\n"
    for size in (1, 5, 1000):
        parser = RequestParser(lambda _: 3)
        data, found = b"\r\n" + head + b"abcGET ", None
        while found is None:
            found, data = parser.feed(data[:size]), data[size:]
        assert (found.body, parser.rest + data, parser.keeps) == (b"abc", b"GET ", True)


def test_a_body_that_is_said_to_be_too_long_is_refused_by_its_head() -> None:
    parser = RequestParser(lambda _: 3)
    head = b"POST /x HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: 4\r\n\r\n"
    assert parser.feed(head) is None
    assert parser.fault is not None
    assert (parser.fault.status, parser.waits, parser.keeps) == (413, False, False)
