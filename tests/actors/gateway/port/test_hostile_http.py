"""HTTP in bad shapes: what a client without a token can make the server do is counted, not timed."""

import asyncio
import contextlib
import json
from typing import Any

import pytest

from ramify.actors.gateway.apis.openai.stored_responses import ItemPage
from ramify.actors.gateway.port.access.strangers import BURST_S, MOST_DEBT_S, WORK_PER_S
from ramify.actors.gateway.port.connection import RequestConnection
from ramify.actors.gateway.port.http import HEAD_LINES, RequestParser
from ramify.actors.gateway.port.interfaces import Served
from ramify.actors.gateway.port.pump import SLICE
from ramify.actors.gateway.port.tcp import TcpConnection
from ramify.protocol.config import Limits
from ramify.protocol.errors import BadRequest
from tests.actors.gateway.conftest import response

POST = "POST {path} HTTP/1.1\r\nHost: {host}\r\n{more}\r\n"
INFO = {"model": {"model": "stub", "context": 100}, "started": 0.0}
CHUNKED = "Transfer-Encoding: chunked\r\n"


async def settle(turns: int = 300) -> None:
    """Let the loop do all that it can do without time."""
    for _ in range(turns):
        await asyncio.sleep(0)


def post(gateway: Any, path: str, more: str = CHUNKED) -> bytes:
    return POST.format(path=path, host=gateway.address, more=more).encode()


def _result(ident: str) -> dict[str, Any]:
    result = {"type": "tool_result", "tool_use_id": ident, "content": "x"}
    return {"role": "user", "content": [result]}


@pytest.mark.parametrize(
    "more", [CHUNKED, "Content-Length: 1000000\r\n", "Expect: 100-continue\r\n" + CHUNKED]
)
@pytest.mark.parametrize(
    "path",
    ["/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat", "/v1/tokens"],
)
async def test_a_stranger_is_refused_before_its_body(serve, path, more) -> None:
    """Whatever looks like a token: it is the head that is answered. No byte of a body was sent."""
    async with serve(tokens=("k",)) as gateway:
        for token in ("", "Authorization: Bearer no\r\n"):
            status, _, body = await gateway.http(post(gateway, path, more + token))
            assert status == 401
            assert json.loads(body)


async def test_what_a_refused_client_goes_on_sending_is_not_parsed(serve, monkeypatch) -> None:
    fed: list[int] = []
    feed = RequestParser.feed
    monkeypatch.setattr(
        RequestParser, "feed", lambda it, data: (fed.append(len(data)), feed(it, data))[1]
    )
    async with serve(tokens=("k",)) as gateway:
        status, _, _ = await gateway.http(
            post(gateway, "/v1/chat/completions") + b"1\r\nx\r\n" * 500_000
        )
        assert status == 401
    assert sum(fed) <= SLICE


async def test_a_body_may_fill_the_context(serve) -> None:
    async with serve(limits=Limits(frame_bytes=1000)) as gateway:
        gateway.status.info = lambda: INFO
        for context, size, status in ((0, 1001, 413), (200, 1600, 400), (200, 1601, 413)):
            gateway.actor.loaded((), Served(context))
            head = post(gateway, "/v1/chat/completions", f"Content-Length: {size}\r\n")
            assert (await gateway.http(head + b" " * size))[0] == status


@pytest.mark.parametrize(
    ("path", "call", "version"),
    [
        ("/v1/chat/completions", {"function": {"name": "f", "arguments": {"a": [1] * 9000}}}, ""),
        ("/api/chat", {"function": {"name": "f", "arguments": {"a": [1] * 9000}}}, ""),
        ("/v1/messages", {"a": [1] * 9000}, "anthropic-version: 2023-06-01\r\n"),
    ],
)
async def test_the_values_of_a_body_are_bounded_together(serve, path, call, version) -> None:
    """1 MiB of them in calls of 16 messages held the loop for 66 ms."""
    if path == "/v1/messages":
        call = {"type": "tool_use", "id": "i", "name": "f", "input": call}
        ask = [{"role": "assistant", "content": [call]}, _result("i")]
    else:
        ask = [{"role": "assistant", "content": "", "tool_calls": [call]}]
    settings = {} if path == "/api/chat" else {"max_tokens": 9}
    async with serve() as gateway:
        gateway.status.info = lambda: INFO
        for count, refused in ((8, True), (7, False)):
            messages = [{"role": "user", "content": "hi"}, *(ask * count)]
            data = json.dumps({"model": "stub", "messages": messages, **settings}).encode()
            more = f"Content-Length: {len(data)}\r\n{version}"
            reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
            writer.write(post(gateway, path, more) + data)
            if refused:
                status, _, answer = await response(reader)
                assert status == 400
                assert b"hold more than 65536" in answer
            else:
                await gateway.next_open()
            writer.close()


