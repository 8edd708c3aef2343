"""Sets of characters, and the UTF-8 bytes that spell them. Pure.

A set is a tuple of ranges of code points, ascending, not touching: ((48, 57), (97, 122)). Surrogates
(U+D800 to U+DFFF) have no UTF-8, so no set contains them.
"""

from collections.abc import Iterable
from functools import lru_cache
from itertools import pairwise

Ranges = tuple[tuple[int, int], ...]
Sequence = tuple[tuple[int, int], ...]  # a range of bytes for each byte of a character

LAST = 0x10FFFF
_ENDS = (0x7F, 0x7FF, 0xFFFF, LAST)  # the last code point with 1, 2, 3, 4 bytes


def ranges(pairs: Iterable[tuple[int, int]]) -> Ranges:
    """The union of `pairs` (first, last) as a set."""
    merged: list[tuple[int, int]] = []
    for low, high in sorted(pairs):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(merged[-1][1], high))
        else:
            merged.append((low, high))
    found: list[tuple[int, int]] = []
    for low, high in merged:
        for a, b in ((low, min(high, 0xD7FF)), (max(low, 0xE000), high)):
            if a <= b:
                found.append((a, b))
    return tuple(found)


def complement(chars: Ranges) -> Ranges:
    """All characters that are not in `chars`."""
    found = []
    at = 0
    for low, high in chars:
        if at < low:
            found.append((at, low - 1))
        at = high + 1
    if at <= LAST:
        found.append((at, LAST))
    return ranges(found)


def ignore_case(chars: Ranges) -> Ranges:
    """`chars` with both cases of its ASCII letters."""
    added = list(chars)
    for low, high in chars:
        for first, last, shift in ((65, 90, 32), (97, 122, -32)):
            a, b = max(low, first), min(high, last)
            if a <= b:
                added.append((a + shift, b + shift))
    return ranges(added)


ANY: Ranges = ranges([(0, LAST)])
NEWLINE: Ranges = ((10, 10),)
DIGIT: Ranges = ((48, 57),)
WORD: Ranges = ((48, 57), (65, 90), (95, 95), (97, 122))
SPACE: Ranges = ((9, 13), (32, 32))


def sequences(low: int, high: int) -> list[Sequence]:
    """The UTF-8 of the characters low..high as byte ranges, one sequence of them for each shape."""
    found: list[Sequence] = []
    for length, end in enumerate(_ENDS, 1):
        if low > end:
            continue
        _split(low, min(high, end), length, found)
        if high <= end:
            break
        low = end + 1
    return found


def _split(low: int, high: int, length: int, found: list[Sequence]) -> None:
    """Cut low..high, all of `length` bytes, where the trailing bytes do not run through 80..BF."""
    for i in range(1, length):
        mask = (1 << (6 * i)) - 1
        if low & ~mask != high & ~mask:
            if low & mask:
                _split(low, low | mask, length, found)
                _split((low | mask) + 1, high, length, found)
                return
            if high & mask != mask:
                _split(low, (high & ~mask) - 1, length, found)
                _split(high & ~mask, high, length, found)
                return
    found.append(tuple(zip(chr(low).encode(), chr(high).encode(), strict=True)))


@lru_cache(maxsize=1024)
def byte_tree(chars: Ranges) -> tuple[tuple[tuple[int, int, int], ...], ...]:
    """The deterministic automaton of one character of `chars`.

    Element i is the edges of state i: (first byte, last byte, next state). State 0 is the start, -1
    the end of the character.
    """
    whole = frozenset(seq for low, high in chars for seq in sequences(low, high))
    ids: dict[frozenset[Sequence], int] = {whole: 0}
    order = [whole]
    states = []
    for tails in order:
        cuts = sorted({cut for seq in tails for cut in (seq[0][0], seq[0][1] + 1)})
        edges: list[tuple[int, int, int]] = []
        for first, behind in pairwise(cuts):
            rest = frozenset(seq[1:] for seq in tails if seq[0][0] <= first <= seq[0][1])
            if not rest:
                continue
            if rest == {()}:
                target = -1
            else:
                target = ids.setdefault(rest, len(order))
                if target == len(order):
                    order.append(rest)
            if edges and edges[-1][1:] == (first - 1, target):
                edges[-1] = (edges[-1][0], behind - 1, target)
            else:
                edges.append((first, behind - 1, target))
        states.append(tuple(edges))
    return tuple(states)
