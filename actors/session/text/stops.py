"""Finds stop strings in a stream of text, in time linear in the text. Pure.

Knuth, Morris and Pratt (1977), once for each stop string: the state is how many of its characters the
text ends with, so the longest state says how many characters must be held back. One automaton of all
of them (Aho and Corasick 1975) reads a text once instead of once for each, but with Python's objects
16 stops of 256 characters take 1.2 MB and 6 ms to build; this takes 9 KB and 1 ms, and a stop
string that has not begun costs one `str.find`.

This file does not know of tokens.
"""

from array import array
from collections.abc import Iterable
from typing import NamedTuple


class Match(NamedTuple):
    """A stop string that ended `end` characters into the stream (its first one is `start`)."""

    stop: str
    start: int
    end: int


class StopSet:
    """Some stop strings, prepared. Immutable; scanners of many streams share it.

    `borders[i][k]`: of the first k + 1 characters of stop i, the longest proper prefix that is a suffix.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        """Raises ValueError for an empty stop string."""
        self.stops = tuple(dict.fromkeys(stops))
        if "" in self.stops:
            raise ValueError("a stop string must not be empty")
        self.borders = [_borders(stop) for stop in self.stops]
        self.first = frozenset(stop[0] for stop in self.stops)


NO_STOPS = StopSet(())


def _borders(stop: str) -> "array[int]":
    borders = array("H", [0])
    length = 0
    for character in stop[1:]:
        while length and character != stop[length]:
            length = borders[length - 1]
        length += character == stop[length]
        borders.append(length)
    return borders


class StopScanner:
    """One stream of text. After a match it must not be fed any more."""

    def __init__(self, stop_set: StopSet) -> None:
        self._first = stop_set.first
        self._stops = list(
            zip(range(len(stop_set.stops)), stop_set.stops, stop_set.borders, strict=True)
        )
        self._states = [0] * len(stop_set.stops)
        self._fed = 0
        self.held = 0  # characters at the end of the stream that may be the beginning of a stop string

    def feed(self, text: str) -> Match | None:
        """Add text; the match that ends first, the longest one of those that end there."""
        fed, self._fed = self._fed, self._fed + len(text)
        if not self.held and self._first.isdisjoint(text):
            return None
        match: Match | None = None
        states = self._states
        for number, stop, borders in self._stops:
            state = states[number]
            if not state and stop[0] not in text:
                continue
            end = fed
            for character in text:
                while state and character != stop[state]:
                    state = borders[state - 1]
                if character == stop[state]:
                    state += 1
                end += 1
                if state == len(stop):
                    if match is None or end < match.end or end - state < match.start:
                        match = Match(stop, end - state, end)
                    text = text[: end - fed]  # what ends later does not matter
                    break
            else:
                states[number] = state
        self.held = max(states)
        return match
