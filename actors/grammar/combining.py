"""Fragments joined: concatenation, choice, repetition, subsets, products. Pure.

Where no symbol could go on in two ways, fragments are joined by copying rows: a concatenation, a
repetition or a choice then costs a few copies of arrays, and stays deterministic. Everywhere else the
subset construction (`determinize`) makes one fragment of them.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import cache, partial

import numpy as np
from numpy.typing import NDArray

from ramify.actors.grammar.fragment import (
    FACTORS,
    Flags,
    Fragment,
    Table,
    TooAmbiguous,
    empty_text,
    nothing,
    reduce,
    too_large,
)
from ramify.actors.grammar.limits import MAX_STATES, MAX_WORK, check_deadline

_Moves = list[tuple[int, frozenset[int]]]  # of a state: symbols, and what is behind each


class Concatenation:
    """A concatenation that grows to the left, each part copied once."""

    def __init__(self, last: Fragment) -> None:
        self._begin(last)

    def _begin(self, last: Fragment) -> None:
        self._tables = [last.table]
        self._finals = [last.final]
        self._size = len(last)
        self._start = last.start
        self._row = last.table[last.start]  # what the chain so far does first
        self._nullable = last.nullable

    def prepend(self, part: Fragment) -> None:
        """Put `part` before all that is there."""
        ends = np.flatnonzero(part.final)
        if ((part.table[ends] >= 0) & (self._row >= 0)).any():
            self._begin(_ambiguous_pair(part, self.fragment()))
            return
        base = self._size
        table = np.where(part.table >= 0, part.table + base, -1).astype(np.int32, copy=False)
        if len(ends):
            table[ends] = np.where(self._row >= 0, self._row, table[ends])
        final = part.final if self._nullable else np.zeros(len(part), np.bool_)
        self._tables.append(table)
        self._finals.append(final)
        self._size += len(part)
        if self._size > 4 * MAX_STATES:
            raise too_large()
        self._start = base + part.start
        self._row = table[part.start]
        self._nullable = bool(final[part.start])

    def fragment(self) -> Fragment:
        """The whole concatenation."""
        if len(self._tables) == 1:
            return Fragment(self._tables[0], self._finals[0], self._start)
        return Fragment(np.concatenate(self._tables), np.concatenate(self._finals), self._start)


def _ambiguous_pair(left: Fragment, right: Fragment) -> Fragment:
    table, final = _side_by_side([left, right])
    final[: len(left)] = False
    entry = len(left) + right.start
    jumps = {int(end): [entry] for end in np.flatnonzero(left.final)}
    pure = np.zeros(len(table), np.bool_)
    pure[len(left) :] = True
    return determinize(table, final, jumps, [left.start], pure)


def choice(parts: Sequence[Fragment], symbols: int) -> Fragment:
    """Any of `parts`."""
    if not parts:
        return nothing(symbols)
    if len(parts) == 1:
        return parts[0]
    table, final = _side_by_side(parts)
    bases = np.cumsum([0, *map(len, parts[:-1])])
    starts = [int(base) + part.start for base, part in zip(bases, parts, strict=True)]
    rows = table[starts]
    if ((rows >= 0).sum(axis=0) > 1).any():
        if len(parts) > _FEW_PARTS:
            return determinize(table, final, {}, starts, np.ones(len(table), np.bool_))
        return _together(table, final, np.array(starts, np.int32))
    start = len(table)
    return Fragment(
        np.concatenate([table, rows.max(axis=0, keepdims=True)]),
        np.append(final, final[starts].any()),
        start,
    )


_FEW_PARTS = 32  # of which each subset is looked at as a whole


def _together(table: Table, final: Flags, starts: NDArray[np.int32]) -> Fragment:
    """The texts from any of `starts`, none of which ever comes to a state of another one.

    The subset construction, layer by layer: a subset has a state of each start's, or -1. Where one is
    left alone, its own states go on.
    """
    first, symbols = len(table), table.shape[1]
    padded = np.concatenate([table, np.full((1, symbols), -1, np.int32)])  # the last row: of -1
    factors = FACTORS[: len(starts)]
    ids: dict[int, int] = {}
    layer = starts[None]
    subsets, rows = [layer], []
    count = 1
    ids[int((layer.astype(np.uint64) * factors).sum(dtype=np.uint64))] = first
    while len(layer):
        check_deadline()
        behind = padded[layer]  # [subsets, starts, symbols]
        alive = (behind >= 0).sum(axis=1, dtype=np.int32)
        row = behind.max(axis=1)
        at, symbol = np.nonzero(alive > 1)
        found = behind[at, :, symbol]
        codes = (found.astype(np.uint64) * factors).sum(axis=1, dtype=np.uint64)
        _, index, inverse = np.unique(codes, return_index=True, return_inverse=True)
        kinds = found[index]
        if (kinds[inverse] != found).any():  # two hashes of 64 bits were equal
            return determinize(table, final, {}, starts.tolist(), np.ones(first, np.bool_))
        numbers = np.empty(len(kinds), np.int32)
        fresh = []
        for i, code in enumerate(codes[index].tolist()):
            known = ids.get(code)
            if known is None:
                known = ids[code] = first + count
                count += 1
                fresh.append(i)
            numbers[i] = known
        if count > MAX_STATES:
            raise too_large()
        row[at, symbol] = numbers[inverse]
        rows.append(row)
        layer = kinds[fresh]
        subsets.append(layer)
    ended = np.append(final, False)[np.concatenate(subsets)].any(axis=1)
    whole = np.concatenate([table, *rows]).astype(np.int32, copy=False)
    return reduce(Fragment(whole, np.concatenate([final, ended]), first))


def _side_by_side(parts: Sequence[Fragment]) -> tuple[Table, Flags]:
    """The states of all parts in one table, in order."""
    if sum(map(len, parts)) > 4 * MAX_STATES:
        raise too_large()
    tables = []
    base = 0
    for part in parts:
        tables.append(np.where(part.table >= 0, part.table + base, -1).astype(np.int32, copy=False))
        base += len(part)
    return np.concatenate(tables), np.concatenate([part.final for part in parts])


def _with_start(part: Fragment, nullable: bool) -> Fragment:
    """`part` with the empty text, or without it: its start may have to be a state of its own."""
    if part.nullable == nullable:
        return part
    if (part.table == part.start).any():  # texts come back to it
        table = np.concatenate([part.table, part.table[part.start][None]])
        return Fragment(table, np.append(part.final, nullable), len(part))
    final = part.final.copy()
    final[part.start] = nullable
    return Fragment(part.table, final, part.start)


def repetition(part: Fragment, least: int, most: int | None) -> Fragment:
    """`part` at least `least` times, at most `most` times (None: no bound)."""
    symbols = part.table.shape[1]
    if most == 0:
        return empty_text(symbols)
    if part.nullable:
        least = 0
        part = _with_start(part, False)
    if least == 0 and most == 1:
        return _with_start(part, True)
    if (least, most) == (1, 1):
        return part
    count = max(least, 1) if most is None else most
    size = len(part)
    if size * count > 4 * MAX_STATES:
        raise too_large()
    # the ends of copy i go on as the start of copy i + 1; without bound, those of the last as its own
    table = np.tile(part.table, (count, 1))
    copies = np.arange(count, dtype=np.int32)
    table = np.where(table >= 0, table + np.repeat(copies * size, size)[:, None], -1).astype(np.int32)
    row = part.table[part.start]
    ends = np.flatnonzero(part.final)
    all_ends = (copies[:, None] * size + ends).ravel()
    final = np.zeros(len(table), np.bool_)
    final[all_ends] = np.repeat(copies + 1 >= least, len(ends))
    into = np.minimum(copies + 1, count - 1)  # which copy each one goes on in
    going_on = count if most is None else count - 1
    if ((part.table[ends] >= 0) & (row >= 0)).any():
        jumps = {
            int(end) + i * size: [int(into[i]) * size + part.start]
            for i in range(going_on)
            for end in ends
        }
        whole = determinize(table, final, jumps, [part.start], np.zeros(len(table), np.bool_))
    else:
        entry = np.where(row >= 0, row + (into * size)[:, None], -1).astype(np.int32)  # [count, symbols]
        from_ends = all_ends[: going_on * len(ends)]
        entries = np.repeat(entry[:going_on], len(ends), axis=0)
        table[from_ends] = np.where(entries >= 0, entries, table[from_ends])
        whole = Fragment(table, final, part.start)
    return _with_start(whole, True) if least == 0 else whole


def _closure(jumps: Mapping[int, Sequence[int]], state: int) -> frozenset[int]:
    reached = {state}
    stack = [state]
    while stack:
        fresh = [target for target in jumps.get(stack.pop(), ()) if target not in reached]
        reached.update(fresh)
        stack.extend(fresh)
    return frozenset(reached)


def _add(reached: dict[int, frozenset[int] | set[int]], moves: _Moves) -> None:
    for symbol, target in moves:
        known = reached.get(symbol)
        if known is None:
            reached[symbol] = target
        elif isinstance(known, set):
            known |= target
        elif not target <= known:
            reached[symbol] = set(known | target)


def determinize(
    table: Table, final: Flags, jumps: Mapping[int, Sequence[int]], starts: Iterable[int], pure: Flags
) -> Fragment:
    """The subset construction (Rabin and Scott 1959) over `table`.

    `jumps`: from a state to others without a symbol. `pure`: the states from which no jump can be
    reached; they are taken over as they are.
    """
    closure = cache(partial(_closure, jumps))

    @cache
    def moves_of(state: int) -> _Moves:
        row = table[state]
        symbols = np.flatnonzero(row >= 0)
        pairs = zip(symbols.tolist(), row[symbols].tolist(), strict=True)
        return [(symbol, closure(target)) for symbol, target in pairs]

    ids: dict[frozenset[int], int] = {}
    order: list[frozenset[int]] = []

    def number(states: frozenset[int]) -> int:
        if len(states) == 1:
            (only,) = states
            if pure[only]:
                return only
        found = ids.get(states)
        if found is None:
            found = ids[states] = len(table) + len(order)
            order.append(states)
            if len(order) > MAX_STATES:
                raise too_large()
        return found

    start = number(frozenset().union(*(closure(state) for state in starts)))
    sources, symbols, targets = list[int](), list[int](), list[int]()
    work = 0
    for at, states in enumerate(order):
        if at % 256 == 0:
            check_deadline()
        reached: dict[int, frozenset[int] | set[int]] = {}
        for state in states:
            found = moves_of(state)
            work += 1 + len(found)
            _add(reached, found)
        if work > MAX_WORK:
            raise TooAmbiguous(
                "the constraint is too ambiguous: too many of its parts can match the same text; "
                "make repeated parts end differently from how they begin"
            )
        symbols.extend(reached)
        targets.extend([number(frozenset(target)) for target in reached.values()])
        sources.extend([at] * len(reached))
    rows = np.full((len(order), table.shape[1]), -1, np.int32)
    rows[sources, symbols] = targets
    if jumps:  # states before a jump have new rows; nothing leads to the old ones
        kept = np.where(pure[:, None], table, -1).astype(np.int32, copy=False)
    else:
        kept = table
    ended = np.fromiter((final[list(states)].any() for states in order), np.bool_, len(order))
    return reduce(Fragment(np.concatenate([kept, rows]), np.concatenate([final, ended]), start))


def product(left: Fragment, right: Fragment, mode: str) -> Fragment:
    """Texts of both ("and"), of either ("or"), of `left` without those of `right` ("minus")."""
    a = np.vstack([left.table, np.full((1, left.table.shape[1]), -1, np.int32)])
    b = np.vstack([right.table, np.full((1, right.table.shape[1]), -1, np.int32)])
    a[a < 0] = len(left)
    b[b < 0] = len(right)
    width = len(right) + 1
    ids = {left.start * width + right.start: 0}
    layer = np.array([left.start * width + right.start], np.int64)
    codes, rows = [layer], []
    while len(layer):
        check_deadline()
        i, j = np.divmod(layer, width)
        ni, nj = a[i], b[j]
        following = ni.astype(np.int64) * width + nj
        if mode == "and":
            dead = (ni == len(left)) | (nj == len(right))
        elif mode == "minus":
            dead = ni == len(left)
        else:
            dead = (ni == len(left)) & (nj == len(right))
        found, inverse = np.unique(following, return_inverse=True)
        alive = np.zeros(len(found), np.bool_)
        alive[inverse.reshape(dead.shape)[~dead]] = True
        numbers = np.full(len(found), -1, np.int32)
        fresh = []
        for at in np.flatnonzero(alive).tolist():
            code = int(found[at])
            known = ids.get(code)
            if known is None:
                known = ids[code] = len(ids)
                fresh.append(code)
            numbers[at] = known
        if len(ids) > 4 * MAX_STATES:
            raise too_large()
        rows.append(np.where(dead, -1, numbers[inverse].reshape(dead.shape)))
        layer = np.array(fresh, np.int64)
        codes.append(layer)
    i, j = np.divmod(np.concatenate(codes), width)
    fa, fb = np.append(left.final, False)[i], np.append(right.final, False)[j]
    final = {"and": fa & fb, "or": fa | fb, "minus": fa & ~fb}[mode]
    return reduce(Fragment(np.concatenate(rows).astype(np.int32), final, 0))
