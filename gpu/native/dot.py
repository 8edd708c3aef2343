"""Sums of products of 8-bit integers, four at a time: one function for each instruction set.

All give the same sums to the last bit, since integers do not round. x86 multiplies unsigned by signed
bytes only, so with VNNI an activation has `Isa.offset` added, and the caller subtracts that many times
the sum of the weights.
"""

from ramify.gpu.native.host import Isa
from ramify.gpu.native.ir import I8, I16, I32, LANES, Function, IrValue, vector


def dot(f: Function, isa: Isa, sums: IrValue, four: IrValue, weights: IrValue) -> IrValue:
    """Add to each output's sum the dot product of four activations and its four weights.

    `sums`: int32[16], zero at first. `four`: int32, four bytes, each with
    `isa.offset` added. `weights`: int8[64], four for each output.
    """
    if isa.dot == "vnni512":
        activations = f.splat(four)
        return f.call(
            "llvm.x86.avx512.vpdpbusd.512", sums.kind, sums, activations, weights.bits_as(vector(I32))
        )
    parts = {"vnni256": 2, "madd256": 2, "sdot": 4, "plain": 1}[isa.dot]
    lanes = LANES // parts
    done = []
    for part in range(parts):
        some = f.shuffle(sums, sums, range(part * lanes, (part + 1) * lanes))
        own = f.shuffle(weights, weights, range(4 * part * lanes, 4 * (part + 1) * lanes))
        done.append(_PARTS[isa.dot](f, some, f.splat(four, lanes), own))
    return _joined(f, done)


def dot_codes(f: Function, isa: Isa, sums: IrValue, four: IrValue, codes: IrValue, bits: int) -> IrValue:
    """Do `dot` for signed activations and unsigned codes of 4 bits, or of 8 (signed ones on ARM)."""
    if isa.dot == "vnni512":
        return f.call(
            "llvm.x86.avx512.vpdpbusd.512", sums.kind, sums, codes.bits_as(sums.kind), f.splat(four)
        )
    parts = {"vnni256": 2, "madd256": 4 if bits == 8 else 2, "sdot": 4, "plain": 1}[isa.dot]
    lanes, count = sums.kind.count // parts, 4 * LANES // parts
    done = []
    for part in range(parts):
        some = f.shuffle(sums, sums, range(part * lanes, (part + 1) * lanes))
        own = f.shuffle(codes, codes, range(part * count, (part + 1) * count))
        fours = f.splat(four, count // 4)
        if isa.dot == "vnni256":
            name = "llvm.x86.avx512.vpdpbusd.256"
            done.append(f.call(name, some.kind, some, own.bits_as(fours.kind), fours))
        elif isa.dot == "madd256":
            done.append(some + _madd_codes(f, fours.bits_as(own.kind), own, bits))
        else:
            done.append(_PARTS[isa.dot](f, some, fours, own))
    return _joined(f, done)


def _madd_codes(f: Function, activations: IrValue, codes: IrValue, bits: int) -> IrValue:
    """Multiply with AVX2: vpmaddubsw does not saturate with 4 bits: 2 * 15 * 127 fits 16 bits."""
    pairs, sums = vector(I16, 16), vector(I32, 8)
    if bits == 4:
        added = f.call("llvm.x86.avx2.pmadd.ub.sw", pairs, codes, activations)
        return f.call("llvm.x86.avx2.pmadd.wd", sums, added, f.constant(pairs, 1))
    wide = f.unsigned(codes, pairs), f.convert(activations, pairs)
    return f.call("llvm.x86.avx2.pmadd.wd", sums, *wide)


def codes_start(f: Function, isa: Isa, bits: int, start: IrValue) -> IrValue:
    """Make the first sums of `dot_codes`: int32 `start` for each of 16 outputs; some have two sums."""
    starts = f.splat(start)
    if bits == 4 or isa.dot != "madd256":
        return starts
    return f.shuffle(starts, f.like(0, starts), [lane % 2 * LANES for lane in range(2 * LANES)])


def total(f: Function, sums: IrValue) -> IrValue:
    """Reduce the sums of `dot_codes` to int32[16]."""
    if sums.kind.count == LANES:
        return sums
    lanes = sums.kind.count
    return f.shuffle(sums, sums, range(0, lanes, 2)) + f.shuffle(sums, sums, range(1, lanes, 2))


def _joined(f: Function, parts: list[IrValue]) -> IrValue:
    """Join vectors one after another."""
    while len(parts) > 1:
        width = 2 * parts[0].kind.count
        parts = [f.shuffle(a, b, range(width)) for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def _vnni256(f: Function, sums: IrValue, fours: IrValue, weights: IrValue) -> IrValue:
    """Multiply with vpdpbusd of 256 bits (AVX VNNI)."""
    name = "llvm.x86.avx512.vpdpbusd.256"
    return f.call(name, sums.kind, sums, fours, weights.bits_as(fours.kind))


def _madd256(f: Function, sums: IrValue, fours: IrValue, weights: IrValue) -> IrValue:
    """Multiply with AVX2: |activation| times the weight with its sign. vpmaddubsw does not saturate, as
    both are up to 127.
    """
    activations, pairs = fours.bits_as(weights.kind), vector(I16, 16)
    size, signed = (
        f.call("llvm.x86.avx2.psign.b", weights.kind, each, activations)
        for each in (activations, weights)
    )
    added = f.call("llvm.x86.avx2.pmadd.ub.sw", pairs, size, signed)
    return sums + f.call("llvm.x86.avx2.pmadd.wd", sums.kind, added, f.constant(pairs, 1))


def _sdot(f: Function, sums: IrValue, fours: IrValue, weights: IrValue) -> IrValue:
    """Multiply with ARM's dot product of signed bytes."""
    name = "llvm.aarch64.neon.sdot.v4i32.v16i8"
    return f.call(name, sums.kind, sums, fours.bits_as(vector(I8, 16)), weights)


def _plain(f: Function, sums: IrValue, fours: IrValue, weights: IrValue) -> IrValue:
    """Multiply without an instruction for it: the compiler chooses."""
    activations = f.convert(fours.bits_as(vector(I8, 64)), vector(I32, 64))
    products = activations * f.convert(weights, vector(I32, 64))
    for place in range(4):
        sums = sums + f.shuffle(products, products, range(place, 64, 4))
    return sums


_PARTS = {"vnni256": _vnni256, "madd256": _madd256, "sdot": _sdot, "plain": _plain}
