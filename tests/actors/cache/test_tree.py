"""Structure: match, split, insert, merge, prune."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ramify.actors.cache.node import DEVICE, SUSPECT, Node, common_prefix, compact
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
    node.claim(7)
    assert (tree.split(node, 2).owner, node.owner) == (7, 7)


@pytest.mark.parametrize("size", [1, 2, 4, 5])
def test_a_split_divides_pages_with_no_rest(size: int) -> None:
    for start in range(6):
        for at in range(start + 1, 12):
            tree = RadixTree(size)
            node = held(tree, *range(start), *range(20, 32 - start))
            if start:
                tree.split(node, start).fill(np.arange(start // size, dtype=np.int32))
            node.fill(np.arange(start // size, node.end // size, dtype=np.int32))
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


def test_short_answers_do_not_keep_what_is_before_them_apart() -> None:
    """300 turns of 40 tokens, a prompt of 2 and an answer of 1, each a node of its own at first."""
    tree = RadixTree()
    node = tree.root("")
    for i in range(300):
        for size in (40, 2, 1):
            node = tree.insert(node, array(*[3 * i + size] * size))
        tree.tidy(node)
    assert (node.end, tree.nodes <= 12) == (300 * 43, True)


def test_merge_stops_at_forks_handles_and_anchors() -> None:
    for keep in ("refs", "locks", "fork", "resident", "claimed"):
        tree = RadixTree()
        node = held(tree, 1, 2, 3)
        upper = tree.split(node, 2)
        if keep == "fork":
            held(tree, 1, 2, 4)
        elif keep == "resident":
            upper.fill(array(0, 1))
        elif keep == "claimed":
            upper.claim(1)
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


def test_how_small_a_page_may_be() -> None:
    assert (RadixTree().page_size, RadixTree(1).page_size) == (1, 1)
    with pytest.raises(ValueError, match="page_size is 0: must be at least 1"):
        RadixTree(0)


def test_a_root_is_resident_proven_and_there_once() -> None:
    tree = RadixTree()
    root = tree.root("a")
    assert tree.root("a") is root
    assert (root.start, root.end, root.table, root.proven, tree.nodes) == (0, 0, b"", True, 0)
    assert root.resident
    assert len(root.pages) == 0


def test_what_both_parts_of_a_split_know() -> None:
    tree = RadixTree(2)
    node = held(tree, 1, 2, 3, 4, 5)
    node.fill(array(8, 9))
    node.last_use, node.until, node.held, node.locks = 5, 7.0, {"a": 3, "b": 1}, 2
    node.prove()
    upper = tree.split(node, 3)
    assert (upper.last_use, upper.until, upper.held, upper.locks) == (5, 7.0, {"a": 1, "b": 1}, 1)
    assert (upper.proven, upper.state, upper.resident_children, upper.refs) == (True, DEVICE, 1, 0)
    assert (node.held, node.locks, node.refs, tree.nodes) == ({"a": 3, "b": 1}, 2, 1, 2)
    assert (upper.pages.tolist(), node.pages.tolist()) == ([8], [9])
    assert (upper.tokens.tolist(), node.tokens.tolist()) == ([1, 2, 3], [4, 5])
    assert tree.root("").children == {1: upper}
    assert upper.children == {4: node}
    node.proven, node.held, node.locks = False, None, 0
    node.distrust()
    again = tree.split(node, 4)
    assert (again.proven, again.state, again.held, again.locks) == (False, SUSPECT, None, 0)


def test_a_cold_node_is_split_without_pages() -> None:
    tree = RadixTree()
    node = held(tree, 1, 2)
    upper = tree.split(node, 1)
    assert (upper.resident, upper.resident_children, node.resident) == (False, 0, False)


def test_where_a_node_cannot_be_split() -> None:
    tree = RadixTree()
    node = held(tree, 1, 2, 3)
    tree.split(node, 1)
    for at in (0, 1, 4):
        with pytest.raises(ValueError, match=f"split at {at}"):
            tree.split(node, at)
    with pytest.raises(ValueError, match="split at 1"):
        tree.split(tree.root(""), 1)
    assert tree.nodes == 2


def test_ancestor_of_the_root_and_before_it() -> None:
    tree = RadixTree()
    node = held(tree, 1, 2)
    root = tree.root("")
    assert tree.ancestor(root, 0) is root
    assert tree.ancestor(node, 0) is root
    with pytest.raises(ValueError, match="position -1 of a branch of 2 tokens"):
        tree.ancestor(node, -1)
    upper = tree.ancestor(node, 1)
    assert tree.ancestor(node, 1) is upper
    assert tree.nodes == 2


def test_merge_takes_the_later_times_and_leaves_the_eviction_queue() -> None:
    tree = RadixTree()
    node = held(tree, 1, 2, 3)
    upper = tree.split(node, 1)
    upper.last_use, upper.until, upper.stamp = 9, 4.0, 6
    node.last_use, node.until, node.stamp = 5, 7.0, 8
    tree.merge(node)
    assert (node.last_use, node.until, node.stamp, upper.stamp) == (9, 7.0, 8, 0)
    assert (node.start, node.end, node.tokens.tolist(), node.resident) == (0, 3, [1, 2, 3], False)
    assert (node.parent, upper.parent, tree.nodes) == (tree.root(""), None, 1)
    assert tree.root("").children == {1: node}


def test_merge_joins_pages_in_their_order() -> None:
    tree = RadixTree()
    node = held(tree, 1, 2, 3)
    node.fill(array(7, 8, 9))
    tree.split(node, 1)
    tree.split(node, 2)
    tree.merge(node)
    assert (node.pages.tolist(), tree.nodes) == ([7, 8, 9], 1)


@pytest.mark.parametrize(("upper", "lower", "joined"), [(4, 2, True), (5, 2, False), (1, 9, True)])
def test_how_long_an_ancestor_may_be(upper: int, lower: int, joined: bool) -> None:
    """At most twice as long as what it is joined with: so copies are paid for by what is new."""
    tree = RadixTree()
    node = held(tree, *range(upper + lower))
    tree.split(node, upper)
    tree.merge(node)
    assert tree.nodes == (1 if joined else 2)


def test_what_was_joined_counts_for_the_next_ancestor() -> None:
    """Parts of 6, 2 and 1 tokens: 2 <= 2 x 1, then 6 <= 2 x 3."""
    tree = RadixTree()
    node = held(tree, *range(9))
    tree.split(node, 6)
    tree.split(node, 8)
    tree.merge(node)
    assert tree.nodes == 1


@pytest.mark.parametrize("keep", ["proven", "distrusted"])
def test_merge_stops_where_less_is_known(keep: str) -> None:
    for both in (True, False):
        tree = RadixTree()
        node = held(tree, 1, 2, 3)
        upper = tree.split(node, 2)
        for each in (upper, node):
            each.fill(array())
        for each in (upper, node) if both else (upper,):
            each.prove() if keep == "proven" else each.distrust()
        tree.merge(node)
        assert (tree.nodes == 1) == both


@pytest.mark.parametrize("keep", ["children", "refs", "locks", "root"])
def test_what_is_in_use_is_not_deleted(keep: str) -> None:
    tree = RadixTree()
    node = held(tree, 1, 2)
    node.refs = 0
    if keep == "children":
        node = tree.split(node, 1)
    elif keep == "root":
        node = tree.root("b")
    else:
        setattr(node, keep, 1)
    before = tree.nodes
    with pytest.raises(ValueError, match="in use"):
        tree.delete(node)
    assert tree.nodes == before


def test_what_a_deleted_leaf_leaves() -> None:
    """Its parent's tokens and pages no longer keep the buffer alive that they shared."""
    tree = RadixTree()
    node = held(tree, *range(1000))
    node.fill(np.arange(1000, dtype=np.int32))
    upper = tree.split(node, 3)
    node.refs = 0
    node.empty()
    tree.delete(node)
    assert (upper.children, node.parent, tree.nodes) == ({}, None, 1)
    assert (upper.tokens.base, upper.pages.base) == (None, None)
    assert (upper.tokens.tolist(), upper.pages.tolist()) == ([0, 1, 2], [0, 1, 2])


