"""Deadlines of many sockets in one heap: one task for all of them, not one per socket.

Pure: time is an argument.
"""

import heapq


class Timers:
    """At most one deadline per key, so that the heap stays as small as the set of sockets."""

    def __init__(self) -> None:
        self._when: dict[int, float] = {}
        self._heap: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self._when)

    def schedule(self, key: int, when: float) -> None:
        """Call for `key` at `when` or earlier: an earlier deadline that is set already stays."""
        old = self._when.get(key)
        if old is None or when < old:
            self._when[key] = when
            heapq.heappush(self._heap, (when, key))

    def forget(self, key: int) -> None:
        """Drop the deadline of `key`, if there is one."""
        self._when.pop(key, None)

    def due(self, now: float) -> list[int]:
        """Remove and return the keys whose deadline has come, earliest first."""
        keys: list[int] = []
        while self._heap and self._heap[0][0] <= now:
            when, key = heapq.heappop(self._heap)
            if self._when.get(key) == when:  # else superseded by an earlier one, or forgotten
                del self._when[key]
                keys.append(key)
        return keys
