"""What goes first, how much of it, and what is left behind."""

import random

import numpy as np
import pytest

from ramify.actors.cache.eviction import Victims, evictable
from ramify.actors.cache.node import Node
from ramify.actors.cache.tree import RadixTree
from ramify.protocol import messages as m
from ramify.protocol.plan import unpack


def fill(b, branch: int, first: int, count: int = 4, request: int = 90) -> None:
    """A branch with `count` resident tokens of its own."""
    b.open(branch, [first + i for i in range(count)])
    b.run(request, branch)


def test_least_recently_used_first(bench) -> None:
    b = bench(12)
    for branch in (1, 2, 3):
        fill(b, branch, 100 * branch)
    b.run(91, 1)  # used again
    fill(b, 4, 400)
    assert b.resident(1, 2, 3, 4) == [4, 0, 4, 4]


def test_what_was_used_again_while_it_was_up_goes_later(bench) -> None:
    """There is room for the token that runs again, so nothing of the branch is evicted meanwhile."""
    b = bench(13)
    for branch in (1, 2, 3):
        fill(b, branch, 100 * branch)
    b.run(91, 1)
    fill(b, 4, 400)
    assert b.resident(1, 2, 3, 4) == [4, 1, 4, 4]


def test_a_denied_or_inspected_branch_stays_in_order(bench) -> None:
    b = bench(12)
    for branch in (1, 2, 3):
        fill(b, branch, 100 * branch)
    assert b.resident(1) == [4]
    fill(b, 4, 400)
    assert b.resident(1, 2, 3, 4) == [0, 4, 4, 4]


def test_no_more_than_needed_is_taken_from_a_long_leaf(bench) -> None:
    b = bench(100)
    fill(b, 1, 0, count=98)
    fill(b, 2, 500, count=5)
    assert b.resident(1) == [95]
    assert b.counts == (0, 100, 0)
    assert b.grant(7, 1).cached == 95  # takes three pages of branch 2
    assert b.resident(2) == [2]


def test_partial_eviction_takes_whole_pages(bench) -> None:
    b = bench(10, 4)
    fill(b, 1, 0, count=38)
    assert b.counts == (1, 9, 0)
    fill(b, 2, 500, count=9)  # 3 pages, of which 2 stay
    assert b.resident(1, 2) == [28, 8]


def test_tokens_of_a_handle_survive_and_others_are_deleted(bench) -> None:
    b = bench(8)
    fill(b, 1, 100)
    fill(b, 2, 200)
    b.drop(1)
    fill(b, 3, 300, count=8)
    assert b.resident(2, 3) == [0, 8]
    assert b.tokens(2) == [200, 201, 202, 203]
    assert b.cache.tree.nodes == 2
    b.drop(3)
    assert list(unpack(b.grant(7, 2).tokens)) == [200, 201, 202, 203]


def test_children_go_before_their_parent(bench) -> None:
    b = bench(10)
    fill(b, 1, 100)
    b.fork(1, [2], 4)
    b.extend(2, [1, 2, 3])
    b.run(91, 2)
    b.run(92, 1)  # the parent was used last
    fill(b, 3, 300, count=6)
    assert b.resident(1, 2, 3) == [4, 4, 6]


def test_a_parent_is_as_recent_as_its_evicted_child(bench) -> None:
    b = bench(12)
    fill(b, 1, 100)
    fill(b, 2, 200)
    b.extend(1, [7, 8])
    b.run(91, 1)
    fill(b, 3, 300, count=2)
    fill(b, 4, 400, count=4)
    assert b.resident(1, 2) == [6, 0]


def test_retained_branches_go_last(bench) -> None:
    b = bench(12)
    for branch in (1, 2, 3):
        fill(b, branch, 100 * branch)
    b.retain(1, 50.0)
    fill(b, 4, 400, count=8)
    assert b.resident(1, 2, 3) == [4, 0, 0]
    fill(b, 5, 500, count=12)  # a hint, not a lock
    assert b.resident(1, 5) == [0, 12]


