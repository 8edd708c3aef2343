"""The pure core of links: two cores talking in memory, and a peer that breaks the rules."""

import struct
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ramify.actors.links.frames import LinkCore, LinkError


def core(window: int = 8, queue: int = 8, max_frame: int = 1000, kind: Any = int) -> LinkCore[Any, Any]:
    return LinkCore(
        msgspec.msgpack.Decoder(kind),
        msgspec.msgpack.Encoder(),
        window=window,
        queue=queue,
        max_frame=max_frame,
    )


def frame(body: bytes) -> bytes:
    return struct.pack("<I", len(body)) + body


def test_nothing_is_sent_before_the_peer_grants() -> None:
    a, b = core(), core()
    opening = a.take()
    a.send(1)
    a.send(2)
    assert a.take() == b""
    assert a.waiting == 2
    a.feed(b.take())
    assert b.feed(opening + a.take()) == [1, 2]
    assert a.waiting == 0


def test_credits_and_queue_bound_the_sender() -> None:
    a, b = core(queue=2), core(window=3)
    a.feed(b.take())
    for i in range(5):
        assert not a.full
        a.send(i)
    assert a.full
    with pytest.raises(LinkError, match="2 messages wait"):
        a.send(5)
    assert b.feed(a.take()) == [0, 1, 2]
    a.feed(b.take())
    assert a.full  # nothing was consumed
    b.consumed(2)
    a.feed(b.take())
    assert not a.full
    assert b.feed(a.take()) == [3, 4]


def test_grants_are_batched() -> None:
    a = core(window=8)
    a.take()
    grants = []
    for _ in range(8):
        a.consumed()
        grants.append(a.take())
    assert [bool(grant) for grant in grants] == [False, False, False, True] * 2


def test_message_over_the_cap_is_refused_by_the_sender() -> None:
    a = core(max_frame=10)
    with pytest.raises(LinkError, match="a str of 31 bytes: a frame holds at most 10"):
        a.send("x" * 30)
    assert a.waiting == 0


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (struct.pack("<I", 1001), "a frame of 1001 bytes"),
        (frame(b"\xc1"), "does not decode"),
        (frame(b""), "does not decode"),
        (frame(b"\x01\x01"), "does not decode"),
        (frame(msgspec.msgpack.encode("text")), "does not decode"),
        (b"GET / HTTP/1.1\r\n\r\n", "bytes: at most"),
        (frame(b"\x01") * 9, "more messages than it was granted"),
    ],
)
def test_broken_peer_is_an_error(data: bytes, message: str) -> None:
    with pytest.raises(LinkError, match=message):
        core().feed(data)


def test_deep_nesting_is_an_error() -> None:
    with pytest.raises(LinkError, match="does not decode"):
        core(kind=Any, max_frame=1 << 20).feed(frame(b"\x91" * 100_000))


def test_end_in_mid_frame_is_an_error() -> None:
    whole = frame(b"\x01")
    for cut in range(1, len(whole)):
        a = core()
        assert a.feed(whole[:cut]) == []
        with pytest.raises(LinkError, match=f"after {cut} bytes"):
            a.end()
    a = core()
    assert a.feed(whole) == [1]
    a.end()


@settings(derandomize=True, deadline=None)
@given(
    st.lists(st.one_of(st.binary(max_size=40), st.integers(0, 5)), max_size=80),
    st.integers(1, 6),
    st.lists(st.integers(1, 30), min_size=1, max_size=10),
)
def test_any_interleaving_and_any_cut_delivers_in_order(
    operations: list[bytes | int], window: int, cuts: list[int]
) -> None:
    """Bytes are sent, a number moves that many pieces of the stream and consumes what arrives."""
    a, b = core(window=window, queue=100, kind=bytes), core(window=window, queue=100, kind=bytes)
    wires = {0: bytearray(), 1: bytearray()}  # a -> b, b -> a
    sent: list[bytes] = []
    received: list[bytes] = []

    def move(pieces: int) -> None:
        for piece in range(pieces):
            wires[0] += a.take()
            wires[1] += b.take()
            cut = cuts[piece % len(cuts)]
            for wire, to in ((wires[0], b), (wires[1], a)):
                data, wire[:] = bytes(wire[:cut]), wire[cut:]
                arrived = to.feed(data)
                received.extend(arrived)
                assert to is b or not arrived
                b.consumed(len(arrived))

    for operation in operations:
        if isinstance(operation, bytes):
            a.send(operation)
            sent.append(operation)
        else:
            move(operation)
    while len(received) < len(sent):
        move(10)
    assert received == sent


def test_big_frames_in_small_pieces_are_not_copied_each_time() -> None:
    a = core(kind=bytes, max_frame=1 << 23)
    data = frame(msgspec.msgpack.encode(bytes(1 << 22)))
    messages = []
    for at in range(0, len(data), 4096):  # 1024 pieces: quadratic copying would move 2 GB
        messages += a.feed(data[at : at + 4096])
    assert messages == [bytes(1 << 22)]
