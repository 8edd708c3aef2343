"""The check must see what it is there to see: each corruption is found."""

from collections.abc import Callable

import numpy as np
import pytest

from ramify.actors.cache.cache import RadixCache
from ramify.actors.cache.node import COMPUTING, DEVICE, GONE, SUSPECT, Node
from tests.actors.cache.integrity import IntegrityError, check


def leaf(cache: RadixCache) -> Node:
    return next(node for node in cache.tree.walk() if len(node.pages) > 1)


def two_owners(cache: RadixCache) -> None:
    node = leaf(cache)
    node.pages = np.repeat(node.pages[:1], len(node.pages))


def page_is_free(cache: RadixCache) -> None:
    node = leaf(cache)
    pages = node.pages.copy()
    pages[0] = cache.allocator.alloc(1)[0]
    cache.allocator.free(pages[:1])
    node.pages = pages


def lost_page(cache: RadixCache) -> None:
    cache.allocator.alloc(1)


def wrong_count(cache: RadixCache) -> None:
    cache.residency.evictable += 1


def lost_reference(cache: RadixCache) -> None:
    cache.branches.head(1).refs += 1


def lost_lock(cache: RadixCache) -> None:
    cache.runs[9].anchor.locks -= 1


def cold_above_resident(cache: RadixCache) -> None:
    node = leaf(cache)
    cache.tree.split(node, node.start + 1).empty()


def lost_entry(cache: RadixCache) -> None:
    leaf(cache).stamp = 0


def wrong_retention(cache: RadixCache) -> None:
    leaf(cache).until = 3.0


def wrong_owner(cache: RadixCache) -> None:
    next(node for node in cache.tree.walk() if node.state is COMPUTING).owner = 77


def owner_of_what_nobody_computes(cache: RadixCache) -> None:
    leaf(cache).owner = 9


def computed_by_nobody(cache: RadixCache) -> None:
    next(node for node in cache.tree.walk() if node.state is COMPUTING).owner = 0


def gone_with_pages(cache: RadixCache) -> None:
    leaf(cache).state = GONE


def on_the_device_without_pages(cache: RadixCache) -> None:
    next(node for node in cache.tree.walk() if node.state is COMPUTING).state = DEVICE


def suspect_and_held_by_nobody(cache: RadixCache) -> None:
    leaf(cache).state = SUSPECT


def uncounted_node(cache: RadixCache) -> None:
    cache.tree.nodes += 1


@pytest.mark.parametrize(
    "corrupt",
    [
        two_owners,
        page_is_free,
        lost_page,
        wrong_count,
        lost_reference,
        lost_lock,
        cold_above_resident,
        lost_entry,
        wrong_retention,
        wrong_owner,
        owner_of_what_nobody_computes,
        computed_by_nobody,
        gone_with_pages,
        on_the_device_without_pages,
        suspect_and_held_by_nobody,
        uncounted_node,
    ],
)
def test_finds(bench, corrupt: Callable[[RadixCache], None]) -> None:
    b = bench(32)
    b.open(1, [1, 2, 3, 4, 5])
    b.run(7, 1)
    b.open(2, [6, 7, 8])
    b.grant(9, 2)
    check(b.cache)
    corrupt(b.cache)
    with pytest.raises(IntegrityError):
        check(b.cache)
