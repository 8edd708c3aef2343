"""Which sessions are deleted where a store holds too much. Pure.

The owner with most bytes loses its longest unused session, again and again, so no owner's data displaces
another's. Sessions without an owner share one. Sessions in a server's memory count, but stay.
"""

import heapq
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

K = TypeVar("K")


def surplus(
    held: Mapping[str, int], oldest: Callable[[str], Iterator[tuple[K, int]]], over: int, most: int
) -> list[K]:
    """The sessions that hold `over` bytes too many, at most `most` of them. O(sessions that go).

    `held`: bytes of all sessions, by the owner's name. `oldest(owner)`: those that may go, the longest
    unused first, with their bytes; asked only of owners that lose some.
    """
    gone: list[K] = []
    sizes = [(-size, owner) for owner, size in held.items()]
    heapq.heapify(sizes)
    waiting: dict[str, Iterator[tuple[K, int]]] = {}
    while over > 0 and sizes and len(gone) < most:
        size, owner = sizes[0]
        if owner not in waiting:
            waiting[owner] = oldest(owner)
        found = next(waiting[owner], None)
        if found is None:
            heapq.heappop(sizes)
            continue
        gone.append(found[0])
        over -= found[1]
        heapq.heapreplace(sizes, (size + found[1], owner))
    return gone
