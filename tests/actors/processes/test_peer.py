"""The other end of a link: order, its end when it takes nothing, and what is asked of it."""

from typing import Any

import pytest

from ramify.actors.kit.mailbox import MailboxClosed, MailboxFull
from ramify.actors.processes.messages import AskMetrics
from ramify.actors.processes.peer import MOST_ASKED, Peer, Scrapes


class Link:
    """Takes frames, or raises."""

    credits = 9

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.closed = self.aborted = False
        self.raises: Exception | None = None
        self.granted = 0

    def tell(self, message: Any, /) -> None:
        if self.raises is not None:
            raise self.raises
        self.told.append(message)

    def consumed(self, count: int) -> None:
        self.granted += count

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.closed = self.aborted = True


@pytest.fixture
def link() -> Link:
    return Link()


async def test_what_was_put_before_goes_first(link: Link) -> None:
    peer = Peer()
    peer.tell("nobody is there")
    peer.consumed()
    peer.attach(link)  # type: ignore[arg-type]
    bundle = peer.bundle(lambda messages: ("many", bytes(messages)))
    bundle.put([1])
    peer.tell("one")
    assert link.told == [("many", b"\x91\x01"), "one"]
    peer.consumed(2)
    assert (peer.there, link.granted) == (True, 2)
    bundle.put([2])
    peer.close()
    assert (peer.there, len(bundle), link.closed, link.aborted) == (False, 0, True, False)


async def test_one_that_takes_nothing_is_ended_for_its_first_reason(link: Link) -> None:
    ended: list[int] = []
    peer = Peer(lambda: ended.append(1))
    peer.attach(link)  # type: ignore[arg-type]
    link.raises = MailboxClosed("gone")
    peer.tell("x")  # its end is under way
    assert (peer.why, ended) == ("", [])
    link.raises = MailboxFull("no credits")
    peer.tell("x")
    peer.hung("it is silent")
    assert (peer.why, link.aborted, ended) == ("it hung: no credits", True, [1, 1])


def test_answers_find_who_asked() -> None:
    scrapes, asked, got = Scrapes(), [], []
    for _ in range(2):
        scrapes.ask(asked.append, got.append)
    assert asked == [AskMetrics(1), AskMetrics(2)]
    scrapes.answered(2, b"two")
    scrapes.answered(2, b"again")
    scrapes.answered(7, b"nobody")
    for _ in range(MOST_ASKED):
        scrapes.ask(asked.append, got.append)
    scrapes.answered(1, b"far too late")
    assert got == [b"two"]
