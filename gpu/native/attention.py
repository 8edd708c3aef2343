"""The attention kernel over pages: item i is a tile of one sequence's queries and one KV head.

Items of one tile that a thread takes together share the walk over keys: a position's keys of all heads
lie side by side, and are found once.

Keys are read in place. They are taken 16 positions at a time, from a multiple of 16 on, with the online
softmax of Dao et al. 2022; so a query's result depends on its own keys alone: not on the other queries
of the step, on how its prompt was cut into chunks, or on which pages hold the keys.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ramify.gpu.native.ir import (
    CACHE_LINE,
    F16,
    F32,
    I32,
    I64,
    LANES,
    PTR,
    Function,
    IrValue,
    Module,
    vector,
)
from ramify.gpu.native.math import exp, tanh

_V = vector(F32)
NONE = -3.0e38  # below every score
MOST_ROWS = 16  # queries of a tile, times the query heads of the KV heads that are computed together
_FEW = 4  # queries of a tile that waits for memory; of a prompt's, earlier tiles brought the keys nearer

# words of the arguments
(Q, Q_STRIDE, KEYS, VALUES, OUT, OUT_STRIDE, HEADS, KV_HEADS, PAGE_SHIFT, TILES, SCALE, SOFTCAP, WINDOW,
 SINKS) = range(14)  # fmt: skip
# words of a tile: the address of its sequence's pages (int32), its first token, its number of tokens,
# the position of the first
PAGES, FIRST, COUNT, POSITION = range(4)
TILE_WORDS = 4


@dataclass(slots=True)
class _Tile:
    """The values that the rows of a tile share."""

    args: IrValue
    group: IrValue  # query heads of a KV head
    count: IrValue  # queries
    first: IrValue  # token
    position: IrValue  # of the first token
    window: IrValue
    offsets: IrValue  # int64[16]: where the keys of this block lie in the pool
    ahead: IrValue  # int64[16]: those of the next block
    copied: IrValue  # float32[16][dim]: keys, then values of this block, if several rows read them
    before: IrValue  # float32[MOST_ROWS]: the largest score before this block
    tops: IrValue  # float32[MOST_ROWS]: the largest score so far
    masses: IrValue  # float32[MOST_ROWS][16]: sums of exp(score - top), lane by lane
    mixed: IrValue  # float32[MOST_ROWS][dim]: sums of exp(score - top) * value
    shares: IrValue  # float32[MOST_ROWS][16]: exp(score - top) of this block
    fades: IrValue  # float32[MOST_ROWS]: the factor of the sums so far, by this block's top


def emit_attention(module: Module, dim: int, kind: Any, wide: Function | None = None) -> str:
    """Write the kernel. `dim`: size of a head, a multiple of 16; `kind`: F32 or F16, the pool's.

    `wide`: takes items whose tiles have more rows than MOST_ROWS; None: there are no such tiles.
    """
    f = Function(module, f"attention_{dim}", [PTR, I64, I64])
    args, begin, end = f.args
    kv_heads = f.word(args, KV_HEADS)
    group = f.word(args, HEADS) // kv_heads
    scratch = [f.scratch(I64, LANES), f.scratch(I64, LANES), f.scratch(F32, LANES * dim)]
    scratch += [f.scratch(F32, MOST_ROWS * n) for n in (1, 1, LANES, dim, LANES, 1)]
    for each in scratch[3:5]:  # of rows that the items have none of, too
        f.store(f.constant(_V, 0.0), each)
    at = f.var(begin)
    with f.repeat() as leave:
        item = at.get()
        leave(item >= end)
        words = f.at(f.pointer(args, TILES), item // kv_heads * TILE_WORDS, I64)
        tile = _Tile(
            args, group, f.word(words, COUNT), f.word(words, FIRST), f.word(words, POSITION),
            f.word(args, WINDOW), *scratch,
        )  # fmt: skip
        first, rows = item % kv_heads, tile.count * group
        if wide is not None:
            with f.when(rows > MOST_ROWS):
                f.invoke(wide, args, item)
                at.set(item + 1)
        with f.when(rows <= MOST_ROWS):
            many = f.smaller(f.smaller(end - item, kv_heads - first), f.i64(MOST_ROWS) // rows)
            at.set(item + many)
            _attend(f, tile, f.pointer(words, PAGES), first, many, dim, kind)
    f.done()
    return f.name


def _attend(
    f: Function, tile: _Tile, pages: IrValue, first: IrValue, many: IrValue, dim: int, kind: Any
) -> None:
    """Attend for the rows of some KV heads from `first` on."""
    args, rows = tile.args, tile.count * tile.group
    width = f.word(args, KV_HEADS) * dim
    last = tile.position + tile.count
    lowest = f.larger(tile.position - tile.window + 1, f.i64(0))
    with _rows(f, tile, first, many) as row:
        _begin(f, tile, row, dim)
    start = lowest & -LANES
    find_keys(f, args, pages, start, lowest, last, width, tile.ahead)
    with f.loop(start, last, LANES) as base:
        f.store(f.load(tile.ahead, vector(I64)), tile.offsets)
        find_keys(f, args, pages, base + LANES, lowest, last, width, tile.ahead)
        with f.loop(0, many) as number:
            _take_block(f, tile, KEYS, first + number, number * rows, base, dim, kind)
        tops = f.load(tile.tops, _V)
        f.store(exp(f, f.load(tile.before, _V) - tops), tile.fades)
        f.store(tops, tile.before)
        with f.loop(0, many) as number:
            _take_block(f, tile, VALUES, first + number, number * rows, base, dim, kind)
    with _rows(f, tile, first, many) as row:
        _finish(f, tile, row, dim)


def _take_block(
    f: Function, tile: _Tile, which: int, kv_head: IrValue, before: IrValue, base: IrValue, dim: int,
    kind: Any,
) -> None:  # fmt: skip
    """Take in 16 keys, or 16 values, of a KV head, whose rows lie behind `before` others."""
    alone = (tile.count * tile.group).equals(1)
    lines = _Lines(f, tile, which, kv_head, dim, kind)
    with f.when(tile.count <= _FEW):
        _fetch(f, tile, which, kv_head, dim, kind)
    with f.when(alone):
        only = [_QueryRow(before, tile.first, tile.position, kv_head)]
        if which == KEYS:
            _weigh(f, tile, lines, only, base, dim)
        else:
            _mix(f, tile, lines, only, dim)
    with f.when(alone.opposite()):
        copied = _copied(f, tile, lines, dim)
        with _pairs(f, tile, kv_head, before, base) as rows:
            if which == KEYS:
                _weigh(f, tile, copied, rows, base, dim)
            else:
                _mix(f, tile, copied, rows, dim)


def _fetch(f: Function, tile: _Tile, which: int, kv_head: IrValue, dim: int, kind: Any) -> None:
    """Fetch the values of this block, or the keys of the next one, while this one is computed."""
    other, offsets = (VALUES, tile.offsets) if which == KEYS else (KEYS, tile.ahead)
    pool = f.at(f.pointer(tile.args, other), kv_head * dim, kind)
    step = CACHE_LINE // (2 if kind == F16 else 4)
    for lane in range(LANES):
        line = f.at(pool, f.word(offsets, lane), kind)
        for at in range(0, dim, step):
            f.fetch(f.at(line, at, kind))


@dataclass(slots=True)
class _QueryRow:
    """A query of the tile, for one query head."""

    index: IrValue
    token: IrValue
    position: IrValue
    head: IrValue


@contextmanager
def _rows(f: Function, tile: _Tile, kv_head: IrValue, many: IrValue) -> Iterator[_QueryRow]:
    """Loop over the rows of the tile, of `many` KV heads."""
    rows = tile.count * tile.group
    with f.loop(0, many) as number, f.loop(0, rows) as own:
        yield _row(tile, kv_head + number, number * rows, own)


def _row(tile: _Tile, kv_head: IrValue, before: IrValue, own: IrValue) -> _QueryRow:
    """Make row `own` of a KV head's rows."""
    query = own // tile.group
    head = kv_head * tile.group + own % tile.group
    return _QueryRow(before + own, tile.first + query, tile.position + query, head)


