"""The cheap WebSocket: frames in pieces, and against a real server."""

import asyncio
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from websockets.asyncio.server import ServerConnection, serve
from websockets.typing import Subprotocol

from ramify.clients.bench.websocket import BINARY, PING, TEXT, ClientWebSocket, FrameReader

SIZES = (0, 1, 125, 126, 127, 65535, 65536, 70000)


def server_frame(payload: bytes, opcode: int = BINARY, *, fin: bool = True) -> bytes:
    head = bytes([(0x80 if fin else 0) | opcode])
    if len(payload) < 126:
        head += bytes([len(payload)])
    elif len(payload) < 1 << 16:
        head += b"\x7e" + len(payload).to_bytes(2)
    else:
        head += b"\x7f" + len(payload).to_bytes(8)
    return head + payload


def pieces(data: bytes, cuts: list[int]) -> Iterator[bytes]:
    marks = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    for start, end in itertools.pairwise(marks):
        yield data[start:end]


@given(st.lists(st.binary(max_size=300), max_size=6), st.lists(st.integers(0, 3000), max_size=12))
def test_frames_in_any_pieces(payloads: list[bytes], cuts: list[int]) -> None:
    reader = FrameReader()
    data = b"".join(server_frame(payload) for payload in payloads)
    found = [message for piece in pieces(data, cuts) for message in reader.feed(piece)]
    assert found == [(BINARY, payload) for payload in payloads]


@pytest.mark.parametrize("size", SIZES)
def test_lengths_byte_by_byte_at_the_head(size: int) -> None:
    data = server_frame(bytes(size), TEXT)
    reader = FrameReader()
    found = [m for piece in pieces(data, list(range(12))) for m in reader.feed(piece)]
    assert found == [(TEXT, bytes(size))]


def test_fragments_with_a_ping_between() -> None:
    frames = [
        server_frame(b"ab", TEXT, fin=False),
        server_frame(b"", PING),
        server_frame(b"cd", 0, fin=False),
        server_frame(b"e", 0),
        server_frame(b"f"),
    ]
    found = list(FrameReader().feed(b"".join(frames)))
    assert found == [(PING, b""), (TEXT, b"abcde"), (BINARY, b"f")]


class Client:
    """A connection, and what came."""

    def __init__(self) -> None:
        self.got: asyncio.Queue[bytes] = asyncio.Queue()
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def connect(self, port: int, **changes: Any) -> ClientWebSocket:
        settings: dict[str, Any] = {"subprotocol": "x+msgpack", "token": None} | changes
        return await ClientWebSocket.connect(
            f"ws://127.0.0.1:{port}/here",
            receive=lambda _, payload: self.got.put_nowait(payload),
            lost=self.lost.set_result,
            **settings,
        )


async def echo(socket: ServerConnection) -> None:
    assert socket.request is not None
    await socket.send(socket.request.path + socket.request.headers.get("Authorization", ""))
    async for message in socket:
        if message == b"ping":
            await (await socket.ping())
        elif message == b"end":
            await socket.close(4429, "enough")
        await socket.send(message)


async def test_against_a_real_server() -> None:
    async with serve(
        echo, "127.0.0.1", 0, subprotocols=[Subprotocol("x+msgpack")], max_size=None
    ) as server:
        client = Client()
        socket = await client.connect(server.sockets[0].getsockname()[1], token="secret")
        assert await client.got.get() == b"/hereBearer secret"
        for size in SIZES:
            socket.send(bytes(size))
            assert await client.got.get() == bytes(size)
        socket.send(b"ping")  # comes back only after our pong
        assert await client.got.get() == b"ping"
        socket.send(b"end")
        assert "4429 enough" in await client.lost


async def test_a_refusal_is_told() -> None:
    async def refuse(connection: ServerConnection, request: Any) -> Any:
        return connection.respond(401, "who are you?")

    async with serve(echo, "127.0.0.1", 0, process_request=refuse) as server:
        with pytest.raises(ConnectionError, match=r"401.*who are you"):
            await Client().connect(server.sockets[0].getsockname()[1])
