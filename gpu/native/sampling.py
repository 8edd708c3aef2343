"""Item i: the next token of a row of logits: the best one, or one drawn at a temperature.

A row whose logits hold what is not a number, or whose best one is infinite, gets BAD. Drawing inverts
the cumulative distribution at a number in [0, 1), summed in one order: the same token on every machine.
"""

from ramify.gpu.native.ir import F32, F64, I32, I64, LANES, PTR, Function, IrValue, Module, vector
from ramify.gpu.native.math import exp

_V = vector(F32)
_INFINITE = float("inf")

# words of the arguments; the vocabulary's size is a multiple of 16 with -infinity behind its end
LOGITS, STRIDE, SIZE, TEMPERATURES, UNIFORMS, TOKENS, BAD = range(7)


def emit_choose(module: Module) -> str:
    f = Function(module, "choose", [PTR, I64, I64])
    args, begin, end = f.args
    size = f.word(args, SIZE)
    with f.loop(begin, end) as item:
        line = f.at(f.pointer(args, LOGITS), item * f.word(args, STRIDE), F32)
        best, index, numbers = _best(f, line, size)
        token = f.var(index)
        temperature = f.load(f.at(f.pointer(args, TEMPERATURES), item, F32), F32)
        with f.when(temperature > 0.0):
            uniform = f.load(f.at(f.pointer(args, UNIFORMS), item, F64), F64)
            token.set(_drawn(f, line, size, best, temperature, uniform, index))
        good = numbers.both(best < _INFINITE).both(best > -_INFINITE)
        f.store(f.select(good, token.get(), f.word(args, BAD)), f.at(f.pointer(args, TOKENS), item, I64))
    f.done()
    return f.name


def _best(f: Function, line: IrValue, size: IrValue) -> tuple[IrValue, IrValue, IrValue]:
    """The largest logit, the first place where it stands, and whether all are numbers."""
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


def _drawn(
    f: Function, line: IrValue, size: IrValue, best: IrValue, temperature: IrValue, uniform: IrValue,
    index: IrValue,
) -> IrValue:  # fmt: skip
    """The first token at which the sum of the masses passes `uniform` of the whole."""

    def mass(at: IrValue) -> IrValue:
        # relative to the best logit, so that a tiny temperature cannot overflow
        logit = f.load(f.at(line, at, F32), _V)
        there = logit > -_INFINITE
        value = exp(f, (logit - best) / temperature)
        return f.select(there, value, f.constant(_V, 0.0))

    def sum_of(values: IrValue) -> IrValue:
        return f.convert(f.reduce(values, lambda a, b: a + b), F64)

    whole = f.var(f.constant(F64, 0.0))
    with f.loop(0, size, LANES) as at:
        whole.set(whole.get() + sum_of(mass(at)))
    wanted = uniform * whole.get()
    before, block = f.var(f.constant(F64, 0.0)), f.var(f.i64(0))
    with f.repeat() as leave:
        leave(block.get() >= size)
        after = before.get() + sum_of(mass(block.get()))
        leave(after > wanted)
        before.set(after)
        block.set(block.get() + LANES)
    token = f.var(index)  # if the sums of the lanes, in another order, end just below
    with f.when(block.get() < size):
        masses = mass(block.get())
        sums = [before.get()]
        for lane in range(LANES):
            sums.append(sums[-1] + f.convert(masses.lane(lane), F64))
        for lane in reversed(range(LANES)):
            passed = (sums[lane + 1] > wanted).both(masses.lane(lane) > 0.0)
            token.set(f.select(passed, block.get() + lane, token.get()))
    return token.get()
