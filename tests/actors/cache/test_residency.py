"""Kept locks: what a request on a deep path costs, and that its pages are there when they are wanted."""

import numpy as np
import pytest

from ramify.actors.cache import residency
from ramify.actors.cache.cache import RadixCache
from ramify.actors.cache.node import GONE, Node
from ramify.actors.cache.residency import REACH
from ramify.protocol import messages as m
from ramify.protocol.plan import pack, unpack
from tests.actors.cache.integrity import check

LONG = 1


class Visits:
    """Counts how often `Node.parent` is read: every walk up a path goes through it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        slot = Node.parent

        def get(node: Node) -> Node | None:
            self.count += 1
            return slot.__get__(node, Node)  # type: ignore[attr-defined, no-any-return]

        monkeypatch.setattr(Node, "parent", property(get, lambda node, value: slot.__set__(node, value)))  # type: ignore[attr-defined]

    def since(self) -> int:
        count, self.count = self.count, 0
        return count


def deep(depth: int, pages: int, reach: int = REACH) -> RadixCache:
    """A resident path of `depth` nodes with a fork at each."""
    cache = RadixCache(pages, reach=reach)
    cache.open_branch(m.OpenBranch(LONG))
    for i in range(depth):
        cache.extend_branch(m.ExtendBranch(LONG, pack([i])))
        cache.fork_branch(m.ForkBranch(LONG, [1000 + i], i + 1))
    turn(cache, LONG)
    return cache


def turn(cache: RadixCache, branch: int, *tokens: int) -> m.Granted:
    if tokens:
        cache.extend_branch(m.ExtendBranch(branch, pack(tokens)))
    granted = cache.acquire(m.Acquire(7, branch, 0))
    assert isinstance(granted, m.Granted), granted
    cache.commit(m.Commit(7, cache.branches.head(branch).end, final=True))
    return granted


@pytest.mark.parametrize("depth", [300, 3000])
def test_a_turn_costs_the_same_at_any_depth(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = deep(depth, 2 * depth)
    granted = turn(cache, LONG, 1)  # makes the page table once
    visits = Visits(monkeypatch)
    for i in range(100):
        granted = turn(cache, LONG, i)
        cache.fork_branch(m.ForkBranch(LONG, [10_000 + i], depth + i + 2))
        assert granted.cached == depth + i + 1
    assert visits.since() < 100 * 20 * REACH
    cache.fork_branch(m.ForkBranch(LONG, [5, 6], depth + 50))
    for sibling in (5, 6):
        table = unpack(turn(cache, sibling, 77).pages)
        assert table[: depth + 50] == unpack(granted.pages)[: depth + 50]
    assert visits.since() < 2 * 20 * REACH
    check(cache)


def test_kept_pages_are_there_for_whoever_wants_them() -> None:
    cache = deep(200, 400, reach=10)
    assert (cache.free, cache.referenced > 0, len(cache.residency.kept)) == (200, True, 1)
    assert cache.free + cache.evictable + cache.referenced == 400
    cache.open_branch(m.OpenBranch(2))
    cache.extend_branch(m.ExtendBranch(2, pack(range(1000, 1400))))
    assert isinstance(cache.acquire(m.Acquire(8, 2, 0)), m.Granted)
    assert (cache.free, cache.evictable, cache.referenced) == (0, 0, 400)
    assert not cache.residency.kept
    check(cache)


def test_who_is_denied_is_told_the_true_need() -> None:
    cache = deep(200, 400, reach=10)
    cache.open_branch(m.OpenBranch(2))
    cache.extend_branch(m.ExtendBranch(2, pack(range(1000, 1300))))
    assert isinstance(cache.acquire(m.Acquire(8, 2, 0)), m.Granted)
    cache.open_branch(m.OpenBranch(3))
    cache.extend_branch(m.ExtendBranch(3, pack(range(2000, 2150))))
    assert cache.acquire(m.Acquire(9, 3, 0)) == m.Denied(9, "memory", short=50)
    check(cache)


def test_only_what_is_wanted_is_given_up() -> None:
    cache = deep(1000, 2000, reach=10)
    cache.open_branch(m.OpenBranch(2))
    cache.extend_branch(m.ExtendBranch(2, pack(range(3000, 4050))))
    assert isinstance(cache.acquire(m.Acquire(8, 2, 0)), m.Granted)  # takes 50 of the path
    assert len(cache.residency.kept) == 1
    assert cache.inspect(m.Inspect(1, 1, [LONG])).resident == [950]
    check(cache)


def test_kept_pages_count_as_left_for_others() -> None:
    cache = deep(200, 400, reach=10)
    cache.open_branch(m.OpenBranch(2))
    cache.extend_branch(m.ExtendBranch(2, pack(range(1000, 1100))))
    denied = cache.acquire(m.Acquire(8, 2, 0, leave=301))
    assert isinstance(denied, m.Denied)
    assert denied.short == 1
    assert isinstance(cache.acquire(m.Acquire(8, 2, 0, leave=300)), m.Granted)
    check(cache)


def test_few_pages_left_and_none_are_kept() -> None:
    """So that the counts which the scheduler admits by are never far from the truth."""
    cache = deep(380, 400, reach=10)
    cache.open_branch(m.OpenBranch(2))
    cache.extend_branch(m.ExtendBranch(2, pack(range(3000, 3200))))
    assert isinstance(cache.acquire(m.Acquire(8, 2, 0)), m.Granted)
    turn(cache, 1000 + 100)
    assert 4 * (cache.free + cache.evictable) >= 400 or not cache.residency.kept
    check(cache)


def test_the_tables_of_kept_paths_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ramify.actors.cache.residency._MOST_KEPT", 3)
    monkeypatch.setattr("ramify.actors.cache.residency._KEPT_BYTES", 2000)
    cache = RadixCache(4000, reach=5)
    for branch in range(1, 7):
        cache.open_branch(m.OpenBranch(branch))
        for i in range(200):
            cache.extend_branch(m.ExtendBranch(branch, pack([1000 * branch + i])))
            cache.fork_branch(m.ForkBranch(branch, [1000 * branch + i], i + 1))
        turn(cache, branch)
        turn(cache, branch, 1)
        assert len(cache.residency.kept) <= 3
        assert sum(len(node.table or b"") for node in cache.residency.kept) <= 2000
        check(cache)


def test_inspecting_forks_of_a_cold_path_walks_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = RadixCache(64)
    cache.open_branch(m.OpenBranch(LONG))
    for i in range(1000):
        cache.extend_branch(m.ExtendBranch(LONG, pack([i])))
        cache.fork_branch(m.ForkBranch(LONG, [1000 + i], i + 1))
    visits = Visits(monkeypatch)
    every = [LONG, *range(1000, 2000)]
    assert cache.inspect(m.Inspect(1, 1, every)).resident == [0] * 1001
    assert visits.since() < 3000


def test_taking_a_retention_back_asks_no_sibling(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = RadixCache(64)
    cache.open_branch(m.OpenBranch(LONG))
    cache.extend_branch(m.ExtendBranch(LONG, pack([5])))
    children = list(range(2, 1002))
    cache.fork_branch(m.ForkBranch(LONG, children, 1))
    for child in children:
        cache.extend_branch(m.ExtendBranch(child, pack([child])))
        cache.retain_branches(m.RetainBranches({child: float(child)}))
    visits = Visits(monkeypatch)
    asked: list[int] = []
    slot = Node.held

    def get(node: Node) -> dict[str, int] | None:
        asked.append(1)
        return slot.__get__(node, Node)  # type: ignore[attr-defined, no-any-return]

    monkeypatch.setattr(Node, "held", property(get, lambda node, value: slot.__set__(node, value)))  # type: ignore[attr-defined]
    for child in reversed(children):
        cache.retain_branches(m.RetainBranches({child: 0.0}))
    assert visits.since() + len(asked) < 20 * len(children)
    check(cache)
    assert not any(node.retained for node in cache.tree.walk())


def test_how_far_an_unlock_walks() -> None:
    """`reach` nodes, if there are as many before it: of 200 the first 136 stay locked."""
    cache = deep(200, 1000)
    (kept,) = cache.residency.kept
    assert (REACH, kept.end) == (64, 200 - 64)
    cache = deep(2 * 10, 1000, reach=10)
    assert [node.end for node in cache.residency.kept] == [10]
    cache = deep(2 * 10 - 1, 1000, reach=10)
    assert not cache.residency.kept


@pytest.mark.parametrize(("nodes", "joined"), [(6, False), (7, True)])
def test_the_tables_of_long_paths_are_joined(nodes: int, joined: bool) -> None:
    """With the root's and the request's own pages these are 8 and 9 parts."""
    cache = deep(nodes, 100)
    cache.extend_branch(m.ExtendBranch(LONG, pack([99])))
    assert isinstance(cache.acquire(m.Acquire(7, LONG, 0)), m.Granted)
    anchor = cache.runs[7].anchor
    assert anchor.end == nodes
    assert (anchor.table is not None) == joined


def kept_ends(cache: RadixCache) -> list[int]:
    return [node.end for node in cache.residency.kept]


def path(cache: RadixCache, branch: int, depth: int) -> None:
    """A resident path of `depth` nodes of a page each, run twice: its page table was made."""
    size = cache.page_size
    cache.open_branch(m.OpenBranch(branch))
    for i in range(depth):
        cache.extend_branch(m.ExtendBranch(branch, pack([1000 * branch + i] * size)))
        cache.fork_branch(m.ForkBranch(branch, [1000 * branch + i], size * (i + 1)))
    turn(cache, branch)
    turn(cache, branch, *[1] * size)


def test_how_much_is_kept() -> None:
    assert (residency._MOST_KEPT, residency._KEPT_BYTES) == (256, 64 << 20)


def test_the_oldest_of_too_many_kept_paths_is_given_up_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ramify.actors.cache.residency._MOST_KEPT", 2)
    cache = RadixCache(4000, reach=5)
    for branch, kept in ((1, [1]), (2, [1, 2]), (3, [2, 3])):
        path(cache, branch, 30)
        firsts = [int(cache.tree.ancestor(node, 1).tokens[0]) // 1000 for node in cache.residency.kept]
        assert firsts == kept
    assert len(set(kept_ends(cache))) == 1
    top = cache.tree.root("").children[1000]
    assert top.locks == 0


def test_how_many_bytes_of_tables_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = RadixCache(400, reach=5)
    path(cache, 1, 30)
    (kept,) = cache.residency.kept
    assert (cache.residency._kept_bytes, cache.residency.kept[kept]) == (4 * kept.end, 4 * kept.end)
    for limit, stays in ((4 * kept.end, True), (4 * kept.end - 1, False)):
        monkeypatch.setattr("ramify.actors.cache.residency._KEPT_BYTES", limit)
        cache = RadixCache(400, reach=5)
        path(cache, 1, 30)
        assert bool(cache.residency.kept) == stays
        assert cache.residency._kept_bytes == (limit if stays else 0)


@pytest.mark.parametrize("size", [1, 2])
def test_the_table_of_a_kept_path_is_that_of_its_pages(size: int) -> None:
    cache = RadixCache(400, size, reach=5)
    path(cache, 1, 30)
    (kept,) = cache.residency.kept
    pages = []
    node: Node | None = kept
    while node is not None:
        pages = [*node.pages.tolist(), *pages]
        node = node.parent
    assert kept.end == size * len(pages)
    assert kept.table is not None
    assert list(unpack(kept.table)) == pages
    check(cache)


def test_a_kept_path_that_is_used_is_the_last_to_go() -> None:
    cache = RadixCache(4000, reach=5)
    path(cache, 1, 30)
    path(cache, 2, 30)
    first, second = cache.residency.kept
    assert isinstance(cache.acquire(m.Acquire(7, 1, 0)), m.Granted)
    assert list(cache.residency.kept) == [second, first]


@pytest.mark.parametrize(("depth", "ends"), [(40, [30]), (41, [21])])
def test_a_quarter_of_the_pool_is_left(depth: int, ends: list[int]) -> None:
    """The pool has as many pages as the path."""
    assert kept_ends(deep(depth, depth, reach=10)) == ends


def test_what_is_not_locked_is_not_unlocked() -> None:
    cache = deep(3, 10)
    node = cache.branches.head(LONG)
    with pytest.raises(RuntimeError, match="unlock without lock"):
        cache.residency.unlock(node)
    node.empty()
    node.locks = 1
    with pytest.raises(RuntimeError, match="unlock without lock"):
        cache.residency.unlock(node)


def test_a_root_that_was_only_locked_is_gone() -> None:
    cache = RadixCache(4)
    root = cache.tree.root("a")
    cache.residency.lock(root)
    cache.residency.unlock(root)
    assert cache.tree.roots == {}


def test_nothing_is_given_up_where_enough_is_left() -> None:
    """210 pages can be had: 100 are taken, 110 must be left."""
    cache = deep(200, 400, reach=10)
    before = kept_ends(cache)
    cache.open_branch(m.OpenBranch(2))
    cache.extend_branch(m.ExtendBranch(2, pack(range(1000, 1100))))
    assert isinstance(cache.acquire(m.Acquire(8, 2, 0, leave=110)), m.Granted)
    assert (kept_ends(cache), cache.free, cache.evictable) == (before, 100, 10)
    cache.extend_branch(m.ExtendBranch(2, pack([7])))


def test_no_lock_is_given_up_where_just_enough_can_be_evicted() -> None:
    """200 are free, and 10 can be evicted."""
    cache = deep(200, 400, reach=10)
    before = kept_ends(cache)
    cache.open_branch(m.OpenBranch(2))
    cache.extend_branch(m.ExtendBranch(2, pack(range(1000, 1210))))
    assert isinstance(cache.acquire(m.Acquire(8, 2, 0)), m.Granted)
    assert (kept_ends(cache), cache.free, cache.evictable) == (before, 0, 0)


def resident(cache: RadixCache, parent: Node, tokens: list[int], last_use: int) -> Node:
    """A leaf below `parent` with pages of its own, used at `last_use` and up for eviction."""
    node = cache.tree.insert(parent, np.array(tokens, dtype=np.int32))
    node.refs += 1
    size = cache.page_size
    pages = cache.residency.take(node.end // size - node.start // size)
    assert pages is not None
    cache.residency.publish(node, pages)
    node.last_use = last_use
    return node


def test_what_is_published_was_used_just_now() -> None:
    cache = RadixCache(8)
    first = resident(cache, cache.tree.root(""), [1], 0)
    before = cache.residency._uses
    node = cache.tree.insert(first, np.array([2], dtype=np.int32))
    pages = cache.residency.take(1)
    assert pages is not None
    cache.residency.publish(node, pages)
    assert node.last_use > before
    assert (first.resident_children, cache.residency.private, cache.residency.evictable) == (1, 0, 2)


def test_a_parent_was_used_when_its_evicted_child_was() -> None:
    for child_use, parent_use, expected in ((9, 3, 9), (3, 9, 9)):
        cache = RadixCache(8)
        parent = resident(cache, cache.tree.root(""), [1], parent_use)
        child = resident(cache, parent, [2], child_use)
        child.stamp = 5
        child.prove()
        pages = cache.residency._make_cold(child)
        assert (len(pages), child.state, child.stamp) == (1, GONE, 0)
        assert not child.proven
        assert (parent.last_use, parent.resident_children) == (expected, 0)


def test_the_end_of_a_leaf_that_begins_inside_the_path_is_evicted() -> None:
    """Pages of two tokens: of [3, 9) the last two pages go, [3, 5) stays with one."""
    cache = RadixCache(8, 2)
    parent = resident(cache, cache.tree.root(""), [1, 2, 3], 1)
    leaf = resident(cache, parent, [4, 5, 6, 7, 8, 9], 2)
    cache.residency._offer(leaf)
    assert len(leaf.pages) == 3
    cache.residency._evict(2)
    assert (leaf.start, leaf.end, leaf.state) == (4, 9, GONE)
    assert leaf.parent is not None
    assert (leaf.parent.start, leaf.parent.end, len(leaf.parent.pages)) == (3, 4, 1)
    assert cache.free == 6