def test_prune_stops_at_what_is_resident_or_held() -> None:
    for keep in ("pages", "refs", "children"):
        tree = RadixTree()
        node = held(tree, 1, 2, 3)
        upper = tree.split(node, 2)
        if keep == "pages":
            upper.fill(array(0, 1))
        elif keep == "refs":
            upper.refs = 1
        else:
            held(tree, 1, 2, 9)
        node.refs = 0
        tree.prune(node)
        assert (node.parent, upper.parent) == (None, tree.root("")), keep


@pytest.mark.parametrize("keep", ["refs", "locks", "children", ""])
def test_how_long_a_root_stays(keep: str) -> None:
    tree = RadixTree()
    root = tree.root("a")
    if keep == "children":
        tree.insert(root, array(1))
    elif keep:
        setattr(root, keep, 1)
    tree.prune(root)
    tree.prune(root)  # nothing is left to prune, or still needed
    assert (tree.roots == {"a": root}) == bool(keep)
    assert (tree.root("a") is root) == bool(keep)


def test_a_root_that_only_a_leaf_needed_goes_with_it() -> None:
    tree = RadixTree()
    leaf = tree.insert(tree.root("a"), array(1))
    tree.delete(leaf)
    assert tree.roots == {}


def test_tokens_from_any_position() -> None:
    tree = RadixTree()
    node = held(tree, *range(6))
    tree.split(node, 2)
    tree.split(node, 4)
    for start in range(7):
        tokens = tree.tokens(node, start)
        assert np.frombuffer(tokens, dtype=np.int32).tolist() == list(range(start, 6))


def test_walk_comes_to_parents_first_and_to_all() -> None:
    tree = RadixTree()
    node, other = held(tree, 1, 2, 3), held(tree, 1, 2, 4)
    every = list(tree.walk())
    assert len(every) == 4
    assert every[0] is tree.root("")
    assert every[1] is node.parent
    assert {node, other} == set(every[2:])
