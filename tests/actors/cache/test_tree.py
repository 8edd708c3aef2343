"""Structure: match, split, insert, merge, prune."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ramify.actors.cache.node import Node, common_prefix, compact
from ramify.actors.cache.tree import RadixTree


def array(*tokens: int) -> np.ndarray:
    return np.array(tokens, dtype=np.int32)


def held(tree: RadixTree, *tokens: int) -> Node:
    """The node that ends after `tokens`, kept by a reference."""
    node = tree.insert(tree.root(""), array(*tokens))
    node.refs += 1
    return node


@settings(derandomize=True, deadline=None)
@given(st.integers(0, 3000), st.integers(0, 3000), st.integers(0, 3000))
def test_common_prefix(a: int, b: int, differs_at: int) -> None:
    left, right = np.zeros(a, dtype=np.int32), np.zeros(b, dtype=np.int32)
    if differs_at < b:
        right[differs_at] = 1
        right[differs_at + 7 :: 3] = 1
    assert common_prefix(left, right) == min(a, b, differs_at if differs_at < b else b)


def test_insert_shares_the_common_prefix() -> None:
    tree = RadixTree()
    long, short, other = held(tree, 1, 2, 3, 4), held(tree, 1, 2), held(tree, 1, 2, 9)
    assert long.parent is short
    assert other.parent is short
    assert (long.start, long.end, tree.nodes) == (2, 4, 3)
    assert held(tree, 1, 2, 3, 4) is long
    assert np.frombuffer(tree.tokens(other, 1), dtype=np.int32).tolist() == [2, 9]


def test_split_keeps_the_identity_of_the_end() -> None:
    tree = RadixTree()
    node = held(tree, 1, 2, 3, 4)
    upper = tree.split(node, 3)
    assert (upper.start, upper.end, node.start, node.end) == (0, 3, 3, 4)
    assert node.parent is upper
    assert tree.split(node, 4) is node
    with pytest.raises(ValueError, match="split at 3"):
        tree.split(node, 3)


def test_both_parts_of_a_split_are_computed_by_the_same_request() -> None:
    tree = RadixTree()
    node = held(tree, 1, 2, 3)
    node.owner = 7
    assert (tree.split(node, 2).owner, node.owner) == (7, 7)


@pytest.mark.parametrize("size", [1, 2, 4, 5])
def test_a_split_divides_pages_with_no_rest(size: int) -> None:
    for start in range(6):
        for at in range(start + 1, 12):
            tree = RadixTree(size)
            node = held(tree, *range(start), *range(20, 32 - start))
            if start:
                tree.split(node, start).pages = np.arange(start // size, dtype=np.int32)
            node.pages = np.arange(start // size, node.end // size, dtype=np.int32)
            upper = tree.split(node, at)
            assert upper.pages.tolist() == list(range(start // size, at // size))
            assert node.pages.tolist() == list(range(at // size, node.end // size))


def test_ancestor_walks_and_splits() -> None:
    tree = RadixTree()
    node = held(tree, *range(10))
    assert tree.ancestor(node, 10) is node
    assert tree.ancestor(node, 4).end == 4
    assert tree.ancestor(node, 0) is tree.root("")
    with pytest.raises(ValueError, match="position 11"):
        tree.ancestor(node, 11)


def test_prune_takes_what_nothing_needs_and_the_root_last() -> None:
    tree = RadixTree()
    a, b = held(tree, 1, 2, 3), held(tree, 1, 2, 4)
    a.refs = 0
    tree.prune(a)
    assert tree.nodes == 2
    b.refs = 0
    tree.prune(b)
    assert (tree.nodes, tree.roots) == (0, {})


def test_delete_refuses_what_is_in_use() -> None:
    tree = RadixTree()
    node = held(tree, 1, 2)
    with pytest.raises(ValueError, match="in use"):
        tree.delete(node)


def test_namespaces_share_nothing() -> None:
    tree = RadixTree()
    node = held(tree, 1, 2)
    assert tree.insert(tree.root("lora"), array(1, 2)) is not node


def test_merge_keeps_a_long_path_short() -> None:
    """2,000 appends make a path of a few nodes that grow towards the root."""
    tree = RadixTree()
    node, length = tree.root(""), 0
    for i in range(2000):
        node.refs -= 1
        node = tree.insert(node, array(i, i, i))
        node.refs += 1
        tree.merge(node)
        length += 3
    assert node.end == length
    assert tree.nodes <= 12
    tokens = np.frombuffer(tree.tokens(node, 0), dtype=np.int32)
    assert tokens.tolist() == [i for i in range(2000) for _ in range(3)]


def test_merge_stops_at_forks_handles_and_anchors() -> None:
    for keep in ("refs", "locks", "fork", "resident", "owner"):
        tree = RadixTree()
        node = held(tree, 1, 2, 3)
        upper = tree.split(node, 2)
        if keep == "fork":
            held(tree, 1, 2, 4)
        elif keep == "resident":
            upper.pages = array(0, 1)
        else:
            setattr(upper, keep, 1)
        tree.merge(node)
        assert node.parent is upper, keep


def test_merge_joins_what_one_request_has_locked() -> None:
    """A lock of a node is one of its parent, whoever else holds that."""
    for locks, upper_locks, joined in ((1, 1, True), (3, 1, True), (1, 2, False), (0, 1, False)):
        tree = RadixTree()
        node = held(tree, 1, 2, 3)
        upper = tree.split(node, 2)
        node.locks, upper.locks = locks, upper_locks
        tree.merge(node)
        assert (node.parent is not upper) == joined, (locks, upper_locks)


def test_compact_copies_only_small_views_of_large_buffers() -> None:
    large = np.zeros(10_000, dtype=np.int32)
    assert compact(large[:10]).base is None
    assert compact(large[:5000]).base is large
    received = np.frombuffer(bytes(40_000), dtype=np.int32)
    assert compact(received[:10]).base is None
    assert compact(received) is received