@pytest.mark.parametrize("first", [1, 1 << 40])
def test_retention_ends_with_time(bench, first: int) -> None:
    b = bench(12)
    for branch in (first, 2, 3):
        fill(b, branch, 100 * (branch % 100))
    b.retain(first, 50.0)
    b.now = 49.0
    fill(b, 4, 400)
    b.now = 50.0
    fill(b, 5, 500)
    assert b.resident(first, 2, 3, 4) == [0, 0, 4, 4]


def test_retention_ends_when_taken_back_or_dropped(bench) -> None:
    for end in ("retain", "drop", "move"):
        b = bench(12)
        for branch in (1, 2, 3):
            fill(b, branch, 100 * branch)
        b.retain(1, 50.0)
        fill(b, 4, 400)  # passes branch 1 over: it is among the retained now
        assert b.resident(1, 2) == [4, 0]
        if end == "retain":
            b.retain(1, 0.0)
        elif end == "drop":
            b.drop(1)
        else:
            b.move(1, 0)
        fill(b, 5, 500)
        assert b.resident(3, 4, 5) == [4, 4, 4], end


def test_retention_follows_the_head(bench) -> None:
    b = bench(12)
    b.open(1, [1, 2])
    b.retain(1, 50.0)
    b.grant(90, 1, extra=2)
    b.finish(90, 4, [3, 4])
    fill(b, 2, 200)
    fill(b, 3, 300)
    fill(b, 4, 400)
    assert b.resident(1, 2, 3, 4) == [4, 0, 4, 4]


def test_the_sooner_retention_ends_the_sooner_it_goes(bench) -> None:
    b = bench(8)
    fill(b, 1, 100)
    fill(b, 2, 200)
    b.retain(1, 90.0)
    b.retain(2, 60.0)
    fill(b, 3, 300)
    assert b.resident(1, 2) == [4, 0]


def test_everything_locked_denies_and_changes_nothing(bench) -> None:
    b = bench(8)
    b.open(1, [1, 2, 3, 4])
    b.open(2, [5, 6, 7, 8])
    b.grant(7, 1)
    b.grant(8, 2)
    b.commit(7, 4)
    b.open(3, [9])
    assert b.acquire(9, 3) == m.Denied(9, "memory", short=1)
    assert b.grow(7, 1) == []
    assert b.counts == (0, 0, 8)
    b.finish(8, 0)  # retracted: its pages are free at once
    assert b.counts == (4, 0, 4)
    b.grant(9, 3)


def test_the_heap_does_not_grow_with_use(bench) -> None:
    b = bench(8)
    fill(b, 1, 100)
    for i in range(2000):
        b.cache.retain_branches(m.RetainBranches({1: 9.0 if i % 2 else 0.0}))
        b.cache.acquire(m.Acquire(7, 1, 0))
        b.cache.commit(m.Commit(7, 4, final=True))
    assert len(b.cache.residency.victims) < 100
    assert len(b.cache.leases._expiry) < 100


def test_the_heap_does_not_grow_with_the_turns_of_a_chat(bench) -> None:
    """Each turn's node was up for eviction before the next turn's absorbed it."""
    b = bench(1000)
    b.open(1)
    for turn in range(200):
        b.extend(1, [turn, turn + 1])
        b.run(90, 1)
    assert len(b.cache.residency.victims) <= 64 + 4 * b.cache.tree.nodes


