"""Frames as bytes: floods of them, control frames between others, text that is no UTF-8.

The cases of RFC 6455 that a client library cannot send are written by hand (Autobahn's 5.6, 5.7, 5.19,
5.20 and 6.4 are among them).
"""

import asyncio
import json
import struct
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any
from weakref import ref

import anyio
import pytest

from ramify.actors.gateway.port.connection import RequestConnection
from ramify.actors.gateway.port.dialogues.channel import Channel
from ramify.actors.gateway.port.websocket import WebSocket
from ramify.actors.gateway.port.websocket_connection import WebSocketConnection
from ramify.protocol.config import Limits
from ramify.protocol.credentials import CredentialLimits
from ramify.protocol.messages import Deliver, Frame
from ramify.protocol.wire import Delta

TEXT, CONT, BINARY, CLOSE, PING, PONG = 1, 0, 2, 8, 9, 10
UPGRADE = (
    "GET /v1/ws HTTP/1.1\r\nHost: {address}\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n{more}"
    "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
)


def frame(opcode: int, payload: bytes = b"", fin: bool = True) -> bytes:
    """A client's, with a mask of zeros."""
    first, size = (0x80 if fin else 0) | opcode, len(payload)
    long = size >= 126
    head = struct.pack("!BBH", first, 0xFE, size) if long else struct.pack("!BB", first, 0x80 | size)
    return head + b"\0\0\0\0" + payload


