"""Two switches that forward to each other: what stays, what travels, what a death leaves behind."""

import asyncio
from collections.abc import Sequence

import pytest

from ramify.actors.front.peer_router import PeerRouter
from ramify.actors.kit.mailbox import Mailbox, MailboxFull
from ramify.actors.links.bundle import CannotEncode
from ramify.protocol.messages import (
    CloseSocket,
    Deliver,
    Detached,
    Frame,
    Opened,
    OpenRefused,
    OpenSession,
    SessionMessage,
    Throttled,
)
from ramify.protocol.wire import Append, Error, Open, Pong

HERE, THERE = 0, 1  # workers; so are their first sockets and sessions, modulo MAX_WORKERS
SOCKET, SESSION = 64, 65  # a socket here, a session there


class Pair:
    """Gateway processes 0 and 1, both serving; `frames`: bytes that went between them."""

    def __init__(self, capacity: int = 100) -> None:
        self.frames = 0
        self.here = PeerRouter(HERE, self._forward, 256)
        self.there = PeerRouter(THERE, self._forward, 256)
        for router in (self.here, self.there):
            router.peers({HERE, THERE})
        self.session: Mailbox[SessionMessage] = Mailbox("session", capacity)
        self.there.sessions.add(SESSION, self.session)

    def _forward(self, worker: int, body: bytes) -> None:
        self.frames += 1
        (self.here, self.there)[worker].receive(body)

    def open(self, session: str | None = "s_1_x") -> OpenSession:
        message = OpenSession(SOCKET, Open(client="c", session=session), [])
        self.here.directory.tell(message)
        return message

    async def attach(self) -> None:
        """A socket here opens the session there."""
        self.open()
        await turn()
        self.there.to_directory.drain_nowait()
        self.there.gateway.tell(Opened(SOCKET, SESSION))
        await turn()
        assert self.here.to_gateway.drain_nowait() == [Opened(SOCKET, SESSION)]


async def turn() -> None:
    await asyncio.sleep(0)


async def test_new_and_own_sessions_stay() -> None:
    pair = Pair()
    opens: Sequence[OpenSession] = [pair.open(None), pair.open("s_0_mine"), pair.open("s_7_nobody")]
    await turn()
    assert pair.here.to_directory.drain_nowait() == opens
    pair.here.gateway.tell(Opened(SOCKET, 128))
    assert pair.here.to_gateway.drain_nowait() == [Opened(SOCKET, 128)]
    assert pair.frames == 0


async def test_a_session_elsewhere_is_reached_in_one_frame_a_turn() -> None:
    pair = Pair()
    message = pair.open()
    await turn()
    assert pair.there.to_directory.drain_nowait() == [message]
    assert pair.frames == 1
    pong = Deliver(SOCKET, [Pong(n=1, load={})])
    pair.there.gateway.tell(Opened(SOCKET, SESSION))
    pair.there.gateway.tell(pong)
    await turn()
    assert pair.frames == 2
    assert pair.here.to_gateway.drain_nowait() == [Opened(SOCKET, SESSION), pong]
    frame = Frame(SOCKET, [Append(id=1, text="x")])
    assert pair.here.sessions.tell(SESSION, frame)
    assert pair.here.sessions.tell(SESSION, Throttled(SOCKET))
    assert pair.here.sessions.tell(SESSION, Detached(SOCKET))
    await turn()
    assert pair.frames == 3
    assert pair.session.drain_nowait() == [frame, Throttled(SOCKET), Detached(SOCKET)]
    assert pair.here.relayed == pair.there.relayed == 0


async def test_a_busy_session_refuses_frames_but_hears_of_its_sockets() -> None:
    pair = Pair(capacity=1)
    await pair.attach()
    pair.session.tell(Detached(1))
    pair.here.sessions.tell(SESSION, Frame(SOCKET, [Append(id=5, text="x")]))
    pair.here.sessions.tell(SESSION, Detached(SOCKET))
    await turn()
    await turn()
    (refusal,) = pair.here.to_gateway.drain_nowait()
    assert isinstance(refusal, Deliver)
    (error,) = refusal.messages
    assert isinstance(error, Error)
    assert (error.id, error.code) == (5, "overloaded")
    assert pair.session.drain_nowait() == [Detached(1)]
    await turn()
    await turn()
    assert pair.session.drain_nowait() == [Detached(SOCKET)]


async def test_a_new_process_asks_nobody_before_it_knows_its_neighbours() -> None:
    """Else a session that a peer has would be one that does not exist."""
    sent: list[int] = []
    router = PeerRouter(HERE, lambda worker, body: sent.append(worker), 256)
    own, abroad, lost = (
        OpenSession(64 * n, Open(client="c", session=session), [])
        for n, session in enumerate(("s_0_x", "s_1_x", "s_7_x"), 1)
    )
    for message in (own, abroad, lost):
        router.directory.tell(message)
    assert router.to_directory.drain_nowait() == [own]
    router.peers({THERE})  # it does not know this one yet: its answer would go nowhere
    await turn()
    assert sent == []
    router.peers({HERE, THERE})
    await turn()
    assert sent == [THERE]
    assert router.to_directory.drain_nowait() == [lost]


