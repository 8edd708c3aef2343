"""The check must see what it is there to see: each corruption is found."""

from collections.abc import Callable

import numpy as np
import pytest

from ramify.actors.cache.cache import RadixCache
from ramify.actors.cache.integrity import IntegrityError, check
from ramify.actors.cache.node import Node


def leaf(cache: RadixCache) -> Node:
    return next(node for node in cache.tree.walk() if node.pages is not None and len(node.pages) > 1)


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
    cache.tree.split(node, node.start + 1).pages = None


def lost_entry(cache: RadixCache) -> None:
    leaf(cache).stamp = 0


def wrong_retention(cache: RadixCache) -> None:
    leaf(cache).until = 3.0


def wrong_owner(cache: RadixCache) -> None:
    next(node for node in cache.tree.walk() if node.pages is None).owner = 77


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
