"""What a front tells a core: in order, all of it, and nothing is left of a front that has gone."""

import asyncio
from typing import Any

from ramify.actors.cluster.intake import Intake
from ramify.actors.cluster.shift import Shift
from ramify.actors.front.interface import Core
from ramify.actors.kit.mailbox import Mailbox
from ramify.protocol import messages as m
from ramify.protocol.cluster import UnlistenKv
from ramify.protocol.wire import ServerInfo


def a_core(room: int = 100) -> tuple[Core, Mailbox[Any], Mailbox[Any], Mailbox[Any]]:
    boxes = [Mailbox[Any](name, room) for name in ("cache", "scheduler", "grammar")]
    return (Core(*boxes, ServerInfo(version=1, epoch="e", model="m"), 10, 10), *boxes)  # type: ignore[return-value]


async def test_messages_reach_their_actors_and_what_is_left_is_dropped() -> None:
    core, cache, scheduler, grammar = a_core()
    intake = Intake(core, Shift(0.0))
    taken: list[int] = []
    opened = [m.OpenBranch(session << 32 | 1) for session in (1, 2, 3)]
    intake.take([*opened, m.Cancel(1), m.Abandon(1), m.DropSessions([2])], lambda: taken.append(1))
    assert taken == [1]
    assert cache.drain_nowait() == [*opened, m.DropSessions([2])]
    assert scheduler.drain_nowait() == [m.Cancel(1)]
    assert grammar.drain_nowait() == [m.Abandon(1)]
    intake.release()
    assert scheduler.drain_nowait() == [m.CancelSession(1), m.CancelSession(3)]
    assert grammar.drain_nowait() == [m.AbandonSession(1), m.AbandonSession(3)]
    assert cache.drain_nowait() == [m.DropSessions([1, 3]), UnlistenKv(1)]


async def test_a_full_mailbox_holds_the_credit_back() -> None:
    core, cache, _, _ = a_core(room=2)
    intake = Intake(core, Shift(0.0))
    taken: list[int] = []
    said = [m.OpenBranch(session << 32 | 1) for session in range(5)]
    intake.take(list(said), lambda: taken.append(1))
    heard: list[Any] = []
    assert taken == []
    while len(heard) < 5:
        heard += cache.drain_nowait()
        await asyncio.sleep(0.002)
    assert heard == said
    assert taken == [1]