async def test_a_refused_open_is_forgotten() -> None:
    pair = Pair()
    pair.open()
    await turn()
    pair.there.gateway.tell(OpenRefused(SOCKET, Error(code="forbidden", message="key")))
    await turn()
    assert len(pair.here.to_gateway.drain_nowait()) == 1
    assert pair.here.relayed == 0


async def test_when_the_owner_dies_its_sockets_here_are_closed() -> None:
    pair = Pair()
    await pair.attach()
    other = OpenSession(128, Open(client="d", session="s_1_y"), [])  # has no answer yet
    pair.here.directory.tell(other)
    pair.here.peers({HERE})
    closed = pair.here.to_gateway.drain_nowait()
    assert {(c.socket, c.code) for c in closed if isinstance(c, CloseSocket)} == {
        (SOCKET, 1012),
        (128, 1012),
    }
    assert pair.here.relayed == 0
    assert not pair.here.sessions.tell(SESSION, Detached(SOCKET))
    assert pair.here.sessions.tell(SESSION, Frame(SOCKET, []))  # no answer: the socket is being closed
    pair.here.directory.tell(other)  # its session cannot be anywhere now
    assert pair.here.to_directory.drain_nowait() == [other]


async def test_when_a_visitors_process_dies_sessions_here_lose_it() -> None:
    pair = Pair()
    await pair.attach()
    pair.there.peers({THERE})
    assert pair.session.drain_nowait() == [Detached(SOCKET)]
    assert pair.there.relayed == 0
    pair.there.gateway.tell(Deliver(SOCKET, [Pong(n=1, load={})]))  # to nobody
    pair.there.gateway.tell(Opened(SOCKET, SESSION))  # late: it is gone
    assert pair.session.drain_nowait() == [Detached(SOCKET)]


async def test_frames_are_refused_while_the_way_to_the_neighbour_is_full() -> None:
    """Notices are kept: they must arrive."""
    behind = True
    sent: list[int] = []
    router = PeerRouter(HERE, lambda worker, body: sent.append(worker), 256, behind=lambda: behind)
    router.peers({HERE, THERE})
    with pytest.raises(MailboxFull):
        router.sessions.tell(SESSION, Frame(SOCKET, []))
    assert router.sessions.tell(SESSION, Throttled(SOCKET))
    await turn()
    assert sent == [THERE]
    behind = False
    assert router.sessions.tell(SESSION, Frame(SOCKET, []))


async def test_what_cannot_be_forwarded_now_goes_later() -> None:
    bodies: list[bytes] = []
    full = True

    def forward(worker: int, body: bytes) -> None:
        if full:
            raise MailboxFull("the link")
        bodies.append(body)

    router = PeerRouter(HERE, forward, 256)
    router.peers({HERE, THERE})
    router.sessions.tell(SESSION, Throttled(SOCKET))
    await turn()
    router.sessions.tell(SESSION, Detached(SOCKET))
    full = False
    async with asyncio.timeout(60):
        while not bodies:
            await asyncio.sleep(0.001)
    peer = PeerRouter(THERE, lambda worker, body: None, 256)
    session: Mailbox[SessionMessage] = Mailbox("session", 10)
    peer.sessions.add(SESSION, session)
    peer.receive(bodies[0])
    assert session.drain_nowait() == [Throttled(SOCKET), Detached(SOCKET)]


async def test_sockets_that_wait_to_hear_of_neighbours_are_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ramify.actors.front.peer_router.OPENS", 2)
    router = PeerRouter(HERE, lambda worker, body: None, 256)
    for socket in (64, 128):
        router.directory.tell(OpenSession(socket, Open(client="c", session="s_1_x"), []))
    with pytest.raises(MailboxFull):
        router.directory.tell(OpenSession(192, Open(client="c", session="s_1_x"), []))


async def test_a_message_that_cannot_be_encoded_fails_its_teller_alone() -> None:
    pair = Pair()
    await pair.attach()
    pong = Deliver(SOCKET, [Pong(n=1, load={})])
    pair.there.gateway.tell(pong)
    with pytest.raises(CannotEncode):
        pair.there.gateway.tell(Deliver(SOCKET, [Pong(n=2**70, load={})]))
    pair.there.gateway.tell(pong)
    await turn()
    assert pair.here.to_gateway.drain_nowait() == [pong, pong]


async def test_an_open_that_cannot_be_encoded_leaves_nothing_behind() -> None:
    pair = Pair()
    bad = OpenSession(SOCKET, Open(client="c", session="s_1_\ud800"), [])
    with pytest.raises(CannotEncode):
        pair.here.directory.tell(bad)
    await turn()
    assert pair.here.relayed == 0
    assert pair.frames == 0
