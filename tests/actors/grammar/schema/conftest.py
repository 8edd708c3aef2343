"""Random texts of an automaton."""

import random

import numpy as np
import pytest

from ramify.actors.grammar.automaton import Automaton


class Walker:
    """Draws texts of `automaton` at random, each of about `length` bytes at most."""

    def __init__(self, automaton: Automaton) -> None:
        self._automaton = automaton
        self._bytes = [np.flatnonzero(automaton.classes == c) for c in range(automaton.next.shape[1])]
        count = len(automaton)
        self._far = np.full(count, 1 << 30)  # steps to the next final state
        self._far[automaton.final] = 0
        edges = np.where(automaton.next >= 0, automaton.next, count)
        while True:
            behind = np.append(self._far, 1 << 30)[edges].min(axis=1) + 1
            nearer = np.minimum(self._far, behind)
            if (nearer == self._far).all():
                break
            self._far = nearer

    def text(self, rng: random.Random, length: int = 60) -> bytes:
        """One text: at random first, then the shortest way to an end."""
        found = bytearray()
        state = 0
        while True:
            ends = bool(self._automaton.final[state])
            row = self._automaton.next[state]
            ways = np.flatnonzero(row >= 0).tolist()
            if ends and (not ways or len(found) >= length or rng.random() < 0.2):
                return bytes(found)
            if len(found) >= length:
                ways = [min(ways, key=lambda way: int(self._far[row[way]]))]
            way = rng.choice(ways)
            found.append(int(rng.choice(self._bytes[way].tolist())))
            state = int(row[way])


@pytest.fixture(scope="session")
def walker() -> type[Walker]:
    return Walker
