"""Automata while they are put together: tables over classes of symbols that all parts share. Pure.

Where no symbol could go on in two ways, fragments are joined by copying rows: a concatenation, a
repetition or a choice then costs a few copies of arrays, and stays deterministic. Everywhere else the
subset construction (`determinize`) makes one fragment of them.

A fragment of n states and k symbols: `table` int32 [n, k], the next state or -1; `final` bool [n].
It does not know what the symbols stand for.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import cache, partial

import numpy as np
from numpy.typing import NDArray

from ramify.actors.grammar.limits import MAX_STATES, MAX_WORK, check_deadline
from ramify.protocol.errors import ConstraintError

Table = NDArray[np.int32]
Flags = NDArray[np.bool_]
_Moves = list[tuple[int, frozenset[int]]]  # of a state: symbols, and what is behind each


class Fragment:
    """A deterministic automaton; it may have states that no text reaches. Never changed once made."""

    __slots__ = ("final", "start", "table")

    def __init__(self, table: Table, final: Flags, start: int = 0) -> None:
        if len(table) > 4 * MAX_STATES:  # `reduce` may still find that most are not needed
            raise too_large()
        self.table = table
        self.final = final
        self.start = start

    def __len__(self) -> int:
        return len(self.table)

    @property
    def nullable(self) -> bool:
        """Whether it accepts the empty text."""
        return bool(self.final[self.start])


class TooAmbiguous(ConstraintError):
    """No automaton within the limits holds the language; a back end without tables might."""


def too_large() -> TooAmbiguous:
    """The error that each step of the construction raises past `MAX_STATES`."""
    return TooAmbiguous(
        f"the constraint needs more than {MAX_STATES} states: lower its repetition counts or lengths, "
        "or make its parts less ambiguous"
    )


def empty_text(symbols: int) -> Fragment:
    """The empty text alone."""
    return Fragment(np.full((1, symbols), -1, np.int32), np.ones(1, np.bool_))


def nothing(symbols: int) -> Fragment:
    """The language without any text."""
    return Fragment(np.full((1, symbols), -1, np.int32), np.zeros(1, np.bool_))


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
    factors = _FACTORS[: len(starts)]
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


def reduce(part: Fragment, *, loops: bool = True) -> Fragment:
    """The same language without useless states: start 0, equal states merged as far as that is cheap.

    `loops`: look for equal states in loops too. Raises ConstraintError past `MAX_STATES`.
    """
    part = _merge_ends(trim(part))
    if loops:
        part = _minimize(part)
    if len(part) > MAX_STATES:
        raise too_large()
    return part


def trim(part: Fragment) -> Fragment:
    """Only states on a way from the start to a final state; the start is 0."""
    size = len(part)
    sources, targets = _edges(part)
    reached = _reached(part, sources, targets)
    # of most states a way to an end is found by taking one kind of edge again and again
    ending = part.final
    own = np.arange(size)
    last, first, back = np.full((3, size), -1)
    away = targets != sources
    ahead, to = sources[away], targets[away]
    order = np.argsort(to, kind="stable")
    last[ahead[order]] = to[order]
    first[ahead[order[::-1]]] = to[order[::-1]]
    back[ahead[::-1]] = to[::-1]  # over the first symbol
    for ways in (last, first, back, last):
        ending = ending | ending[_roots(ending, np.where(ways < 0, own, ways))]
        if ending.all():
            break
    else:
        left = ~ending[sources]
        ending = _spread(targets[left], sources[left], ending)
    keep = reached & ending
    keep[part.start] = True
    if keep.all() and part.start == 0:
        return part
    order = np.flatnonzero(keep)
    order = np.concatenate([[part.start], order[order != part.start]])
    numbers = np.full(size + 1, -1, np.int32)  # the last one: of -1
    numbers[order] = np.arange(len(order), dtype=np.int32)
    return Fragment(numbers[part.table[order]], part.final[order], 0)


def _edges(part: Fragment) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Sources and targets, one edge for each run of neighbouring symbols with the same target."""
    new = part.table >= 0
    new[:, 1:] &= part.table[:, 1:] != part.table[:, :-1]
    edges = np.flatnonzero(new)
    return edges // part.table.shape[1], part.table.ravel()[edges]


