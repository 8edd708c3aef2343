"""A node when it is made, and what is copied of a buffer that holds more."""

import numpy as np
import pytest

from ramify.actors.cache.node import NO_PAGES, NO_TOKENS, Node, compact


def test_a_new_node_is_cold_and_nobody_holds_it() -> None:
    root = Node(None, 0, NO_TOKENS)
    node = Node(root, 3, np.array([5, 6], dtype=np.int32))
    assert (node.parent, node.start, node.end, node.children) == (root, 3, 5, {})
    assert (node.pages, node.table, node.refs, node.locks, node.owner) == (None, None, 0, 0, 0)
    assert (node.resident_children, node.last_use, node.stamp) == (0, 0, 0)
    assert (node.retained, node.until, node.proven, node.suspect) == (0, 0.0, False, False)


def test_how_it_is_printed() -> None:
    node = Node(None, 3, np.array([5, 6], dtype=np.int32))
    assert repr(node) == "<Node [3, 5) cold refs=0 locks=0>"
    node.pages = NO_PAGES
    assert repr(node) == "<Node [3, 5) 0 pages refs=0 locks=0>"


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
