"""Random texts of an automaton."""

import random

import numpy as np

from ramify.actors.grammar.automaton import Automaton


def sample(automaton: Automaton, rng: random.Random, most: int = 60) -> bytes:
    """A random walk of `most` bytes, then the shortest way to a final state."""
    far = _distances(automaton)
    text = bytearray()
    state = 0
    members = [np.flatnonzero(automaton.classes == c) for c in range(automaton.next.shape[1])]
    while True:
        row = automaton.next[state]
        columns = np.flatnonzero(row >= 0)
        enough = len(text) >= most or not len(columns) or rng.random() < 0.1
        if automaton.final[state] and enough:
            return bytes(text)
        if len(text) >= most:
            columns = columns[far[row[columns]] == far[row[columns]].min()]
        target = rng.choice(np.unique(row[columns]).tolist())  # rare bytes lead on as often as others
        column = int(rng.choice(columns[row[columns] == target].tolist()))
        text.append(int(rng.choice(members[column].tolist())))
        state = int(row[column])


def _distances(automaton: Automaton) -> np.ndarray:
    """From each state to a final one."""
    far = np.where(automaton.final, 0, 10**9)
    while True:
        ways = np.where(automaton.next >= 0, far[automaton.next], 10**9).min(axis=1) + 1
        nearer = np.minimum(far, ways)
        if (nearer == far).all():
            return far
        far = nearer
