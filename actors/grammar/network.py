"""Automata one behind the other in any order, loops too. Pure.

An expression has one way through its parts. Here each part says which ones may follow it: behind a tool
call another one, or free text and then the same calls again. Each part is there once, however it is
reached.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ramify.actors.grammar.automaton import Automaton
from ramify.actors.grammar.combining import determinize
from ramify.actors.grammar.fragment import Flags, Fragment, Table, reduce, too_large
from ramify.actors.grammar.limits import MAX_STATES


class Exit(NamedTuple):
    """In `states` of part `part`, the text may go on with a text of any of the parts `into`."""

    part: int
    states: NDArray[np.int64]
    into: Sequence[int]


def ends(automaton: Automaton) -> NDArray[np.int64]:
    """Its final states."""
    return np.flatnonzero(automaton.final)


def network(
    parts: Sequence[Automaton], exits: Sequence[Exit], final: Sequence[int], starts: Sequence[int] = (0,)
) -> Automaton:
    """The texts that begin in one of the parts `starts`, go through `exits`, and end in a final state of
    a part in `final`.

    Raises ConstraintError past `limits`.
    """
    stacked = np.stack([part.classes for part in parts])
    _, first, classes = np.unique(stacked, axis=1, return_index=True, return_inverse=True)
    bases = np.cumsum([0, *map(len, parts)]).tolist()
    if bases[-1] > 4 * MAX_STATES:
        raise too_large()
    table: Table = np.concatenate(
        [
            np.where(part.next >= 0, part.next + base, -1)[:, part.classes[first]]
            for part, base in zip(parts, bases, strict=False)
        ]
    ).astype(np.int32)
    flags: Flags = np.concatenate(
        [part.final if i in final else np.zeros(len(part), np.bool_) for i, part in enumerate(parts)]
    )
    jumps: dict[int, list[int]] = {}
    for part, states, into in exits:
        for state in states.tolist():
            jumps.setdefault(bases[part] + state, []).extend(bases[target] for target in into)
    begins = [bases[start] for start in starts]
    merged = _merged(table, flags, jumps) if len(begins) == 1 else None
    if merged is not None:
        made = reduce(Fragment(merged, flags, begins[0]))
    else:
        made = determinize(table, flags, jumps, begins, np.zeros(len(table), np.bool_))
    return Automaton.of(made, classes.reshape(-1).astype(np.uint8))


def _merged(table: Table, final: Flags, jumps: dict[int, list[int]]) -> Table | None:
    """The table with the rows of what follows copied; None if a text could then go on in two ways."""
    found = table.copy()
    for state, targets in jumps.items():
        for target in targets:
            row = table[target]
            if final[target] or target in jumps or ((found[state] >= 0) & (row >= 0)).any():
                return None
            found[state] = np.where(row >= 0, row, found[state])
    return found