def test_a_parent_whose_child_was_used_last_outlives_what_is_older(bench) -> None:
    """The child is evicted, and then the parent counts as used when the child was."""
    b = bench(pages=8)
    b.open(1, [1, 2])
    b.finish(b.grant(7, 1).request, 2)
    b.open(2, [5, 6])
    b.finish(b.grant(8, 2).request, 2)
    b.fork(1, [3], 2)
    b.extend(3, [9, 9])  # below [1, 2], and used last
    b.finish(b.grant(9, 3).request, 4)
    b.open(4, [11, 12, 13])  # 2 free pages, and one of [5, 6]
    b.finish(b.grant(10, 4).request, 3)
    assert b.cache.inspect(m.Inspect(0, 0, [1, 2, 3])).resident == [2, 1, 4]
    b.open(5, [15, 16, 17])  # the other one, then what is least recent: [9, 9]
    b.finish(b.grant(11, 5).request, 3)
    assert b.cache.inspect(m.Inspect(0, 0, [1, 2, 3])).resident == [2, 0, 2]
    b.open(6, [21, 22])  # [11, 12, 13] is younger than [9, 9] was, and with it [1, 2]
    b.finish(b.grant(12, 6).request, 2)
    assert b.cache.inspect(m.Inspect(0, 0, [1, 4, 5])).resident == [0, 3, 3]


@pytest.mark.parametrize("how", ["acquire", "grow", "settle"])
def test_without_a_time_no_retention_ends(bench, how: str) -> None:
    b = bench(12)
    for branch in (1, 2):
        fill(b, branch, 100 * branch)
    b.retain(1, 0.5)
    b.open(3, [7])
    if how == "acquire":
        b.extend(3, range(300, 307))
        b.cache.acquire(m.Acquire(5, 3, 0))
    elif how == "settle":
        b.extend(3, range(300, 307))
        b.cache.settle(m.Settle([], [], [m.Acquire(5, 3, 0)]))
    else:
        b.grant(5, 3)
        b.cache.grow(m.Grow(5, 7))
    b.check()
    assert b.resident(1, 2) == [4, 0]


def leaf(tree: RadixTree, token: int, last_use: int = 0, until: float = 0.0) -> Node:
    """A resident leaf of one token, retained if `until` is a time."""
    node = tree.insert(tree.root(""), np.array([token], dtype=np.int32))
    node.fill(np.array([token], dtype=np.int32))
    node.last_use, node.until, node.held = last_use, until, {"": 1} if until > 0.0 else None
    return node


@pytest.mark.parametrize("field", ["state", "locks", "resident_children", "parent"])
def test_what_can_be_evicted(field: str) -> None:
    node = leaf(RadixTree(), 1)
    assert evictable(node)
    if field == "state":
        node.empty()
    else:
        setattr(node, field, None if field == "parent" else 1)
    assert not evictable(node)


def test_victims_in_order_each_once() -> None:
    tree = RadixTree()
    victims = Victims(tree)
    old, young, first, second = (
        leaf(tree, 1, 1), leaf(tree, 2, 2), leaf(tree, 3, 0, 5.0), leaf(tree, 4, 0, 9.0)
    )  # fmt: skip
    for node in (second, young, first, old):
        victims.push(node)
    victims.push(old)  # the entry before does not count any more
    assert len(victims) == 5
    for node in (old, young, first, second):
        assert victims.pop() is node
        assert node.stamp == 0
    assert len(victims) == 0


def test_what_changed_since_it_was_put_up_is_put_right() -> None:
    tree = RadixTree()
    victims = Victims(tree)
    used, locked, plain, later, sooner = (
        leaf(tree, 1, 1), leaf(tree, 2, 2), leaf(tree, 3, 3),
        leaf(tree, 4, 0, 5.0), leaf(tree, 5, 0, 9.0),
    )  # fmt: skip
    for node in (used, locked, plain, later, sooner):
        victims.push(node)
    used.last_use, locked.locks = 8, 1
    assert victims.pop() is plain  # later and sooner are among the retained now
    assert locked.stamp == 0  # it was no victim
    later.until = 20.0
    assert victims.pop() is used
    locked.locks = 0
    assert victims.pop() is sooner
    victims.reconsider(locked)  # it is not up
    victims.reconsider(later)  # it is
    assert [entry[2] for entry in victims._plain] == [later]
    assert victims.pop() is later


