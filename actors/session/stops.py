"""Finds stop strings in a stream of text, in time linear in the text. Pure.

Aho and Corasick (1975): the automaton's state is the longest suffix of the text so far that is
a prefix of some stop string, so its depth says how many characters must be held back.
This file does not know of tokens.
"""

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple


class Match(NamedTuple):
    """A stop string that ended `end` characters into the stream (its first one is `start`)."""

    stop: str
    start: int
    end: int


class StopSet:
    """The automaton of some stop strings. Immutable; scanners of many streams share it."""

    def __init__(self, stops: Iterable[str]) -> None:
        """Raises ValueError for an empty stop string."""
        self.stops = tuple(dict.fromkeys(stops))
        self.next: list[dict[str, int]] = [{}]
        self.fail: list[int] = [0]
        self.depth: list[int] = [0]
        self.ends: list[str | None] = [None]  # the longest stop that ends in this state
        for stop in self.stops:
            if not stop:
                raise ValueError("a stop string must not be empty")
            self._insert(stop)
        self._link()
        self.first = frozenset(self.next[0])

    def _insert(self, stop: str) -> None:
        state = 0
        for character in stop:
            following = self.next[state].get(character)
            if following is None:
                following = len(self.next)
                self.next[state][character] = following
                self.next.append({})
                self.fail.append(0)
                self.depth.append(self.depth[state] + 1)
                self.ends.append(None)
            state = following
        self.ends[state] = stop

    def _link(self) -> None:
        """Fail links, breadth first: each points at the longest proper suffix that is a state."""
        queue = deque(self.next[0].values())
        while queue:
            state = queue.popleft()
            for character, following in self.next[state].items():
                fallback = self.fail[state]
                while fallback and character not in self.next[fallback]:
                    fallback = self.fail[fallback]
                self.fail[following] = self.next[fallback].get(character, 0)
                self.ends[following] = self.ends[following] or self.ends[self.fail[following]]
                queue.append(following)


class StopScanner:
    """One stream of text. After a match it must not be fed any more."""

    def __init__(self, stop_set: StopSet) -> None:
        self._set = stop_set
        self._state = 0
        self._fed = 0

    @property
    def held(self) -> int:
        """Characters at the end of the stream that may be the beginning of a stop string."""
        return self._set.depth[self._state]

    def feed(self, text: str) -> Match | None:
        """Add text; the match that ends first, the longest one of those that end there."""
        automaton, state = self._set, self._state
        if state == 0 and automaton.first.isdisjoint(text):
            self._fed += len(text)
            return None
        following, fail = automaton.next, automaton.fail
        for index, character in enumerate(text, self._fed + 1):
            while state and character not in following[state]:
                state = fail[state]
            state = following[state].get(character, 0)
            stop = automaton.ends[state]
            if stop is not None:
                self._state, self._fed = state, index
                return Match(stop, index - len(stop), index)
        self._state = state
        self._fed += len(text)
        return None
