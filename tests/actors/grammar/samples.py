"""Random texts of an automaton."""

import random
from collections.abc import Callable
from functools import cache, lru_cache

import numpy as np

from ramify.actors.grammar.automaton import Automaton
from ramify.actors.grammar.nested import ARRAY, OBJECT, Nested

_EMPTY = {OBJECT: b"{}", ARRAY: b"[]"}  # letters, by the least that they stand for


def sample(automaton: Automaton, rng: random.Random, most: int = 60) -> bytes:
    """A random walk of `most` bytes, then the shortest way to a final state."""
    far, members, ways = _looked_at(automaton)
    text = bytearray()
    state = 0
    while True:
        row = automaton.next[state]
        columns, targets = ways(state)
        enough = len(text) >= most or not len(columns) or rng.random() < 0.1
        if automaton.final[state] and enough:
            return bytes(text)
        if len(text) >= most:
            columns = columns[far[row[columns]] == far[row[columns]].min()]
            targets = np.unique(row[columns]).tolist()
        target = rng.choice(targets)  # rare bytes lead on as often as others
        column = int(rng.choice(columns[row[columns] == target].tolist()))
        byte = int(rng.choice(members[column]))
        text += _EMPTY.get(byte, bytes([byte])) if isinstance(automaton, Nested) else bytes([byte])
        state = int(row[column])


@lru_cache(maxsize=4)
def _looked_at(
    automaton: Automaton,
) -> tuple[np.ndarray, list[list[int]], Callable[[int], tuple[np.ndarray, list[int]]]]:
    """From each state to a final one, the bytes of each column, and the ways on from a state."""

    @cache
    def ways(state: int) -> tuple[np.ndarray, list[int]]:
        columns = np.flatnonzero(automaton.next[state] >= 0)
        return columns, np.unique(automaton.next[state][columns]).tolist()

    columns = range(automaton.next.shape[1])
    members = [np.flatnonzero(automaton.classes == column).tolist() for column in columns]
    return _distances(automaton), members, ways


def _distances(automaton: Automaton) -> np.ndarray:
    """From each state to a final one."""
    far = np.where(automaton.final, 0, 10**9)
    while True:
        ways = np.where(automaton.next >= 0, far[automaton.next], 10**9).min(axis=1) + 1
        nearer = np.minimum(far, ways)
        if (nearer == far).all():
            return far
        far = nearer
