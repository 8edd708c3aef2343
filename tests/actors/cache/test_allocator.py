"""The free list: nothing is handed out twice, nothing is taken back twice."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ramify.actors.cache.allocator import DoubleFree, PageAllocator


def test_hands_out_every_page_once() -> None:
    allocator = PageAllocator(10)
    pages = np.concatenate([allocator.alloc(3), allocator.alloc(0), allocator.alloc(7)])
    assert sorted(pages.tolist()) == list(range(10))
    assert allocator.free_pages == 0


def test_too_many_is_an_error_and_takes_nothing() -> None:
    allocator = PageAllocator(4)
    allocator.alloc(3)
    with pytest.raises(ValueError, match="2 pages asked for, 1 are free"):
        allocator.alloc(2)
    assert allocator.free_pages == 1


@pytest.mark.parametrize("pages", [[9], [0, 0]], ids=["not out", "twice"])
def test_double_free_raises_and_changes_nothing(pages: list[int]) -> None:
    allocator = PageAllocator(10)
    allocator.alloc(5)
    with pytest.raises(DoubleFree):
        allocator.free(np.array(pages, dtype=np.int32))
    assert allocator.free_pages == 5


def test_freed_pages_are_used_again_first() -> None:
    allocator = PageAllocator(100)
    first = allocator.alloc(4)
    allocator.free(first)
    assert set(allocator.alloc(4).tolist()) == set(first.tolist())


@settings(derandomize=True, deadline=None)
@given(st.lists(st.integers(-8, 8), max_size=40))
def test_against_a_set(steps: list[int]) -> None:
    allocator, held = PageAllocator(16), list[int]()
    for step in steps:
        if 0 <= step <= allocator.free_pages:
            new = allocator.alloc(step).tolist()
            assert not set(new) & set(held)
            held.extend(new)
        elif step < 0:
            back, held = held[:-step], held[-step:]
            allocator.free(np.array(back, dtype=np.int32))
        assert allocator.free_pages == 16 - len(held)
        assert allocator.is_out(np.arange(16)).nonzero()[0].tolist() == sorted(held)


def test_the_lowest_pages_go_out_first() -> None:
    allocator = PageAllocator(6)
    assert allocator.alloc(3).tolist() == [0, 1, 2]
    assert allocator.alloc(2).tolist() == [3, 4]
    allocator.free(np.array([3, 1], dtype=np.int32))
    assert allocator.alloc(3).tolist() == [1, 3, 5]


def test_how_small_a_pool_may_be() -> None:
    assert PageAllocator(1).alloc(1).tolist() == [0]
    with pytest.raises(ValueError, match="a pool of 0 pages: at least 1"):
        PageAllocator(0)


def test_fewer_than_none_are_not_handed_out() -> None:
    allocator = PageAllocator(4)
    with pytest.raises(ValueError, match="-1 pages asked for, 4 are free"):
        allocator.alloc(-1)
    assert allocator.alloc(4).tolist() == [0, 1, 2, 3]


def test_a_double_free_takes_none_of_the_good_pages_back() -> None:
    allocator = PageAllocator(4)
    allocator.alloc(2)
    with pytest.raises(DoubleFree, match="2 pages were freed"):
        allocator.free(np.array([0, 3], dtype=np.int32))
    assert allocator.is_out(np.arange(4)).tolist() == [True, True, False, False]
