"""The kernel that norms (if the layer does) and rotates q and k, and stores k and v. Item i: token i.

q stays where it is; k and v go to their slot of the KV pool, in the pool's dtype.
"""

from typing import Any

from ramify.gpu.native.ir import F16, F32, I64, LANES, PTR, Function, IrValue, Module, vector
from ramify.gpu.native.rows import row_root

_V = vector(F32)
_MOST_F16 = 65504.0

# words of the arguments
(QKV, QKV_STRIDE, POSITIONS, SLOTS, COS, SIN, KEYS, VALUES, HEADS, KV_HEADS, Q_NORM, K_NORM,
 EPS, WIDE) = range(14)  # fmt: skip


def emit_rotary(module: Module, dim: int, kind: Any) -> str:
    """Write the kernel. `dim`: size of a head, a multiple of 32; `kind`: F32 or F16, the pool's.

    COS and SIN are float32[positions, dim / 2]: the angles of halves (as in GPT-NeoX). WIDE: norms are
    over all heads of q, and of k, with a weight for each value of theirs; 0: over each head.
    """
    f = Function(module, f"rotary_{dim}", [PTR, I64, I64])
    args, begin, end = f.args
    heads, kv_heads = f.word(args, HEADS), f.word(args, KV_HEADS)
    with f.loop(begin, end) as item:
        line = f.at(f.pointer(args, QKV), item * f.word(args, QKV_STRIDE), F32)
        position = f.word(f.pointer(args, POSITIONS), item)
        cos = f.at(f.pointer(args, COS), position * (dim // 2), F32)
        sin = f.at(f.pointer(args, SIN), position * (dim // 2), F32)
        slot = f.word(f.pointer(args, SLOTS), item) * kv_heads * dim
        keys, values = (f.at(f.pointer(args, pool), slot, kind) for pool in (KEYS, VALUES))
        root = _wide_root(f, args, line, heads * dim)
        with f.loop(0, heads) as head:
            x = f.at(line, head * dim, F32)
            for at, value in enumerate(_rotated(f, args, x, head, dim, (cos, sin), Q_NORM, root)):
                f.store(value, f.at(x, at * LANES, F32))
        root = _wide_root(f, args, f.at(line, heads * dim, F32), kv_heads * dim)
        with f.loop(0, kv_heads) as head:
            x = f.at(line, (heads + head) * dim, F32)
            for at, value in enumerate(_rotated(f, args, x, head, dim, (cos, sin), K_NORM, root)):
                f.store(_stored(f, value, kind), f.at(keys, head * dim + at * LANES, kind))
        with f.loop(0, kv_heads * dim, LANES) as place:
            value = f.load(f.at(line, (heads + kv_heads) * dim + place, F32), _V)
            f.store(_stored(f, value, kind), f.at(values, place, kind))
    f.done()
    return f.name


def _wide_root(f: Function, args: IrValue, x: IrValue, size: IrValue) -> IrValue:
    """Compute 1 / sqrt(mean(x^2) + eps) of all heads, if norms are over all of them."""
    root = f.var(f.constant(F32, 0.0))
    with f.when(f.word(args, WIDE).differs(0)):
        root.set(row_root(f, x, size, f.load(f.at(args, EPS, I64), F32)))
    return root.get()


def _rotated(
    f: Function, args: IrValue, x: IrValue, head: IrValue, dim: int, angles: tuple[IrValue, IrValue],
    norm: int, root: IrValue,
) -> list[IrValue]:  # fmt: skip
    """Rotate a head, as vectors. `root`: of all heads, if norms are over all of them."""
    count = dim // LANES
    parts = [f.var(f.load(f.at(x, at * LANES, F32), _V)) for at in range(count)]
    with f.when(f.word(args, norm).differs(0)):
        wide = f.word(args, WIDE)
        weight = f.at(f.pointer(args, norm), wide * head * dim, F32)
        squares = f.constant(_V, 0.0)
        for part in parts:
            squares = f.fma(part.get(), part.get(), squares)
        mean = f.reduce(squares, lambda a, b: a + b) * (1 / dim)
        eps = f.load(f.at(args, EPS, I64), F32)
        own = f.constant(F32, 1.0) / f.call("llvm.sqrt.f32", F32, mean + eps)
        factor = f.select(wide.differs(0), root, own)
        for at, part in enumerate(parts):
            part.set(part.get() * factor * f.load(f.at(weight, at * LANES, F32), _V))
    low, high = [], []
    for at in range(count // 2):
        a, b = parts[at].get(), parts[at + count // 2].get()
        c, s = (f.load(f.at(table, at * LANES, F32), _V) for table in angles)
        low.append(a * c - b * s)
        high.append(f.fma(a, s, b * c))
    return low + high


def _stored(f: Function, value: IrValue, kind: Any) -> IrValue:
    """Convert to the pool's dtype; beyond float16's range to its largest number, not infinity."""
    if kind is not F16:
        return value
    most = f.constant(_V, _MOST_F16)
    value = f.select(value > most, most, value)
    value = f.select(value < -_MOST_F16, f.constant(_V, -_MOST_F16), value)
    return f.convert(value, vector(F16))
