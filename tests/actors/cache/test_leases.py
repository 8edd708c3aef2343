"""Leases without pages: what is counted, until when, who is told, and what does not fit."""

import numpy as np
import pytest

from ramify.actors.cache.branches import Branches
from ramify.actors.cache.leases import Bounds, Leases
from ramify.actors.cache.node import Node
from ramify.actors.cache.tree import RadixTree


@pytest.fixture
def tree() -> RadixTree:
    return RadixTree()


@pytest.fixture
def lowered() -> list[Node]:
    """The nodes that were reported to be retained for a shorter time."""
    return []


@pytest.fixture
def leases(tree: RadixTree, lowered: list[Node]) -> Leases:
    return Leases(tree, lowered.append, Bounds())


@pytest.fixture
def branches(tree: RadixTree, leases: Leases) -> Branches:
    made = Branches(tree, leases)
    made.open(1, tree.root(""))
    made.extend(1, array(5, 6))
    return made


def array(*tokens: int) -> np.ndarray:
    return np.array(tokens, dtype=np.int32)


def retain(branches: Branches, leases: Leases, branch: int, until: float) -> int:
    return leases.retain(branch, branches.head(branch), "", until)


def test_how_long_a_node_is_retained(
    branches: Branches, leases: Leases, tree: RadixTree, lowered: list[Node]
) -> None:
    node, root = branches.head(1), tree.root("")

    def counts() -> tuple[int, float, int, float]:
        return (node.held or {}).get("", 0), node.until, (root.held or {}).get("", 0), root.until

    branches.fork(1, [2], 2)
    assert counts() == (0, 0.0, 0, 0.0)
    assert retain(branches, leases, 1, 5.0) == 2
    assert counts() == (1, 5.0, 1, 5.0)
    retain(branches, leases, 2, 9.0)
    assert counts() == (2, 9.0, 1, 5.0)
    assert (sorted(leases.branches()), leases.tokens) == ([1, 2], {"": 2})
    assert lowered == []
    retain(branches, leases, 2, 7.0)  # about when the last of them ends
    assert (counts(), lowered) == ((2, 9.0, 1, 5.0), [node])
    retain(branches, leases, 1, 0.0)
    assert (counts(), lowered) == ((1, 9.0, 1, 5.0), [node])
    retain(branches, leases, 2, 6.0)
    assert (counts(), lowered) == ((1, 6.0, 1, 5.0), [node, node])
    retain(branches, leases, 2, 6.0)
    retain(branches, leases, 2, 8.0)
    assert (counts(), lowered) == ((1, 8.0, 1, 5.0), [node, node])
    leases.expire(7.9)
    assert counts() == (1, 8.0, 1, 5.0)
    leases.expire(8.0)
    assert counts() == (0, 0.0, 0, 0.0)
    assert (lowered[2:], len(leases), leases.tokens) == ([node, root], 0, {})


def test_retention_goes_with_the_handle(branches: Branches, leases: Leases, tree: RadixTree) -> None:
    branches.fork(1, [2], 2)
    old = branches.head(1)
    retain(branches, leases, 1, 5.0)
    branches.extend(2, array(7))
    branches.move(1, branches.head(2))
    assert (old.held, branches.head(2).held) == ({"": 1}, {"": 1})  # by its child
    branches.rollback(1, 0)
    root = tree.root("")
    assert branches.head(1) is root
    assert (root.held, root.until, branches.head(2).held) == ({"": 1}, 5.0, None)
    branches.drop(1)
    assert (root.held, root.until, len(leases)) == (None, 0.0, 0)


def test_ends_that_were_put_off_or_dropped_do_not_count(branches: Branches, leases: Leases) -> None:
    branches.fork(1, [2], 2)
    for branch, until in ((1, 5.0), (1, 9.0), (2, 4.0)):
        retain(branches, leases, branch, until)
    branches.drop(2)
    leases.expire(6.0)
    assert list(leases.branches()) == [1]
    leases.expire(9.0)
    assert list(leases.branches()) == []


def test_old_ends_are_forgotten_and_the_order_stays(branches: Branches, leases: Leases) -> None:
    branches.fork(1, [2], 2)
    retain(branches, leases, 1, 100.0)
    for number in range(171):
        retain(branches, leases, 2, 190.0 - number)
        assert len(leases._expiry) <= 64 + 4 * 2
    retain(branches, leases, 2, 5.0)
    leases.expire(6.0)
    assert list(leases.branches()) == [1]


def test_what_a_session_retained_outlives_it(
    branches: Branches, leases: Leases, tree: RadixTree
) -> None:
    retain(branches, leases, 1, 5.0)
    branches.drop(1, keep=True)
    (lease,) = leases.all()
    assert (lease.branch, lease.node.end, tree.nodes, leases.tokens) == (None, 2, 1, {"": 2})
    leases.expire(5.0)
    assert (tree.nodes, tree.roots, leases.tokens) == (0, {}, {})