async def test_chunks_of_a_byte_are_paced_as_frames_are(serve) -> None:
    """7.8 MB of them took 7.1 s of CPU in one go."""
    async with serve(limits=Limits(ops_per_second=50, ops_burst=100)) as gateway:
        _, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        writer.write(post(gateway, "/v1/chat/completions") + b"1\r\nx\r\n" * 200_000)
        await settle()
        (connection,) = gateway.actor.hub.connections.values()
        before = connection._parser.events
        assert 400 <= before <= 400 + 2 * SLICE  # a burst and a slice; a byte takes 2 events at most
        assert not connection._transport.is_reading()
        gateway.clock.advance(9.0)
        await settle()
        assert connection._parser.events <= before + 9 * 200 + 2 * SLICE
        writer.close()


async def test_a_byte_a_read_is_paced_and_arrives(serve, monkeypatch) -> None:
    """Each read wakes the loop up, however little it brings."""
    reads = 0
    received = TcpConnection.data_received

    def counted(it: TcpConnection, data: bytes) -> None:
        nonlocal reads
        reads += 1
        received(it, data)

    monkeypatch.setattr(TcpConnection, "data_received", counted)
    async with serve(limits=Limits(ops_per_second=10, ops_burst=20)) as gateway:
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        pad = "y" * 900
        for byte in f"GET /healthz HTTP/1.1\r\nHost: {gateway.address}\r\nX: {pad}\r\n\r\n".encode():
            writer.write(bytes([byte]))
            await settle(4)
        assert reads == 41
        answer = asyncio.ensure_future(reader.readline())
        while not answer.done():
            gateway.clock.advance(0.1)
            await settle(20)
        assert answer.result() == b"HTTP/1.1 200 OK\r\n"
        assert reads < 50
        writer.close()


async def test_what_comes_behind_a_request_is_paced_too(serve, monkeypatch) -> None:
    """While it is answered, and after it was."""
    async with serve(limits=Limits(bytes_per_second=1000, bytes_burst=1000)) as gateway:
        for path in ("/v1/chat/completions", "/healthz"):
            _, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
            writer.write(post(gateway, path, "Content-Length: 2\r\n") + b"{}" + b"x" * 1_000_000)
            await settle()
            (connection,) = gateway.actor.hub.connections.values()
            assert connection._inflow.stopped
            gateway.clock.advance(10_000)
            await settle()
            writer.close()
            gateway.clock.advance(10)  # the rest of a refused connection is read for seconds
            await gateway.until_gone()


async def test_heads_are_counted_before_they_are_parsed(serve, monkeypatch) -> None:
    """4,000 empty headers took 6 ms."""

    def never(*_: Any) -> None:
        raise AssertionError("h11 got it")

    monkeypatch.setattr("h11.Connection.receive_data", never)
    lines = b"a:\r\n" * HEAD_LINES
    async with serve() as gateway:
        head = f"GET / HTTP/1.1\r\nHost: {gateway.address}\r\n".encode()
        status, _, body = await gateway.http(head + lines + b"\r\n")
        assert status == 431
        assert f"at most {HEAD_LINES}" in json.loads(body)["message"]


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"1;" + b"e" * 3000, 431),
        (b"0\r\n" + b"a:\r\n" * 1000, 431),
        (b"zz\r\n", 400),
        (b"-1\r\n", 400),
        (b"fffffffffffffffffffff\r\n", 400),
        (b"1\r\nxyz", 400),
    ],
)
async def test_framing_that_is_no_body(serve, body, status) -> None:
    async with serve() as gateway:
        got, _, answer = await gateway.http(post(gateway, "/v1/chat/completions") + body)
        assert got == status
        assert set(json.loads(answer)["error"]) == {"message", "type", "param", "code"}


