"""What a gateway process says, while cache and scheduler have no room, and after its end."""

import asyncio
from types import SimpleNamespace
from typing import Any

from ramify.actors.front.dispatcher import Dispatcher
from ramify.actors.front.interface import Core
from ramify.actors.kit.mailbox import LimitedAddress, Mailbox
from ramify.actors.kit.metrics import Metrics
from ramify.protocol import messages as m
from ramify.protocol.sampling import SamplingParams
from ramify.protocol.wire import ServerInfo

SESSION = 64
HANDLE, REQUEST = SESSION << 32 | 1, SESSION << 32 | 2


class Process(SimpleNamespace):
    """As much of a gateway process as the dispatcher sees."""

    __hash__ = object.__hash__  # type: ignore[assignment]


class Rig:
    def __init__(self, room: int = 2) -> None:
        self.cache: Mailbox[Any] = Mailbox("cache", 100)
        self.scheduler: Mailbox[Any] = Mailbox("scheduler", 100)
        self.grammar: Mailbox[Any] = Mailbox("grammar", 100)
        self.dispatcher = Dispatcher(Metrics(), {})
        self.dispatcher.core = Core(
            LimitedAddress(self.cache, room),
            LimitedAddress(self.scheduler, room),
            LimitedAddress(self.grammar, room),
            ServerInfo(version=1, epoch="e", model="m"),
            100,
            384,
        )
        self.process: Any = Process(worker=0, live=set(), first=0)
        self.done = 0

    def handle(self, *messages: Any) -> None:
        def done() -> None:
            self.done += 1

        self.dispatcher.handle(self.process, list(messages), done)


def submit() -> m.Submit:
    return m.Submit(REQUEST, HANDLE, 1, 1, SamplingParams())


async def until(condition: Any) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)


async def test_what_finds_no_room_waits_in_order_and_holds_the_credits_back() -> None:
    rig = Rig()
    extends = [m.ExtendBranch(HANDLE, bytes([i])) for i in range(5)]
    rig.handle(m.OpenBranch(HANDLE), *extends, submit())
    rig.handle(m.Cancel(REQUEST))
    assert rig.done == 0
    assert len(rig.cache) == 2
    assert len(rig.scheduler) == 0  # a request must not overtake its branch
    told: list[Any] = []

    def emptied() -> bool:
        told.extend(rig.cache.drain_nowait())
        return len(rig.scheduler) == 2

    await until(emptied)
    assert told == [m.OpenBranch(HANDLE), *extends]
    assert rig.scheduler.drain_nowait() == [submit(), m.Cancel(REQUEST)]
    assert rig.done == 2
    assert rig.process.live == {SESSION}


async def test_a_session_that_has_ended_is_not_buried_again() -> None:
    rig = Rig(room=10)
    rig.handle(m.OpenBranch(HANDLE), m.CancelSession(SESSION), m.DropSessions([SESSION]))
    assert rig.process.live == set()
    assert rig.process.first == 2
    rig.dispatcher.release(rig.process)
    assert rig.cache.drain_nowait() == [m.OpenBranch(HANDLE), m.DropSessions([SESSION])]


async def test_a_dead_process_is_buried_though_the_mailboxes_are_full() -> None:
    """What it said last and nobody heard is forgotten; what it held is given back."""
    rig = Rig(room=1)
    rig.handle(m.OpenBranch(HANDLE), m.OpenBranch(SESSION + 64 << 32 | 1))
    rig.dispatcher.release(rig.process)
    told: list[Any] = []

    def heard() -> bool:
        told.extend(rig.cache.drain_nowait())
        return len(told) == 2

    await until(heard)
    assert told == [m.OpenBranch(HANDLE), m.DropSessions([SESSION])]
    assert rig.scheduler.drain_nowait() == [m.CancelSession(SESSION)]
