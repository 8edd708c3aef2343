"""Prompts that are computed although they could be loaded, and what becomes of the blocks compared."""

import pytest

from ramify.actors.cache.cache import RadixCache
from ramify.actors.cache.canaries import MOST_BLOCKS, Canaries
from ramify.actors.cache.on_disk import OnDisk
from ramify.protocol import messages as m
from ramify.protocol.plan import pack
from tests.actors.cache.integrity import check

A, B = list(range(100, 110)), list(range(200, 210))


class Stage:
    """A cache of 12 pages with blocks of 4 tokens."""

    def __init__(self, share: float, disk: OnDisk | None = None) -> None:
        self.canaries = Canaries(share)
        self.cache = RadixCache(12, 1, 64, 4, host_blocks=8, disk=disk, canaries=self.canaries)
        self.stored = self.cache.residency.stored
        self.count = 0

    def ask(self, tokens: list[int], **more: int) -> m.Granted:
        self.count += 1
        branch = self.count << 32 | 1
        self.cache.open_branch(m.OpenBranch(branch))
        self.cache.extend_branch(m.ExtendBranch(branch, pack(tokens)))
        acquire = m.Acquire(branch, branch, 0, load=True, **more)
        (verdict,) = self.cache.settle(m.Settle([], [], [acquire])).verdicts
        check(self.cache)
        assert isinstance(verdict, m.Granted)
        return verdict

    def end(self, granted: m.Granted, computed: int = 10) -> list[int]:
        """Slots that are saved."""
        commit = m.Commit(granted.request, computed, final=True, finite=True)
        settled = self.cache.settle(m.Settle([commit], [], []))
        self.cache.drop_branches(m.DropBranches([granted.request]))
        check(self.cache)
        return [block.slot for block in settled.saves]

    def turn(self, tokens: list[int]) -> m.Granted:
        granted = self.ask(tokens)
        self.end(granted)
        return granted

    def done(self, verdict: str) -> None:
        for order in self.canaries.take_orders():
            assert self.canaries.done(self.stored, m.CompareResult(order, verdict))
        check(self.cache)


def test_a_share_of_what_could_be_loaded_is_computed() -> None:
    stage = Stage(0.25)
    loaded = []
    for _ in range(8):
        loaded += [stage.turn(A).loaded, stage.turn(B).loaded]
        stage.done("equal")
    assert loaded[:2] == [0, 0]  # nothing is stored
    assert loaded[2:].count(0) == 3
    assert loaded[2:].count(6) == 11  # two tokens are on the device
    assert stage.canaries.counts == {"equal": 6, "differs": 0, "unknown": 0}
    assert Stage(0.0).canaries.choose([b"k"] * 9, 0) == {}


def test_the_block_is_compared_with_what_was_computed_and_pinned_until_then() -> None:
    stage = Stage(1.0)
    stage.turn(A)
    stage.turn(B)
    granted = stage.ask(A)
    assert (granted.loaded, granted.loads, granted.cached) == (0, [], 2)
    saved = stage.end(granted)
    orders = stage.canaries.take_orders()
    assert len(orders) == 2
    assert {order.other for order in orders} <= set(saved)
    assert all(stage.stored.pinned(order.key) == order.slot for order in orders)
    for order, verdict in zip(orders, ("equal", "differs"), strict=True):
        stage.canaries.done(stage.stored, m.CompareResult(order, verdict))
        check(stage.cache)
        assert (order.key in stage.stored) == (verdict == "equal")
    assert not stage.stored.coming


@pytest.mark.parametrize("how", ["ends early", "not finite", "another executor"])
def test_a_prompt_that_is_not_computed_to_its_end_says_nothing(how: str) -> None:
    stage = Stage(1.0)
    stage.turn(A)
    stage.turn(B)
    granted = stage.ask(A)
    if how == "ends early":
        stage.end(granted, 6)
    elif how == "not finite":
        stage.cache.settle(m.Settle([m.Commit(granted.request, 0, final=True, finite=False)], [], []))
    else:
        stage.end(granted)
        (order, _) = stage.canaries.take_orders()
        stage.cache.renew(12, host_blocks=8)
        stored = stage.cache.residency.stored
        assert not stage.canaries.done(stored, m.CompareResult(order, "differs"))
    check(stage.cache)
    assert stage.canaries.take_orders() == []
    assert stage.canaries.counts == {"equal": 0, "differs": 0, "unknown": 2}


def test_a_request_that_is_let_in_for_what_is_stored_loads_it() -> None:
    stage = Stage(1.0)
    stage.turn(A)
    stage.turn(B)
    assert stage.ask(A, most=4).loaded == 6


def test_of_a_long_prompt_some_blocks_are_compared_and_others_the_next_time() -> None:
    canaries = Canaries(1.0)
    keys = [bytes([at]) * 16 for at in range(20)]
    seen = set[int]()
    for _ in range(3):
        chosen = canaries.choose(keys, 5)
        assert all(keys[number - 5] == key for number, key in chosen.items())
        assert len(chosen) in (MOST_BLOCKS - 2, MOST_BLOCKS - 1)
        seen |= chosen.keys()
        canaries.granted(computed=True)
    assert seen == set(range(5, 25))


@pytest.mark.parametrize("written", [False, True])
def test_a_block_that_differs_is_erased_on_the_disk(written: bool) -> None:
    disk = OnDisk(8)
    stage = Stage(1.0, disk)
    waits = stage.cache.waits

    def move() -> list[m.DiskOrder]:
        orders = waits.take_orders()
        for order in orders:
            waits.done(m.DiskResult(order, True, 0.001))
        check(stage.cache)
        return orders

    stage.turn(A)
    late = [] if written else waits.take_orders()
    move()
    stage.turn(B)
    move()
    stage.turn(A)
    stage.done("differs")
    for order in late:
        waits.done(m.DiskResult(order, True, 0.001))
    erased = [order for order in move() if order.slot == m.ERASE]
    assert len(erased) == 2
    assert not disk.erasing
    assert all(order.key not in disk for order in erased)
    assert len(disk.free) + len(disk) == disk.places
