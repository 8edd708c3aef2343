"""The attention kernel for tiles of more than 16 rows, of prompts: twice as fast with AVX-512.

A vector has 16 rows of queries here, not 16 numbers of one: scores are keys by rows, so there are no
sums across a vector, and exponentials of many rows are computed at once. Each sum has the order that it
has in `attention`: a row gets the same bits from both.
"""

from dataclasses import dataclass
from typing import Any

from ramify.gpu.native.attention import (
    COUNT,
    FIRST,
    HEADS,
    KEYS,
    KV_HEADS,
    NONE,
    OUT,
    OUT_STRIDE,
    PAGES,
    POSITION,
    Q_STRIDE,
    SCALE,
    SINKS,
    SOFTCAP,
    TILE_WORDS,
    TILES,
    VALUES,
    WINDOW,
    Q,
    emit_attention,
    find_keys,
)
from ramify.gpu.native.ir import F32, I32, I64, LANES, PTR, Function, IrValue, Module, Variable, vector
from ramify.gpu.native.math import exp, tanh

_V, _VI = vector(F32), vector(I32)
WIDE_ROWS = 32
_COLUMNS = range(0, WIDE_ROWS, LANES)  # of vectors in a line of all rows
_KEYS = 4  # whose scores are computed at a time: 16 sums are in registers
_ROWS = 4  # whose values are


@dataclass(slots=True)
class _Wide:
    """A tile's rows, of one KV head. Missing rows are copies of its last one."""

    args: IrValue
    dim: int
    kind: Any
    kv_head: IrValue
    group: IrValue  # query heads of a KV head
    rows: IrValue
    first: IrValue  # token
    position: IrValue  # of the first token
    last: IrValue  # position behind those of the tile
    window: IrValue
    offsets: IrValue  # int64[16]: where the keys of this block lie in the pool
    sources: IrValue  # int64[WIDE_ROWS]: addresses of queries
    places: IrValue  # int32[WIDE_ROWS]: positions
    queries: IrValue  # float32[dim][WIDE_ROWS]
    copied: IrValue  # float32[16][dim]: keys, then values of this block
    partial: IrValue  # float32[8][_KEYS][WIDE_ROWS]: sums of an eighth of a product
    scores: IrValue  # float32[16][WIDE_ROWS], then shares
    tops: IrValue  # float32[WIDE_ROWS]: the largest score so far
    fades: IrValue  # float32[WIDE_ROWS]: the factor of the sums so far, by this block's top
    masses: IrValue  # float32[16][WIDE_ROWS]: sums of shares, key by key of a block
    mixed: IrValue  # float32[WIDE_ROWS][dim]: sums of share * value