class Raw:
    """A WebSocket without a library."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def send(self, *frames: bytes) -> None:
        """All in one write."""
        self.writer.write(b"".join(frames))

    async def frame(self) -> tuple[int, bytes]:
        """The next frame of the server: opcode and payload."""
        first, size = await self.reader.readexactly(2)
        if size == 126:
            (size,) = struct.unpack("!H", await self.reader.readexactly(2))
        return first & 15, await self.reader.readexactly(size)

    async def close_code(self) -> int:
        """Read on until the server closes."""
        while True:
            opcode, payload = await self.frame()
            if opcode == CLOSE:
                return int(struct.unpack("!H", payload[:2])[0])


@asynccontextmanager
async def raw(gateway: Any, token: str = "", path: str = "/v1/ws") -> AsyncIterator[Raw]:
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    try:
        more = f"Authorization: Bearer {token}\r\n" if token else ""
        upgrade = UPGRADE.format(address=gateway.address, more=more)
        writer.write(upgrade.replace("/v1/ws", path).encode())
        head = await reader.readuntil(b"\r\n\r\n")
        assert b" 101 " in head, head
        yield Raw(reader, writer)
    finally:
        writer.close()


async def attached(gateway: Any, peer: Raw) -> int:
    peer.send(frame(TEXT, b'{"type":"open","client":"c"}'))
    socket: int = (await gateway.next_open()).socket
    gateway.state(socket)
    assert (await peer.frame())[0] == TEXT
    return socket


@pytest.mark.parametrize("together", [True, False])
async def test_a_pong_goes_out_before_what_follows_its_ping(serve, together) -> None:
    """Between the fragments of a message, in one read or in several."""
    async with serve() as gateway, raw(gateway) as peer:
        first, last = b'[{"type":"ping","n":1},', b'{"type":"ping","n":2}]'
        frames = [
            frame(TEXT, first, fin=False),
            frame(PING, b"one"),
            frame(CONT, b"", fin=False),
            frame(PING, b"two"),
            frame(CONT, last),
        ]
        if together:
            peer.send(*frames)
        else:
            for one in frames[:-1]:
                peer.send(one)
                await peer.writer.drain()
            assert await peer.frame() == (PONG, b"one")  # before the message is complete
            assert await peer.frame() == (PONG, b"two")
            peer.send(frames[-1])
        if together:
            assert await peer.frame() == (PONG, b"one")
            assert await peer.frame() == (PONG, b"two")
        for n in (1, 2):
            opcode, payload = await peer.frame()
            assert (opcode, json.loads(payload)["n"]) == (TEXT, n)


async def test_a_pong_goes_out_before_replies_to_the_same_read(serve) -> None:
    async with serve() as gateway, raw(gateway) as peer:
        peer.send(frame(TEXT, b'{"type":"ping","n":7}'), frame(PING, b"x"))
        assert await peer.frame() == (PONG, b"x")
        assert (await peer.frame())[0] == TEXT


GOOD, BAD = "κόσμε".encode(), b"\xf4\x90\x80\x80"


@pytest.mark.parametrize(
    "frames",
    [
        [frame(TEXT, GOOD + BAD, fin=False)],  # 6.4.1: the rest never comes
        [frame(TEXT, GOOD, fin=False), frame(CONT, BAD, fin=False)],
        [frame(TEXT, GOOD + BAD[:1], fin=False), frame(CONT, BAD[1:2], fin=False)],  # 6.4.2
        [frame(TEXT, b"\xce", fin=False), frame(CONT)],  # cut off in a character
        [frame(TEXT, BAD)],
    ],
)
async def test_text_that_is_no_utf8_fails_at_once(serve, frames) -> None:
    async with serve() as gateway, raw(gateway) as peer:
        for one in frames:
            peer.send(one)
            await peer.writer.drain()
        assert await peer.close_code() == 1007


async def test_characters_may_be_cut_anywhere(serve) -> None:
    async with serve() as gateway, raw(gateway) as peer:
        session = gateway.session()
        await attached(gateway, peer)
        message = json.dumps({"type": "append", "id": 1, "text": "κόσμε😀"}, ensure_ascii=False).encode()
        peer.send(frame(TEXT, message[:1], fin=False))
        peer.send(*(frame(CONT, bytes([byte]), fin=False) for byte in message[1:-1]))
        peer.send(frame(CONT, message[-1:]))
        (got,) = await session.drain()
        assert isinstance(got, Frame)
        assert got.ops[0].text == "κόσμε😀"


@pytest.mark.parametrize(
    ("begin", "flood"),
    [
        (b"", frame(PING)),
        (b"", frame(PONG)),
        (frame(TEXT, b"", fin=False), frame(CONT, b"", fin=False)),
        (b"", frame(TEXT, b'{"type":"ping"}')),
    ],
    ids=["pings", "pongs", "empty fragments", "messages"],
)
async def test_a_flood_of_frames_closes_its_socket_only(serve, begin, flood) -> None:
    """After what its burst allows: nothing of the rest is parsed."""
    async with serve(limits=Limits(ops_burst=50)) as gateway:
        async with raw(gateway) as peer, raw(gateway) as other:
            peer.send(begin, flood * 20_000)
            assert await peer.close_code() == 4429
            other.send(frame(TEXT, b'{"type":"ping","n":3}'))
            assert json.loads((await other.frame())[1])["n"] == 3
            usage = gateway.actor.usage()[""]
            assert usage.abuses == 1
            assert usage.frames < 2000


async def test_fragments_that_carry_something_wait_and_are_not_abuse(serve) -> None:
    """A byte a fragment is slow, for whoever sends it; the message arrives."""
    limits = Limits(ops_per_second=50, ops_burst=50)
    async with serve(limits=limits) as gateway, raw(gateway) as peer:
        session = gateway.session()
        await attached(gateway, peer)
        message = b'{"type":"append","id":1,"text":"' + b"x" * 1000 + b'"}'
        peer.send(frame(TEXT, b"", fin=False))
        peer.send(*(frame(CONT, bytes([byte]), fin=False) for byte in message), frame(CONT))
        while (waiting := gateway.actor.usage()[""].frames) < 200:
            await asyncio.sleep(0)
        assert not session.drain_nowait()
        assert waiting < 1000
        while not (got := session.drain_nowait()):
            gateway.clock.advance(1.0)
            await asyncio.sleep(0)
        assert len(got[0].ops[0].text) == 1000


async def test_bytes_over_the_rate_wait_and_nothing_is_lost(serve) -> None:
    limits = Limits(bytes_per_second=10_000, bytes_burst=20_000, ops_burst=500)
    async with serve(limits=limits) as gateway, raw(gateway) as peer:
        session = gateway.session()
        await attached(gateway, peer)
        for ident in range(20):
            text = json.dumps({"type": "append", "id": ident, "text": "x" * 10_000})
            peer.send(frame(TEXT, text.encode()))
        seen: list[int] = []
        while len(seen) < 2:
            seen += [one.ops[0].id for one in await session.drain()]
        for _ in range(50):
            await asyncio.sleep(0)
        assert not session.drain_nowait()
        for _ in range(3):  # a heartbeat later the socket is still there: it is we who do not read
            gateway.clock.advance(1.0)
        while len(seen) < 20:
            gateway.clock.advance(1.0)
            await asyncio.sleep(0)
            seen += [one.ops[0].id for one in session.drain_nowait()]
        assert seen == list(range(20))


async def test_a_credential_over_its_rate_slows_all_its_sockets(serve) -> None:
    loose = Limits(ops_per_second=10_000, ops_burst=10_000)
    own = CredentialLimits(sockets=2, ops_per_second=10, bytes_per_second=1 << 20)
    async with serve(limits=loose, tokens=("k", "other"), credential_limits=own) as gateway:
        async with raw(gateway, "k") as one, raw(gateway, "k") as two, raw(gateway, "other") as free:
            for peer, errors in ((one, 0), (two, 1), (free, 0)):
                peer.send(frame(TEXT, json.dumps([{"type": "ping"}] * 15).encode()))
                reply = json.loads((await peer.frame())[1])
                kind = reply[0] if isinstance(reply, list) else reply
                assert (kind["type"] == "error") == bool(errors), reply
            status, _, body = await gateway.get(
                "/v1/ws",
                Authorization="Bearer k",
                Upgrade="websocket",
                Connection="Upgrade",
                Sec_WebSocket_Key="AAAAAAAAAAAAAAAAAAAAAA==",
                Sec_WebSocket_Version="13",
            )
            assert status == 429
            assert json.loads(body)["code"] == "limit"
        while gateway.actor.usage()["token-1"].sockets:
            await asyncio.sleep(0)
        async with raw(gateway, "k"):
            pass


async def test_the_server_has_a_limit_of_sockets(serve) -> None:
    async with serve(max_sockets=1) as gateway, raw(gateway):
        status, headers, body = await gateway.get(
            "/v1/ws",
            Upgrade="websocket",
            Connection="Upgrade",
            Sec_WebSocket_Key="AAAAAAAAAAAAAAAAAAAAAA==",
            Sec_WebSocket_Version="13",
        )
        assert (status, headers["retry-after"]) == (503, "5")
        assert "--max-sockets" in json.loads(body)["message"]
        assert (await gateway.get("/healthz"))[0] == 200


async def test_a_flood_does_not_hold_up_what_others_are_sent(serve) -> None:
    """Work between two turns of the loop is bounded: counted, not timed."""
    async with serve(limits=Limits(ops_per_second=10**6, ops_burst=10**6)) as gateway:
        gateway.session()
        async with raw(gateway) as peer, raw(gateway) as other:
            socket = await attached(gateway, other)
            peer.send(frame(PONG) * 40_000)
            usage = gateway.actor.usage()[""]
            turns, before = [], usage.frames
            while usage.frames < 40_000:
                gateway.mailbox.tell(Deliver(socket, [Delta(branch="a", position=1, text="x")]))
                await asyncio.sleep(0)
                turns.append(usage.frames - before)
                before = usage.frames
            assert max(turns) < 1500
            assert json.loads((await other.frame())[1])["type"] == "delta"


async def test_compressed_bytes_count_as_what_they_become(serve) -> None:
    """A kilobyte that becomes a megabyte is a megabyte."""
    limits = Limits(bytes_per_second=1 << 20, bytes_burst=2 << 20)
    async with serve(deflate=True, limits=limits) as gateway:
        session = gateway.session()
        async with gateway.connect(compression="deflate") as client:
            await gateway.attach(client)
            text = json.dumps({"type": "append", "id": 1, "text": "x" * (1 << 19)})
            for _ in range(8):
                await client.send(text)
            seen = 0
            while seen < 4:
                seen += len(await session.drain())
            for _ in range(50):
                await asyncio.sleep(0)
            assert seen + len(session.drain_nowait()) < 8
            assert gateway.actor.usage()[""].received_bytes > 2 << 20


ENDS = {
    "closed": frame(CLOSE, struct.pack("!H", 1000)),
    "cut": b"",
    "cut in a frame": frame(TEXT, b'{"type":"ping"}')[:-3],
    "an opcode that is none": frame(3),
    "a close code that is none": frame(CLOSE, struct.pack("!H", 65535) + b"\xff"),
    "too long": struct.pack("!BBQ", 0x81, 0xFF, 1 << 40),
}


@pytest.mark.parametrize("end", list(ENDS))
async def test_what_a_websocket_held_goes_with_its_end_without_the_collector(
    serve, remains, end
) -> None:
    async with serve() as gateway:
        async with raw(gateway) as peer:
            await attached(gateway, peer)
            (connection,) = gateway.actor.hub.connections.values()
            transport = ref(connection._transport)
            del connection
            peer.send(ENDS[end])
            if end.startswith("cut"):
                await peer.writer.drain()
            else:
                await peer.close_code()
        await gone(gateway)
        assert (remains(RequestConnection, WebSocketConnection, WebSocket), transport()) == ([], None)


@pytest.mark.parametrize(
    "more",
    [
        "Sec-WebSocket-Protocol: another\r\n",  # `websockets` refuses it
        "Sec-WebSocket-Key: short\r\n",  # ... cannot read it
        "Authorization: Bearer once\r\n",  # it is accepted, and its token is not
    ],
)
async def test_a_refused_handshake_leaves_nothing_to_the_collector(serve, remains, more) -> None:
    async with serve(tokens=("k",)) as gateway:
        if "Bearer" in more:
            gateway.actor.hub.tokens.accepts = lambda token, now: True
        status, _, _ = await gateway.http(UPGRADE.format(address=gateway.address, more=more))
        assert status in (400, 401)
        await gone(gateway)
        assert remains(RequestConnection, WebSocketConnection, WebSocket) == []


async def test_a_socket_of_lanes_leaves_nothing_to_the_collector(serve, remains) -> None:
    """Its door and lanes know it, and a response that runs knows its lane."""
    async with serve() as gateway:
        gateway.status.info = lambda: {"model": {"model": "stub", "context": 100}, "started": 0.0}
        async with raw(gateway, path="/v1/responses") as peer:
            create = {"type": "response.create", "model": "stub", "input": "Hi", "store": False}
            peer.send(frame(TEXT, json.dumps(create).encode()))
            await gateway.next_open()
        await gone(gateway)
        assert remains(RequestConnection, WebSocketConnection, Channel) == []


async def gone(gateway: Any) -> None:
    """Until no connection is left, and nobody is about to forget one."""
    await gateway.until_gone()
    for _ in range(5):
        await anyio.lowlevel.checkpoint()


async def test_the_client_with_most_in_messages_that_do_not_end_loses_its_first_one(
    serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ramify.actors.gateway.port.hub.UNFINISHED_BYTES", 0)
    size, blank = 100_000, b" " * 50_000
    head = struct.pack("!BBQ", 0x80 | TEXT, 0xFF, size) + b"\0\0\0\0"
    one_frame = (head, blank, blank[1:])  # all but a byte
    fragments = frame(TEXT, blank, fin=False), frame(CONT, blank, fin=False)
    async with serve(limits=Limits(frame_bytes=size)) as gateway, AsyncExitStack() as stack:
        hub, sockets = gateway.actor.hub, []
        for parts in (one_frame, fragments, one_frame, fragments):
            sockets.append(await stack.enter_async_context(raw(gateway)))
            number = max(hub.connections)
            sockets[-1].send(*parts)
            while number not in hub.unfinished.parts:
                await anyio.lowlevel.checkpoint()
        request = f"POST /v1/responses HTTP/1.1\r\nHost: {gateway.address}\r\nContent-Length: {size}\r\n"
        for lost in sockets[:2]:
            reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
            stack.callback(writer.close)
            writer.write(request.encode() + b"\r\n" + blank + blank[1:])
            assert await lost.close_code() == 4429
            assert await lost.reader.read() == b"", "its client need not wait for the end"
        for parts in (fragments, fragments, fragments):  # two requests are older than the last one
            sockets.append(await stack.enter_async_context(raw(gateway)))
            sockets[-1].send(*parts)
        assert (await reader.read()).startswith(b"HTTP/1.1 503 ")
    assert number not in hub.unfinished.parts, "what ends counts no more"
