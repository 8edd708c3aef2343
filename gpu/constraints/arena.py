"""Which part of a bounded piece of memory each constraint has, and who must go for a new one. Pure.

Users are counted; what nobody uses stays until its place is needed, the longest unused first.
"""

from dataclasses import dataclass


@dataclass(slots=True)
class _ArenaPart:
    start: int
    size: int
    users: int = 0


class Arena:
    """`size`: in any unit."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._parts: dict[int, _ArenaPart] = {}  # the longest unused first

    @property
    def used(self) -> int:
        """How much is taken, by parts that nobody uses too."""
        return sum(part.size for part in self._parts.values())

    def find(self, key: int) -> int | None:
        """Where the part of `key` begins, if it has one."""
        part = self._parts.get(key)
        return None if part is None else part.start

    def take(self, key: int, size: int) -> int | None:
        """Where a new part begins. None: parts in use leave no such place, and nothing has changed."""
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
        """One user more; the part is there."""
        part = self._parts.pop(key)
        part.users += 1
        self._parts[key] = part

    def leave(self, key: int) -> None:
        """One user less."""
        part = self._parts.pop(key)
        part.users -= 1
        self._parts[key] = part

    def forget(self, key: int) -> None:
        """The part of `key` is free, if it has one; nobody uses it."""
        self._parts.pop(key, None)


def _gap(taken: list[tuple[int, int]], size: int, end: int) -> int | None:
    """The first place with room for `size` between `taken` (start, size)."""
    at = 0
    for start, length in sorted(taken):
        if start - at >= size:
            return at
        at = start + length
    return at if end - at >= size else None