def test_a_retained_victim_that_was_locked_meanwhile_is_passed_over() -> None:
    tree = RadixTree()
    victims = Victims(tree)
    first, second, third = leaf(tree, 1, 0, 5.0), leaf(tree, 2, 0, 6.0), leaf(tree, 3, 0, 7.0)
    for node in (first, second, third):
        victims.push(node)
    assert victims.pop() is first
    second.locks = 1
    assert victims.pop() is third
    assert second.stamp == 0


def test_how_many_old_entries_there_may_be() -> None:
    tree = RadixTree()
    victims = Victims(tree)
    nodes = leaf(tree, 1, 2), leaf(tree, 2, 1)
    victims.push(nodes[1])
    for _ in range(64 + 4 * 2 - 1):
        victims.push(nodes[0])
    assert len(victims) == 64 + 4 * 2
    victims.push(nodes[0])
    assert len(victims) == 2
    assert [victims.pop(), victims.pop()] == [nodes[1], nodes[0]]


@pytest.mark.parametrize("retained", [False, True])
def test_the_order_stays_when_old_entries_are_forgotten(retained: bool) -> None:
    for seed in range(10):
        dice = random.Random(seed)
        tree = RadixTree()
        victims = Victims(tree)
        nodes = [leaf(tree, i, 0, 1.0 if retained else 0.0) for i in range(20)]
        for node in dice.sample(nodes, 20):
            node.last_use = dice.randrange(1000)
            node.until = dice.uniform(1.0, 9.0) if retained else 0.0
            victims.push(node)
        if retained:  # the first one, and then all others are among the retained
            nodes.remove(victims.pop())
        spare = leaf(tree, 99, 5000)
        drop = dice.sample(nodes, 10)
        for node in drop:
            victims.push(node)
        before = len(victims)
        while len(victims) >= before:
            before = len(victims)
            victims.push(spare)
        assert len(victims) == len(nodes) + 1
        out = [victims.pop() for _ in range(len(nodes) + 1)]
        rest = [node for node in out if node is not spare]
        if retained:
            assert out[0] is spare
            assert rest == sorted(nodes, key=lambda node: node.until)
        else:
            assert rest == sorted(nodes, key=lambda node: (node.last_use, out.index(node)))


def test_what_ended_last_goes_last(bench) -> None:
    b = bench(8)
    b.open(1, [100, 101, 102, 103])
    b.grant(5, 1)
    b.commit(5, 4)
    fill(b, 2, 200, request=6)
    b.finish(5, 4)
    fill(b, 3, 300, count=1)
    assert b.resident(1, 2) == [4, 3]


def test_what_is_demoted_goes_first_as_far_as_it_is_nobody_elses(bench) -> None:
    b = bench(pages=10)
    b.open(1, [1, 2, 3])
    b.run(7, 1)
    b.fork(1, [2], 2)
    b.extend(2, [8, 8])
    b.run(8, 2)  # last used
    b.open(3, [5, 6])
    b.run(9, 3)
    assert b.cache.inspect(m.Inspect(1, 1, [2], demote=True)).resident == [4]
    b.check()
    b.open(4, [21, 22, 23, 24])  # 3 are free
    b.run(10, 4)
    assert b.resident(1, 2, 3) == [3, 3, 2]
    b.open(5, [31])
    b.run(11, 5)
    assert b.resident(1, 2, 3) == [3, 2, 2]
    assert b.cache.inspect(m.Inspect(1, 1, [9], [(2, 5.0)], demote=True)).resident == [-1, 0]


def test_what_is_retained_is_not_demoted_by_another_branch(bench) -> None:
    b = bench(pages=6)
    b.open(1, [1, 2, 3])
    b.run(7, 1)
    b.retain(1, 50.0)
    b.fork(1, [2], 3)
    b.cache.inspect(m.Inspect(1, 1, [2], demote=True))
    b.check()
    b.open(3, [5, 6, 7])
    b.run(8, 3)
    b.open(4, [9])
    b.run(9, 4)
    assert b.resident(1, 3) == [3, 2]