async def test_a_body_that_waits_for_100_continue_is_asked_for_once(serve) -> None:
    async with serve(tokens=("k",)) as gateway:
        gateway.status.info = lambda: INFO
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        more = "Authorization: Bearer k\r\nExpect: 100-continue\r\nContent-Length: 2\r\n"
        writer.write(post(gateway, "/v1/chat/completions", more))
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(b"{")
        await settle()
        writer.write(b"?")
        assert await reader.readline() == b"HTTP/1.1 400 Bad Request\r\n"
        writer.close()


async def test_a_minted_token_is_used_up_by_the_whole_request_only(serve) -> None:
    async with serve(tokens=("k",)) as gateway:
        gateway.status.info = lambda: INFO
        _, _, body = await gateway.get("/v1/tokens", "POST", Authorization="Bearer k")
        token = f"Authorization: Bearer {json.loads(body)['token']}\r\nContent-Length: 1\r\n"
        head = post(gateway, "/v1/chat/completions", token)
        _, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        writer.write(head)
        await settle()
        writer.close()
        await gateway.until_gone()
        assert (await gateway.http(head + b"{"))[0] == 400
        assert (await gateway.http(head + b"{"))[0] == 401


async def test_sockets_of_one_address_share_what_strangers_may_cost(serve) -> None:
    """On the wire: frames before a token was shown. A socket with a token goes on as before."""
    async with serve(tokens=("k",)) as gateway:
        strangers = gateway.actor.hub.strangers
        async with gateway.connect(additional_headers={"Authorization": "Bearer k"}) as client:
            guest = strangers.enter("127.0.0.1", gateway.clock.now())
            guest.spend(WORK_PER_S * (BURST_S + 0.5), gateway.clock.now())
            before = len(gateway.actor.hub.connections)
            _, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
            writer.write(f"GET /healthz HTTP/1.1\r\nHost: {gateway.address}\r\n\r\n".encode())
            await settle()
            assert len(gateway.actor.hub.connections) == before + 1  # it waits
            gateway.session()
            await gateway.attach(client)
            guest.spend(WORK_PER_S * MOST_DEBT_S, gateway.clock.now())
            reader, cut = await asyncio.open_connection("127.0.0.1", gateway.port)
            with contextlib.suppress(ConnectionResetError):
                assert not await reader.read(1)
            gateway.clock.advance(6.0)
            await settle()
            assert len(gateway.actor.hub.connections) <= before + 1
            assert (await gateway.get("/healthz"))[0] == 200
            writer.close()
            cut.close()


async def test_a_handshake_has_few_items(serve) -> None:
    async with serve() as gateway:
        for name in ("Sec-WebSocket-Extensions", "Sec-WebSocket-Protocol", "Connection", "Upgrade"):
            fields = {
                "Upgrade": "websocket",
                "Connection": "Upgrade",
                "Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA==",
                "Sec-WebSocket-Version": "13",
            }
            fields[name] = fields.get(name, "x") + ", a;b" * 500
            status, _, body = await gateway.get(
                "/v1/ws", **{k.replace("-", "_"): v for k, v in fields.items()}
            )
            assert status == 400
            assert name.lower() in json.loads(body)["message"]


async def test_a_post_that_also_asks_for_a_websocket_keeps_its_body(serve) -> None:
    async with serve() as gateway:
        gateway.status.info = lambda: INFO
        body = b'{"model":"other","messages":[{"role":"user","content":"x"}]}'
        more = f"Upgrade: websocket\r\nConnection: Upgrade\r\nContent-Length: {len(body)}\r\n"
        status, _, answer = await gateway.http(post(gateway, "/v1/chat/completions", more) + body)
        assert (status, json.loads(answer)["error"]["code"]) == (404, "model_not_found")


def test_a_number_of_a_query_is_bounded_before_it_is_read() -> None:
    for limit in ("00000001" + "9" * 5000, "9" * 5000, "0", "-1", "٣"):
        with pytest.raises(BadRequest, match="limit"):
            ItemPage.of(f"limit={limit}")
    assert ItemPage.of("limit=7").limit == 7


async def test_a_connection_that_ended_is_freed_at_once(serve, remains) -> None:
    """Without waiting for the collector of cycles: there are many of them in a flood."""
    async with serve(tokens=("k",)) as gateway:
        for path in ("/healthz", "/v1/models", "/v1/ws"):
            await gateway.get(path)
        odd = post(gateway, "/v1/models", "Content-Length: 1\r\nContent-Length: 2\r\n")
        assert (await gateway.http(odd))[0] == 400
        await gateway.until_gone()
        await settle()
        assert remains(RequestConnection) == []
