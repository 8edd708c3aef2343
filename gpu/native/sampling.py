"""The sampling kernel. Item i: the next token of a row of logits, the best one or a drawn one.

A row with a logit that is NaN, or whose best one is infinite, gets BAD. Drawing inverts the cumulative
distribution at a number in [0, 1), summed in one order: the same token on every machine.

top-k, top-p and min-p are one number: the lowest logit that may be drawn, so that equal ones stay or
go together, as in `sampling.truncation`. It is found by bisection of the floats in between, without a
sort: each step counts the logits above the middle, or sums their masses.
"""

from collections.abc import Callable
from dataclasses import dataclass

from ramify.gpu.native.ir import F32, F64, I16, I32, I64, LANES, PTR, Function, IrValue, Module, vector
from ramify.gpu.native.math import exp

_V = vector(F32)
_INFINITE = float("inf")
_MASSLESS = -88.0  # of a scaled logit: `exp` gives 0
_MAGNITUDE = 0x7FFFFFFF  # bits of a float32 without its sign
_FEW, _MANY = 512, 1024  # logits that top-p looks at alone, if the nucleus is among them

# words of the arguments; the vocabulary's size is a multiple of 16 with -infinity behind its end
LOGITS, STRIDE, SIZE, TEMPERATURES, UNIFORMS, TOP_K, TOP_P, FLOORS, TOKENS, BAD = range(10)


def emit_choose(module: Module) -> str:
    f = Function(module, "choose", [PTR, I64, I64])
    args, begin, end = f.args
    size = f.word(args, SIZE)
    copied = f.scratch(F32, _MANY + LANES)
    with f.loop(begin, end) as item:
        line = f.at(f.pointer(args, LOGITS), item * f.word(args, STRIDE), F32)
        best, index, numbers = _best(f, line, size)
        token = f.var(index)
        temperature = f.load(f.at(f.pointer(args, TEMPERATURES), item, F32), F32)
        with f.when(temperature > 0.0):
            row = _Row(f, line, size, best, temperature)
            top_k = f.word(f.pointer(args, TOP_K), item)
            top_p = f.load(f.at(f.pointer(args, TOP_P), item, F64), F64)
            floor = f.load(f.at(f.pointer(args, FLOORS), item, F32), F32)
            lowest = _lowest(row, top_k, top_p, best + floor * temperature, copied)
            uniform = f.load(f.at(f.pointer(args, UNIFORMS), item, F64), F64)
            token.set(_drawn(row, lowest, uniform, index))
        good = numbers.both(best < _INFINITE).both(best > -_INFINITE)
        f.store(f.select(good, token.get(), f.word(args, BAD)), f.at(f.pointer(args, TOKENS), item, I64))
    f.done()
    return f.name


def _best(f: Function, line: IrValue, size: IrValue) -> tuple[IrValue, IrValue, IrValue]:
    """Find the largest logit, the first place where it stands, and whether none is NaN."""
    most = f.var(f.constant(_V, -_INFINITE))
    place = f.var(f.constant(vector(I32), 0))
    odd = f.var(f.constant(vector(I32), 0))
    lanes = f.numbers(I32, range(LANES))
    with f.loop(0, size, LANES) as at:
        x = f.load(f.at(line, at, F32), _V)
        larger = x > most.get()
        most.set(f.select(larger, x, most.get()))
        place.set(f.select(larger, lanes + f.convert(at, I32), place.get()))
        odd.set(f.select(f.unordered(x), f.constant(vector(I32), 1), odd.get()))
    best = f.reduce(most.get(), f.larger)
    none = f.constant(vector(I32), 2**31 - 1)
    places = f.select(most.get().equals(best), place.get(), none)
    first = f.reduce(places, f.smaller)
    return best, f.convert(first, I64), f.reduce(odd.get(), f.larger).equals(0)


@dataclass(slots=True)
class _Row:
    """A row: logits [size], the best one of them, and their divisor."""

    f: Function
    line: IrValue
    size: IrValue
    best: IrValue
    temperature: IrValue

    def masses(self, logits: IrValue, lowest: IrValue) -> IrValue:
        """Compute exp of 16 scaled logits, 0 for those below `lowest`."""
        f = self.f
        # relative to the best logit, so that a tiny temperature cannot overflow
        value = exp(f, (logits - self.best) / self.temperature)
        there = (logits > -_INFINITE).both(logits >= lowest)
        return f.select(there, value, f.constant(_V, 0.0))

    def mass(self, line: IrValue, size: IrValue, lowest: IrValue) -> IrValue:
        """Sum the masses of `size` logits at `line`."""
        f = self.f
        whole = f.var(f.constant(F64, 0.0))
        with f.loop(0, size, LANES) as at:
            whole.set(whole.get() + _sum(f, self.masses(f.load(f.at(line, at, F32), _V), lowest)))
        return whole.get()

    def count(self, lowest: IrValue) -> IrValue:
        """Count the logits that are not below `lowest`."""
        f = self.f
        ones, none = f.constant(vector(I32), 1), f.constant(vector(I32), 0)
        counts = f.var(none)
        with f.loop(0, self.size, LANES) as at:
            seen = f.load(f.at(self.line, at, F32), _V) >= lowest
            counts.set(counts.get() + f.select(seen, ones, none))
        return f.convert(f.reduce(counts.get(), lambda a, b: a + b), I64)


