"""Products y = x W^T with 8-bit weights and activations, and their epilogues.

A weight has one scale for each output, an activation one for each row, so a row's result does not
depend on its neighbours. Sums are integers: exact, and the same on every machine.

Weights are packed in panels of 64 outputs, [panel][inputs / 4][64][4]: one step of the inner loop reads
256 bytes in a row. A work item is a panel for up to `ROW_BLOCK` rows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ramify.gpu.native import matrices
from ramify.gpu.native.dot import dot
from ramify.gpu.native.host import Isa
from ramify.gpu.native.ir import (
    F32,
    I8,
    I32,
    I64,
    LANES,
    PTR,
    Function,
    IrValue,
    Module,
    Variable,
    vector,
)
from ramify.gpu.native.math import gelu_tanh, silu, tanh

PANEL = 64  # outputs
ROW_BLOCK = 48  # rows of a work item: a multiple of the tallest tile
_QUADS = PANEL // LANES  # vectors of outputs in a panel
_AHEAD = 16  # steps whose weights are fetched before they are read
_VF32, _VI32 = vector(F32), vector(I32)

# words of an instruction's arguments
X, X_STRIDE, SCALES, WEIGHT, STEPS, WEIGHT_SCALES, SUMS, BIAS, OUT, OUT_STRIDE, ROWS, CAP = range(12)
GROUP_SUMS, GROUP_SUMS_STRIDE = 12, 13  # see `grouped`
# of a product of experts (`native.experts`); ROWS and CAP are not read there
TILES, PAIRS, TOP, PANELS = ROWS, CAP, 14, 15
COUNTS = TOP  # which one ending alone reads, and all others TOP
GATED = ("silu", "gelu_tanh")
_EPILOGUES = ("store", "add", "softcap", *GATED)
WEIGHED = "weigh"  # times the expert's weight for the token

RowsOf = Callable[[Function, IrValue, IrValue], tuple[IrValue, IrValue]]
"""Takes a function, its arguments, a row of a tile. Returns which rows that reads and writes."""


@dataclass(slots=True)
class PackedWeight:
    """A weight as the kernel reads it. `inputs` and `outputs` are padded with zeros."""

    panels: Tensor  # int8 [panels, inputs / 4, 64, 4]
    scales: Tensor  # float32 [outputs]
    sums: Tensor  # int32 [outputs]: -offset times the sum of an output's weights
    bias: Tensor | None  # float32 [outputs]
    inputs: int
    outputs: int


def panel_bias(bias: Tensor | None, order: Tensor, padding: float = 0.0) -> Tensor | None:
    """Put the bias in the order of panels; None: there is none, and no padding that needs a value."""
    known = order >= 0
    if bias is None and (not padding or bool(known.all())):
        return None
    full = torch.full((len(order),), padding)
    full[known] = 0.0 if bias is None else bias.float()[order[known]]
    return full


def padded_inputs(inputs: int) -> int:
    """Compute the bytes of a row of 8-bit activations."""
    return -(-inputs // PANEL) * PANEL


def panel_order(outputs: int, gated: bool, stacked: int = 1) -> Tensor:
    """Compute which row of the weight each packed output is; -1: none. `stacked`: number of weights."""
    outputs //= stacked
    size, wide = (outputs // 2, PANEL // 2) if gated else (outputs, PANEL)
    order = np.full((-(-size // wide), 1 + gated, wide), -1)  # torch's threads would spin for it
    places = np.arange(size)
    for half in range(1 + gated):
        order[places // wide, half, places % wide] = places + half * size
    firsts = np.arange(stacked)[:, None] * outputs
    whole = np.where(order.reshape(-1) < 0, -1, order.reshape(-1) + firsts)
    return torch.from_numpy(whole.reshape(-1))


def emit_linear(module: Module, isa: Isa, epilogue: str) -> str:
    """Write a product. `epilogue`: "store", "add" to OUT, "softcap"; gated "silu", "gelu_tanh"."""
    if epilogue not in _EPILOGUES:
        raise ValueError(f"a product has no ending {epilogue!r}: one of {_EPILOGUES}")
    wide = [_emit_matrices(module, epilogue, blocks) for blocks in (1, 2)] if isa.matrices else []
    tiles = emit_tiles(module, isa, epilogue, tallest=matrices.LEAST - 1 if wide else 6)
    return emit_blocks(module, f"linear_{epilogue}", tiles, wide)


Tiles = dict[int, Function]
"""Tiles by their number of rows, from 1 on."""


def emit_blocks(module: Module, name: str, tiles: Tiles, wide: Sequence[Function] = ()) -> str:
    """Write a kernel of tiles. `wide`: for up to 16 rows and up to 32, where there are many."""
    f = Function(module, name, [PTR, I64, I64])
    args, begin, end = f.args
    rows = f.load(f.pointer(args, ROWS), I64)
    blocks = (rows + (ROW_BLOCK - 1)) // ROW_BLOCK
    many = rows >= matrices.LEAST
    if wide:
        with f.when(many):
            matrices.set_up(f)
    with f.loop(begin, end) as item:
        panel, block = item // blocks, item % blocks
        first = f.var(block * ROW_BLOCK)
        limit = f.smaller(first.get() + ROW_BLOCK, rows)
        if wide:
            _walk_wide(f, wide, args, panel, first, limit)
        walk_tiles(f, tiles, args, panel, first.get(), limit)
    if wide:
        with f.when(many):
            matrices.give_back(f)
    f.done()
    return f.name


def _walk_wide(
    f: Function, wide: Sequence[Function], args: IrValue, panel: IrValue, at: Variable, limit: IrValue
) -> None:
    """Multiply rows by the `wide` tiles, until few are left."""
    with f.repeat() as leave:
        begin, left = at.get(), limit - at.get()
        leave(left < matrices.LEAST)
        for tile, least, most in zip(wide, (matrices.LEAST, 17), (16, 32), strict=True):
            with f.when((left >= least).both(left <= 16) if most == 16 else left >= least):
                taken = f.smaller(left, f.i64(most))
                f.invoke(tile, args, panel, begin, taken)
                at.set(begin + taken)


def walk_tiles(
    f: Function, tiles: Tiles, args: IrValue, panel: IrValue, first: IrValue, limit: IrValue
) -> None:
    """Multiply the rows from `first` to `limit` with a panel, the tallest tile that fits at a time."""
    at = f.var(first)
    with f.repeat() as leave:
        leave(at.get() >= limit)
        begin, left, heights = at.get(), limit - at.get(), [*tiles]
        for height, taller in zip(heights, [*heights[1:], ROW_BLOCK + 1], strict=True):
            with f.when((left >= height).both(left < taller)):
                f.invoke(tiles[height], args, panel, begin)
                at.set(begin + height)


def emit_tiles(
    module: Module, isa: Isa, epilogue: str, rows_of: RowsOf | None = None, name: str = "tile",
    tallest: int = 6,
) -> Tiles:  # fmt: skip
    """Write tiles of some rows by a panel. `rows_of`: None: rows are read and written in place."""
    tallest = tallest if isa.registers >= 32 else 2
    return {
        rows: _emit_tile(module, isa, epilogue, rows, rows_of, f"{name}_{epilogue}_{rows}")
        for rows in range(1, tallest + 1)
    }


def _emit_tile(
    module: Module, isa: Isa, epilogue: str, rows: int, rows_of: RowsOf | None, name: str
) -> Function:
    """Write a tile of `rows` rows by one panel, some vectors of outputs at a time."""
    f = Function(module, name, [PTR, I64, I64], private=True)
    args, panel, first = f.args
    steps = f.word(args, STEPS)
    stride = f.word(args, X_STRIDE)
    places = [(first + row, first + row) for row in range(rows)]
    if rows_of is not None:
        places = [rows_of(f, args, own) for own, _ in places]
    lines = [f.at(f.pointer(args, X), own * stride, I8) for own, _ in places]
    column = panel if rows_of is None else panel % f.word(args, PANELS)  # of what is written
    weight = f.at(f.pointer(args, WEIGHT), panel * steps * (4 * PANEL), I8)
    fresh = (first % ROW_BLOCK).equals(0) if rows_of is None else f.i64(0).equals(0)
    for group in vector_groups(epilogue, _QUADS if isa.registers >= 32 else 1):
        sums = _products(f, isa, args, panel, lines, weight, steps, group, fresh)
        for row, (source, target) in enumerate(places):
            scale = f.load(f.at(f.pointer(args, SCALES), source, F32), F32)
            values = [_scaled(f, args, panel * PANEL + q * LANES, scale, own)
                      for q, own in zip(group, sums[row], strict=True)]  # fmt: skip
            finish(f, args, epilogue, column, target, group, values)
    f.done()
    return f


def _emit_matrices(module: Module, epilogue: str, blocks: int) -> Function:
    """Write a tile of `blocks` times 16 rows by one panel, in matrix registers, which take 16 each."""
    f = Function(module, f"matrices_{epilogue}_{blocks}", [PTR, I64, I64, I64], private=True)
    args, panel, first, count = f.args
    steps, stride = f.word(args, STEPS), f.word(args, X_STRIDE)
    x = f.at(f.pointer(args, X), first * stride, I8)
    weight = f.at(f.pointer(args, WEIGHT), panel * steps * (4 * PANEL), I8)
    fresh = (first % ROW_BLOCK).equals(0)  # no tile has read this panel just before
    for group in vector_groups(epilogue, _QUADS // blocks):
        found = matrices.sums(f, x, stride, weight, steps, blocks, group, fresh)
        base = f.at(f.pointer(args, SUMS), panel * PANEL, I32)
        starts = [f.load(f.at(base, q * LANES, I32), _VI32) for q in group]
        for block in range(blocks):
            before = block * matrices.ROWS
            with f.loop(0, f.smaller(count - before, f.i64(matrices.ROWS))) as row:
                own = first + (row + before)
                scale = f.load(f.at(f.pointer(args, SCALES), own, F32), F32)
                values = []
                for number, (q, start) in enumerate(zip(group, starts, strict=True)):
                    at = row * LANES + (block * len(group) + number) * matrices.ROWS * LANES
                    total_ = f.load(f.at(found, at, I32), _VI32) + start
                    values.append(_scaled(f, args, panel * PANEL + q * LANES, scale, total_))
                finish(f, args, epilogue, panel, own, group, values)
    f.done()
    return f


def vector_groups(epilogue: str, quads: int) -> list[list[int]]:
    """Group a panel's vectors of outputs, `quads` at a time; a gate's with that of its `up`."""
    if epilogue in GATED and quads < _QUADS:
        return [[q, q + _QUADS // 2] for q in range(_QUADS // 2)]
    return [list(range(q, q + quads)) for q in range(0, _QUADS, quads)]


def _products(
    f: Function, isa: Isa, args: IrValue, panel: IrValue, lines: list[IrValue], weight: IrValue,
    steps: IrValue, group: list[int], fresh: IrValue,
) -> list[list[IrValue]]:  # fmt: skip
    """Compute integer sums [row][vector] over all inputs, the offset's share subtracted."""
    base = f.pointer(args, SUMS)
    zeros = f.constant(_VI32, 0)
    sums = [[f.var(zeros) for _ in group] for _ in lines]
    with f.loop(0, steps) as step:
        if len(lines) > 1:  # one row gains nothing
            with f.when(fresh):
                ahead = f.at(weight, f.smaller(step + _AHEAD, steps - 1) * (4 * PANEL), I8)
                for q in group:
                    f.fetch(f.at(ahead, q * 4 * LANES, I8))
        here = f.at(weight, step * (4 * PANEL), I8)
        weights = [f.load(f.at(here, q * 4 * LANES, I8), vector(I8, 4 * LANES)) for q in group]
        for line, own in zip(lines, sums, strict=True):
            four = f.load(f.at(line, step * 4, I8), I32)
            for one, some in zip(own, weights, strict=True):
                one.set(dot(f, isa, one.get(), four, some))
    starts = [f.load(f.at(base, panel * PANEL + q * LANES, I32), _VI32) for q in group]
    return [[one.get() + start for one, start in zip(own, starts, strict=True)] for own in sums]


