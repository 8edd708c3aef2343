"""What sessions of another process say, while cache and scheduler have no room, and after its end."""

import asyncio
from typing import Any

import msgspec

from ramify.actors.front.core_messages import FromCore, ToSessions
from ramify.actors.front.gateway_messages import FromEngine
from ramify.actors.front.interface import Core
from ramify.actors.front.remote_sessions import RemoteSessions
from ramify.actors.kit.mailbox import LimitedAddress, Mailbox
from ramify.actors.processes.messages import decoder, encoder
from ramify.protocol import messages as m
from ramify.protocol.cluster import UnlistenKv
from ramify.protocol.sampling import SamplingParams
from ramify.protocol.wire import ServerInfo

SESSION = 64
HANDLE, REQUEST = SESSION << 32 | 1, SESSION << 32 | 2


class StubLink:
    """Takes frames as its peer would read them."""

    def __init__(self) -> None:
        self.credits = 10
        self.closed = False
        self.done = 0
        self.told: list[tuple[int, FromCore]] = []

    def tell(self, message: Any, /) -> None:
        frame = decoder(FromEngine).decode(encoder().encode(message))
        assert isinstance(frame, ToSessions)
        self.told += frame.messages

    def consumed(self, count: int) -> None:
        self.done += count

    def close(self) -> None:
        self.closed = True


class Rig:
    def __init__(self, room: int = 2) -> None:
        self.cache: Mailbox[Any] = Mailbox("cache", 100)
        self.scheduler: Mailbox[Any] = Mailbox("scheduler", 100)
        self.grammar: Mailbox[Any] = Mailbox("grammar", 100)
        self.core = Core(
            LimitedAddress(self.cache, room),
            LimitedAddress(self.scheduler, room),
            LimitedAddress(self.grammar, room),
            ServerInfo(version=1, epoch="e", model="m"),
            100,
            384,
        )
        self.link = StubLink()
        self.sessions = RemoteSessions(self.core.tell)
        self.sessions.attach(self.link)  # type: ignore[arg-type]

    def take(self, *messages: Any) -> None:
        self.sessions.take(list(messages))


def submit() -> m.Submit:
    return m.Submit(REQUEST, HANDLE, 1, 1, SamplingParams())


async def until(condition: Any) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.001)


async def test_what_finds_no_room_waits_in_order_and_holds_the_credits_back() -> None:
    rig = Rig()
    extends = [m.ExtendBranch(HANDLE, bytes([i])) for i in range(5)]
    rig.take(m.OpenBranch(HANDLE), *extends, submit())
    rig.take(m.CancelRequest(REQUEST))
    assert rig.link.done == 0
    assert len(rig.cache) == 2
    assert len(rig.scheduler) == 0  # a request must not overtake its branch
    told: list[Any] = []

    def emptied() -> bool:
        told.extend(rig.cache.drain_nowait())
        return len(rig.scheduler) == 2

    await until(emptied)
    assert told == [m.OpenBranch(HANDLE), *extends]
    assert rig.scheduler.drain_nowait() == [submit(), m.CancelRequest(REQUEST)]
    assert rig.link.done == 2
    assert rig.sessions.live == {SESSION}
    assert rig.sessions.heard == 1


async def test_each_message_reaches_its_actor_and_what_is_left_is_given_back() -> None:
    rig = Rig(room=10)
    opened = [m.OpenBranch(session << 32 | 1) for session in (1, 2, 3, 4)]
    rig.take(*opened, m.CancelRequest(1), m.Abandon(1), m.DropSessions([2]), m.Reopen(4))
    assert rig.cache.drain_nowait() == [*opened, m.DropSessions([2]), m.Reopen(4)]
    assert rig.scheduler.drain_nowait() == [m.CancelRequest(1)]
    assert rig.grammar.drain_nowait() == [m.Abandon(1)]
    rig.sessions.release(rig.core, UnlistenKv(1))
    assert rig.scheduler.drain_nowait() == [m.CancelSession(1), m.CancelSession(3)]
    assert rig.grammar.drain_nowait() == [m.AbandonSession(1), m.AbandonSession(3)]
    assert rig.cache.drain_nowait() == [m.DropSessions([1, 3]), UnlistenKv(1)]


async def test_a_session_that_has_ended_is_not_buried_again() -> None:
    rig = Rig(room=10)
    rig.take(m.OpenBranch(HANDLE), m.CancelSession(SESSION), m.DropSessions([SESSION]))
    assert rig.sessions.live == set()
    assert rig.sessions.last == SESSION
    rig.sessions.release(rig.core)
    assert rig.cache.drain_nowait() == [m.OpenBranch(HANDLE), m.DropSessions([SESSION])]


async def test_a_dead_process_is_buried_though_the_mailboxes_are_full() -> None:
    """What it said last and nobody heard is forgotten; what it held is given back."""
    rig = Rig(room=1)
    rig.take(m.OpenBranch(HANDLE), m.OpenBranch(SESSION + 64 << 32 | 1))
    rig.sessions.release(rig.core)
    told: list[Any] = []

    def heard() -> bool:
        told.extend(rig.cache.drain_nowait())
        return len(told) == 2

    await until(heard)
    assert told == [m.OpenBranch(HANDLE), m.DropSessions([SESSION])]
    assert rig.scheduler.drain_nowait() == [m.CancelSession(SESSION)]


async def test_before_there_is_a_core_nothing_is_left() -> None:
    rig = Rig()
    rig.sessions.release(None)
    rig.take(m.OpenBranch(HANDLE))
    assert len(rig.cache) == rig.link.done == 0


async def test_a_session_whose_message_cannot_be_encoded_ends_alone() -> None:
    rig = Rig()
    good = m.Tokens([m.Progress(1, b"1234")], [])
    rig.sessions.put([(64, good), (65, m.Inspected(1, [2**70])), (66, good)])
    rig.sessions.flush()
    assert [session for session, _ in rig.link.told] == [64, 65, 66]
    assert [told for _, told in rig.link.told[::2]] == [good, good]
    lost = rig.link.told[1][1]
    assert isinstance(lost, m.Lost)
    assert "cannot be encoded" in lost.reason
    assert msgspec.msgpack.encode(lost)