def _lowest(row: _Row, top_k: IrValue, top_p: IrValue, floor: IrValue, copied: IrValue) -> IrValue:
    """Find the lowest logit that may be drawn. Off: top_k 0, top_p 1. `copied`: float32[_MANY + 16]."""
    f = row.f
    massless = row.best + row.temperature * _MASSLESS
    nucleus = top_p < 1.0
    limited = top_k > 0
    lowest, few = f.var(floor), f.var(massless)
    least = f.select(limited, top_k, f.i64(_FEW))
    most = f.select(limited, top_k, f.i64(_MANY))
    found = f.var(f.i64(_MANY + 1))
    with f.when(limited.either(nucleus)):

        def enough(middle: IrValue) -> tuple[IrValue, IrValue]:
            count = row.count(middle)
            good = count >= least
            found.set(f.select(good, count, found.get()))
            return good, good.both(count <= most)

        few.set(_bisected(f, massless, row.best, enough))
        with f.when(limited):
            lowest.set(f.larger(few.get(), floor))
    with f.when(nucleus):
        kept = f.select(limited, few.get(), massless)
        wanted = top_p * row.mass(row.line, row.size, kept)
        line, size = f.var(row.line.as_number()), f.var(row.size)
        with f.when(found.get() <= _MANY):
            count = _copy(row, few.get(), copied)
            with f.when(row.mass(copied, count, few.get()) >= wanted):
                line.set(copied.as_number())
                size.set(count)

        def heavy(middle: IrValue) -> tuple[IrValue, IrValue]:
            good = row.mass(line.get().as_pointer(), size.get(), f.larger(middle, kept)) >= wanted
            return good, good.both(good.opposite())

        lowest.set(f.larger(lowest.get(), _bisected(f, massless, row.best, heavy)))
    return lowest.get()


def _bisected(
    f: Function, low: IrValue, high: IrValue, holds: "Callable[[IrValue], tuple[IrValue, IrValue]]"
) -> IrValue:
    """Find the largest float32 from `low` to `high` for which `holds`; `low` need not be tried.

    `holds` is true up to some number; it also says whether a number above would do no better.
    """
    below, above = f.var(_key(f, low)), f.var(_key(f, high) + 1)
    with f.repeat() as leave:
        leave(above.get() - below.get() <= 1)
        middle = below.get() + (above.get() - below.get()) // 2
        good, last = holds(_of_key(f, middle))
        below.set(f.select(good, middle, below.get()))
        above.set(f.select(last, middle + 1, f.select(good, above.get(), middle)))
    return _of_key(f, below.get())


def _key(f: Function, number: IrValue) -> IrValue:
    """Convert a float32 to int64 of the same order."""
    bits = f.convert(number.bits_as(I32), I64)
    return f.select(bits < 0, f.i64(0) - (bits & _MAGNITUDE), bits)


def _of_key(f: Function, key: IrValue) -> IrValue:
    size = f.convert(f.larger(key, f.i64(0) - key), I32).bits_as(F32)
    return f.select(key < 0, f.constant(F32, 0.0) - size, size)


def _copy(row: _Row, lowest: IrValue, copied: IrValue) -> IrValue:
    """Copy the logits that are not below `lowest`, at most _MANY. Returns how many, rounded up to 16."""
    f = row.f
    count = f.var(f.i64(0))
    with f.loop(0, row.size, LANES) as at:
        logits = f.load(f.at(row.line, at, F32), _V)
        seen = logits >= lowest
        with f.when(seen.bits_as(I16).differs(0)):
            for lane in range(LANES):
                f.store(logits.lane(lane), f.at(copied, count.get(), F32))
                count.set(count.get() + f.unsigned(seen.lane(lane), I64))
    f.store(f.constant(_V, -_INFINITE), f.at(copied, count.get(), F32))
    return (count.get() + (LANES - 1)) & -LANES


def _sum(f: Function, values: IrValue) -> IrValue:
    return f.convert(f.reduce(values, lambda a, b: a + b), F64)


def _drawn(row: _Row, lowest: IrValue, uniform: IrValue, index: IrValue) -> IrValue:
    """Find the first token at which the sum of the masses passes `uniform` of the whole."""
    f, size = row.f, row.size

    def masses_at(at: IrValue) -> IrValue:
        return row.masses(f.load(f.at(row.line, at, F32), _V), lowest)

    wanted = uniform * row.mass(row.line, size, lowest)
    before, block = f.var(f.constant(F64, 0.0)), f.var(f.i64(0))
    with f.repeat() as leave:
        leave(block.get() >= size)
        after = before.get() + _sum(f, masses_at(block.get()))
        leave(after > wanted)
        before.set(after)
        block.set(block.get() + LANES)
    token = f.var(index)  # if the sums of the lanes, in another order, end just below
    with f.when(block.get() < size):
        masses = masses_at(block.get())
        sums = [before.get()]
        for lane in range(LANES):
            sums.append(sums[-1] + f.convert(masses.lane(lane), F64))
        for lane in reversed(range(LANES)):
            passed = (sums[lane + 1] > wanted).both(masses.lane(lane) > 0.0)
            token.set(f.select(passed, block.get() + lane, token.get()))
    return token.get()
