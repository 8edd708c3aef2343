"""Kernels of layers of experts: routing, and products that read only the chosen experts.

A router's scores are float32, because rounding would change which experts are best. Pairs of a token
and an expert are then put in the experts' order and cut into tiles of an expert's rows; an item of a
product is a tile by a panel, as in `native.linear`, whose tiles do the work. Each expert's result for a
token is stored apart and summed in a fixed order, so a row does not depend on its neighbours.
"""

from ramify.gpu.native.grouped import Grouping, emit_group_tiles
from ramify.gpu.native.host import Isa
from ramify.gpu.native.ir import F32, I64, LANES, PTR, Function, IrValue, Module, vector
from ramify.gpu.native.linear import (
    PAIRS,
    PANELS,
    ROW_BLOCK,
    TILES,
    TOP,
    WEIGHED,
    emit_tiles,
    walk_tiles,
)
from ramify.gpu.native.math import exp
from ramify.gpu.native.rows import row_root

OF = "experts_"  # before a product's epilogue
_V = vector(F32)
_SCORES = LANES  # of an item of `router`

# words of the arguments of `router` and of `route`
ROWS_IN, IN_STRIDE, SIZE, NORM, EPS, ROUTER, EXPERTS, LOGITS, LOGITS_STRIDE = range(9)
CORRECTION, MANY, CHOSEN, WEIGHTS, SCALE, FLAGS, BESIDE = range(9, 16)
SIGMOID, RENORMALISE, SHARED, SHARED_GATE = 1, 2, 4, 8
# of `sort_pairs`
S_CHOSEN, S_TOKENS, S_TOP, S_EXPERTS, S_STARTS, S_PAIRS, S_TILES = range(7)
TILE_WORDS = (
    3  # an expert, its first place, one behind its last; in front of all how many tiles there are
)
# of `sum_experts`
ADDED, ADDED_STRIDE, SUM_TOP, TARGET, TARGET_STRIDE, WIDTH, SHARED_ROWS, SHARED_STRIDE, OPENED = range(9)