def emit_attention_wide(module: Module, dim: int, kind: Any) -> str:
    """Write the kernel of `emit_attention` for tiles of up to WIDE_ROWS rows."""
    f = Function(module, f"attention_wide_{dim}", [PTR, I64], private=True)
    f.raw.attributes.add("noinline")
    args, item = f.args
    kv_heads = f.word(args, KV_HEADS)
    group = f.word(args, HEADS) // kv_heads
    words = f.at(f.pointer(args, TILES), item // kv_heads * TILE_WORDS, I64)
    count, position = f.word(words, COUNT), f.word(words, POSITION)
    scratch = [f.scratch(I64, LANES), f.scratch(I64, WIDE_ROWS), f.scratch(I32, WIDE_ROWS)]
    sizes = (dim, 0, 8 * _KEYS, LANES, 1, 1, LANES, dim)
    scratch += [f.scratch(F32, WIDE_ROWS * size or LANES * dim) for size in sizes]
    tile = _Wide(
        args, dim, kind, item % kv_heads, group, count * group, f.word(words, FIRST), position,
        position + count, f.word(args, WINDOW), *scratch,
    )  # fmt: skip
    _begin(f, tile)
    lowest = f.larger(position - tile.window + 1, f.i64(0))
    with f.loop(lowest & -LANES, tile.last, LANES) as base:
        pages = f.pointer(words, PAGES)
        find_keys(f, args, pages, base, lowest, tile.last, kv_heads * dim, tile.offsets)
        _copy(f, tile, KEYS)
        with f.loop(0, LANES, _KEYS) as key:
            _score(f, tile, key)
        _soften(f, tile, base)
        _copy(f, tile, VALUES)
        with f.loop(0, tile.rows, _ROWS) as row:
            last = f.load(f.at(tile.places, row + (_ROWS - 1), I32), I32)
            with f.when(base <= f.convert(last, I64)):
                _mix(f, tile, row)
    _finish(f, tile)
    f.done()
    return emit_attention(module, dim, kind, f)


def _line(f: Function, place: IrValue, number: "IrValue | int", column: "IrValue | int" = 0) -> IrValue:
    """Find 16 rows' part of a line of all rows."""
    return f.at(place, f.like(number, f.i64(0)) * WIDE_ROWS + column, F32)


def _begin(f: Function, tile: _Wide) -> None:
    """Transpose queries. There is no key yet; a sink (Xiao et al. 2023) is a score without a value."""
    zeros = f.constant(_V, 0.0)
    with f.loop(0, LANES) as lane:
        for column in _COLUMNS:
            f.store(zeros, _line(f, tile.masses, lane, column))
    with f.loop(0, WIDE_ROWS) as row:
        own = f.smaller(row, tile.rows - 1)
        query = own // tile.group
        head = tile.kv_head * tile.group + own % tile.group
        q = f.at(f.pointer(tile.args, Q), (tile.first + query) * f.word(tile.args, Q_STRIDE), F32)
        f.store(f.at(q, head * tile.dim, F32).as_number(), f.at(tile.sources, row, I64))
        f.store(f.convert(tile.position + query, I32), f.at(tile.places, row, I32))
        f.store(f.constant(F32, NONE), f.at(tile.tops, row, F32))
        with f.when(f.word(tile.args, SINKS).differs(0)):
            sink = f.load(f.at(f.pointer(tile.args, SINKS), head, F32), F32)
            f.store(sink, f.at(tile.tops, row, F32))
            f.store(f.constant(F32, 1.0), f.at(tile.masses, row, F32))
        with f.loop(0, tile.dim, LANES) as at:
            f.store(zeros, f.at(tile.mixed, row * tile.dim + at, F32))
    with f.loop(0, WIDE_ROWS, LANES) as start, f.loop(0, tile.dim, LANES) as at:
        sources = [f.pointer(tile.sources, start + n) for n in range(LANES)]
        lines = [f.load(f.at(source, at, F32), _V) for source in sources]
        for n, line in enumerate(_turned(f, lines)):
            f.store(line, _line(f, tile.queries, at + n, start))


def _turned(f: Function, lines: list[IrValue]) -> list[IrValue]:
    """Transpose 16 vectors of 16: lane n of them becomes vector n."""
    lanes, lines = range(LANES), [*lines]
    for step in (8, 4, 2, 1):
        for low in (n for n in lanes if not n & step):
            pair = lines[low], lines[low + step]
            lines[low] = f.shuffle(*pair, [n + LANES - step if n & step else n for n in lanes])
            lines[low + step] = f.shuffle(*pair, [n + LANES if n & step else n + step for n in lanes])
    return lines


def _copy(f: Function, tile: _Wide, which: int) -> None:
    """Copy 16 keys or values as float32."""
    pool = f.at(f.pointer(tile.args, which), tile.kv_head * tile.dim, tile.kind)
    with f.loop(0, LANES) as lane:
        line = f.at(pool, f.word(tile.offsets, lane), tile.kind)
        for at in range(0, tile.dim, LANES):
            part = f.load(f.at(line, at, tile.kind), vector(tile.kind))
            f.store(f.convert(part, _V), f.at(tile.copied, lane * tile.dim + at, F32))


def _score(f: Function, tile: _Wide, key: IrValue) -> None:
    """Compute q k * scale of some keys for all rows."""
    places = [(n, column) for n in range(_KEYS) for column in _COLUMNS]
    with f.loop(0, 8) as lane:  # and the one 8 behind it
        sums = {(half, *place): f.constant(_V, 0.0) for half in (0, 8) for place in places}
        for part in range(0, tile.dim, LANES):
            for half in (0, 8):
                at = lane + (part + half)
                rows = {column: f.load(_line(f, tile.queries, at, column), _V) for column in _COLUMNS}
                for n in range(_KEYS):
                    own = f.splat(f.load(f.at(tile.copied, (key + n) * tile.dim + at, F32), F32))
                    for column in _COLUMNS:
                        total = sums[half, n, column]
                        sums[half, n, column] = f.fma(rows[column], own, total)
        for n, column in places:
            total = sums[0, n, column] + sums[8, n, column]
            f.store(total, _line(f, tile.partial, lane * _KEYS + n, column))
    scale = f.load(f.at(tile.args, SCALE, I64), F32)
    for n, column in places:
        totals = [f.load(_line(f, tile.partial, lane * _KEYS + n, column), _V) for lane in range(8)]
        f.store(_halved(totals) * scale, _line(f, tile.scores, key + n, column))


def _halved(totals: list[IrValue]) -> IrValue:
    """Sum, halves with halves, as `Function.reduce` sums lanes."""
    while len(totals) > 1:
        half = len(totals) // 2
        totals = [a + b for a, b in zip(totals[:half], totals[half:], strict=True)]
    return totals[0]


def _soften(f: Function, tile: _Wide, base: IrValue) -> None:
    """Turn scores into shares, exp(score - the largest so far); sum them key by key of a block."""
    with f.when(f.word(tile.args, SOFTCAP).differs(0)), f.loop(0, LANES) as key:
        cap = f.load(f.at(tile.args, SOFTCAP, I64), F32)
        for column in _COLUMNS:
            place = _line(f, tile.scores, key, column)
            f.store(tanh(f, f.load(place, _V) / cap) * cap, place)
    early, late = base + (LANES - 1) > tile.position, base <= tile.last - 1 - tile.window
    with f.when(early.either(late)), f.loop(0, LANES) as key:
        position = f.splat(f.convert(base + key, I32))
        window = f.splat(f.convert(f.smaller(tile.window, f.i64(1 << 30)), I32))
        for column in _COLUMNS:
            place, own = _line(f, tile.scores, key, column), f.load(f.at(tile.places, column, I32), _VI)
            seen = (position <= own).both(position > own - window)
            f.store(f.select(seen, f.load(place, _V), f.constant(_V, NONE)), place)
    with f.loop(0, WIDE_ROWS, LANES) as first:
        scores = [f.load(_line(f, tile.scores, key, first), _V) for key in range(LANES)]
        while len(scores) > 1:
            scores = [f.larger(a, b) for a, b in zip(scores[::2], scores[1::2], strict=True)]
        tops, none = f.at(tile.tops, first, F32), f.constant(_V, NONE)
        before = f.load(tops, _V)
        top = f.larger(before, scores[0])
        fade = exp(f, before - top)
        f.store(top, tops)
        f.store(fade, f.at(tile.fades, first, F32))
        above = f.select(top > none, top, f.constant(_V, 0.0))  # so that no key seen is no share
        with f.loop(0, LANES) as key:
            place, masses = (_line(f, each, key, first) for each in (tile.scores, tile.masses))
            share = exp(f, f.load(place, _V) - above)
            f.store(share, place)
            f.store(f.fma(f.load(masses, _V), fade, share), masses)


def _mix(f: Function, tile: _Wide, row: IrValue) -> None:
    """Add the values weighted with some rows' shares to the sums so far."""
    count = tile.dim // LANES
    some = 4 if count % 4 == 0 else 2
    with f.loop(0, tile.dim, some * LANES) as at:
        parts = range(0, some * LANES, LANES)
        places = [f.at(tile.mixed, (row + n) * tile.dim + at, F32) for n in range(_ROWS)]
        sums: dict[tuple[int, int], Variable] = {}
        for n, place in enumerate(places):
            fade = f.splat(f.load(f.at(tile.fades, row + n, F32), F32))
            sums |= {(n, part): f.var(f.load(f.at(place, part, F32), _V) * fade) for part in parts}
        with f.loop(0, LANES) as key:
            lines = {
                part: f.load(f.at(tile.copied, key * tile.dim + at + part, F32), _V) for part in parts
            }
            for n in range(_ROWS):
                share = f.splat(f.load(f.at(_line(f, tile.scores, key), row + n, F32), F32))
                for part in parts:
                    sums[n, part].set(f.fma(share, lines[part], sums[n, part].get()))
        for n, place in enumerate(places):
            for part in parts:
                f.store(sums[n, part].get(), f.at(place, part, F32))


def _finish(f: Function, tile: _Wide) -> None:
    for column in _COLUMNS:
        masses = [f.load(_line(f, tile.masses, key, column), _V) for key in range(LANES)]
        f.store(f.constant(_V, 1.0) / _halved(masses), f.at(tile.fades, column, F32))
    with f.loop(0, tile.rows) as row:
        head = tile.kv_head * tile.group + row % tile.group
        out = f.at(f.pointer(tile.args, OUT),
                   (tile.first + row // tile.group) * f.word(tile.args, OUT_STRIDE), F32)  # fmt: skip
        out = f.at(out, head * tile.dim, F32)
        share = f.load(f.at(tile.fades, row, F32), F32)
        for at in range(0, tile.dim, LANES):
            total = f.load(f.at(tile.mixed, row * tile.dim + at, F32), _V)
            f.store(total * share, f.at(out, at, F32))
