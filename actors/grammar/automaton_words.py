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
from ramify.actors.grammar.nested import BRACKETS, Nested, joined
from ramify.protocol.constraints import NO_STEP, Layout

Table = NDArray[np.int32]

_RARE = 8  # states with the same distances that are looked at again
_OFTEN = 16  # states that lead to one over the same class: then it is named, however far it is


class AutomatonRows(NamedTuple):
    """The different rows of steps, int32 [rows, columns], and which of them each state has, and then
    each inner state of `layout`; columns that are equal are one. `classes` uint8 [256]: the column of
    each byte. `returns`: see `layout`.
    """

    kinds: Table
    row: NDArray[np.int64]
    classes: NDArray[np.uint8]
    layout: Layout
    returns: NDArray[np.int32]


def words_of(automaton: Automaton, rows: AutomatonRows) -> Table:
    """The `words` of an `AutomatonBody`."""
    kinds, row, classes, layout, returns = rows
    columns = kinds.shape[1]
    begins = row * columns
    return np.concatenate(
        [
            np.array([columns, layout.states, len(kinds) + 1, *layout[1:]]),
            classes,
            automaton.final,
            [1],
            np.zeros(layout.inner),
            begins[: layout.states],
            [len(kinds) * columns],
            begins[layout.states :],
            kinds.ravel(),
            np.full(columns, NO_STEP),
            returns,
        ],
        dtype=np.int32,
        casting="unsafe",
    )


def rows_of(automaton: Automaton) -> AutomatonRows:
    """The rows of an automaton."""
    if isinstance(automaton, Nested):
        kinds, row, classes = _nested_rows(automaton)
        layout, returns = automaton.layout, automaton.returns
    else:
        kinds, row = _rows(automaton.next)
        classes, layout = automaton.classes, Layout(len(automaton))
        returns = np.zeros(0, np.int32)
    columns: dict[bytes, int] = {}
    numbers = [columns.setdefault(column.tobytes(), len(columns)) for column in kinds.T]
    kept = [numbers.index(number) for number in range(len(columns))]
    return AutomatonRows(kinds[:, kept], row, np.array(numbers, np.uint8)[classes], layout, returns)


def _nested_rows(automaton: Nested) -> tuple[Table, NDArray[np.int64], NDArray[np.uint8]]:
    """As `_rows`, for the states and then for the inner ones, and the classes."""
    layout, inside = automaton.layout, automaton.inside
    own = automaton.without_letters()
    first, classes = joined([own, inside.classes])
    kinds, row = _rows(automaton.next[:, own[first]])
    # states with letters have rows of their own: where these lead to is named
    states, letters, targets = automaton.letters
    doors = np.full((len(automaton), 2), -1, np.int64)
    numbers = np.searchsorted(automaton.returns, targets)
    doors[states, letters] = [
        layout.entry(number, kind)
        for number, kind in zip(numbers.tolist(), letters.tolist(), strict=True)
    ]
    some = np.unique(states)
    found, at = np.unique(np.column_stack([row[some], doors[some]]), axis=0, return_inverse=True)
    fresh = kinds[found[:, 0]]
    for kind, column in enumerate(classes[list(BRACKETS)].tolist()):
        fresh[:, column] = np.where(
            found[:, 1 + kind] >= 0, 2 * found[:, 1 + kind] + 1, fresh[:, column]
        )
    row[some] = len(kinds) + at.ravel()
    inner = inside.next[:, inside.classes[first]]
    steps = 2 * (inner - np.arange(len(inner), dtype=np.int32)[:, None])
    steps = np.where(inner >= 0, steps, np.where(inner == -1, NO_STEP, 2 * inner + 3))
    row = np.concatenate([row, len(kinds) + len(fresh) + np.arange(len(inner))])
    return np.concatenate([kinds, fresh, steps]).astype(np.int32), row, classes


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
