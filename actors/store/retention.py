"""Which sessions a store forgets: those that nobody used for long, and those beyond its size.

The owner with most bytes loses its longest unused session, again and again, so no owner's data displaces
another's. Sessions without an owner share one. Sessions in a server's memory count, but stay.
"""

import heapq
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

from ramify.actors.kit.log import get_log
from ramify.actors.store.base import Store

BACK_SECONDS = 3600.0  # that the clock may go back between two sweeps
AHEAD_SECONDS = 30 * 86_400.0

K = TypeVar("K")
log = get_log(__name__)


class Forgetting:
    """`keep_s`: seconds after their last use; `most`: bytes. See `Store.sweep`."""

    def __init__(self, keep_s: float, most: int) -> None:
        self._keep = keep_s
        self._most = most
        self._asked = False  # the operator was told that the clock may be wrong

    def sweep(self, store: Store, now: float) -> int:
        """Forget what has to go; how many sessions that were. Raises StoreError."""
        trusted = self._trusted(store, now)
        old = (now - self._keep, now) if trusted else (0.0, 0.0)  # else by size alone
        gone = store.sweep(older_than=old[0], most=self._most, now=old[1])
        if trusted:
            store.set_clock(now)
        return gone

    def _trusted(self, store: Store, now: float) -> bool:
        """Whether sessions may be forgotten by this clock: not if it went back since the last sweep, or
        is far ahead of it. The server may have been off for so long: that its operator has to say.
        """
        seen = store.clock()
        if seen is None:  # a new store, or one of a version before: when it was last used
            seen = next((kept.used for kept in store.kept()), now)
        if -BACK_SECONDS <= now - seen <= AHEAD_SECONDS:
            return True
        if not self._asked:
            self._asked = True
            log.warning(
                "no session is forgotten by its age: the clock differs from that of the last sweep by "
                "days, which may be wrong. If it is right, `ramify store trust-clock` says so",
                days=round((now - seen) / 86_400, 1),
            )
        return False


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