def finish(
    f: Function, args: IrValue, epilogue: str, panel: IrValue, row: IrValue,
    group: Sequence[int | IrValue], values: list[IrValue],
) -> None:  # fmt: skip
    """Store a row's values by the epilogue."""
    line = f.at(f.pointer(args, OUT), row * f.word(args, OUT_STRIDE), F32)
    if epilogue in GATED:
        act = silu if epilogue == "silu" else gelu_tanh
        half = len(group) // 2
        for q, gate, up in zip(group[:half], values[:half], values[half:], strict=True):
            place = f.at(line, panel * (PANEL // 2) + q * LANES, F32)
            f.store(act(f, gate) * up, place)
        return
    for q, value in zip(group, values, strict=True):
        place = f.at(line, panel * PANEL + q * LANES, F32)
        if epilogue == "add":
            value = f.load(place, _VF32) + value
        elif epilogue == WEIGHED:
            value = value * f.load(f.at(f.pointer(args, COUNTS), row, F32), F32)
        elif epilogue == "softcap":
            cap = f.load(f.at(args, CAP, I64), F32)
            value = tanh(f, value / cap) * cap
        f.store(value, place)


def _scaled(f: Function, args: IrValue, column: IrValue, scale: IrValue, sums: IrValue) -> IrValue:
    factors = f.load(f.at(f.pointer(args, WEIGHT_SCALES), column, F32), _VF32)
    return biased(f, args, column, f.convert(sums, _VF32) * (factors * scale))


def biased(f: Function, args: IrValue, column: IrValue, values: IrValue) -> IrValue:
    """Add the bias of the outputs from `column` on, if there is one."""
    bias = f.var(values)
    with f.when(f.word(args, BIAS).differs(0)):
        bias.set(values + f.load(f.at(f.pointer(args, BIAS), column, F32), _VF32))
    return bias.get()
