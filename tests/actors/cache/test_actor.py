"""The shell: replies go where they belong, in order; failures are not swallowed."""

from collections.abc import Iterable

import anyio
import numpy as np
import pytest

from ramify.actors.cache.actor import CacheActor
from ramify.actors.cache.branches import UnknownBranch
from ramify.actors.cache.cache import RadixCache
from ramify.actors.cache.on_disk import OnDisk
from ramify.actors.kit.blocks import BlockHasher, seed
from ramify.actors.kit.fanout import FanOut, Router
from ramify.actors.kit.mailbox import Mailbox
from ramify.protocol import messages as m
from ramify.protocol.cluster import KvEvents, ListenKv, UnlistenKv
from ramify.protocol.plan import pack
from tests.actors.cache.integrity import IntegrityError
from tests.manual_clock import ManualClock

pytestmark = pytest.mark.usefixtures("caches_are_checked")


class Wired:
    """A cache actor and the mailboxes around it."""

    def __init__(self, pages: int = 8, routers: Mailbox[KvEvents] | None = None) -> None:
        self.mailbox: Mailbox[m.CacheMessage] = Mailbox("cache", 100)
        self.scheduler: Mailbox[m.Settled] = Mailbox("scheduler", 100)
        self.session: Mailbox[m.SessionMessage] = Mailbox("session", 100)
        sessions: Router[m.SessionMessage] = Router("sessions")
        sessions.add(1, self.session)
        self.cache = RadixCache(pages)
        self.clock = ManualClock()
        self.actor = CacheActor(
            self.mailbox,
            self.cache,
            self.scheduler,
            FanOut(sessions),
            routers,
            clock=self.clock,
        )

    async def tell(self, *messages: m.CacheMessage) -> None:
        """Tell all, and run the actor until it has handled them."""
        for message in messages:
            self.mailbox.tell(message)
        self.mailbox.close()
        async with anyio.create_task_group() as group:
            await group.start(self.actor.run)


def branch(number: int, tokens: list[int]) -> list[m.CacheMessage]:
    return [m.OpenBranch(number), m.ExtendBranch(number, pack(tokens))]


async def test_every_message_and_its_reply() -> None:
    wired = Wired()
    await wired.tell(
        *branch(1, [1, 2, 3]),
        m.Settle([], [], [m.Acquire(7, 1, 2)]),
        m.ForkBranch(1, [2, 3], 2),
        m.RetainBranches({2: 5.0}),
        m.Settle([m.Commit(7, 4, pack([4, 5]), final=True)], [], []),
        m.MoveBranch(1, 3),
        m.DropBranches([3]),
        m.Inspect(1, 42, [1, 2, 3]),
        m.Inspect(2, 43, [1]),  # a session that has ended: dropped
    )
    granted, settled = wired.scheduler.drain_nowait()
    assert isinstance(granted.verdicts[0], m.Granted)
    assert granted.referenced == 5
    assert (settled.free, settled.evictable, settled.referenced) == (4, 4, 0)
    assert wired.session.drain_nowait() == [m.Inspected(42, [3, 2, -1])]


async def test_a_fork_that_is_announced_fetches_what_the_disk_has_of_its_prefix() -> None:
    first = RadixCache(8, block=4, host_blocks=4, disk=OnDisk(4))
    tip = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    first.open_branch(m.OpenBranch(1))
    first.extend_branch(m.ExtendBranch(1, pack(tip)))
    keys = list(first.residency.stored.path(first.branches.head(1), 0, 9))
    orders: list[m.DiskOrder] = []

    class Disk:
        def submit(self, asked: Iterable[m.DiskOrder]) -> None:
            orders.extend(asked)

        def renew(self, path: str, slots: int) -> None: ...

    wired = Wired()
    wired.cache = RadixCache(8, block=4, host_blocks=4, disk=OnDisk(4, zip(keys, (2, 3), strict=True)))
    wired.cache.open_branch(m.OpenBranch(1))
    wired.cache.extend_branch(m.ExtendBranch(1, pack(tip)))
    actor = CacheActor(
        wired.mailbox, wired.cache, wired.scheduler, FanOut(Router("none")), None, disk=Disk(),
        clock=wired.clock,
    )  # fmt: skip
    wired.actor = actor
    await wired.tell(m.ForkBranch(1, [2, 3], 9))
    assert [(order.write, order.key, order.place) for order in orders] == [
        (False, keys[0], 2),
        (False, keys[1], 3),
    ]


