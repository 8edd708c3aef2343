"""Products y = x W^T with weights in groups of 32 inputs, of 4 or 8 bits, each group with a scale.

A weight is its group's scale times its code, plus the group's offset if there are any. Codes are
unsigned bytes, or halves of bytes, from which `zero` is subtracted: x86 multiplies unsigned by signed
bytes, and here the activations are signed. A group's sum of products is an integer; those of groups are
added as floats, in their order, so a row's result depends on that row alone.

Panels of 64 outputs: [panel][group][inputs / 4][64][4] codes. Of 4 bits, the next four inputs' codes are
in the upper halves of the bytes.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ramify.gpu.native.dot import codes_start, dot_codes, total
from ramify.gpu.native.host import Isa
from ramify.gpu.native.ir import F16, F32, I8, I32, I64, LANES, PTR, Function, IrValue, Module, vector
from ramify.gpu.native.linear import (
    GROUP_SUMS,
    GROUP_SUMS_STRIDE,
    PANEL,
    PANELS,
    ROW_BLOCK,
    SCALES,
    STEPS,
    SUMS,
    WEIGHT,
    WEIGHT_SCALES,
    X_STRIDE,
    RowsOf,
    Tiles,
    X,
    biased,
    emit_blocks,
    finish,
    padded_inputs,
    panel_bias,
    panel_order,
    vector_groups,
)

GROUP = 32
_STEPS = GROUP // 4
_AHEAD = 4096  # bytes of codes that are fetched before they are read
OFFSETS = SUMS  # the word that has the sums of weights where there are no groups
_VF32, _VI8 = vector(F32), vector(I8, 4 * LANES)


@dataclass(frozen=True, slots=True)
class Grouping:
    """The form of a weight as kernels differ by it: bits of a code, and whether groups have offsets."""

    bits: int
    offsets: bool

    @property
    def name(self) -> str:
        return f"{self.bits}{'o' if self.offsets else ''}"

    def zero(self, isa: Isa) -> int:
        """Return the number that is subtracted from a code."""
        return isa.code_offset if self.bits == 8 else 0 if self.offsets else 8


@dataclass(slots=True)
class PackedGroups:
    """A weight as the kernel reads it. Inputs and outputs are padded; padding has a scale of 0."""

    grouping: Grouping
    panels: Tensor  # uint8 [panels, groups, steps, 64, 4]
    scales: Tensor  # float16 [panels, groups, 64]
    offsets: Tensor | None  # the same
    bias: Tensor | None  # float32 [outputs]
    inputs: int
    outputs: int


def pack_groups(
    codes: Tensor, scales: Tensor, offsets: Tensor | None, bits: int, bias: Tensor | None, isa: Isa,
    gated: bool = False, padding: float = 0.0, stacked: int = 1,
) -> PackedGroups:  # fmt: skip
    """Pack codes int8 [outputs, inputs], with offsets 0 or more; scales, offsets [outputs, groups].

    `gated`, `stacked`: as for `linear.panel_order`; `padding`: what outputs that pad the last panel are.
    """
    grouping = Grouping(bits, offsets is not None)
    outputs, inputs = codes.shape
    order = panel_order(outputs, gated, stacked)
    known, size = order >= 0, padded_inputs(inputs)
    places = order[known]
    as_is = not gated and len(order) == outputs

    def placed(values: Tensor, width: int) -> Tensor:
        """Put values in order, with zeros for padding."""
        if as_is and values.shape[1] == width:
            return values
        whole = values.new_zeros((len(order), width))
        whole[known, : values.shape[1]] = values[places]
        return whole

    stored = placed(codes.contiguous().view(torch.uint8) + grouping.zero(isa), size)
    steps = stored.view(-1, PANEL, size // GROUP, _STEPS, 4).permute(0, 2, 3, 1, 4)
    panels = steps if bits == 8 else steps[:, :, 0::2] | (steps[:, :, 1::2] << 4)

    def half(values: Tensor) -> Tensor:
        whole = placed(values.half(), size // GROUP)
        return whole.reshape(-1, PANEL, size // GROUP).transpose(1, 2).contiguous()

    bias = panel_bias(bias, order, padding)
    return PackedGroups(
        grouping, panels.contiguous(), half(scales), None if offsets is None else half(offsets), bias,
        size, len(order),
    )  # fmt: skip


def emit_grouped(module: Module, isa: Isa, grouping: Grouping, epilogue: str) -> str:
    """Write a product; `epilogue` as for `linear.emit_linear`."""
    tiles = emit_group_tiles(module, isa, grouping, epilogue)
    return emit_blocks(module, f"linear{grouping.name}_{epilogue}", tiles)


def emit_group_tiles(
    module: Module, isa: Isa, grouping: Grouping, epilogue: str, rows_of: RowsOf | None = None,
    name: str = "tile",
) -> Tiles:  # fmt: skip
    """Write tiles as `linear.emit_tiles` does."""
    tall = [] if isa.registers < 32 else [3, 4, 6, *([8] if grouping.bits == 4 else [])]
    called = f"{name}{grouping.name}_{epilogue}"
    return {
        rows: _emit_tile(module, isa, grouping, epilogue, rows, rows_of, f"{called}_{rows}")
        for rows in (1, 2, *tall)
    }


def _emit_tile(
    module: Module, isa: Isa, grouping: Grouping, epilogue: str, rows: int, rows_of: RowsOf | None,
    name: str,
) -> Function:  # fmt: skip
    """Write a tile of `rows` rows by one panel.

    There are sums as integers and as floats, so fewer vectors at a time of 4 bits. 8 bits are read in
    one pass instead, and floats are spilled once a group.
    """
    f = Function(module, name, [PTR, I64, I64], private=True)
    args, panel, first = f.args
    places = [(first + row, first + row) for row in range(rows)]
    if rows_of is not None:
        places = [rows_of(f, args, own) for own, _ in places]
    column = panel if rows_of is None else panel % f.word(args, PANELS)  # of what is written
    fresh = (first % ROW_BLOCK).equals(0) if rows_of is None else f.i64(0).equals(0)
    quads = 1 if isa.registers < 32 else 4 if rows <= 3 or grouping.bits == 8 else 2
    groups = vector_groups(epilogue, quads)
    step = groups[1][0] - groups[0][0] if len(groups) > 1 else 1
    with f.loop(0, len(groups) * step, step) as start:  # the same code for each group of vectors
        group = [start + q for q in groups[0]]
        sums = _sums(f, isa, grouping, args, panel, [source for source, _ in places], group, fresh)
        for (source, target), own in zip(places, sums, strict=True):
            scale = f.load(f.at(f.pointer(args, SCALES), source, F32), F32)
            values = [biased(f, args, panel * PANEL + q * LANES, one * scale)
                      for q, one in zip(group, own, strict=True)]  # fmt: skip
            finish(f, args, epilogue, column, target, group, values)
    f.done()
    return f


def _sums(
    f: Function, isa: Isa, grouping: Grouping, args: IrValue, panel: IrValue, rows: list[IrValue],
    group: list[IrValue], fresh: IrValue,
) -> list[list[IrValue]]:  # fmt: skip
    """Compute sums [row][vector] over all inputs, without the scales of the activations' `rows`.

    `fresh`: no tile has read this panel just before, so weights are fetched ahead.
    """
    count, bits = f.word(args, STEPS), grouping.bits
    size = PANEL * GROUP * bits // 8
    strides = f.word(args, X_STRIDE), f.word(args, GROUP_SUMS_STRIDE)
    lines = [f.at(f.pointer(args, X), row * strides[0], I8) for row in rows]
    totals = [f.at(f.pointer(args, GROUP_SUMS), row * strides[1], I32) for row in rows]
    floats = [[f.var(f.constant(_VF32, 0.0)) for _ in group] for _ in lines]
    with f.loop(0, count) as number:
        place = panel * count + number
        codes = f.at(f.pointer(args, WEIGHT), place * size, I8)
        with f.when(fresh):
            _fetch(f, grouping, args, f.smaller(place + _AHEAD // size, (panel + 1) * count - 1), group)
        inputs = [f.load(f.at(each, number, I32), I32) for each in totals]
        starts = [codes_start(f, isa, bits, x * -grouping.zero(isa)) for x in inputs]
        wholes = [[f.var(start) for _ in group] for start in starts]
        with f.loop(0, _STEPS, 2) as step:
            here, place_x = f.at(codes, step * (4 * PANEL * bits // 8), I8), number * GROUP + step * 4
            for odd, some in enumerate(_codes(f, here, bits, group)):
                for line, own in zip(lines, wholes, strict=True):
                    four = f.load(f.at(line, place_x + 4 * odd, I8), I32)
                    for whole, one in zip(own, some, strict=True):
                        whole.set(dot_codes(f, isa, whole.get(), four, one, bits))
        for index, q in enumerate(group):
            at = place * PANEL + q * LANES
            scales = _halves(f, args, WEIGHT_SCALES, at)
            offsets = _halves(f, args, OFFSETS, at) if grouping.offsets else None
            for own, sums, x in zip(wholes, floats, inputs, strict=True):
                summed = f.convert(total(f, own[index].get()), _VF32)
                value = f.fma(summed, scales, sums[index].get())
                if offsets is not None:
                    value = f.fma(f.splat(f.convert(x, F32)), offsets, value)
                sums[index].set(value)
    return [[one.get() for one in own] for own in floats]


def _fetch(f: Function, grouping: Grouping, args: IrValue, place: IrValue, group: list[IrValue]) -> None:
    """Fetch the codes, scales and offsets of a group for these vectors into the second cache."""
    for q in group:
        for at in range(0, GROUP * grouping.bits // 8, 4):
            codes = (place * (GROUP * grouping.bits // 8) + at) * PANEL + q * (4 * LANES)
            f.fetch(f.at(f.pointer(args, WEIGHT), codes, I8))
        for word in (WEIGHT_SCALES, OFFSETS)[: 1 + grouping.offsets]:
            f.fetch(f.at(f.pointer(args, word), place * PANEL + q * LANES, F16))


def _codes(f: Function, codes: IrValue, bits: int, group: list[IrValue]) -> list[list[IrValue]]:
    """Load two times four inputs' codes of each output, for each vector of outputs."""
    loaded = [[f.load(f.at(codes, (q * LANES + PANEL * part) * 4, I8), _VI8) for q in group]
              for part in range(bits // 4)]  # fmt: skip
    if bits == 8:
        return loaded
    return [[one & 15 for one in loaded[0]], [f.unshifted(one, f.like(4, one)) for one in loaded[0]]]


def _halves(f: Function, args: IrValue, word: int, at: IrValue) -> IrValue:
    return f.convert(f.load(f.at(f.pointer(args, word), at, F16), vector(F16)), _VF32)
