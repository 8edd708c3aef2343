"""Handles, without pages."""

import numpy as np
import pytest

from ramify.actors.cache.branches import Branches, UnknownBranch
from ramify.actors.cache.leases import Bounds, Leases
from ramify.actors.cache.tree import RadixTree
from ramify.protocol.plan import unpack


@pytest.fixture
def tree() -> RadixTree:
    return RadixTree()


@pytest.fixture
def branches(tree: RadixTree) -> Branches:
    made = Branches(tree, Leases(tree, lambda node: None, Bounds()))
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
