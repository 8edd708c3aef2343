"""What is moved between host memory and the disk, and who waits for it."""

import pytest

from ramify.actors.cache import on_disk
from ramify.actors.cache.cache import RadixCache
from ramify.actors.cache.on_disk import PROBE, OnDisk
from ramify.protocol import messages as m
from ramify.protocol.plan import pack
from tests.actors.cache.integrity import check

Found = tuple[tuple[bytes, int], ...]
A, B = list(range(100, 110)), list(range(200, 210))


class Stage:
    """A cache of 12 pages with blocks of 4 tokens, and a disk that does what the test says."""

    def __init__(
        self, host: int = 8, places: int = 8, found: tuple[tuple[bytes, int], ...] = ()
    ) -> None:
        self.disk = OnDisk(places, found)
        self.cache = RadixCache(12, 1, 64, 4, host_blocks=host, disk=self.disk)
        self.stored, self.waits = self.cache.residency.stored, self.cache.waits
        self.count, self.now = 0, 1.0

    def ask(self, tokens: list[int], rate: float = 0.0, namespace: str = "") -> m.Granted | m.Denied:
        self.count += 1
        branch = self.count << 32 | 1
        self.cache.open_branch(m.OpenBranch(branch, namespace))
        self.cache.extend_branch(m.ExtendBranch(branch, pack(tokens)))
        acquire = m.Acquire(branch, branch, 0, load=True, rate=rate)
        (verdict,) = self.cache.settle(m.Settle([], [], [acquire]), self.now).verdicts
        check(self.cache)
        return verdict

    def turn(self, tokens: list[int], rate: float = 0.0, namespace: str = "") -> m.Granted:
        granted = self.ask(tokens, rate, namespace)
        assert isinstance(granted, m.Granted)
        self.cache.commit(m.Commit(granted.request, len(tokens), final=True, finite=True))
        self.cache.drop_branches(m.DropBranches([granted.request]))
        while self.cache.settle(m.Settle([], [], []), self.now).more:
            pass
        check(self.cache)
        return granted

    def move(self, *, whole: bool = True, broken: bool = False, seconds: float = 0.001) -> list[bytes]:
        """Carry out all orders. Returns the keys that were to be read."""
        orders = self.waits.take_orders()
        for order in orders:
            self.waits.done(m.DiskResult(order, whole, seconds, broken))
        check(self.cache)
        return [order.key for order in orders if not order.write]

    def restart(self, **more: int) -> "Stage":
        return Stage(found=tuple(self.disk.held().items()), **more)


def test_what_requests_leave_is_written_and_a_restart_finds_it() -> None:
    stage = Stage()
    stage.turn(A)
    stage.move()
    assert len(stage.disk) == 2
    again = stage.restart()
    denied = again.ask(A, rate=1000.0)
    assert isinstance(denied, m.Denied)
    assert (denied.reason, again.waits.take_ready()) == ("disk", [])
    assert len(again.move()) == 2
    assert again.waits.take_ready() == [denied.request]
    granted = again.turn(A)
    assert (granted.cached, granted.loaded) == (8, 8)
    assert [tier.hit_tokens for tier in again.cache.tiers(1)] == [0, 0, 8, 0]


def test_another_namespace_finds_nothing_on_the_disk() -> None:
    stage = Stage()
    stage.turn(A, namespace="one")
    stage.move()
    again = stage.restart()
    assert again.turn(A, 1000.0, "other").cached == 0
    assert isinstance(again.ask(A, 1000.0, "one"), m.Denied)


def test_a_torn_block_is_dropped_and_its_tokens_computed() -> None:
    stage = Stage()
    stage.turn(A)
    stage.move()
    again = stage.restart()
    again.ask(A, rate=1000.0)
    again.move(whole=False)
    assert (len(again.disk), len(again.waits.take_ready())) == (0, 1)
    assert again.turn(A, 1000.0).cached == 0


def test_a_slow_disk_is_waited_for_as_long_as_computing_takes() -> None:
    stage = Stage()
    stage.turn(A)
    stage.move()
    again = stage.restart()
    denied = again.ask(A, rate=on_disk.BLOCK * 2 / 0.5)
    assert again.waits.deadline == pytest.approx(again.now + 0.5)
    again.waits.expire(again.now + 0.4)
    assert again.waits.take_ready() == []
    again.waits.expire(again.now + 0.5)
    assert again.waits.take_ready() == [denied.request]
    assert again.turn(A).cached == 0  # the blocks are still on their way
    again.move(seconds=10.0)
    assert again.disk.block_s > 1
    assert [again.disk.pays(1000.0) for _ in range(PROBE)].count(True) == 1


def test_a_broken_disk_gets_nothing_more() -> None:
    stage = Stage()
    stage.turn(A)
    stage.move(whole=False, broken=True)
    stage.turn(B)
    assert (stage.waits.take_orders(), len(stage.disk)) == ([], 0)
    stage.turn(A)


def test_what_was_not_used_for_longest_gives_way() -> None:
    stage = Stage(places=2)
    stage.turn(A)
    stage.move()
    first = set(stage.disk.held())
    stage.turn(B)
    stage.move()
    assert not first & set(stage.disk.held())
    assert len(stage.disk) == 2


def test_blocks_come_ahead_only_to_free_slots() -> None:
    stage = Stage()
    stage.turn(A)
    stage.turn(B)
    stage.move()
    again = stage.restart(host=3)
    branches = []
    for count, tokens in enumerate((A, B)):
        branches.append(count << 32 | 9)
        again.cache.open_branch(m.OpenBranch(branches[-1], ""))
        again.cache.extend_branch(m.ExtendBranch(branches[-1], pack(tokens)))
        again.cache.fetch_ahead(branches[-1])
    assert len(again.move()) == 3
    assert len(again.stored) == 3


def test_another_host_memory_ends_the_waiting() -> None:
    stage = Stage()
    stage.turn(A)
    stage.move()
    again = stage.restart()
    denied = again.ask(A, rate=1000.0)
    again.cache.renew(12, 0, 8)
    assert again.waits.take_ready() == [denied.request]
    again.move()  # of the memory that is gone
    assert isinstance(again.ask(A, rate=1000.0), m.Denied)
    assert len(again.move()) == 2


def test_the_backlog_of_a_disk_holds_up_what_is_saved_for_it() -> None:
    stage = Stage(host=4)
    for tokens in (A, B):
        stage.turn(tokens)
    assert stage.disk.backlog <= 4
    assert stage.cache.may_save == bool(stage.cache.residency.unsaved and stage.disk.backlog <= 1)
    stage.move()
    assert stage.disk.backlog == 0


def test_a_look_at_branches_tells_in_which_tier_what_follows_is() -> None:
    stage = Stage(host=4)
    stage.turn(A)
    stage.move()
    branch = 99 << 32 | 1
    long, short, other = branch, branch + 1, branch + 2
    for each, tokens in ((long, [*A, 7, 8]), (short, A[:3]), (other, [5, 6, 7, 8, 9])):
        stage.cache.open_branch(m.OpenBranch(each))
        stage.cache.extend_branch(m.ExtendBranch(each, pack(tokens)))

    def look() -> m.Inspected:
        return stage.cache.inspect(m.Inspect(99, 1, [long, short, other]))

    assert look() == m.Inspected(1, [10, 3, 0])  # on the device: nothing to tell
    stage.turn(B)
    assert look().tiers[0] == 1
    assert look().resident[0] < 10
    stage.turn(list(range(300, 310)))  # host memory has room for four blocks
    stage.move()
    assert look() == m.Inspected(1, [0, 0, 0], [2, 0, 0])
