"""Which snapshot gives way, and where a prefill leaves some."""

import numpy as np
import pytest

from ramify.actors.cache.node import NO_PAGES, NO_TOKENS, Node
from ramify.actors.cache.snapshots import NEAR, STRIDE, Snapshots, marks


def path(*ends: int) -> list[Node]:
    """Nodes of one branch with these ends, the root first."""
    nodes = [Node(None, 0, NO_TOKENS)]
    for end in ends:
        parent = nodes[-1]
        node = Node(parent, parent.end, np.arange(parent.end, end, dtype=np.int32))
        parent.children[parent.end] = node
        node.fill(NO_PAGES)
        nodes.append(node)
    return nodes


def kept(states: Snapshots, node: Node, *, end: bool = False) -> int:
    """A slot whose state becomes the snapshot of `node`, and which no run uses any more."""
    (slot,) = states.take(1)
    states.put(node, slot, end=end)
    states.release(slot)
    return slot


def test_a_slot_is_handed_out_once_until_nobody_uses_it() -> None:
    states = Snapshots(3)
    assert sorted(states.take(3)) == [1, 2, 3]
    assert (states.free, states.available) == (0, 0)
    states.release(2)
    assert states.take(1) == [2]


def test_a_snapshot_that_a_run_uses_is_not_available_and_lives_on_for_it_when_dropped() -> None:
    states, (_, node) = Snapshots(2), path(10)
    slot = kept(states, node)
    assert (states.free, states.available) == (1, 2)
    states.use(slot)
    assert (states.free, states.available) == (1, 1)
    states.drop(node)
    assert (node.snapshot, states.free, len(states)) == (0, 1, 0)
    states.release(slot)
    assert states.free == 2


def test_the_one_with_the_shortest_replay_gives_way() -> None:
    states, (_, a, b, c) = Snapshots(3), path(1000, 1010, 3000)
    for node in (a, b, c):
        kept(states, node)
    assert [states.saved(node) for node in (a, b, c)] == [1000, 10, 1990]
    states.take(1)
    assert (bool(a.snapshot), bool(b.snapshot), bool(c.snapshot)) == (True, False, True)
    assert states.saved(c) == 2000


def test_what_a_snapshot_is_worth_grows_when_the_one_above_has_gone() -> None:
    states, (_, a, b, c) = Snapshots(3), path(100, 200, 310)
    for node in (a, b, c):
        kept(states, node)
    states.take(1)  # a: 100 tokens. Now b saves 200, and c 110
    states.take(1)
    assert [bool(node.snapshot) for node in (a, b, c)] == [False, True, False]


def test_the_newest_ends_of_a_branch_go_last() -> None:
    states, nodes = Snapshots(6), path(100, 200, 300, 400, 500, 1500)
    for node in nodes[1:6]:
        kept(states, node, end=True)
    kept(states, nodes[6])  # far from all, but no end
    gone = []
    for _ in range(6):
        states.take(1)
        gone += [node.end for node in nodes[1:] if not node.snapshot and node.end not in gone]
    assert gone[:2] == [100, 1500]  # the first is no end any more: four newer ones are


def test_an_end_that_branches_leave_from_stays_one() -> None:
    states, nodes = Snapshots(9), path(100, 200, 300, 400, 500)
    nodes[1].children[-1] = Node(nodes[1], 100, np.array([-1], dtype=np.int32))
    slots = [kept(states, node, end=True) for node in nodes[1:]]
    snapshot = states.of(slots[0])
    assert snapshot is not None
    assert snapshot.end


def test_what_is_not_used_ages() -> None:
    states = Snapshots(3)
    (_, old), (_, used) = path(1000), path(900)
    kept(states, old)
    slot = kept(states, used)
    for _ in range(6):  # others come and go
        (_, other) = path(300)
        kept(states, other)
        states.use(slot)
        states.touch(slot)
        states.release(slot)
    assert (bool(old.snapshot), bool(used.snapshot)) == (False, True)


@pytest.mark.parametrize("room", [0, 1, 2, 5, 1000])
def test_marks_are_within_the_prompt_and_the_room(room: int) -> None:
    found = marks([9000, 8000, 100, 50], 40, 9000, room)
    assert found == sorted(set(found))
    assert len(found) <= room
    assert all(40 < mark < 9000 for mark in found)


def test_the_end_of_a_prompt_comes_first() -> None:
    assert marks([], 0, 5000, 1) == [4999]
    assert marks([5000, 4990], 0, 5000, 1) == [4990]  # of the message; a header follows
    assert marks([5000, 4999 - NEAR - 1], 0, 5000, 1) == [4999]
    assert marks([], 5000 - NEAR, 5000, 1) == []  # it begins as near to the end


def test_ends_of_ops_come_before_multiples() -> None:
    assert marks([7000, 6000, 3000, 2000, 1000, 300], 0, 7001, 6) == [300, 3000, 4096, 6000, 7000]
    assert marks([7000, 6000, 3000, 2000, 1000, 300], 200, 7001, 4) == [3000, 4096, 6000, 7000]


def test_multiples_thin_out_until_there_is_room() -> None:
    assert marks([], 0, 2100, 9) == [STRIDE, 2 * STRIDE, 3 * STRIDE, 2099]
    assert marks([], 0, 2100, 3) == [2 * STRIDE, 2099]
    assert len(marks([], 0, 64_000, 40)) <= 40