def most_tiles(tokens: int, top: int, experts: int) -> int:
    """Count the most tiles that so many tokens can make."""
    pairs = tokens * top
    return min(pairs, experts + pairs // ROW_BLOCK)


def emit_routing(module: Module) -> None:
    """Write the kernels other than products."""
    _emit_router(module)
    _emit_route(module)
    _emit_sort(module)
    _emit_sum(module)


def product_name(epilogue: str, grouping: Grouping | None = None) -> str:
    """Name a kernel."""
    return f"{OF}{'' if grouping is None else grouping.name + '_'}{epilogue}"


def emit_product(module: Module, isa: Isa, epilogue: str, grouping: Grouping | None = None) -> str:
    """Write a product. Gated: tokens' rows -> rows in the experts' order; WEIGHED: these -> pairs'."""

    def to_place(f: Function, args: IrValue, place: IrValue) -> tuple[IrValue, IrValue]:
        return f.word(f.pointer(args, PAIRS), place) // f.word(args, TOP), place

    def to_pair(f: Function, args: IrValue, place: IrValue) -> tuple[IrValue, IrValue]:
        return place, f.word(f.pointer(args, PAIRS), place)

    rows_of = to_pair if epilogue == WEIGHED else to_place
    if grouping is None:
        tiles = emit_tiles(module, isa, epilogue, rows_of, "expert")
    else:
        tiles = emit_group_tiles(module, isa, grouping, epilogue, rows_of, "expert")
    f = Function(module, product_name(epilogue, grouping), [PTR, I64, I64])
    args, begin, end = f.args
    panels, table = f.word(args, PANELS), f.pointer(args, TILES)
    with f.loop(begin, f.smaller(end, f.word(table, 0) * panels)) as item:
        tile = f.at(table, item // panels * TILE_WORDS + 1, I64)
        panel = f.word(tile, 0) * panels + item % panels
        walk_tiles(f, tiles, args, panel, f.word(tile, 1), f.word(tile, 2))
    f.done()
    return f.name


def _emit_router(module: Module) -> None:
    """Write LOGITS = norm(x) ROUTER^T. Rows: tokens; items: _SCORES of their scores each."""
    f = Function(module, "router", [PTR, I64, I64])
    args, begin, end = f.args
    size, experts = f.word(args, SIZE), f.word(args, EXPERTS)
    parts = (experts + (_SCORES - 1)) // _SCORES
    norm = f.pointer(args, NORM)
    with f.loop(begin, end) as item:
        token, first = item // parts, item % parts * _SCORES
        source = f.at(f.pointer(args, ROWS_IN), token * f.word(args, IN_STRIDE), F32)
        factor = f.var(f.constant(F32, 1.0))
        normed = f.word(args, NORM).differs(0)
        with f.when(normed):
            factor.set(row_root(f, source, size, f.load(f.at(args, EPS, I64), F32)))
        logits = f.at(f.pointer(args, LOGITS), token * f.word(args, LOGITS_STRIDE), F32)
        with f.loop(first, f.smaller(first + _SCORES, experts)) as expert:
            line = f.at(f.pointer(args, ROUTER), expert * size, F32)
            total = f.var(f.constant(_V, 0.0))
            with f.loop(0, size, LANES) as at:
                x = f.var(f.load(f.at(source, at, F32), _V) * factor.get())
                with f.when(normed):
                    x.set(x.get() * f.load(f.at(norm, at, F32), _V))
                total.set(f.fma(x.get(), f.load(f.at(line, at, F32), _V), total.get()))
            f.store(f.reduce(total.get(), lambda a, b: a + b), f.at(logits, expert, F32))
    f.done()


def _emit_route(module: Module) -> None:
    """Write the choice of CHOSEN and WEIGHTS [T, MANY], the best, the lower index of equal ones first.

    An item is a token. LOGITS become scores. BESIDE [T]: the weight of the shared expert.
    """
    f = Function(module, "route", [PTR, I64, I64])
    args, begin, end = f.args
    experts, many, flags = f.word(args, EXPERTS), f.word(args, MANY), f.word(args, FLAGS)
    correction = f.pointer(args, CORRECTION)
    corrected = f.word(args, CORRECTION).differs(0)
    zero, one, low = (f.constant(F32, number) for number in (0.0, 1.0, float("-inf")))
    with f.loop(begin, end) as token:
        line = f.at(f.pointer(args, LOGITS), token * f.word(args, LOGITS_STRIDE), F32)
        with f.when((flags & SHARED).differs(0)):
            count = f.var(one)
            with f.when((flags & SHARED_GATE).differs(0)):
                gate = f.load(f.at(line, experts, F32), F32)
                count.set(one / (_exp(f, zero - gate) + 1.0))
            f.store(count.get(), f.at(f.pointer(args, BESIDE), token, F32))
        largest = f.var(low)
        with f.loop(0, experts) as expert:
            largest.set(f.larger(f.load(f.at(line, expert, F32), F32), largest.get()))
        sigmoid = (flags & SIGMOID).differs(0)
        total = f.var(zero)
        with f.loop(0, experts) as expert:
            place = f.at(line, expert, F32)
            logit = f.load(place, F32)
            likely = _exp(f, f.select(sigmoid, zero - logit, logit - largest.get()))
            score = f.select(sigmoid, one / (likely + 1.0), likely)
            total.set(total.get() + score)
            f.store(score, place)
        divisor = f.select(sigmoid, one, total.get())
        with f.loop(0, experts) as expert:
            place = f.at(line, expert, F32)
            f.store(f.load(place, F32) / divisor, place)
        chosen = f.at(f.pointer(args, CHOSEN), token * many, I64)
        weights = f.at(f.pointer(args, WEIGHTS), token * many, F32)
        sum_ = f.var(zero)
        with f.loop(0, many) as number:
            best, score = _best(f, line, experts, correction, corrected, chosen, number)
            f.store(best, f.at(chosen, number, I64))
            f.store(score, f.at(weights, number, F32))
            sum_.set(sum_.get() + score)
        renormalise = (flags & RENORMALISE).differs(0)
        divisor = f.select(renormalise, f.larger(f.constant(F32, 1e-20), sum_.get()), one)
        scale = f.load(f.at(args, SCALE, I64), F32)
        with f.loop(0, many) as number:
            place = f.at(weights, number, F32)
            f.store(f.load(place, F32) / divisor * scale, place)
    f.done()


def _best(
    f: Function, scores: IrValue, experts: IrValue, correction: IrValue, corrected: IrValue,
    chosen: IrValue, number: IrValue,
) -> tuple[IrValue, IrValue]:  # fmt: skip
    """Find the best expert that is none of the first `number` of `chosen`, and its score."""
    best, highest = f.var(f.i64(0)), f.var(f.constant(F32, float("-inf")))
    with f.loop(0, experts) as expert:
        rank = f.var(f.load(f.at(scores, expert, F32), F32))
        with f.when(corrected):
            rank.set(rank.get() + f.load(f.at(correction, expert, F32), F32))
        with f.when(rank.get() > highest.get()):
            taken = f.var(f.i64(0))
            with f.loop(0, number) as before:
                taken.set(f.select(f.word(chosen, before).equals(expert), f.i64(1), taken.get()))
            with f.when(taken.get().equals(0)):
                highest.set(rank.get())
                best.set(expert)
    return best.get(), f.load(f.at(scores, best.get(), F32), F32)


def _exp(f: Function, x: IrValue) -> IrValue:
    return exp(f, f.splat(x)).lane(0)


def _emit_sort(module: Module) -> None:
    """Write the sort, one item: pairs in the experts' order, each expert's as they come, and tiles."""
    f = Function(module, "sort_pairs", [PTR, I64, I64])
    args, begin, end = f.args
    chosen, starts = f.pointer(args, S_CHOSEN), f.pointer(args, S_STARTS)
    order, tiles = f.pointer(args, S_PAIRS), f.pointer(args, S_TILES)
    experts = f.word(args, S_EXPERTS)
    with f.loop(begin, end):
        pairs = f.word(f.pointer(args, S_TOKENS), 0) * f.word(args, S_TOP)
        with f.loop(0, experts) as expert:
            f.store(f.i64(0), f.at(starts, expert, I64))
        with f.loop(0, pairs) as pair:
            count = f.at(starts, f.word(chosen, pair), I64)
            f.store(f.load(count, I64) + 1, count)
        first, number = f.var(f.i64(0)), f.var(f.i64(0))
        with f.loop(0, experts) as expert:
            start = f.at(starts, expert, I64)
            stop = first.get() + f.load(start, I64)
            f.store(first.get(), start)
            with f.loop(first.get(), stop, ROW_BLOCK) as at:
                tile = f.at(tiles, number.get() * TILE_WORDS + 1, I64)
                own = (expert, at, f.smaller(at + ROW_BLOCK, stop))
                for index, word in enumerate(own):
                    f.store(word, f.at(tile, index, I64))
                number.set(number.get() + 1)
            first.set(stop)
        f.store(number.get(), tiles)
        with f.loop(0, pairs) as pair:
            place = f.at(starts, f.word(chosen, pair), I64)
            f.store(pair, f.at(order, f.load(place, I64), I64))
            f.store(f.load(place, I64) + 1, place)
    f.done()


def _emit_sum(module: Module) -> None:
    """Write TARGET = the sum over a token's pairs of ADDED, and SHARED_ROWS times OPENED."""
    f = Function(module, "sum_experts", [PTR, I64, I64])
    args, begin, end = f.args
    stride, top = f.word(args, ADDED_STRIDE), f.word(args, SUM_TOP)
    with f.loop(begin, end) as token:
        source = f.at(f.pointer(args, ADDED), token * top * stride, F32)
        target = f.at(f.pointer(args, TARGET), token * f.word(args, TARGET_STRIDE), F32)
        with f.loop(0, f.word(args, WIDTH), LANES) as at:
            total = f.var(f.load(f.at(source, at, F32), _V))
            with f.loop(1, top) as place:
                total.set(total.get() + f.load(f.at(source, place * stride + at, F32), _V))
            with f.when(f.word(args, SHARED_ROWS).differs(0)):
                row = f.at(f.pointer(args, SHARED_ROWS), token * f.word(args, SHARED_STRIDE) + at, F32)
                opened = f.load(f.at(f.pointer(args, OPENED), token, F32), F32)
                total.set(f.fma(f.load(row, _V), f.like(opened, total.get()), total.get()))
            f.store(total.get(), f.at(target, at, F32))
    f.done()
