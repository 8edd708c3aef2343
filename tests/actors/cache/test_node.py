"""A node when it is made, and what is copied of a buffer that holds more."""

import numpy as np
import pytest

from ramify.actors.cache.node import (
    COMPUTING,
    DEVICE,
    FOLLOWS,
    GONE,
    NO_PAGES,
    NO_TOKENS,
    SUSPECT,
    KvState,
    Node,
    compact,
)


def test_a_new_node_is_cold_and_nobody_holds_it() -> None:
    root = Node(None, 0, NO_TOKENS)
    node = Node(root, 3, np.array([5, 6], dtype=np.int32))
    assert (node.parent, node.start, node.end, node.children) == (root, 3, 5, {})
    assert (node.state, len(node.pages), node.table, node.owner) == (GONE, 0, None, 0)
    assert (node.refs, node.locks, node.resident) == (0, 0, False)
    assert (node.resident_children, node.last_use, node.stamp) == (0, 0, 0)
    assert (node.held, node.retained, node.until, node.proven) == (None, False, 0.0, False)


def test_how_it_is_printed() -> None:
    node = Node(None, 3, np.array([5, 6], dtype=np.int32))
    assert repr(node) == "<Node [3, 5) gone refs=0 locks=0>"
    node.fill(NO_PAGES)
    assert repr(node) == "<Node [3, 5) device 0 pages refs=0 locks=0>"


@pytest.mark.parametrize("of", ["array", "bytes"])
def test_a_view_of_four_times_as_much_is_kept(of: str) -> None:
    """And of 256 bytes more."""
    for size, kept in ((4 * 40 + 256, True), (4 * 40 + 260, False)):
        large = (
            np.zeros(size // 4, dtype=np.int32)
            if of == "array"
            else np.frombuffer(bytes(size), np.int32)
        )
        view = large[:10]
        assert (compact(view) is view) == kept
        assert compact(view).tolist() == [0] * 10


def test_what_owns_its_buffer_is_not_copied() -> None:
    own = np.zeros(3, dtype=np.int32)
    assert compact(own) is own


def in_state(state: KvState) -> Node:
    """A node that reached `state` by its methods."""
    node = Node(None, 0, np.array([5, 6], dtype=np.int32))
    if state is COMPUTING:
        node.claim(7)
    elif state is not GONE:
        node.fill(np.array([3, 4], dtype=np.int32))
        if state is SUSPECT:
            node.distrust()
    assert node.state is state
    return node


ENTER = {
    GONE: lambda node: node.disclaim() if node.owner else node.empty(),
    COMPUTING: lambda node: node.claim(8),
    DEVICE: lambda node: node.prove() if node.resident else node.fill(NO_PAGES),
    SUSPECT: lambda node: node.distrust(),
}


@pytest.mark.parametrize("after", list(KvState))
@pytest.mark.parametrize("before", list(KvState))
def test_only_the_states_of_the_table_follow(before: KvState, after: KvState) -> None:
    node = in_state(before)
    if after in FOLLOWS[before]:
        ENTER[after](node)
        assert node.state is after
    elif before is not after or after is GONE:
        with pytest.raises(RuntimeError, match=f"cannot become {after.name.lower()}"):
            ENTER[after](node)
        assert node.state is before


def test_what_a_state_has() -> None:
    node = in_state(COMPUTING)
    assert (node.owner, node.resident) == (7, False)
    node.fill(np.array([3, 4], dtype=np.int32))
    node.prove()
    assert (node.owner, node.pages.tolist(), node.resident, node.proven) == (0, [3, 4], True, True)
    assert node.empty().tolist() == [3, 4]
    assert (node.state, len(node.pages), node.proven) == (GONE, 0, False)


def test_kv_that_was_suspect_and_is_proven_is_everybodys() -> None:
    node = in_state(SUSPECT)
    node.distrust()
    node.prove()
    assert (node.state, node.proven) == (DEVICE, True)


def test_pages_are_filled_in_once() -> None:
    with pytest.raises(RuntimeError, match="cannot become device"):
        in_state(DEVICE).fill(NO_PAGES)


@pytest.mark.parametrize("state", list(KvState))
def test_what_is_cut_has_one_state(state: KvState) -> None:
    node, upper = in_state(state), Node(None, 0, NO_TOKENS)
    upper.cut_from(node, 1)
    assert (upper.state, upper.owner, upper.is_alike(node)) == (node.state, node.owner, True)
    pages = [[3], [4]] if node.resident else [[], []]
    assert [upper.pages.tolist(), node.pages.tolist()] == pages
