"""Attention over pages: item i is a tile of one sequence's queries and one KV head.

Keys are read where they lie. They are taken 16 positions at a time, from a multiple of 16 on, with the
online softmax of Dao et al. 2022; so what a query gets depends on its own keys alone: not on the other
queries of the step, on how its prompt was cut into chunks, or on which pages hold the keys.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ramify.gpu.native.ir import F32, I32, I64, LANES, PTR, Function, IrValue, Module, vector
from ramify.gpu.native.math import exp, tanh

_V = vector(F32)
_NONE = -3.0e38  # below every score
MOST_ROWS = 16  # queries of a tile, times the query heads of a KV head

# words of the arguments
(Q, Q_STRIDE, KEYS, VALUES, OUT, OUT_STRIDE, HEADS, KV_HEADS, PAGE_SHIFT, TILES, SCALE, SOFTCAP, WINDOW,
 SINKS) = range(14)  # fmt: skip
# words of a tile: the address of its sequence's pages (int32), its first token, its number of tokens,
# the position of the first
PAGES, FIRST, COUNT, POSITION = range(4)
TILE_WORDS = 4


@dataclass(slots=True)
class _Tile:
    """What the rows of a tile share."""

    args: IrValue
    kv_head: IrValue
    group: IrValue  # query heads of a KV head
    first: IrValue  # token
    position: IrValue  # of the first token
    window: IrValue
    offsets: IrValue  # int64[16]: where the keys of this block lie in the pool
    keys: IrValue  # float32[16][dim]: the keys of this block, if several rows read them
    values: IrValue  # float32[16][dim]
    tops: IrValue  # float32[MOST_ROWS]: the largest score so far
    masses: IrValue  # float32[MOST_ROWS][16]: sums of exp(score - top), lane by lane
    mixed: IrValue  # float32[MOST_ROWS][dim]: sums of exp(score - top) * value


def emit_attention(module: Module, dim: int, kind: Any) -> str:
    """`dim`: size of a head, a multiple of 16; `kind`: F32 or F16, the pool's."""
    f = Function(module, f"attention_{dim}", [PTR, I64, I64])
    args, begin, end = f.args
    kv_heads = f.word(args, KV_HEADS)
    group = f.word(args, HEADS) // kv_heads
    scratch = [f.scratch(I64, LANES), *(f.scratch(F32, LANES * dim) for _ in range(2))]
    scratch += [f.scratch(F32, MOST_ROWS * n) for n in (1, LANES, dim)]
    with f.loop(begin, end) as item:
        words = f.at(f.pointer(args, TILES), item // kv_heads * TILE_WORDS, I64)
        tile = _Tile(
            args, item % kv_heads, group, f.word(words, FIRST), f.word(words, POSITION),
            f.word(args, WINDOW), *scratch,
        )  # fmt: skip
        count = f.word(words, COUNT)
        last = tile.position + count
        lowest = f.larger(tile.position - tile.window + 1, f.i64(0))
        with _rows(f, tile, count) as row:
            _begin(f, tile, row, dim)
        with f.loop(lowest & -LANES, last, LANES) as base:
            _find_keys(f, tile, f.pointer(words, PAGES), base, lowest, last, kv_heads * dim, dim)
            alone = (count * group).equals(1)
            with f.when(alone):
                only = _QueryRow(f.i64(0), tile.first, tile.position, tile.kv_head)
                _attend(f, tile, _KeyBlock(f, tile, dim, kind), only, base, dim)
            with f.when(alone.opposite()):
                block = _copied(f, tile, dim, kind)
                with _rows(f, tile, count) as row:
                    low = row.position - tile.window + 1
                    with f.when(base <= row.position), f.when(base + LANES > low):
                        _attend(f, tile, block, row, base, dim)
        with _rows(f, tile, count) as row:
            _finish(f, tile, row, dim)
    f.done()
    return f.name


@dataclass(slots=True)
class _QueryRow:
    """A query of the tile, for one query head."""

    index: IrValue
    token: IrValue
    position: IrValue
    head: IrValue


@contextmanager
def _rows(f: Function, tile: _Tile, count: IrValue) -> Iterator[_QueryRow]:
    """For each row of the tile."""
    with f.loop(0, count) as query, f.loop(0, tile.group) as member:
        head = tile.kv_head * tile.group + member
        yield _QueryRow(query * tile.group + member, tile.first + query, tile.position + query, head)


def _begin(f: Function, tile: _Tile, row: _QueryRow, dim: int) -> None:
    """No key yet; a sink (Xiao et al. 2023) is a score without a value."""
    top, mass = f.var(f.constant(F32, _NONE)), f.var(f.constant(F32, 0.0))
    with f.when(f.word(tile.args, SINKS).differs(0)):
        top.set(f.load(f.at(f.pointer(tile.args, SINKS), row.head, F32), F32))
        mass.set(f.constant(F32, 1.0))
    f.store(top.get(), f.at(tile.tops, row.index, F32))
    zeros = f.constant(_V, 0.0)
    f.store(zeros, f.at(tile.masses, row.index * LANES, F32))
    f.store(mass.get(), f.at(tile.masses, row.index * LANES, F32))
    for at in range(0, dim, LANES):
        f.store(zeros, f.at(tile.mixed, row.index * dim + at, F32))


def _find_keys(
    f: Function, tile: _Tile, pages: IrValue, base: IrValue, lowest: IrValue, last: IrValue,
    width: IrValue, dim: int,
) -> None:  # fmt: skip
    """Where the KV of positions base.. lies; the nearest of [lowest, last) for those outside of it.

    The row may have no page there, or that of somebody else's keys, which need not be finite.
    """
    shift = f.word(tile.args, PAGE_SHIFT)
    size = f.shifted(f.i64(1), shift)
    for lane in range(LANES):
        position = f.larger(f.smaller(base + lane, last - 1), lowest)
        page = f.convert(f.load(f.at(pages, f.unshifted(position, shift), I32), I32), I64)
        slot = page * size + (position & (size - 1))
        f.store(slot * width + tile.kv_head * dim, f.at(tile.offsets, lane, I64))


class _KeyBlock:
    """16 keys and values, read where they lie in the pool."""

    def __init__(self, f: Function, tile: _Tile, dim: int, kind: Any) -> None:
        self._f, self._offsets, self._kind, self._count = f, tile.offsets, kind, dim // LANES
        self._pools = [f.pointer(tile.args, which) for which in (KEYS, VALUES)]

    def key(self, lane: int) -> list[IrValue]:
        """One key as vectors of float32."""
        return self._read(self._pools[0], lane)

    def value(self, lane: int) -> list[IrValue]:
        return self._read(self._pools[1], lane)

    def _read(self, pool: IrValue, lane: int) -> list[IrValue]:
        f, kind = self._f, self._kind
        line = f.at(pool, f.word(self._offsets, lane), kind)
        parts = [f.load(f.at(line, n * LANES, kind), vector(kind)) for n in range(self._count)]
        return [f.convert(part, _V) for part in parts]


class _CopiedBlock(_KeyBlock):
    """16 keys and values as float32, for rows that read them one after another."""

    def __init__(self, f: Function, tile: _Tile, dim: int) -> None:
        super().__init__(f, tile, dim, F32)
        self._pools = [tile.keys, tile.values]

    def _read(self, pool: IrValue, lane: int) -> list[IrValue]:
        f, dim = self._f, self._count * LANES
        return [f.load(f.at(pool, lane * dim + n * LANES, F32), _V) for n in range(self._count)]


def _copied(f: Function, tile: _Tile, dim: int, kind: Any) -> _KeyBlock:
    block = _KeyBlock(f, tile, dim, kind)
    for lane in range(LANES):
        for read, target in ((block.key, tile.keys), (block.value, tile.values)):
            for n, part in enumerate(read(lane)):
                f.store(part, f.at(target, lane * dim + n * LANES, F32))
    return _CopiedBlock(f, tile, dim)


def _attend(f: Function, tile: _Tile, block: _KeyBlock, row: _QueryRow, base: IrValue, dim: int) -> None:
    """16 keys for one row: scores, their exponentials, and the values weighted with them."""
    scores, seen = _scores(f, tile, block, row, base, dim)
    place = f.at(tile.tops, row.index, F32)
    before = f.load(place, F32)
    top = f.larger(before, f.reduce(scores, f.larger))
    f.store(top, place)
    faded = exp(f, f.splat(before - top))
    shares = f.select(seen, exp(f, scores - top), f.constant(_V, 0.0))
    mass = f.at(tile.masses, row.index * LANES, F32)
    f.store(f.fma(f.load(mass, _V), faded, shares), mass)
    line = f.at(tile.mixed, row.index * dim, F32)
    sums = [f.load(f.at(line, at, F32), _V) * faded for at in range(0, dim, LANES)]
    for lane in range(LANES):
        share = f.splat(shares.lane(lane))
        for index, part in enumerate(block.value(lane)):
            sums[index] = f.fma(share, part, sums[index])
    for index, total in enumerate(sums):
        f.store(total, f.at(line, index * LANES, F32))


def _scores(
    f: Function, tile: _Tile, block: _KeyBlock, row: _QueryRow, base: IrValue, dim: int
) -> tuple[IrValue, IrValue]:
    """q k * scale of 16 keys, and which of them the row may see."""
    args = tile.args
    q = f.at(f.pointer(args, Q), row.token * f.word(args, Q_STRIDE), F32)
    q = f.at(q, row.head * dim, F32)
    query = [f.load(f.at(q, at, F32), _V) for at in range(0, dim, LANES)]
    products = []
    for lane in range(LANES):
        total = f.constant(_V, 0.0)
        for part, own in zip(query, block.key(lane), strict=True):
            total = f.fma(part, own, total)
        products.append(total)
    scores = f.var(_sums(f, products) * f.load(f.at(args, SCALE, I64), F32))
    with f.when(f.word(args, SOFTCAP).differs(0)):
        cap = f.load(f.at(args, SOFTCAP, I64), F32)
        scores.set(tanh(f, scores.get() / cap) * cap)
    positions = f.numbers(I64, range(LANES)) + base
    behind, ahead = positions <= row.position, positions > row.position - tile.window
    seen = behind.both(ahead)
    return f.select(seen, scores.get(), f.constant(_V, _NONE)), seen


def _sums(f: Function, vectors: list[IrValue]) -> IrValue:
    """Lane i: the sum of the lanes of vectors[i], of 16."""
    width = LANES
    while width > 1:
        half = width // 2
        low = [start + lane for start in range(0, 2 * LANES, width) for lane in range(half)]
        high = [lane + half for lane in low]
        vectors = [
            f.shuffle(a, b, low) + f.shuffle(a, b, high)
            for a, b in zip(vectors[::2], vectors[1::2], strict=True)
        ]
        width = half
    return vectors[0]


def _finish(f: Function, tile: _Tile, row: _QueryRow, dim: int) -> None:
    args = tile.args
    mass = f.reduce(f.load(f.at(tile.masses, row.index * LANES, F32), _V), lambda a, b: a + b)
    share = f.constant(F32, 1.0) / mass
    out = f.at(f.pointer(args, OUT), row.token * f.word(args, OUT_STRIDE), F32)
    out = f.at(out, row.head * dim, F32)
    for at in range(0, dim, LANES):
        total = f.load(f.at(tile.mixed, row.index * dim + at, F32), _V)
        f.store(total * share, f.at(out, at, F32))
