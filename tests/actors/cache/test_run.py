"""The pages of one running request: those that it has, gave to the tree, and gives back."""

import numpy as np
import pytest

from ramify.actors.cache.node import NO_TOKENS, Node
from ramify.actors.cache.run import PageLease


@pytest.fixture
def run() -> PageLease:
    node = Node(None, 0, NO_TOKENS)
    return PageLease(7, 1, node, node, 3, array(10, 11, 12), 3)


def array(*pages: int) -> np.ndarray:
    return np.array(pages, dtype=np.int32)


def test_a_run_begins_with_the_pages_of_its_grant(run: PageLease) -> None:
    assert (run.request, run.branch, run.first, run.end, run.mixed) == (7, 1, 3, 6, None)
    assert run.rest().tolist() == [10, 11, 12]


def test_pages_are_appended_and_room_is_made_ahead(run: PageLease) -> None:
    run.grow(array(13))
    assert (run.end, len(run._table), run.rest().tolist()) == (7, 6, [10, 11, 12, 13])
    run.grow(array(14, 15))
    assert (run.end, len(run._table)) == (9, 6)
    run.grow(array(*range(16, 36)))
    assert (run.end, len(run._table), run.rest().tolist()) == (29, 26, list(range(10, 36)))


def test_pages_that_were_given_are_not_given_back(run: PageLease) -> None:
    run.grow(array(13))
    assert run.give(4, 6).tolist() == [11, 12]
    assert run.rest().tolist() == [10, 13]
    assert run.give(3, 3).tolist() == []
    assert run.give(3, 4).tolist() == [10]
    assert run.give(6, 7).tolist() == [13]
    assert run.rest().tolist() == []
    assert run.give(7, 7).tolist() == []


@pytest.mark.parametrize(("start", "stop"), [(2, 4), (5, 7), (5, 4)])
def test_pages_that_the_run_does_not_have(run: PageLease, start: int, stop: int) -> None:
    with pytest.raises(RuntimeError, match=rf"pages \[{start}, {stop}\) of request 0x7$"):
        run.give(start, stop)
    assert run.rest().tolist() == [10, 11, 12]


def test_no_page_is_given_twice(run: PageLease) -> None:
    run.give(4, 5)
    with pytest.raises(RuntimeError, match="are given away"):
        run.give(3, 6)
    assert run.rest().tolist() == [10, 12]
