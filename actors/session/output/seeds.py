"""Seeds of generations whose client gave none: random numbers of the operating system, many at a time,
because asking it for each costs as much as twenty calls of Python."""

import os
import struct
from collections.abc import Iterator

AT_ONCE = 64
_NUMBERS = struct.Struct(f"{AT_ONCE}Q")


def seeds() -> Iterator[int]:
    """Endless, each below 2**62."""
    while True:
        for number in _NUMBERS.unpack(os.urandom(_NUMBERS.size)):
            yield number >> 2
