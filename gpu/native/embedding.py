"""The kernel of the embedding, whose rows are floats as a checkpoint has them, or packed blocks.

Item i: TARGET[i] = row IDS[i] of the table * EMBED_SCALE (the bits of a float32).
"""

from ramify.gpu.native.grouped import GROUP, Grouping
from ramify.gpu.native.host import Isa
from ramify.gpu.native.ir import F16, F32, I8, I32, I64, LANES, PTR, Function, IrValue, Module, vector
from ramify.gpu.native.linear import PANEL
from ramify.gpu.native.packing import BYTES_OF_FLOATS, floats_of

# words of the arguments; from SCALES on of blocks alone
IDS, TABLE, TARGET, WIDTH, EMBED_SCALE, SCALES, OFFSETS, GROUPS = range(8)
_VF32 = vector(F32)


def kernel_name(table: Grouping | str) -> str:
    """Name the kernel that `emit_embed` writes."""
    return f"embed_{table if isinstance(table, str) else table.name}"


def emit_embed(module: Module, isa: Isa, table: Grouping | str) -> str:
    """Write the kernel. `table`: the grouping of its blocks, or its floats: "F32", "F16" or "BF16"."""
    f = Function(module, kernel_name(table), [PTR, I64, I64])
    args, begin, end = f.args
    width = f.word(args, WIDTH)
    factor = f.load(f.at(args, EMBED_SCALE, I64), F32)
    with f.loop(begin, end) as item:
        row = f.word(f.pointer(args, IDS), item)
        target = f.at(f.pointer(args, TARGET), item * width, F32)
        if isinstance(table, Grouping):
            _read_blocks(f, isa, table, row, target, factor)
        else:
            line = f.at(f.pointer(args, TABLE), row * width * BYTES_OF_FLOATS[table], I8)
            with f.loop(0, width // LANES) as part:
                f.store(floats_of(f, line, part, table) * factor, f.at(target, part * LANES, F32))
    f.done()
    return f.name


def _read_blocks(
    f: Function, isa: Isa, grouping: Grouping, row: IrValue, target: IrValue, factor: IrValue
) -> None:
    args, bits, zero = f.args[0], grouping.bits, grouping.zero(isa)
    panel, place = row // PANEL, row % PANEL
    words = f.scratch(I32, GROUP // 4)
    widen = f.convert if bits == 8 and not zero else f.unsigned

    def half(word: int, at: IrValue) -> IrValue:
        return f.convert(f.load(f.at(f.pointer(args, word), at, F16), F16), F32)

    with f.loop(0, f.word(args, WIDTH) // GROUP) as number:
        at = panel * f.word(args, GROUPS) + number
        size = GROUP * PANEL * bits // 8
        _read_words(f, f.at(f.pointer(args, TABLE), at * size + place * 4, I8), bits, words)
        at = at * PANEL + place
        scale, offset = half(SCALES, at), half(OFFSETS, at) if grouping.offsets else None
        for part in range(GROUP // LANES):
            codes = widen(f.load(f.at(words, part * LANES // 4, I32), vector(I8)), vector(I32))
            values = f.convert(codes - zero, _VF32) * scale
            if offset is not None:
                values = values + offset
            f.store(values * factor, f.at(target, number * GROUP + part * LANES, F32))


def _read_words(f: Function, codes: IrValue, bits: int, words: IrValue) -> None:
    """Read 32 codes of an output, in their order, as bytes."""
    if bits == 8:
        for step in range(GROUP // 4):
            f.store(f.load(f.at(codes, step * 4 * PANEL, I8), I32, 1), f.at(words, step, I32))
        return
    for pair in range(GROUP // 8):
        both = f.load(f.at(codes, pair * 4 * PANEL, I8), I32, 1)
        f.store(both & 0x0F0F0F0F, f.at(words, 2 * pair, I32))
        high = f.unshifted(both, f.constant(I32, 4)) & 0x0F0F0F0F
        f.store(high, f.at(words, 2 * pair + 1, I32))
