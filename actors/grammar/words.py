"""An automaton as the words that a device reads: see `protocol.constraints.AutomatonBody`. Pure.

Transitions are kept as distances, but those to states that many others lead to, as to what is behind
a string. Then all states of a counted text that differ only in their count have the same row, and a
table of a megabyte becomes one of some kilobytes.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ramify.actors.grammar.automaton import Automaton
from ramify.actors.grammar.fragment import hashes
from ramify.protocol.constraints import NO_STEP

Table = NDArray[np.int32]

_RARE = 8  # states with the same distances that are looked at again
_OFTEN = 16  # states that lead to one over the same class: then it is named, however far it is


class Rows(NamedTuple):
    """The different rows of steps, int32 [rows, columns], and which of them each state has; columns that
    are equal are one. `classes` uint8 [256]: the column of each byte.
    """

    kinds: Table
    row: NDArray[np.int64]
    classes: NDArray[np.uint8]


def words_of(automaton: Automaton, rows: Rows) -> Table:
    """The `words` of an `AutomatonBody`."""
    kinds, row, classes = rows
    states, columns = len(row), kinds.shape[1]
    return np.concatenate(
        [
            np.array([columns, states, len(kinds) + 1, 0]),
            classes,
            automaton.final,
            [1],
            row * columns,
            [len(kinds) * columns],
            kinds.ravel(),
            np.full(columns, NO_STEP),
        ],
        dtype=np.int32,
        casting="unsafe",
    )


def rows_of(automaton: Automaton) -> Rows:
    """The rows of an automaton."""
    kinds, row = _rows(automaton.next)
    columns: dict[bytes, int] = {}
    numbers = [columns.setdefault(column.tobytes(), len(columns)) for column in kinds.T]
    kept = [numbers.index(number) for number in range(len(columns))]
    return Rows(kinds[:, kept], row, np.array(numbers, np.uint8)[automaton.classes])


def _rows(following: Table) -> tuple[Table, NDArray[np.int64]]:
    """The rows of transitions int32 [states, columns].

    First all steps are distances. In rows that few states have, what many of these lead to is named.
    """
    steps = following - np.arange(len(following), dtype=np.int32)[:, None]
    steps *= 2
    steps[following < 0] = NO_STEP
    kinds, row = _different(steps)
    rare = np.bincount(row) <= _RARE
    states = np.flatnonzero(rare[row])
    if len(states) <= _OFTEN:
        return kinds, row
    there = following[states]
    codes = there.astype(np.int64) * there.shape[1] + np.arange(there.shape[1])
    codes[there < 0] = -1
    found, counts = np.unique(codes, return_counts=True)
    often = np.zeros(len(following) + 1, np.bool_)
    often[found[counts > _OFTEN] // there.shape[1]] = True
    often[-1] = False  # of -1
    named = often[there]
    again = steps[states]
    again[named] = 2 * there[named] + 1
    others = np.flatnonzero(~rare)
    kinds, number = _different(np.concatenate([kinds[others], again]))
    numbers = np.empty(len(rare), np.int64)
    numbers[others] = number[: len(others)]
    row = numbers[row]
    row[states] = number[len(others) :]
    return kinds, row


def _different(rows: Table) -> tuple[Table, NDArray[np.int64]]:
    """The different ones of `rows`, and which of them each is."""
    _, first, group = np.unique(hashes(rows), return_index=True, return_inverse=True)
    kinds = rows[first]
    if (kinds[group] != rows).any():  # two hashes of 64 bits were equal
        kinds, group = np.unique(rows, axis=0, return_inverse=True)
    return kinds, group.ravel()
