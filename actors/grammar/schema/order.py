"""A common order of members for an object that several schemas describe. Pure."""

from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heappush
from itertools import pairwise


def merged(lists: Iterable[Sequence[str]]) -> list[str]:
    """All names of `lists`, each once, in an order that keeps that of each list (Kahn 1962).

    Of names that no list compares, the one that appears first comes first. So it is, too, where lists
    contradict each other.
    """
    lists = list(lists)
    names = list(dict.fromkeys(name for each in lists for name in each))
    place = {name: i for i, name in enumerate(names)}
    pairs = {(place[a], place[b]) for each in lists for a, b in pairwise(each)}
    if all(a < b for a, b in pairs):
        return names
    behind: list[list[int]] = [[] for _ in names]
    before = [0] * len(names)  # how many must still come before each
    for a, b in pairs:
        behind[a].append(b)
        before[b] += 1
    free = [i for i, count in enumerate(before) if not count]
    heapify(free)
    found: list[int] = []
    taken = [False] * len(names)
    first = 0  # all names up to here are taken
    while len(found) < len(names):
        while taken[first]:
            first += 1
        at = heappop(free) if free else first
        if taken[at]:
            continue
        taken[at] = True
        found.append(at)
        for other in behind[at]:
            before[other] -= 1
            if not before[other]:
                heappush(free, other)
    return [names[i] for i in found]