@contextmanager
def _pairs(
    f: Function, tile: _Tile, kv_head: IrValue, before: IrValue, base: IrValue
) -> Iterator[list[_QueryRow]]:
    """Loop over pairs of rows, of which one may see a key from `base` on; an odd last row twice."""
    rows = tile.count * tile.group
    with f.loop(0, rows, 2) as first:
        own = first, f.smaller(first + 1, rows - 1)
        pair = [_row(tile, kv_head, before, index) for index in own]
        low = pair[0].position - tile.window + 1
        with f.when(base <= pair[1].position), f.when(base + LANES > low):
            yield pair


def _begin(f: Function, tile: _Tile, row: _QueryRow, dim: int) -> None:
    """Begin a row without keys; a sink (Xiao et al. 2023) is a score without a value."""

    top, mass = f.var(f.constant(F32, NONE)), f.var(f.constant(F32, 0.0))
    with f.when(f.word(tile.args, SINKS).differs(0)):
        top.set(f.load(f.at(f.pointer(tile.args, SINKS), row.head, F32), F32))
        mass.set(f.constant(F32, 1.0))
    for tops in (tile.before, tile.tops):
        f.store(top.get(), f.at(tops, row.index, F32))
    zeros = f.constant(_V, 0.0)
    f.store(zeros, f.at(tile.masses, row.index * LANES, F32))
    f.store(mass.get(), f.at(tile.masses, row.index * LANES, F32))
    for at in range(0, dim, LANES):
        f.store(zeros, f.at(tile.mixed, row.index * dim + at, F32))


