"""Kernels that bring a checkpoint's weights into the form that products read, an item a panel.

Blocks of GGUF files keep their codes (except Q6_K, whose groups of 16 become 8 bits in groups of 32);
floats are rounded to 8 bits, a scale for each output. The result equals that of `grouped.pack_groups`,
and `pack_weight` of its tests, to the last bit. The layouts are those of ggml's `ggml-common.h`. A table
has the address of each output's row, so that merged, reordered and gated weights are read in place.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ramify.gpu.native.grouped import GROUP, Grouping
from ramify.gpu.native.host import Isa
from ramify.gpu.native.ir import (
    F16,
    F32,
    I8,
    I16,
    I32,
    I64,
    LANES,
    PTR,
    Function,
    IrValue,
    Module,
    vector,
)
from ramify.gpu.native.linear import PANEL
from ramify.gpu.native.math import rounded

# words of the arguments; SUMS: of `emit_rounding` alone; GROUPS, PADDED: of a row as it is, and padded
ROWS, PANELS, SCALES, OFFSETS, SUMS, GROUPS, PADDED = range(7)
BYTES_OF_FLOATS = {"F32": 4, "F16": 2, "BF16": 2}
_BYTES = {"Q4_0": 18, "Q4_1": 20, "Q5_0": 22, "Q5_1": 24, "Q8_0": 34, "Q4_K": 144, "Q5_K": 176,
          "Q6_K": 210, "MXFP4": 17}  # fmt: skip
_ZERO = {"Q4_0": 8, "Q5_0": 16}  # the number added to codes
_VI8, _VF32, _V32 = vector(I8), vector(F32), vector(I8, 2 * LANES)

Group = tuple[IrValue, IrValue, IrValue | None]
"""A group: codes int8[32], a scale and an offset, float32."""
_Store = Callable[[IrValue, Group], None]


def emit_packing(module: Module, isa: Isa, kind: str, grouping: Grouping) -> str:
    """Write the packing of blocks. `grouping` may have more bits than `kind`, and offsets."""
    f = Function(module, f"pack_{kind}_{grouping.name}", [PTR, I64, I64])
    args, _, _ = f.args
    groups, padded = f.word(args, GROUPS), f.word(args, PADDED)
    read = _READERS[kind]
    with _outputs(f) as (panel, output, row):

        def store(number: IrValue, group: Group) -> None:
            _store_group(f, isa, kind, grouping, args, panel * padded + number, output, group)

        if kind.endswith("_K"):
            with f.loop(0, groups // 8) as block:
                read(f, f.at(row, block * _BYTES[kind], I8), block * 8, store)
        else:
            with f.loop(0, groups) as number:
                read(f, f.at(row, number * _BYTES[kind], I8), number, store)
    f.done()
    return f.name


def emit_rounding(module: Module, isa: Isa, kind: str) -> str:
    """Write the rounding of rows of floats to 8 bits; GROUPS and PADDED count 16 inputs there."""
    f = Function(module, f"round_{kind}", [PTR, I64, I64])
    args, _, _ = f.args
    parts, padded = f.word(args, GROUPS), f.word(args, PADDED)
    with _outputs(f) as (panel, output, row):
        place = panel * PANEL + output
        largest, sums = f.var(f.constant(_VF32, 0.0)), f.var(f.constant(vector(I32), 0))
        with f.loop(0, parts) as part:
            sizes = f.call("llvm.fabs.v16f32", _VF32, floats_of(f, row, part, kind))
            largest.set(f.larger(sizes, largest.get()))
        scale = f.reduce(largest.get(), f.larger) / 127.0
        f.store(scale, f.at(f.pointer(args, SCALES), place, F32))
        divisor = f.select(scale > 0.0, scale, f.constant(F32, 1.0))
        with f.loop(0, parts) as part:
            codes = rounded(floats_of(f, row, part, kind) / divisor)
            sums.set(sums.get() + codes)
            at = f.at(f.pointer(args, PANELS), (panel * padded + part) * (LANES * PANEL), I8)
            _store_words(f, f.convert(codes, _VI8).bits_as(vector(I32, 4)), at, output)
        total = f.reduce(sums.get(), lambda a, b: a + b)
        f.store(total * -isa.offset, f.at(f.pointer(args, SUMS), place, I32))
    f.done()
    return f.name


@contextmanager
def _outputs(f: Function) -> Iterator[tuple[IrValue, IrValue, IrValue]]:
    """Loop over outputs that have a row: the panel, the place in it and the row."""
    args, begin, end = f.args
    with f.loop(begin, end) as panel, f.loop(0, PANEL) as output:
        row = f.word(f.pointer(args, ROWS), panel * PANEL + output)
        with f.when(row.differs(0)):
            yield panel, output, row.as_pointer()


def floats_of(f: Function, row: IrValue, part: IrValue, kind: str) -> IrValue:
    """Load numbers [16 * part, 16 * part + 16) of a row as float32."""
    if kind == "BF16":
        bits = f.load(f.at(row, part * LANES, I16), vector(I16))
        return (f.unsigned(bits, vector(I32)) << 16).bits_as(_VF32)
    own = F16 if kind == "F16" else F32
    return f.convert(f.load(f.at(row, part * LANES, own), vector(own)), _VF32)


def _store_words(f: Function, words: IrValue, at: IrValue, output: IrValue) -> None:
    """Store words of four inputs each, for one of a panel's outputs."""
    for number in range(words.kind.count):
        f.store(words.lane(number), f.at(at, output + number * PANEL, I32))