def test_a_longer_lease_takes_the_place_of_those_above(
    branches: Branches, leases: Leases, tree: RadixTree
) -> None:
    for turn in range(50):
        branches.open(10 + turn, tree.root(""))
        branches.extend(10 + turn, array(*range(5, 8 + turn)))
        retain(branches, leases, 10 + turn, 5.0 + turn)
        branches.drop(10 + turn, keep=True)
    assert (len(leases), leases.tokens) == (1, {"": 52})
    assert tree.nodes < 8  # a path that no lease divides any more is merged
    branches.open(2, tree.root(""))
    branches.extend(2, array(5, 6, 7, 8))
    retain(branches, leases, 2, 900.0)
    branches.drop(2, keep=True)
    assert len(leases) == 2  # it ends later, and stays
    leases.expire(100.0)
    assert (len(leases), leases.tokens) == (1, {"": 4})


def test_what_does_not_fit_is_left_out(tree: RadixTree, lowered: list[Node]) -> None:
    leases = Leases(tree, lowered.append, Bounds(tokens=6, leases=3))
    branches = Branches(tree, leases)
    for branch, first in ((1, 100), (2, 200), (3, 300)):
        branches.open(branch, tree.root(""))
        branches.extend(branch, array(*range(first, first + 4)))
    assert leases.retain(1, branches.head(1), "a", 9.0) == 4
    assert leases.retain(2, branches.head(2), "a", 9.0) == 2
    assert leases.retain(3, branches.head(3), "a", 9.0) == 0
    assert leases.retain(3, branches.head(3), "b", 9.0) == 0  # the lease of a has it
    leases.drop(3)
    assert leases.retain(3, branches.head(3), "b", 9.0) == 4  # another's share
    assert leases.tokens == {"a": 6, "b": 4}
    branches.extend(1, array(104))  # it grows past the share, and stays whole below
    assert (leases.of(1).node.end, leases.tokens["a"]) == (4, 6)  # type: ignore[union-attr]
    branches.rollback(2, 1)
    assert leases.tokens["a"] == 5
    branches.extend(1, array(105))
    assert (leases.of(1).node.end, leases.tokens["a"]) == (5, 6)  # type: ignore[union-attr]


def keep(branches: Branches, leases: Leases, end: int | None, until: float, holder: str = "") -> int:
    return leases.keep(1, branches.head(1), holder, until, end)


def test_prefixes_are_kept_each_for_its_time(
    branches: Branches, leases: Leases, tree: RadixTree
) -> None:
    branches.extend(1, array(*range(7, 15)))
    assert [keep(branches, leases, end, until) for end, until in ((3, 9.0), (6, 5.0), (None, 2.0))] == [
        3, 6, 10,
    ]  # fmt: skip
    assert (leases.tokens[""], len(leases)) == (10, 3)
    leases.expire(2.0)
    assert leases.tokens[""] == 6
    branches.rollback(1, 1)  # the branch goes elsewhere, what is kept does not
    branches.extend(1, array(50))
    assert leases.tokens[""] == 6
    leases.expire(5.0)
    assert leases.tokens[""] == 3
    leases.expire(9.0)
    assert (leases.tokens, len(leases)) == ({}, 0)


def test_a_prefix_is_kept_once_and_as_long_as_any_one_says(branches: Branches, leases: Leases) -> None:
    for until in (5.0, 9.0, 7.0):
        assert keep(branches, leases, 2, until) == 2
    assert [lease.until for lease in leases.all()] == [9.0]
    assert keep(branches, leases, 99, 20.0) == 2  # there is no more of it
    assert keep(branches, leases, 2, 0.0) == 0
    assert (leases.tokens, len(leases)) == ({}, 0)
    assert keep(branches, leases, 1, 0.0) == 0  # it was not kept


def test_prefixes_have_their_holders_bounds(branches: Branches, leases: Leases) -> None:
    branches.extend(1, array(*range(7, 15)))
    leases.bounds = Bounds(tokens=4, leases=2)
    assert keep(branches, leases, 6, 5.0) == 4
    assert keep(branches, leases, 8, 7.0) == 4  # no further, but longer
    assert [lease.until for lease in leases.all()] == [7.0]
    assert keep(branches, leases, 2, 9.0) == 2
    assert keep(branches, leases, 1, 9.0) == 0  # two are there
    assert keep(branches, leases, 1, 9.0, "ann") == 1
    leases.bounds = Bounds(tokens=0)
    assert keep(branches, leases, 5, 5.0, "bob") == 0
    assert "bob" not in leases.tokens
