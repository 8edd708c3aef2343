"""AMX: products of up to 32 rows by a panel in a CPU's matrix registers.

A register holds 16 rows of 64 bytes. The panels of `linear` have weights in its layout, four inputs of
16 outputs in a row, and the sums are the same integers as with every other instruction set. Linux grants
a process the registers when it asks. They are set up for each call of a kernel, and released after it:
a thread without them is switched faster.
"""

import ctypes
import sys
from itertools import product

from ramify.gpu.native.ir import I8, I32, I64, LANES, Function, IrValue

ROWS = 16  # of a register
LEAST = 3  # rows that are worth it, though as many are multiplied as a register has
ROOM = 2 * ROWS  # rows of activations come in whole numbers of so many
_STEPS = 16  # of four inputs, that one product takes
_ROW_BYTES = 4 * LANES * 4  # between rows of a panel
_SYSCALL, _ASK, _TILES = 158, 0x1023, 18  # arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)
# the first palette, 64 bytes in each row of all eight, 16 rows
_SET_UP = {0: 1, 2: 0x0040004000400040, 3: 0x0040004000400040, 6: 0x1010101010101010}


def granted() -> bool:
    """Ask for the registers. Returns whether this process may use them."""
    if sys.platform != "linux":
        return False
    return int(ctypes.CDLL(None).syscall(_SYSCALL, _ASK, _TILES)) == 0


def set_up(f: Function) -> None:
    words = f.scratch(I64, 8)
    for place in range(8):
        f.store(f.i64(_SET_UP.get(place, 0)), f.at(words, place, I64))
    f.effect("llvm.x86.ldtilecfg", words)


def give_back(f: Function) -> None:
    f.effect("llvm.x86.tilerelease")


def sums(
    f: Function,
    x: IrValue,
    stride: IrValue,
    weight: IrValue,
    steps: IrValue,
    blocks: int,
    group: list[int],
    fresh: IrValue,
) -> IrValue:
    """Multiply `x` by the vectors `group` of a panel: int32 [blocks of rows][vectors][16 rows][16].

    x: unsigned bytes, ROWS * `blocks` rows; weight: signed ones. Blocks times vectors are 4 at most.
    All vectors go through one register: with all eight in use, each load waits for the product before it
    where the other thread of the core is busy (docs/log/cpu.md). `fresh`: weights are fetched ahead.
    """
    results = [[block * len(group) + place for place in range(len(group))] for block in range(blocks)]
    inputs, panel = [*range(4, 4 + blocks)], 4 + blocks
    for row in results:
        for one in row:
            f.effect("llvm.x86.tilezero", _number(f, one))
    with f.loop(0, steps, _STEPS) as step:
        with f.when(fresh):
            ahead = f.smaller(step + _STEPS, steps - _STEPS)
            for line, q in product(range(_STEPS), group):
                f.fetch(f.at(weight, (ahead + line) * _ROW_BYTES + q * 4 * LANES, I8))
        for block, register in enumerate(inputs):
            place = f.at(x, f.like(block * ROWS, stride) * stride + step * 4, I8)
            f.effect("llvm.x86.tileloadd64", _number(f, register), place, stride)
        for number, q in enumerate(group):
            place = f.at(weight, step * _ROW_BYTES + q * 4 * LANES, I8)
            f.effect("llvm.x86.tileloadd64", _number(f, panel), place, f.i64(_ROW_BYTES))
            for block, own in enumerate(inputs):
                numbers = (results[block][number], own, panel)
                f.effect("llvm.x86.tdpbusd", *(_number(f, one) for one in numbers))
    out = f.scratch(I32, blocks * len(group) * ROWS * LANES)
    for one in range(blocks * len(group)):
        place = f.at(out, one * ROWS * LANES, I32)
        f.effect("llvm.x86.tilestored64", _number(f, one), place, f.i64(4 * LANES))
    return out


def _number(f: Function, register: int) -> IrValue:
    return f.constant(I8, register)
