"""The parts of a bounded piece of memory that constraints have, and their eviction. Pure.

Users are counted; an unused part stays until its place is needed, the longest unused goes first.
"""

from dataclasses import dataclass


@dataclass(slots=True)
class _ArenaPart:
    start: int
    size: int
    users: int = 0


class Arena:
    """A bounded piece of memory. `size`: in any unit."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._parts: dict[int, _ArenaPart] = {}  # the longest unused first

    @property
    def used(self) -> int:
        """The size of all parts, unused ones included."""
        return sum(part.size for part in self._parts.values())

    def find(self, key: int) -> int | None:
        """Find where the part of `key` begins; None: it has none."""
        part = self._parts.get(key)
        return None if part is None else part.start

    def take(self, key: int, size: int) -> int | None:
        """Make a part. Returns where it begins; None: parts in use leave no room; nothing changes."""
        in_use = [(part.start, part.size) for part in self._parts.values() if part.users]
        if _gap(in_use, size, self.size) is None:
            return None
        while True:
            start = _gap([(part.start, part.size) for part in self._parts.values()], size, self.size)
            if start is not None:
                self._parts[key] = _ArenaPart(start, size)
                return start
            del self._parts[next(key for key, part in self._parts.items() if not part.users)]

    def use(self, key: int) -> None:
        """Count one more user of a part, which exists."""
        part = self._parts.pop(key)
        part.users += 1
        self._parts[key] = part

    def leave(self, key: int) -> None:
        """Count one user less."""
        part = self._parts.pop(key)
        part.users -= 1
        self._parts[key] = part

    def forget(self, key: int) -> None:
        """Free the part of `key`, which has no users, if there is one."""
        self._parts.pop(key, None)


def _gap(taken: list[tuple[int, int]], size: int, end: int) -> int | None:
    """Find the first place with room for `size` between `taken` (start, size)."""
    at = 0
    for start, length in sorted(taken):
        if start - at >= size:
            return at
        at = start + length
    return at if end - at >= size else None
