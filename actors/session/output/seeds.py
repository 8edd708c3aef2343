"""Seeds of generations whose client gave none: random numbers of the operating system, many at a time,
because asking it for each costs as much as twenty calls of Python."""

import os
import struct

AT_ONCE = 64
_NUMBERS = struct.Struct(f"{AT_ONCE}Q")


class Seeds:
    """Each call returns a number below 2**62.

    All sessions share one. It is no generator, because an exception inside a generator ends it for all.
    """

    def __init__(self) -> None:
        self._left: list[int] = []

    def __call__(self) -> int:
        if not self._left:
            self._left = [number >> 2 for number in _NUMBERS.unpack(os.urandom(_NUMBERS.size))]
        return self._left.pop()
