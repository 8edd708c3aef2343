"""Links on real socket pairs: both kinds of end, batching, credits, and every way to end."""

import asyncio
import socket
import struct
from typing import Any

import msgspec
import pytest

from ramify.actors.kit.mailbox import MailboxClosed, MailboxFull
from ramify.actors.links.blocking import BlockingLink
from ramify.actors.links.frames import LinkClosed, LinkError
from ramify.actors.links.link import Link, open_link

GRANT = 0x8000_0000


class End:
    """One end of a link that records what it is told."""

    def __init__(self, consume: bool = True) -> None:
        self.consume = consume
        self.messages: list[Any] = []
        self.ends: list[Exception | None] = []
        self.changed = asyncio.Event()
        self.link: Link[Any, Any]

    async def open(self, sock: socket.socket, **settings: Any) -> "End":
        self.link = await open_link(
            "test",
            sock,
            msgspec.msgpack.Decoder(int | str),
            msgspec.msgpack.Encoder(),
            on_message=self.on_message,
            on_end=self.on_end,
            **settings,
        )
        return self

    def on_message(self, message: Any) -> None:
        self.messages.append(message)
        if self.consume:
            self.link.consumed()
        self.changed.set()

    def on_end(self, error: Exception | None) -> None:
        self.ends.append(error)
        self.changed.set()

    async def until(self, count: int) -> None:
        while len(self.messages) < count:
            self.changed.clear()
            await asyncio.wait_for(self.changed.wait(), 60)

    async def granted(self) -> None:
        for _ in range(1000):
            if self.link.credits:
                return
            await asyncio.sleep(0)
        raise AssertionError("the peer granted nothing")

    async def ended(self) -> Exception | None:
        await asyncio.wait_for(self.link.wait_closed(), 60)
        assert len(self.ends) == 1
        return self.ends[0]


async def pair(consume: bool = True, **settings: Any) -> tuple[End, End]:
    left, right = socket.socketpair()
    return await End(consume).open(left, **settings), await End(consume).open(right, **settings)


async def raw(**settings: Any) -> tuple[End, socket.socket]:
    left, right = socket.socketpair()
    right.setblocking(False)
    return await End().open(left, **settings), right


async def close(*ends: End) -> None:
    for end in ends:
        end.link.close()
    for end in ends:
        await end.link.wait_closed()


async def test_messages_pass_both_ways_in_order_beyond_the_window() -> None:
    a, b = await pair(window=4, queue=1000)
    for i in range(500):
        a.link.tell(i)
        b.link.tell(str(i))
    await a.until(500)
    await b.until(500)
    assert b.messages == list(range(500))
    assert a.messages == [str(i) for i in range(500)]
    await close(a, b)
    assert a.ends == b.ends == [None]


async def test_first_message_goes_out_at_once_and_the_rest_in_one_write() -> None:
    end, peer = await raw()
    await asyncio.sleep(0)
    peer.recv(100)  # our opening grant
    peer.send(struct.pack("<I", GRANT | 100))
    loop = asyncio.get_running_loop()
    await end.granted()
    for i in range(10):
        end.link.tell(i)
    assert peer.recv(1000) == struct.pack("<IB", 1, 0)  # without any turn of the loop
    with pytest.raises(BlockingIOError):
        peer.recv(1000)
    rest = await loop.sock_recv(peer, 1000)
    assert rest == b"".join(struct.pack("<IB", 1, i) for i in range(1, 10))
    await close(end)
    peer.close()


async def test_tell_raises_when_credits_and_queue_are_used_up() -> None:
    a, b = await pair(consume=False, window=4, queue=3)
    await a.granted()
    for i in range(7):
        a.link.tell(i)
    with pytest.raises(MailboxFull, match="test: no credits, and 3 messages wait"):
        a.link.tell(7)
    await b.until(4)
    with pytest.raises(MailboxFull):  # received, not consumed
        a.link.tell(7)
    b.link.consumed(4)
    await b.until(7)
    a.link.tell(7)
    b.link.consumed(3)
    await b.until(8)
    assert b.messages == list(range(8))
    await close(a, b)


async def test_peer_that_never_reads_does_not_block_tell() -> None:
    end, peer = await raw(queue=10, window=16)
    peer.send(struct.pack("<I", GRANT | 16))
    await end.granted()
    for _ in range(26):
        end.link.tell("x" * (1 << 20))
    with pytest.raises(MailboxFull):
        end.link.tell("")
    end.link.abort()
    assert await end.ended() is None
    peer.close()


async def test_closed_link_refuses() -> None:
    a, b = await pair()
    a.link.tell(1)
    await b.until(1)
    a.link.tell(2)
    a.link.close()
    with pytest.raises(MailboxClosed):
        a.link.tell(3)
    assert a.link.closed
    assert await b.ended() is None
    assert b.messages == [1, 2]  # what was told before the close arrives
    with pytest.raises(MailboxClosed):
        b.link.tell(3)
    await a.ended()


