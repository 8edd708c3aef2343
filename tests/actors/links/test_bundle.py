"""Bundle: one frame a turn, order, waiting for credits, the bound, the end of the link."""

import asyncio
from typing import Any

import msgspec
import pytest

from ramify.actors.kit.mailbox import MailboxClosed, MailboxFull
from ramify.actors.links import bundle as module
from ramify.actors.links.bundle import RETRY_SECONDS, Bundle, CannotEncode

ENCODER = msgspec.msgpack.Encoder()


class StubLink:
    """Takes a frame for each credit."""

    def __init__(self, credits: int = 100) -> None:
        self.credits = credits
        self.frames: list[list[str]] = []
        self.closed = False

    def tell(self, message: list[str], /) -> None:
        if self.closed:
            raise MailboxClosed("link")
        assert self.credits, "a bundle never uses the link's own queue"
        self.credits -= 1
        self.frames.append(message)


def frame(array: Any) -> list[str]:
    """What a link would bring to the other side."""
    messages: list[str] = msgspec.msgpack.decode(ENCODER.encode(array))
    return messages


async def turn() -> None:
    await asyncio.sleep(0)


async def test_a_turn_is_one_frame_in_order() -> None:
    link = StubLink()
    bundle: Bundle[str] = Bundle(link, frame, ENCODER)
    for text in "abc":
        bundle.tell(text)
    assert link.frames == []
    await turn()
    assert link.frames == [["a", "b", "c"]]
    bundle.tell("d")
    await turn()
    await turn()
    assert link.frames == [["a", "b", "c"], ["d"]]


async def test_flush_sends_now_and_once() -> None:
    link = StubLink()
    bundle: Bundle[str] = Bundle(link, frame, ENCODER)
    bundle.put(["a"])
    bundle.tell("b")
    bundle.flush()
    bundle.flush()
    await turn()
    assert link.frames == [["a", "b"]]


async def test_without_credits_messages_wait_and_merge() -> None:
    link = StubLink(credits=1)
    bundle: Bundle[str] = Bundle(link, frame, ENCODER)
    for text in "abc":
        bundle.put([text])
        bundle.flush()
    assert link.frames == [["a"]]
    assert len(bundle) == 2
    link.credits = 5
    await asyncio.sleep(2 * RETRY_SECONDS)
    assert link.frames == [["a"], ["b", "c"]]


async def test_a_peer_that_takes_nothing_is_noticed() -> None:
    bundle: Bundle[str] = Bundle(StubLink(credits=0), frame, ENCODER, most=2)
    bundle.put(["a"])
    bundle.tell("b")
    with pytest.raises(MailboxFull):
        bundle.put(["c"])
    bundle.close()
    with pytest.raises(MailboxFull):
        bundle.put(["d", "e", "f"])  # all, or none
    assert len(bundle) == 0


async def test_the_end_of_the_link_is_somebody_elses_business() -> None:
    link = StubLink()
    link.closed = True
    bundle: Bundle[str] = Bundle(link, frame, ENCODER)
    bundle.put(["a"])
    bundle.flush()
    assert len(bundle) == 0


async def test_sent_returns_when_nothing_waits() -> None:
    link = StubLink(credits=1)
    bundle: Bundle[str] = Bundle(link, frame, ENCODER)
    bundle.put(["a"])
    await bundle.sent()  # at once
    bundle.put(["b"])
    waiting = asyncio.create_task(bundle.sent())
    await asyncio.sleep(2 * RETRY_SECONDS)
    assert not waiting.done()
    link.credits = 1
    async with asyncio.timeout(60):
        await waiting
    assert link.frames == [["a"], ["b"]]
    await bundle.sent()


async def test_a_message_that_cannot_be_encoded_fails_its_teller_alone() -> None:
    link = StubLink()
    bundle: Bundle[Any] = Bundle(link, frame, ENCODER)
    bundle.tell("a")
    for bad in (10**30, "\ud800", {"k": object()}):
        with pytest.raises(CannotEncode):
            bundle.tell(bad)
    bundle.tell("b")
    assert len(bundle) == 2
    await turn()
    assert link.frames == [["a", "b"]]


async def test_what_waits_long_leaves_in_several_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FRAME_BYTES", 10)
    link = StubLink(credits=0)
    bundle: Bundle[str] = Bundle(link, frame, ENCODER)
    told = [str(i) * 4 for i in range(5)]
    for text in told:
        bundle.put([text])
    link.credits = 2
    bundle.flush()
    assert link.frames == [told[:2], told[2:4]]
    assert len(bundle) == 1
    link.credits = 1
    bundle.flush()
    assert link.frames[2:] == [told[4:]]
    await bundle.sent()
    bundle.close()
