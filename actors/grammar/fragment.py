"""Automata while they are put together: tables over classes of symbols that all parts share. Pure.

How they are joined: `combining.py`. Here a fragment loses the states that it does not need.

A fragment of n states and k symbols: `table` int32 [n, k], the next state or -1; `final` bool [n].
It does not know what the symbols stand for.
"""

import numpy as np
from numpy.typing import NDArray

from ramify.actors.grammar.limits import MAX_STATES
from ramify.protocol.errors import ConstraintError

Table = NDArray[np.int32]
Flags = NDArray[np.bool_]


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


FACTORS = np.random.default_rng(0x9E3779B97F4A7C15).integers(0, 1 << 64, 512, np.uint64)
_HALF = np.uint64(32)


def hashes(rows: Table) -> NDArray[np.uint64]:
    """64 bits of each row, of which two numbers are taken at a time."""
    if rows.shape[1] % 2 or not rows.flags.c_contiguous:
        even = np.zeros((len(rows), rows.shape[1] + rows.shape[1] % 2), np.int32)
        even[:, : rows.shape[1]] = rows
        rows = even
    pairs = rows.view(np.uint64)
    found: NDArray[np.uint64] = (pairs ^ (pairs >> _HALF)).dot(FACTORS[: pairs.shape[1]])
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