async def test_retention_is_on_the_clock() -> None:
    wired = Wired(pages=4)
    wired.cache.open_branch(m.OpenBranch(1))
    run = [m.Settle([], [], [m.Acquire(7, 1, 0)]), m.Settle([m.Commit(7, 2, final=True)], [], [])]
    other = [*branch(2, [3, 4]), m.Settle([], [], [m.Acquire(8, 2, 0)])]
    third = [m.Settle([m.Commit(8, 2, final=True)], [], []), *branch(3, [5, 6])]
    retain = m.RetainBranches({1: wired.clock.now() - 1.0})  # over already: 1 is the least recent
    last: list[m.CacheMessage] = [m.Settle([], [], [m.Acquire(9, 3, 0)]), m.Inspect(1, 1, [1, 2])]
    await wired.tell(m.ExtendBranch(1, pack([1, 2])), *run, retain, *other, *third, *last)
    assert wired.session.drain_nowait() == [m.Inspected(1, [0, 2])]


@pytest.mark.parametrize("what", ["message", "integrity"])
async def test_a_failure_ends_the_actor(what: str) -> None:
    wired = Wired()
    error: type[Exception] = UnknownBranch
    if what == "integrity":
        wired.cache.residency.evictable += 1
        error = IntegrityError
    with pytest.raises(ExceptionGroup) as raised:
        await wired.tell(m.OpenBranch(1) if what == "integrity" else m.MoveBranch(1, 0))
    assert raised.value.subgroup(error) is not None


async def test_routers_hear_what_is_resident() -> None:
    routers: Mailbox[KvEvents] = Mailbox("routers", 100)
    wired = Wired(pages=200, routers=routers)
    tokens = list(range(130))
    await wired.tell(
        *branch(1, tokens),
        ListenKv(3),
        m.Settle([], [], [m.Acquire(7, 1, 0)]),
        m.Settle([m.Commit(7, 130, final=True)], [], []),
    )
    hashes = BlockHasher().chain(seed(""), np.array(tokens, dtype=np.int32))
    assert routers.drain_nowait() == [
        KvEvents(0, listener=3, reset=True),
        KvEvents(1, stored=hashes.tobytes()),
    ]


async def test_much_that_is_new_is_told_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ramify.actors.cache.announcer.MOST_TOKENS", 1)
    routers: Mailbox[KvEvents] = Mailbox("routers", 100)
    wired = Wired(pages=1000, routers=routers)
    news: list[m.CacheMessage] = []
    for number in range(1, 6):
        news += branch(number, [number] * 64)
        news.append(m.Settle([], [], [m.Acquire(number, number, 0)]))
        news.append(m.Settle([m.Commit(number, 64, final=True)], [], []))
    await wired.tell(*news, ListenKv(3))
    assert [event.seq for event in routers.drain_nowait()] == [0, 1, 2, 3, 4, 5]


async def test_without_routers_nobody_listens() -> None:
    wired = Wired()
    await wired.tell(*branch(1, [1]), ListenKv(1), UnlistenKv(1))
    assert wired.cache.residency.announcer is None


async def test_a_disk_that_is_slower_than_computing_is_said_once_in_a_while(
    caplog: pytest.LogCaptureFixture,
) -> None:
    wired, disk = Wired(), OnDisk(32)
    wired.cache = wired.actor.cache = RadixCache(8, block=4, host_blocks=4, disk=disk)

    def reads(first: int, seconds: float) -> list[m.CacheMessage]:
        orders = [m.DiskOrder(False, bytes([at] * 16), 0, at) for at in range(first, first + 8)]
        disk.reading.update((order.key, order.place) for order in orders)
        return [m.DiskResult(order, True, seconds) for order in orders]

    assert disk.pays(6400.0)  # a block takes 10 ms to compute
    with caplog.at_level("WARNING"):
        quick = reads(0, 0.01)
        await wired.tell(*quick, *reads(8, 0.1), *reads(16, 0.1))
    (record,) = caplog.records
    assert "slower than computing" in record.getMessage()
    disk_tier = wired.cache.tiers(1)[2]
    assert disk_tier.slow
    assert disk_tier.read_s > 0.01