def _reached(part: Fragment, sources: NDArray[np.int64], targets: NDArray[np.int32]) -> Flags:
    """The states that some text leads to.

    Of most of them a way back to the start is found by going to the first state before each, or to the
    last one, again and again. Not to one that none is before: only the start is reached without.
    """
    size = len(part)
    found: Flags = np.arange(size) == part.start
    if size > _SMALL:
        own = np.arange(size)
        last, first = np.full((2, size), -1)
        last[targets] = sources
        first[targets[::-1].copy()] = sources[::-1].copy()  # read backwards, it would be as above
        useless = (last < 0) | (last == own) & (first == own)
        useless[part.start] = False
        for one, other in ((last, first), (first, last)):
            found |= found[_roots(found, np.where(useless[one] | (one == own), other, one))]
        if not (found[sources] & ~found[targets]).any():
            return found
    return _spread(sources, targets, found)


def before(part: Fragment, seeds: Flags) -> Flags:
    """`seeds`, and the states from which some text leads to one of them."""
    sources, targets = _edges(part)
    return _spread(targets, sources, seeds)


_SMALL = 256  # states, of which all edges are gone through


def _roots(ends: Flags, ways: NDArray[np.integer]) -> NDArray[np.int64]:
    """For each state, the end of its way along `ways`: one of `ends`, or a state without a way."""
    own = np.arange(len(ends))
    jump = np.where(ends | (ways < 0), own, ways)
    for _ in range(len(ends).bit_length()):
        jump = jump[jump]
    return jump


def _spread(sources: NDArray[np.integer], targets: NDArray[np.integer], seeds: Flags) -> Flags:
    """`seeds`, and what can be reached from them by these edges."""
    size = len(seeds)
    new = ~seeds[targets]
    sources, targets = sources[new], targets[new]
    if not len(sources):
        return seeds
    if (sources[1:] < sources[:-1]).any():
        order = np.argsort(sources, kind="stable")
        sources, targets = sources[order], targets[order]
    begins = np.searchsorted(sources, np.arange(size + 1)).tolist()
    following = targets.tolist()
    seen = bytearray(seeds.tobytes())
    stack = np.unique(sources[seeds[sources]]).tolist()
    while stack:
        state = stack.pop()
        for target in following[begins[state] : begins[state + 1]]:
            if not seen[target]:
                seen[target] = 1
                stack.append(target)
    return np.frombuffer(bytes(seen), np.bool_).copy()


_REFINE_CELLS = 2_000_000  # cells of the table that refinement may look at: some 10 ms
_LOOK_FOR_LOOPS = 8  # rounds of refinement before it is asked whether it can find anything
_REFINE_ROUNDS = 12  # with fewer it has never come to an end: of 214 automata of real schemas not once


def _minimize(part: Fragment) -> Fragment:
    """Merge equal states that `_merge_ends` left: there are some only where there are loops.

    By Moore's refinement of a partition, as long as it stays cheap: not in large automata.
    """
    size, symbols = part.table.shape
    rounds = _REFINE_CELLS // (size * symbols)
    if rounds < _REFINE_ROUNDS:
        return part
    count, blocks = _group(part.final[:, None].astype(np.int32))
    for at in range(min(size, rounds)):
        if at == _LOOK_FOR_LOOPS and not has_loops(part):
            break
        rows = _beside(np.where(part.table >= 0, blocks[part.table], -1), blocks)
        found, blocks = _group(rows)
        if found == size:
            break
        if found == count:
            return _merged(part, blocks, rows) or part
        count = found
    return part