def _store_group(
    f: Function, isa: Isa, kind: str, grouping: Grouping, args: IrValue, place: IrValue, output: IrValue,
    group: Group,
) -> None:  # fmt: skip
    codes, scale, offset = group
    zero = _ZERO.get(kind, 0)
    if grouping.bits == 8:
        codes = codes + (grouping.zero(isa) - zero)
    words = codes.bits_as(vector(I32, 8))
    if grouping.bits == 4:
        low, high = (f.shuffle(words, words, range(odd, 8, 2)) for odd in (0, 1))
        words = IrValue(f, f.builder.or_(low.raw, (high << 4).raw))
    size = GROUP * PANEL * grouping.bits // 8
    _store_words(f, words, f.at(f.pointer(args, PANELS), place * size, I8), output)
    at = place * PANEL + output
    f.store(f.convert(scale, F16), f.at(f.pointer(args, SCALES), at, F16))
    if grouping.offsets:
        least = zero if grouping.bits == 4 else 0
        offset = scale * -float(least) if offset is None else offset
        f.store(f.convert(offset, F16), f.at(f.pointer(args, OFFSETS), at, F16))


def _half(f: Function, block: IrValue, at: int) -> IrValue:
    return f.convert(f.load(f.at(block, at, I8), F16, 1), F32)


def _either(f: Function, a: IrValue, b: IrValue) -> IrValue:
    return IrValue(f, f.builder.or_(a.raw, b.raw))


def _nibbles(f: Function, block: IrValue, at: int) -> IrValue:
    """Unpack 16 bytes to int8[32]: their lower halves, then the upper ones."""
    bytes_ = f.load(f.at(block, at, I8), _VI8)
    return f.shuffle(bytes_ & 15, f.unshifted(bytes_, f.like(4, bytes_)), range(32))


def _fifth(f: Function, block: IrValue, at: int) -> IrValue:
    """Unpack a bit for each of 32 codes, as their fifth bit."""
    bits = f.splat(f.load(f.at(block, at, I8), I32, 1), 32)
    return f.convert(f.unshifted(bits, f.numbers(I32, range(32))) & 1, _V32) << 4


def _read_4_0(f: Function, block: IrValue, number: IrValue, store: _Store) -> None:
    store(number, (_nibbles(f, block, 2), _half(f, block, 0), None))


def _read_4_1(f: Function, block: IrValue, number: IrValue, store: _Store) -> None:
    store(number, (_nibbles(f, block, 4), _half(f, block, 0), _half(f, block, 2)))


def _read_5_0(f: Function, block: IrValue, number: IrValue, store: _Store) -> None:
    codes = _either(f, _nibbles(f, block, 6), _fifth(f, block, 2))
    store(number, (codes, _half(f, block, 0), None))


def _read_5_1(f: Function, block: IrValue, number: IrValue, store: _Store) -> None:
    codes = _either(f, _nibbles(f, block, 8), _fifth(f, block, 4))
    store(number, (codes, _half(f, block, 0), _half(f, block, 2)))


def _read_8_0(f: Function, block: IrValue, number: IrValue, store: _Store) -> None:
    store(number, (f.load(f.at(block, 2, I8), _V32), _half(f, block, 0), None))


