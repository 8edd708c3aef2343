"""What routers are told is what is resident: against random programs, and over snapshots and gaps."""

import random
from typing import Any

import numpy as np
import pytest

from ramify.actors.cache.announcer import Announcer
from ramify.actors.cache.cache import RadixCache
from ramify.actors.kit.blocks import BlockHasher, seed
from ramify.protocol import cluster
from ramify.protocol import messages as m
from ramify.protocol.cluster import KvEvents, ListenKv, UnlistenKv
from ramify.protocol.plan import pack
from tests.actors.cache.integrity import check


def resident(cache: RadixCache, size: int) -> set[int]:
    """The hashes of all blocks that end in a resident node, from the tree alone."""
    found: set[int] = set()
    for node in cache.tree.walk():
        if not node.resident or node.parent is None:
            continue
        root = node
        while root.parent is not None:
            root = root.parent
        tokens = np.frombuffer(cache.tree.tokens(node, 0), dtype=np.int32)
        hashes = BlockHasher(size).chain(seed(cache.tree.namespace(root)), tokens)
        found.update(int(each) for each in hashes)
    return found


class Listener:
    """Follows the events as a router does."""

    def __init__(self, cache: RadixCache, number: int) -> None:
        self.cache, self.number = cache, number
        self.known: set[int] = set()
        self.seq = -1
        for event in cache.listen_kv(ListenKv(number)):
            self.take(event)

    def take(self, event: KvEvents) -> None:
        stored, removed = (
            np.frombuffer(b, dtype=np.uint64).tolist() for b in (event.stored, event.removed)
        )
        if event.listener:
            if event.listener != self.number:
                return
            self.known = set() if event.reset else self.known
        else:
            assert event.seq == self.seq + 1
        self.seq = event.seq
        assert self.known.issuperset(removed)
        self.known.difference_update(removed)
        assert self.known.isdisjoint(stored)
        self.known.update(stored)