def find_keys(
    f: Function, args: IrValue, pages: IrValue, base: IrValue, lowest: IrValue, last: IrValue,
    width: IrValue, to: IrValue,
) -> None:  # fmt: skip
    """Write where the KV of positions base.. lies to int64[16]; for others the nearest of [lowest,
    last).

    The row may have no page there, or a page of another row's keys, which need not be finite.
    """
    shift = f.word(args, PAGE_SHIFT)
    size = f.shifted(f.i64(1), shift)
    for lane in range(LANES):
        position = f.larger(f.smaller(base + lane, last - 1), lowest)
        page = f.convert(f.load(f.at(pages, f.unshifted(position, shift), I32), I32), I64)
        slot = page * size + (position & (size - 1))
        f.store(slot * width, f.at(to, lane, I64))


class _Lines:
    """A block of 16 keys or values (`which`) of a KV head, read in place in the pool."""

    def __init__(
        self, f: Function, tile: _Tile, which: int, kv_head: IrValue, dim: int, kind: Any
    ) -> None:
        self._f, self._offsets, self._kind, self._count = f, tile.offsets, kind, dim // LANES
        self._pool = f.at(f.pointer(tile.args, which), kv_head * dim, kind)

    def read(self, lane: int) -> list[IrValue]:
        """Read one of them as vectors of float32."""
        f, kind = self._f, self._kind
        line = f.at(self._pool, f.word(self._offsets, lane), kind)
        parts = [f.load(f.at(line, n * LANES, kind), vector(kind)) for n in range(self._count)]
        return [f.convert(part, _V) for part in parts]


class _CopiedLines(_Lines):
    """A block copied as float32, for rows that read it one after another."""

    def __init__(self, f: Function, tile: _Tile, dim: int) -> None:
        self._f, self._count, self._pool = f, dim // LANES, tile.copied

    def read(self, lane: int) -> list[IrValue]:
        f, first = self._f, lane * self._count
        return [f.load(f.at(self._pool, (first + n) * LANES, F32), _V) for n in range(self._count)]


def _copied(f: Function, tile: _Tile, lines: _Lines, dim: int) -> _Lines:
    for lane in range(LANES):
        for n, part in enumerate(lines.read(lane)):
            f.store(part, f.at(tile.copied, lane * dim + n * LANES, F32))
    return _CopiedLines(f, tile, dim)


def _weigh(
    f: Function, tile: _Tile, keys: _Lines, rows: list[_QueryRow], base: IrValue, dim: int
) -> None:
    """Score 16 keys for some rows: scores, the largest one so far, and exponentials."""
    for row, (scores, seen) in zip(rows, _scores(f, tile, keys, rows, base, dim), strict=True):
        # of an odd last row, which is there twice, both are the same
        top = f.larger(f.load(f.at(tile.before, row.index, F32), F32), f.reduce(scores, f.larger))
        f.store(top, f.at(tile.tops, row.index, F32))
        shares = f.select(seen, exp(f, scores - top), f.constant(_V, 0.0))
        f.store(shares, f.at(tile.shares, row.index * LANES, F32))