def _k_scales(f: Function, block: IrValue, table: IrValue) -> None:
    """Unpack eight scales, then eight offsets, of six bits, in twelve bytes after their two factors."""
    low, middle, high = (f.load(f.at(block, at, I8), vector(I8, 4)) for at in (4, 8, 12))

    def over(a: IrValue, b: IrValue) -> IrValue:
        return _either(f, a, f.unshifted(b, f.like(2, b)) & 48)

    parts = low & 63, over(high & 15, low), middle & 63, over(f.unshifted(high, f.like(4, high)), middle)
    factors = _half(f, block, 0), _half(f, block, 2) * -1.0
    for place, part in enumerate(parts):
        numbers = f.convert(f.unsigned(part, vector(I32, 4)), vector(F32, 4))
        f.store(numbers * factors[place // 2], f.at(table, 4 * place, F32))


def _read_k(fifth: bool, f: Function, block: IrValue, number: IrValue, store: _Store) -> None:
    """Read Q4_K or Q5_K: 32 bytes hold a group in the lower halves and the next in the upper ones."""
    table = f.scratch(F32, 16)
    _k_scales(f, block, table)
    top = f.load(f.at(block, 16, I8), _V32) if fifth else None
    with f.loop(0, 4) as pair:
        bytes_ = f.load(f.at(block, pair * 32 + (48 if fifth else 16), I8), _V32)
        for half, nibbles in enumerate((bytes_ & 15, f.unshifted(bytes_, f.like(4, bytes_)))):
            own, codes = pair * 2 + half, nibbles
            if top is not None:
                shift = f.splat(f.convert(own, I8), 32)
                codes = _either(f, codes, (f.unshifted(top, shift) & 1) << 4)
            scale, offset = (f.load(f.at(table, own + at, F32), F32) for at in (0, 8))
            store(number + own, (codes, scale, offset))


def _read_6_k(f: Function, block: IrValue, number: IrValue, store: _Store) -> None:
    factor = _half(f, block, 208)
    with f.loop(0, 2) as half:
        top = f.load(f.at(block, half * 32 + 128, I8), _V32)
        for place in range(4):
            bytes_ = f.load(f.at(block, half * 64 + 32 * (place % 2), I8), _V32)
            low = bytes_ & 15 if place < 2 else f.unshifted(bytes_, f.like(4, bytes_))
            high = (f.unshifted(top, f.like(2 * place, top)) & 3) << 4
            codes = _either(f, low, high) - 32
            values = []
            for part in range(2):
                own = f.shuffle(codes, codes, range(LANES * part, LANES * (part + 1)))
                scale = f.load(f.at(block, half * 8 + (192 + 2 * place + part), I8), I8)
                numbers = f.convert(f.convert(own, vector(I32)), _VF32)
                values.append(numbers * (factor * f.convert(scale, F32)))
            store(number + half * 4 + place, _in_8_bits(f, values))


def _in_8_bits(f: Function, values: list[IrValue]) -> Group:
    """Round 32 numbers, float32[16] each, as Q8_0 does."""
    sizes = [f.call("llvm.fabs.v16f32", _VF32, each) for each in values]
    largest = f.reduce(f.larger(*sizes), f.larger)
    scale = f.convert(f.convert(largest / 127.0, F16), F32)
    divisor = f.select(scale.equals(0.0), f.constant(F32, 1.0), scale)
    codes = []
    for each in values:
        whole = rounded(each / divisor)
        whole = f.larger(f.like(-128, whole), f.smaller(whole, f.like(127, whole)))
        codes.append(f.convert(whole, _VI8))
    return f.shuffle(codes[0], codes[1], range(32)), scale, None


def _read_mxfp4(f: Function, block: IrValue, number: IrValue, store: _Store) -> None:
    """Read MXFP4: twice the numbers 0, 0.5, 1, 1.5, 2, 3, 4, 6, then negative ones; a scale 2^n."""
    nibbles = _nibbles(f, block, 1)
    size = nibbles & 7
    codes, zero = size, f.like(0, size)
    for code, more in ((5, 1), (6, 2), (7, 5)):
        codes = codes + f.select(size.equals(code), f.like(more, size), zero)
    codes = f.select(nibbles > 7, zero - codes, codes)
    exponent = f.unsigned(f.load(block, I8), I32) - 1
    bits = f.larger(exponent, f.constant(I32, 0)) << 23
    store(number, (codes, bits.bits_as(F32), None))


def _read_4_k(f: Function, block: IrValue, number: IrValue, store: _Store) -> None:
    _read_k(False, f, block, number, store)


def _read_5_k(f: Function, block: IrValue, number: IrValue, store: _Store) -> None:
    _read_k(True, f, block, number, store)


_READERS = {
    "Q4_0": _read_4_0, "Q4_1": _read_4_1, "Q5_0": _read_5_0, "Q5_1": _read_5_1, "Q8_0": _read_8_0,
    "Q4_K": _read_4_k, "Q5_K": _read_5_k, "Q6_K": _read_6_k,
    "MXFP4": _read_mxfp4,
}  # fmt: skip