@pytest.mark.parametrize("page_size", [1, 2])
@pytest.mark.parametrize("start", range(12))
def test_listeners_know_what_is_resident(start: int, page_size: int) -> None:
    """Sessions that come, grow, fork, go; a pool that is too small; listeners that come and go."""
    size = 4
    dice = random.Random(start)
    cache = RadixCache(40 // page_size, page_size, block=size)
    listeners: list[Listener] = []
    branches: list[int] = []
    count = 0

    def settle() -> None:
        while cache.pending_news:
            for event in cache.news():
                for each in listeners:
                    each.take(event)
        for each in listeners:
            assert each.known == resident(cache, size)
        check(cache)

    for _ in range(250):
        count += 1
        match dice.randrange(10):
            case 0:
                branches.append(count)
                cache.open_branch(m.OpenBranch(count, dice.choice(["", "b"])))
            case 1 if branches:
                branch = dice.choice(branches)
                cache.branches.fork(branch, [count], dice.randint(0, cache.branches.head(branch).end))
                branches.append(count)
            case 2 if branches:
                cache.drop_branches(m.DropBranches([branches.pop(dice.randrange(len(branches)))]))
            case 3 if len(listeners) < 3:
                settle()
                listeners.append(Listener(cache, count))
            case 4 if listeners and dice.random() < 0.2:
                cache.unlisten_kv(UnlistenKv(listeners.pop().number))
            case 5:
                settle()
            case _ if branches:
                branch = dice.choice(branches)
                tokens = [dice.randrange(2) for _ in range(dice.randint(1, 9))]
                if cache.branches.head(branch).end < 30:
                    cache.extend_branch(m.ExtendBranch(branch, pack(tokens)))
                end = cache.branches.head(branch).end
                if not end:
                    continue
                verdict = cache.acquire(m.Acquire(count, branch, 3), 0.0)
                if isinstance(verdict, m.Granted):
                    finite = None if dice.random() < 0.9 else False
                    out = pack([dice.randrange(2)] * 2) if finite is None else b""
                    if dice.random() < 0.5 and end > 1:
                        cache.commit(m.Commit(count, max(verdict.cached, end // 2)))
                        if dice.random() < 0.5:
                            settle()
                    cache.commit(m.Commit(count, end + 1 if out else end, out, True, finite))
    settle()


def test_messages_are_bounded_and_a_flush_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ramify.actors.cache.announcer.MOST_HASHES", 3)
    monkeypatch.setattr("ramify.actors.cache.announcer.MOST_TOKENS", 20)
    cache = RadixCache(100, block=2)
    for branch in range(1, 5):
        cache.open_branch(m.OpenBranch(branch, str(branch)))
        cache.extend_branch(m.ExtendBranch(branch, pack([branch] * 18)))
        cache.acquire(m.Acquire(branch, branch, 0))
        cache.commit(m.Commit(branch, 18, final=True))
    listener = Listener(cache, 1)
    assert not listener.known
    events = cache.news()
    assert [len(each.stored) // 8 for each in events] == [
        3,
        3,
        3,
        3,
        3,
        3,
    ]  # two branches of nine blocks
    assert cache.pending_news
    for event in events + cache.news():
        listener.take(event)
    assert not cache.pending_news
    assert listener.known == resident(cache, 2)
    snapshot = cache.listen_kv(ListenKv(2))
    assert [each.reset for each in snapshot] == [True] + [False] * 11
    assert {each.seq for each in snapshot} == {listener.seq}


def test_nothing_is_kept_where_nobody_listens() -> None:
    cache = RadixCache(100, block=2)
    cache.open_branch(m.OpenBranch(1))
    cache.extend_branch(m.ExtendBranch(1, pack([1, 2, 3, 4])))
    cache.acquire(m.Acquire(1, 1, 0))
    cache.commit(m.Commit(1, 4, final=True))
    assert not cache.pending_news
    Listener(cache, 1)
    cache.news()
    assert any(node.hashes is not None for node in cache.tree.walk())
    cache.unlisten_kv(UnlistenKv(1))
    cache.unlisten_kv(UnlistenKv(1))
    assert all(node.hashes is None for node in cache.tree.walk())
    assert cache.news() == []


def test_too_many_listeners(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ramify.actors.cache.cache.MOST_LISTENERS", 1)
    cache = RadixCache(10)
    assert cache.listen_kv(ListenKv(1))
    assert cache.listen_kv(ListenKv(2)) == []
    assert cache.listen_kv(ListenKv(1))  # again: after a gap


def test_a_turn_hashes_what_is_new_only() -> None:
    """A chat that has grown long: its node is one after each turn, and only its end is hashed."""
    cache = RadixCache(10_000, block=4)
    cache.open_branch(m.OpenBranch(1))
    cache.listen_kv(ListenKv(1))
    announcer = cache.residency.announcer
    assert isinstance(announcer, Announcer)
    told = []
    for turn in range(1, 40):
        cache.extend_branch(m.ExtendBranch(1, pack(range(turn * 100, turn * 100 + 20))))
        cache.acquire(m.Acquire(turn, 1, 0))
        cache.commit(m.Commit(turn, 20 * turn, final=True))
        told.append(sum(len(each.stored) // 8 for each in cache.news()))
    assert told == [5] * 39


def test_what_was_evicted_and_is_computed_again_is_told_without_hashing() -> None:
    cache = RadixCache(40, block=4)
    for branch in (1, 2):
        cache.open_branch(m.OpenBranch(branch))
        cache.extend_branch(m.ExtendBranch(branch, pack(range(100 * branch, 100 * branch + 36))))
    listener = Listener(cache, 1)
    announcer = cache.residency.announcer
    assert isinstance(announcer, Announcer)
    hashed: list[int] = []
    chains = announcer._hasher.chains

    def counted(runs: Any) -> Any:
        hashed.append(sum(len(tokens) for _, tokens in runs))
        return chains(runs)

    announcer._hasher.chains = counted  # type: ignore[method-assign]
    for turn in range(1, 7):
        cache.acquire(m.Acquire(turn, 1 + turn % 2, 0))
        cache.commit(m.Commit(turn, 36, final=True))
        for event in cache.news():
            listener.take(event)
        assert listener.known == resident(cache, 4)
    assert sum(hashed) <= 2 * 36 + 8  # of a node that was cut within a block its first one again


def test_one_message_holds_what_the_protocol_allows() -> None:
    assert cluster.MOST_HASHES * 8 == 1 << 16