def _merge_ends(part: Fragment) -> Fragment:
    """States with equal rows are one, again and again: rows that led to them may be equal now.

    Each round looks at those rows only. The start stays the first state.
    """
    size, symbols = part.table.shape
    rows = _beside(part.table, part.final)
    codes = hashes(rows)
    _, first, group = np.unique(codes, return_index=True, return_inverse=True)
    into = first[group]  # the state that each one is merged into
    merged = np.flatnonzero(into != np.arange(size))
    if not len(merged):
        return part
    sources, targets = _edges(part)
    order = np.argsort(targets, kind="stable")
    before = sources[order]
    begins = np.searchsorted(targets[order], np.arange(size + 1))
    known = dict(zip(codes[first].tolist(), first.tolist(), strict=True))
    code_of = codes.tolist()
    alike: dict[int, list[int]] = {}  # by state: all that were merged into it, and itself
    while len(merged):
        if (rows[merged] != rows[into[merged]]).any():  # two hashes of 64 bits were equal
            return part
        groups = [alike.pop(state, [state]) for state in merged.tolist()]
        moved = np.array([state for states in groups for state in states])
        for states, target in zip(groups, into[merged].tolist(), strict=True):
            alike.setdefault(target, [target]).extend(states)
        counts = begins[moved + 1] - begins[moved]
        starts = np.repeat(begins[moved] - (np.cumsum(counts) - counts), counts)
        affected = np.unique(before[starts + np.arange(len(starts))])
        affected = affected[into[affected] == affected]
        own = rows[affected, :symbols]
        rows[affected, :symbols] = np.where(own >= 0, into[own], -1)
        gone = []
        fresh = hashes(rows[affected]).tolist()
        for state in affected.tolist():
            del known[code_of[state]]
        for state, code in zip(affected.tolist(), fresh, strict=True):
            code_of[state] = code
            other = known.setdefault(code, state)
            if other != state:
                gone.append(state)
                into[state] = other
        merged = np.array(gone, np.int64)
    start = part.start
    while into[start] != start:
        start = int(into[start])
    kept = np.flatnonzero(into == np.arange(size))
    kept = np.concatenate([[start], kept[kept != start]])
    numbers = np.full(size + 1, -1, np.int32)  # the last one: of -1
    numbers[kept] = np.arange(len(kept), dtype=np.int32)
    return Fragment(numbers[rows[kept, :symbols]], part.final[kept], 0)


def has_loops(part: Fragment) -> bool:
    """Whether a state can be reached from itself: states that nothing leads to are taken off until none
    is left (Kahn 1962).
    """
    size = len(part)
    sources, targets = _edges(part)
    if (sources == targets).any():
        return True
    ways = np.bincount(targets, minlength=size).tolist()
    begins = np.searchsorted(sources, np.arange(size + 1)).tolist()
    following = targets.tolist()
    free = [state for state, count in enumerate(ways) if not count]
    for state in free:  # grows
        for target in following[begins[state] : begins[state + 1]]:
            ways[target] -= 1
            if not ways[target]:
                free.append(target)
    return len(free) < size


_FACTORS = np.random.default_rng(0x9E3779B97F4A7C15).integers(0, 1 << 64, 512, np.uint64)


_HALF = np.uint64(32)


def hashes(rows: Table) -> NDArray[np.uint64]:
    """64 bits of each row, of which two numbers are taken at a time."""
    if rows.shape[1] % 2 or not rows.flags.c_contiguous:
        even = np.zeros((len(rows), rows.shape[1] + rows.shape[1] % 2), np.int32)
        even[:, : rows.shape[1]] = rows
        rows = even
    pairs = rows.view(np.uint64)
    found: NDArray[np.uint64] = (pairs ^ (pairs >> _HALF)).dot(_FACTORS[: pairs.shape[1]])
    return found


def _group(rows: Table) -> tuple[int, NDArray[np.int64]]:
    """The number of different rows, and the group of each, by a hash of 64 bits."""
    found, groups = np.unique(hashes(rows), return_inverse=True)
    return len(found), groups


def _beside(rows: NDArray[np.integer], last: NDArray[np.generic]) -> Table:
    """`rows` with a column more, or two, of which one is empty: an even number."""
    size, columns = rows.shape
    found = np.zeros((size, columns + 2 - columns % 2), np.int32)
    found[:, :columns], found[:, columns] = rows, last
    return found


def _merged(part: Fragment, groups: NDArray[np.int64], rows: Table) -> Fragment | None:
    """`part` with one state for each group. None if `rows` of a group differ: two hashes were equal."""
    _, first = np.unique(groups, return_index=True)
    other = np.ones(len(rows), np.bool_)
    other[first] = False
    again = np.flatnonzero(other)
    if (rows[again] != rows[first[groups[again]]]).any():
        return None
    order = np.argsort(first)  # numbers in the order of first states, so the start stays the first
    numbers = np.empty_like(order)
    numbers[order] = np.arange(len(order))
    following = np.append(numbers[groups], -1).astype(np.int32)  # the last one: of -1
    table = following[part.table[first[order]]]
    return Fragment(table, part.final[first[order]], int(numbers[groups[part.start]]))