async def test_oversized_message_leaves_the_link_usable() -> None:
    a, b = await pair(max_frame=100)
    with pytest.raises(LinkError, match="at most 100"):
        a.link.tell("x" * 200)
    a.link.tell("fits")
    await b.until(1)
    assert b.messages == ["fits"]
    await close(a, b)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"GET /metrics HTTP/1.1\r\n\r\n", "bytes: at most"),
        (struct.pack("<I", 1) + b"\xc1", "does not decode"),
        (struct.pack("<IB", 1, 7) * 5, "more messages than it was granted"),
    ],
)
async def test_garbage_ends_the_link_with_its_reason(data: bytes, message: str) -> None:
    end, peer = await raw(window=4, max_frame=1 << 20)
    peer.send(data)
    error = await end.ended()
    assert isinstance(error, LinkError)
    assert message in str(error)
    peer.close()


@pytest.mark.parametrize("cut", [1, 3, 4, 5])
async def test_eof_in_mid_frame_is_an_error(cut: int) -> None:
    end, peer = await raw()
    peer.send(struct.pack("<IB", 1, 7) + (struct.pack("<I", 2) + b"\xcc\xff")[:cut])
    peer.shutdown(socket.SHUT_WR)
    error = await end.ended()
    assert isinstance(error, LinkError)
    assert f"after {cut} bytes" in str(error)
    assert end.messages == [7]
    peer.close()


async def test_reset_by_the_peer_is_an_error() -> None:
    end, peer = await raw()
    peer.close()  # our grant is unread in it
    assert isinstance(await end.ended(), OSError)


async def test_eof_between_frames_is_clean() -> None:
    end, peer = await raw()
    peer.recv(100)
    peer.send(struct.pack("<IB", 1, 7))
    peer.close()
    assert await end.ended() is None
    assert end.messages == [7]


async def test_half_frames_wait_for_their_rest() -> None:
    end, peer = await raw()
    whole = struct.pack("<I", 6) + msgspec.msgpack.encode("hello")
    for byte in whole:
        peer.send(bytes([byte]))
        for _ in range(3):
            await asyncio.sleep(0)
    await end.until(1)
    assert end.messages == ["hello"]
    await close(end)
    peer.close()


async def test_error_in_on_message_ends_the_link() -> None:
    left, right = socket.socketpair()
    ends: list[Exception | None] = []

    def fail(message: int) -> None:
        raise RuntimeError("boom")

    link: Link[int, int] = await open_link(
        "test",
        left,
        msgspec.msgpack.Decoder(int),
        msgspec.msgpack.Encoder(),
        on_message=fail,
        on_end=ends.append,
    )
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
    right.send(struct.pack("<IB", 1, 7))
    await link.wait_closed()
    assert [str(error) for error in ends] == ["boom"]
    right.close()


def blocking(sock: socket.socket, **settings: Any) -> BlockingLink[Any, Any]:
    decoder: Any = msgspec.msgpack.Decoder(int | str)
    return BlockingLink(sock, decoder, msgspec.msgpack.Encoder(), **settings)


async def test_blocking_end_talks_to_the_asyncio_end() -> None:
    left, right = socket.socketpair()
    end = await End().open(left, window=4)

    def echo() -> int:
        link = blocking(right, window=4)
        count = 0
        try:
            while True:
                link.send(link.receive(None))
                count += 1
        except LinkClosed:
            return count
        finally:
            link.close()

    thread = asyncio.create_task(asyncio.to_thread(echo))
    for i in range(200):
        end.link.tell(i)
    await end.until(200)
    assert end.messages == list(range(200))
    await close(end)
    assert await thread == 200


def test_blocking_receive_times_out() -> None:
    left, right = socket.socketpair()
    a, b = blocking(left), blocking(right)
    assert a.receive(0) is None
    assert a.receive(0.001) is None
    b.receive(0)  # reads a's grant
    b.send("now")
    assert a.receive(0.001) == "now"
    a.close()
    with pytest.raises(LinkClosed):
        b.receive(None)
    with pytest.raises(LinkClosed):
        b.send("nobody")
    b.close()
    b.close()


def test_blocking_end_reports_mid_frame_eof_and_garbage() -> None:
    left, right = socket.socketpair()
    a = blocking(left)
    right.send(b"\x05\x00\x00")
    right.shutdown(socket.SHUT_WR)
    with pytest.raises(LinkError, match="mid-frame"):
        a.receive(None)
    a.close()
    right.close()
    left, right = socket.socketpair()
    a = blocking(left)
    right.send(b"\xff\xff\xff\x7f")
    with pytest.raises(LinkError, match="at most"):
        a.receive(None)
    a.close()
    right.close()


async def test_last_message_arrives_although_the_sender_never_read() -> None:
    left, right = socket.socketpair()
    end = await End().open(left)

    def part() -> None:
        link = blocking(right)
        link.receive(None)
        link.send("last words")
        link.finish(5.0)
        link.close()

    thread = asyncio.create_task(asyncio.to_thread(part))
    for i in range(50):
        end.link.tell(i)
    await end.until(1)
    assert end.messages == ["last words"]
    await close(end)
    await thread
