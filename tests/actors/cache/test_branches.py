"""Handles and their retention, without pages: what is counted, until when, and who is told."""

import numpy as np
import pytest

from ramify.actors.cache.branches import Branches, UnknownBranch
from ramify.actors.cache.node import Node
from ramify.actors.cache.tree import RadixTree
from ramify.protocol.plan import unpack


@pytest.fixture
def tree() -> RadixTree:
    return RadixTree()


@pytest.fixture
def lowered() -> list[Node]:
    """The nodes that were reported to be retained for a shorter time."""
    return []


@pytest.fixture
def branches(tree: RadixTree, lowered: list[Node]) -> Branches:
    made = Branches(tree, lowered.append)
    made.open(1, tree.root(""))
    made.extend(1, array(5, 6))
    return made


def array(*tokens: int) -> np.ndarray:
    return np.array(tokens, dtype=np.int32)


def test_handles_by_number_and_by_session(branches: Branches, tree: RadixTree) -> None:
    other = 3 << 32
    branches.open(other + 1, tree.root(""))
    branches.fork(1, [other + 2], 2)
    assert len(branches) == 3
    assert sorted(branch for branch, _ in branches.items()) == [1, other + 1, other + 2]
    assert (branches.of(0), sorted(branches.of(3)), branches.of(4)) == ([1], [other + 1, other + 2], [])
    assert branches.head(other + 2) is branches.find(1)
    assert branches.find(9) is None
    with pytest.raises(UnknownBranch, match="0x9 is not open"):
        branches.head(9)
    branches.drop(other + 1)
    assert branches.of(3) == [other + 2]
    branches.drop(other + 2)
    assert (branches.of(3), len(branches), list(branches._sessions)) == ([], 1, [0])


def test_a_handle_that_is_open_is_not_opened_again(branches: Branches, tree: RadixTree) -> None:
    head = branches.head(1)
    with pytest.raises(UnknownBranch, match="0x1 is open already"):
        branches.open(1, tree.root(""))
    assert (branches.head(1), head.refs, tree.root("").refs) == (head, 1, 0)


def test_what_nobody_holds_is_gone(branches: Branches, tree: RadixTree) -> None:
    branches.extend(1, array(7))
    assert (branches.head(1).refs, branches.head(1).end, tree.nodes) == (1, 3, 1)
    branches.rollback(1, 1)
    assert (tree.nodes, list(unpack(tree.tokens(branches.head(1), 0)))) == (1, [5])
    branches.rollback(1, 1)
    assert branches.head(1).refs == 1
    branches.drop(1)
    assert (tree.nodes, tree.roots, len(branches)) == (0, {}, 0)


def test_how_long_a_node_is_retained(branches: Branches, tree: RadixTree, lowered: list[Node]) -> None:
    node, root = branches.head(1), tree.root("")

    def counts() -> tuple[int, float, int, float]:
        return node.retained, node.until, root.retained, root.until

    branches.fork(1, [2], 2)
    assert counts() == (0, 0.0, 0, 0.0)
    branches.retain(1, 5.0)
    assert counts() == (1, 5.0, 1, 5.0)
    branches.retain(2, 9.0)
    assert counts() == (2, 9.0, 1, 5.0)
    assert sorted(branches.retained()) == [1, 2]
    assert lowered == []
    branches.retain(2, 7.0)  # about when the last of them ends
    assert (counts(), lowered) == ((2, 9.0, 1, 5.0), [node])
    branches.retain(1, 0.0)
    assert (counts(), lowered) == ((1, 9.0, 1, 5.0), [node])
    branches.retain(2, 6.0)
    assert (counts(), lowered) == ((1, 6.0, 1, 5.0), [node, node])
    branches.retain(2, 6.0)
    branches.retain(2, 8.0)
    assert (counts(), lowered) == ((1, 8.0, 1, 5.0), [node, node])
    branches.expire(7.9)
    assert counts() == (1, 8.0, 1, 5.0)
    branches.expire(8.0)
    assert counts() == (0, 0.0, 0, 0.0)
    assert (lowered[2:], list(branches.retained())) == ([node, root], [])
    branches.retain(2, 0.0)
    branches.retain(2, 0.5)
    assert (counts(), len(lowered)) == ((1, 0.5, 1, 0.5), 4)
    branches.retain(2, -1.0)
    assert counts() == (0, 0.0, 0, 0.0)


def test_retention_goes_with_the_handle(branches: Branches, tree: RadixTree) -> None:
    branches.fork(1, [2], 2)
    old = branches.head(1)
    branches.retain(1, 5.0)
    branches.extend(2, array(7))
    branches.move(1, branches.head(2))
    assert (old.retained, branches.head(2).retained) == (1, 1)  # by its child
    branches.rollback(1, 0)
    root = tree.root("")
    assert branches.head(1) is root
    assert (root.retained, root.until, branches.head(2).retained) == (1, 5.0, 0)
    branches.drop(1)
    assert (root.retained, root.until, list(branches.retained())) == (0, 0.0, [])


def test_ends_that_were_put_off_or_dropped_do_not_count(branches: Branches) -> None:
    branches.fork(1, [2], 2)
    for branch, until in ((1, 5.0), (1, 9.0), (2, 4.0)):
        branches.retain(branch, until)
    branches.drop(2)
    branches.expire(6.0)
    assert list(branches.retained()) == [1]
    branches.expire(9.0)
    assert list(branches.retained()) == []


def test_old_ends_are_forgotten_and_the_order_stays(branches: Branches) -> None:
    branches.fork(1, [2], 2)
    branches.retain(1, 100.0)
    for number in range(71):
        branches.retain(2, 80.0 - number)
    assert len(branches._expiry) == 64 + 4 * 2
    branches.retain(2, 5.0)
    assert len(branches._expiry) == 2
    branches.expire(6.0)
    assert list(branches.retained()) == [1]
