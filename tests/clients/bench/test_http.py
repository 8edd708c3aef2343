"""Server-sent events in any pieces, and connections that are kept."""

import asyncio
import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ramify.clients.bench.http import ChunkedBody, HttpConnection, SseReader
from ramify.clients.bench.session import BenchFailed

BODY = b'{"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 3}}'


@given(
    st.lists(
        st.lists(st.binary(max_size=9).filter(lambda b: not b.strip(b"ab")), min_size=1, max_size=3)
    ),
    st.sampled_from([b"\n", b"\r\n"]),
    st.lists(st.integers(0, 400), max_size=20),
)
def test_events_in_any_pieces(events: list[list[bytes]], end: bytes, cuts: list[int]) -> None:
    body = b": hello" + end
    for lines in events:
        body += b"id: 1" + end + b"".join(b"data: " + line + end for line in lines) + end
    reader, found = SseReader(), []
    marks = sorted({0, len(body), *(cut % (len(body) + 1) for cut in cuts)})
    for start, stop in itertools.pairwise(marks):
        found += reader.feed(body[start:stop])
    assert found == [b"\n".join(lines) for lines in events]
    assert reader.clean


def test_half_an_event_shows() -> None:
    reader = SseReader()
    assert reader.feed(b"data:x\n\ndata: y\n") == [b"x"]
    assert not reader.clean
    assert reader.feed(b"\n") == [b"y"]
    assert reader.clean
    assert reader.feed(b"da") == []
    assert not reader.clean


@given(st.lists(st.binary(min_size=1, max_size=40)), st.lists(st.integers(0, 400), max_size=20))
def test_chunks_in_any_pieces(chunks: list[bytes], cuts: list[int]) -> None:
    body = b"".join(b"%X;x=y\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n\r\n"
    reader, found = ChunkedBody(), b""
    marks = sorted({0, len(body), *(cut % (len(body) + 1) for cut in cuts)})
    for start, stop in itertools.pairwise(marks):
        assert not reader.done
        found += reader.feed(body[start:stop])
    assert found == b"".join(chunks)
    assert reader.done


@pytest.mark.parametrize(
    "body",
    [
        b"x\r\n",
        b"-2\r\n",
        b"+1\r\na\r\n",
        b"f" * 5000 + b"\r\n",
        b"1\r\nab\r\n\r\n",
        b"0\r\nTrailer: x\r\n\r\n",
    ],
)
def test_bad_chunks(body: bytes) -> None:
    with pytest.raises(BenchFailed, match="chunk"):
        ChunkedBody().feed(body)


async def post(connection: HttpConnection) -> list[bytes]:
    return [data async for _, events in connection.post("/generate", BODY) for data in events]


async def test_a_connection_is_used_again(http_serving: Any) -> None:
    async with http_serving() as server:
        connection = HttpConnection(server.url + "/", "secret")
        await connection.connect()
        for _ in range(3):
            events = await post(connection)
            assert len(events) == 4
            assert events[-1] == b"[DONE]"
        assert server.connections == 1
        assert "Bearer secret" in server.heads[0]
        connection.close()


async def test_a_connection_that_the_server_ended_while_idle() -> None:
    answer = (
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"9\r\ndata: x\n\n\r\n0\r\n\r\n"
    )
    closed = asyncio.Event()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(BODY)
        writer.write(answer)
        writer.close()
        await writer.wait_closed()
        closed.set()

    async with await asyncio.start_server(talk, "127.0.0.1", 0) as server:
        connection = HttpConnection(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", None)
        for _ in range(2):
            assert await post(connection) == [b"x"]
            await closed.wait()
            while not connection._reader.at_eof():
                await asyncio.sleep(0)
        connection.close()


@pytest.mark.parametrize(
    ("fault", "text"), [("status", "answered HTTP 400.*no such thing"), ("broken", "breaks off")]
)
async def test_faults(http_serving: Any, fault: str, text: str) -> None:
    async with http_serving(fault=fault) as server:
        connection = HttpConnection(server.url, None)
        with pytest.raises(BenchFailed, match=text):
            await post(connection)
        connection.close()


async def test_an_answer_that_is_no_http() -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"hello\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(talk, "127.0.0.1", 0) as server:
        connection = HttpConnection(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", None)
        with pytest.raises(BenchFailed, match="no HTTP"):
            await post(connection)
        connection.close()
