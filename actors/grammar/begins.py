"""Where the JSON values begin that are checked while a structure is written. Pure.

An automaton does not know which part of a structure it is in: equal texts lead to one state. So while a
structure is put together, a *begin* stands before each such value: bytes that no text has, with the
number of the value's place. They keep states apart that lead to values of different places. In the end
they are taken out again, and the states where they stood are told (`JsonChecks.begins`).
"""

import numpy as np

from ramify.actors.grammar.automaton import Automaton
from ramify.actors.grammar.expression import Literal
from ramify.actors.grammar.fragment import Flags, Fragment, Table
from ramify.actors.grammar.nested import ARRAY, BRACKETS, OBJECT

_BEGIN, _END, _OTHER = 0xFC, 0xFB, 0xF5  # no parts of a text, nor of a mark's name

Begins = tuple[tuple[int, int], ...]  # states, and the place of the value that begins there
Begun = tuple[int, bytes]  # the place of a value, its text, and what stands behind that already
NOTHING_BEGUN: Begun = (-1, b"")


def begin(place: int) -> Literal:
    """Stands before a value whose place has this number."""
    return Literal(b"%c%d%c" % (_BEGIN, place, _END))


def without_begins(free: Automaton) -> Automaton:
    """Free text, which takes every byte, but those that would be read as a begin."""
    table = np.pad(free.next, ((0, 0), (0, 1)), constant_values=-1)
    classes = free.classes.copy()
    classes[[_BEGIN, _END]] = table.shape[1] - 1
    return Automaton(table, classes, free.final)


def taken_out(whole: Automaton) -> tuple[Automaton, Begins] | None:
    """`whole` without begins, where free text takes every byte again, and the states where they stood.

    None if a byte, or an opening bracket, could begin a value or go on with something else: a reader
    could not tell which.
    """
    table, final = whole.next.copy(), whole.final.copy()
    opening = list({int(whole.classes[byte]) for byte in (*BRACKETS, OBJECT, ARRAY)})
    at, end, other = whole.classes[[_BEGIN, _END, _OTHER]].tolist()
    found: dict[int, int] = {}
    for state in np.flatnonzero(table[:, at] >= 0).tolist():
        place, start = _only(whole, int(table[state, at]))
        own, value = whole.next[state].copy(), whole.next[start]
        own[at] = -1
        if place < 0 or (own[opening] >= 0).any() or ((own >= 0) & (value >= 0)).any():
            return None
        found[state] = place
        table[state] = np.where(value >= 0, value, own)
    if found:
        table[:, at] = table[:, end] = table[:, other]
    classes = whole.classes.copy()
    classes[[_BEGIN, _END]] = other
    kept = _kept(table)
    numbers = np.append(np.cumsum(kept) - 1, -1).astype(np.int32)
    part = Fragment(numbers[table[kept]], final[kept])
    begins = tuple((int(numbers[state]), place) for state, place in found.items() if kept[state])
    return Automaton.of(part, classes), begins


def behind(whole: Automaton, data: bytes) -> tuple[int, Begun]:
    """The state of `whole`, begins and all, behind `data`, -1 for none; and what that begins last."""
    state, begun = 0, NOTHING_BEGUN
    for at, byte in enumerate(data):
        column = whole.classes[byte]
        following = int(whole.next[state, column])
        marked = int(whole.next[state, whole.classes[_BEGIN]])
        if following < 0 and marked >= 0:
            place, start = _only(whole, marked)
            following = int(whole.next[start, column]) if place >= 0 else -1
            begun = place, data[at:]
        state = following
        if state < 0:
            break
    return state, begun


def _only(whole: Automaton, state: int) -> tuple[int, int]:
    """The place whose number follows in `state`, and where its value starts; -1: there are several."""
    place = 0
    while True:
        ways = np.flatnonzero(whole.next[state] >= 0)
        if len(ways) != 1:
            return -1, state
        state, column = int(whole.next[state, ways[0]]), int(ways[0])
        if column == whole.classes[_END]:
            return place, state
        place = 10 * place + int(np.flatnonzero(whole.classes == column)[0]) - ord("0")


def _kept(table: Table) -> Flags:
    """The states that others lead to, and the start: the beginnings of values are now elsewhere."""
    kept = np.ones(len(table), np.bool_)
    while True:
        rows = table[kept]
        led_to = np.bincount(rows[rows >= 0], minlength=len(table)) > 0
        led_to[0] = True
        if (kept <= led_to).all():
            return kept
        kept &= led_to