def _mix(f: Function, tile: _Tile, values: _Lines, rows: list[_QueryRow], dim: int) -> None:
    """Add the values weighted with the rows' shares, and the sums of shares."""
    lines = [f.at(tile.mixed, row.index * dim, F32) for row in rows]
    faded = [f.splat(f.load(f.at(tile.fades, row.index, F32), F32)) for row in rows]
    masses = [f.at(tile.masses, row.index * LANES, F32) for row in rows]
    shares = [f.load(f.at(tile.shares, row.index * LANES, F32), _V) for row in rows]
    done = [f.fma(f.load(mass, _V), *own) for mass, *own in zip(masses, faded, shares, strict=True)]
    sums = [[f.load(f.at(line, at, F32), _V) * own for at in range(0, dim, LANES)]
            for line, own in zip(lines, faded, strict=True)]  # fmt: skip
    for lane in range(LANES):
        parts = values.read(lane)
        for row, own in zip(rows, sums, strict=True):
            share = f.splat(f.load(f.at(tile.shares, row.index * LANES + lane, F32), F32))
            own[:] = [f.fma(share, part, one) for part, one in zip(parts, own, strict=True)]
    # behind all that is read: a row may be there twice
    for line, own, mass, total in zip(lines, sums, masses, done, strict=True):
        f.store(total, mass)
        for index, one in enumerate(own):
            f.store(one, f.at(line, index * LANES, F32))


def _scores(
    f: Function, tile: _Tile, keys: _Lines, rows: list[_QueryRow], base: IrValue, dim: int
) -> list[tuple[IrValue, IrValue]]:
    """Compute q k * scale of 16 keys, and which of them each row may see."""
    args, queries = tile.args, []
    for row in rows:
        q = f.at(f.pointer(args, Q), row.token * f.word(args, Q_STRIDE), F32)
        q = f.at(q, row.head * dim, F32)
        queries.append([f.load(f.at(q, at, F32), _V) for at in range(0, dim, LANES)])
    lanes, found = f.numbers(I32, range(LANES)), []
    for row, products in zip(rows, _products(f, keys, queries, 0, LANES), strict=True):
        scores = f.var(products * f.load(f.at(args, SCALE, I64), F32))
        with f.when(f.word(args, SOFTCAP).differs(0)):
            cap = f.load(f.at(args, SOFTCAP, I64), F32)
            scores.set(tanh(f, scores.get() / cap) * cap)
        last = f.smaller(row.position - base, f.i64(LANES))
        before = f.larger(row.position - tile.window - base, f.i64(-1))
        seen = (lanes <= f.convert(last, I32)).both(lanes > f.convert(before, I32))
        found.append((f.select(seen, scores.get(), f.constant(_V, NONE)), seen))
    return found


def _products(
    f: Function, keys: _Lines, queries: list[list[IrValue]], first: int, count: int
) -> list[IrValue]:
    """Multiply each query with the keys from `first` on; lanes are summed from 16 / count on.

    So lane i of 16 is the sum of the products with key i.
    """
    if count == 1:
        key, totals = keys.read(first), []
        for query in queries:
            total = f.constant(_V, 0.0)
            for part, own in zip(query, key, strict=True):
                total = f.fma(part, own, total)
            totals.append(total)
        return totals
    half, width = count // 2, 2 * LANES // count
    low = [start + lane for start in range(0, 2 * LANES, width) for lane in range(width // 2)]
    high = [lane + width // 2 for lane in low]
    sides = [_products(f, keys, queries, start, half) for start in (first, first + half)]
    return [f.shuffle(a, b, low) + f.shuffle(a, b, high) for a, b in zip(*sides, strict=True)]


def _finish(f: Function, tile: _Tile, row: _QueryRow, dim: int) -> None:
    args = tile.args
    mass = f.reduce(f.load(f.at(tile.masses, row.index * LANES, F32), _V), lambda a, b: a + b)
    share = f.constant(F32, 1.0) / mass
    out = f.at(f.pointer(args, OUT), row.token * f.word(args, OUT_STRIDE), F32)
    out = f.at(out, row.head * dim, F32)
    for at in range(0, dim, LANES):
        total = f.load(f.at(tile.mixed, row.index * dim + at, F32), _V)
        f.store(total * share, f.at(out, at, F32))
