"""Kernels of single rows: root mean square norm, and rounding to 8 bits.

Each row is computed alone, in one order, so it does not depend on its neighbours.
"""

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
from ramify.gpu.native.math import rounded

_V = vector(F32)
_GROUP = 32

# words of the arguments
ROWS_IN, IN_STRIDE, SIZE, NORM, EPS, QUANTISED, Q_STRIDE, SCALES, LINES, ADDED = range(10)
GROUP_SUMS, GROUP_SUMS_STRIDE = 10, 11


def quantise_name(normed: bool, grouped: bool) -> str:
    """Name the kernel that `emit_quantise` writes."""
    return ("norm_quantise" if normed else "quantise") + ("_grouped" if grouped else "")


def emit_quantise(module: Module, isa: Isa, normed: bool, grouped: bool = False) -> str:
    """Write the rounding of row LINES[i] of ROWS_IN (LINES 0: row i), normed or not, to 8 bits.

    A row with a value that is not finite gets the scale NaN. `grouped`: the bytes are signed, and the
    sum of each 32 goes to GROUP_SUMS.
    """
    f = Function(module, quantise_name(normed, grouped), [PTR, I64, I64])
    args, begin, end = f.args
    size = f.word(args, SIZE)
    with f.loop(begin, end) as item:
        source = f.at(f.pointer(args, ROWS_IN), _line(f, args, item) * f.word(args, IN_STRIDE), F32)
        factor = row_root(f, source, size, _float(f, args, EPS)) if normed else None
        _quantise_row(f, 0 if grouped else isa.offset, args, item, source, size, factor, grouped)
    f.done()
    return f.name


def emit_norm_add(module: Module) -> str:
    """Write row i of ADDED += norm(row i of ROWS_IN); NORM 0: without the norm."""
    f = Function(module, "norm_add", [PTR, I64, I64])
    args, begin, end = f.args
    size = f.word(args, SIZE)
    with f.loop(begin, end) as item:
        source = f.at(f.pointer(args, ROWS_IN), item * f.word(args, IN_STRIDE), F32)
        target = f.at(f.pointer(args, ADDED), item * size, F32)
        factor, normed = f.var(f.constant(F32, 1.0)), f.word(args, NORM).differs(0)
        with f.when(normed):
            factor.set(row_root(f, source, size, _float(f, args, EPS)))
        with f.loop(0, size, LANES) as at:
            value = f.var(f.load(f.at(source, at, F32), _V) * factor.get())
            with f.when(normed):
                value.set(value.get() * f.load(f.at(f.pointer(args, NORM), at, F32), _V))
            f.store(f.load(f.at(target, at, F32), _V) + value.get(), f.at(target, at, F32))
    f.done()
    return f.name


def _line(f: Function, args: IrValue, item: IrValue) -> IrValue:
    line = f.var(item)
    with f.when(f.word(args, LINES).differs(0)):
        line.set(f.word(f.pointer(args, LINES), item))
    return line.get()


def _float(f: Function, args: IrValue, index: int) -> IrValue:
    """Load a float32 in the lower half of a word."""
    return f.load(f.at(args, index, I64), F32)


def row_root(f: Function, source: IrValue, size: IrValue, eps: IrValue) -> IrValue:
    """Compute 1 / sqrt(mean(x^2) + eps) of a row."""
    squares = f.var(f.constant(_V, 0.0))
    with f.loop(0, size, LANES) as at:
        x = f.load(f.at(source, at, F32), _V)
        squares.set(f.fma(x, x, squares.get()))
    total = f.reduce(squares.get(), lambda a, b: a + b)
    mean = total / f.convert(size, F32)
    return f.constant(F32, 1.0) / f.call("llvm.sqrt.f32", F32, mean + eps)


def _quantise_row(
    f: Function, offset: int, args: IrValue, item: IrValue, source: IrValue, size: IrValue,
    factor: IrValue | None, grouped: bool,
) -> None:  # fmt: skip
    weight = f.pointer(args, NORM)

    def read(at: IrValue) -> IrValue:
        x = f.load(f.at(source, at, F32), _V)
        return x if factor is None else x * factor * f.load(f.at(weight, at, F32), _V)

    largest, zero = f.var(f.constant(_V, 0.0)), f.var(f.constant(_V, 0.0))
    with f.loop(0, size, LANES) as at:
        x = read(at)
        largest.set(f.larger(f.call("llvm.fabs.v16f32", _V, x), largest.get()))
        zero.set(f.fma(x, f.constant(_V, 0.0), zero.get()))  # 0, or not a number
    most = f.reduce(largest.get(), f.larger)
    scale = most * (1 / 127) + _sum(f, zero)
    f.store(scale, f.at(f.pointer(args, SCALES), item, F32))
    inverse = f.select(most > 0.0, f.constant(F32, 127.0) / most, f.constant(F32, 0.0))
    target = f.at(f.pointer(args, QUANTISED), item * f.word(args, Q_STRIDE), I8)
    sums = (
        f.at(f.pointer(args, GROUP_SUMS), item * f.word(args, GROUP_SUMS_STRIDE), I32)
        if grouped
        else target
    )
    with f.loop(0, size, LANES) as at:
        numbers = rounded(read(at) * inverse) + offset
        f.store(f.convert(numbers, vector(I8)), f.at(target, at, I8))
        if grouped:
            place = f.at(sums, at // _GROUP, I32)
            own = f.reduce(numbers, lambda a, b: a + b)
            before = f.select((at % _GROUP).equals(0), f.constant(I32, 0), f.load(place, I32))
            f.store(before + own, place)


def _sum(f: Function, lanes: Variable) -> IrValue:
    return f.reduce(lanes.get(), lambda a, b: a + b)
