"""Products of up to eight tokens with weights of 4 bits, as `linear.humming` keeps them, in Triton.

The layout is that of operands of a tensor core: 64 outputs by 16 inputs are 128 words of 32 bits, four
for each thread of a warp. So codes go from memory to registers to the tensor core, and shared memory
serves the last sum alone: warps, and programs, split the inputs. The operations before and after a
product are in the same launch, as in `triton_linear`.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, import-untyped, import-not-found"

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ramify.gpu.ops.triton_layer import load_squares, opened
from ramify.gpu.programmatic_launch import overlap_options, wait

STORE, ADD, GATED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
MOST_TOKENS = 8
_TILE = 64  # outputs

# A word has the codes of two outputs at four inputs. With 128 ahead they are bfloat16: a byte of 0x43.
_FRAGMENT = tl.constexpr("""{
.reg .b32 a, b, c, d, mask, base;
mov.b32 mask, 0x000f000f;
mov.b32 base, 0x43004300;
shr.b32 b, $8, 8;
shr.b32 c, $8, 4;
shr.b32 d, $8, 12;
lop3.b32 a, $8, mask, base, 0xea;
lop3.b32 b, b, mask, base, 0xea;
lop3.b32 c, c, mask, base, 0xea;
lop3.b32 d, d, mask, base, 0xea;
mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32
    {$0, $1, $2, $3}, {a, b, c, d}, {$9, $10}, {$4, $5, $6, $7};
}""")
_ONES = tl.constexpr("""{
.reg .b32 one;
.reg .f32 e, f;
mov.b32 one, 0x3f803f80;
mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32
    {$0, $1, e, f}, {one, one, one, one}, {$4, $5}, {$2, $3, $2, $3};
}""")


def fragment_product(
    epilogue: Any, x: Tensor, words: Tensor, scales: Tensor, zeros: "Tensor | None",
    bias: "Tensor | None", output: Tensor, arrived: Tensor, warps: int, splits: int,
    squares: "Tensor | None" = None, eps: float = 0.0, residual: "Tensor | None" = None,
    gain: "Tensor | None" = None, squares_out: "Tensor | None" = None, gelu: bool = False,
) -> None:  # fmt: skip
    """Multiply x bfloat16 [T, inputs], T up to 8. words int32[inputs / 16, 2 * outputs];
    scales [inputs / 128, outputs].

    zeros int32[inputs / 128, outputs / 8]: eight codes of 0 in a word; None: 8. The rest as for
    `triton_linear`.
    """
    (tokens, inputs), outputs = x.shape, scales.shape[1]
    tiles = outputs // _TILE // (2 if epilogue == GATED.value else 1)
    sums = (tiles, splits * warps, 512)
    partial = torch.empty(sums, dtype=torch.float32, device=x.device)
    parts = 1 if squares is None else squares.shape[1]
    share = -(-(inputs // 128) // (warps // (2 if epilogue == GATED.value else 1) * splits))
    _fragments[(tiles, splits)](
        x, words, scales, zeros, bias, squares, residual, gain, output, squares_out, partial, arrived,
        tokens, outputs, inputs, share, parts, eps, EPILOGUE=epilogue, GELU=gelu,
        SCALED=squares is not None, BIAS=bias is not None, SPLITS=splits, WARPS=warps,
        PARTS=triton.next_power_of_2(parts), ASM=x.is_cuda, num_warps=warps,
        **overlap_options(x.device),
    )  # fmt: skip


@triton.jit
def _low(pair):
    return (pair << 16).to(tl.float32, bitcast=True)


@triton.jit
def _high(pair):
    return (pair & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _multiply(c0, c1, c2, c3, v, low, high, WARPS: tl.constexpr, ASM: tl.constexpr):
    """Multiply 16 inputs and add, as a tensor core has them in its threads.

    c0, c1: of output lane / 4 in each 16, for tokens lane % 4 * 2 and the next; c2, c3: 8 outputs
    further on. low, high: inputs lane % 4 * 2 and the next of token lane / 4, and those 8 further on.
    """
    if ASM:
        c0, c1, c2, c3 = tl.inline_asm_elementwise(
            _FRAGMENT, "=f,=f,=f,=f,f,f,f,f,r,r,r", [c0, c1, c2, c3, v, low, high],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        c0, c1 = _sums(c0, c1, v, v >> 4, low, high, WARPS)
        c2, c3 = _sums(c2, c3, v >> 8, v >> 12, low, high, WARPS)
    return c0, c1, c2, c3


@triton.jit
def _sums(one, other, near, far, low, high, WARPS: tl.constexpr):
    """Do `_multiply` by plain products: codes of inputs `low` are `near`, those of `high` are `far`."""
    total = _pairs((near & 15), low << 16, WARPS) + _pairs(near >> 16 & 15, low & -65536, WARPS)
    total += _pairs((far & 15), high << 16, WARPS) + _pairs(far >> 16 & 15, high & -65536, WARPS)
    total = tl.permute(tl.reshape(total, (8, 4, 2, WARPS, 4)), (0, 1, 3, 4, 2))
    even, odd = tl.split(total)
    return one + tl.reshape(even, (32, WARPS, 4)), other + tl.reshape(odd, (32, WARPS, 4))


@triton.jit
def _pairs(codes, bits, WARPS: tl.constexpr):
    a = tl.reshape((codes + 128).to(tl.float32), (8, 1, 4, WARPS, 4))
    x = tl.reshape(bits.to(tl.float32, bitcast=True), (1, 8, 4, WARPS, 1))
    return tl.sum(a * x, 2)


@triton.jit
def _add_up(d0, d1, low, high, WARPS: tl.constexpr, ASM: tl.constexpr):
    """Add up 16 inputs of tokens lane % 4 * 2 and the next."""
    if ASM:
        d0, d1 = tl.inline_asm_elementwise(
            _ONES, "=f,=f,f,f,r,r", [d0, d1, low, high], dtype=(tl.float32, tl.float32), is_pure=True,
            pack=1,
        )  # fmt: skip
    else:
        total = tl.reshape(_low(low) + _high(low) + _low(high) + _high(high), (8, 4, WARPS))
        even, odd = tl.split(tl.permute(tl.reshape(tl.sum(total, 1), (4, 2, WARPS)), (0, 2, 1)))
        d0 += tl.reshape(tl.broadcast_to(even[None, :, :], (8, 4, WARPS)), (32, WARPS, 1))
        d1 += tl.reshape(tl.broadcast_to(odd[None, :, :], (8, 4, WARPS)), (32, WARPS, 1))
    return d0, d1


@triton.jit
def _loaded(at, jump, there):
    v0 = tl.load(at, mask=there, other=0)
    v1 = tl.load(at + jump, mask=there, other=0)
    v2 = tl.load(at + 2 * jump, mask=there, other=0)
    v3 = tl.load(at + 3 * jump, mask=there, other=0)
    v4 = tl.load(at + 4 * jump, mask=there, other=0)
    v5 = tl.load(at + 5 * jump, mask=there, other=0)
    v6 = tl.load(at + 6 * jump, mask=there, other=0)
    v7 = tl.load(at + 7 * jump, mask=there, other=0)
    return v0, v1, v2, v3, v4, v5, v6, v7


@triton.jit
def _group(
    v0, v1, v2, v3, v4, v5, v6, v7, l0, h0, l1, h1, l2, h2, l3, h3, l4, h4, l5, h5, l6, h6, l7, h7,
    d0, d1, scale, zero, acc0, acc1, acc2, acc3, word, ZEROS: tl.constexpr, WARPS: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """Multiply 128 inputs, which share scales."""
    c0 = tl.zeros_like(acc0)
    c1, c2, c3 = c0, c0, c0
    c0, c1, c2, c3 = _multiply(c0, c1, c2, c3, v0, l0, h0, WARPS, ASM)
    c0, c1, c2, c3 = _multiply(c0, c1, c2, c3, v1, l1, h1, WARPS, ASM)
    c0, c1, c2, c3 = _multiply(c0, c1, c2, c3, v2, l2, h2, WARPS, ASM)
    c0, c1, c2, c3 = _multiply(c0, c1, c2, c3, v3, l3, h3, WARPS, ASM)
    c0, c1, c2, c3 = _multiply(c0, c1, c2, c3, v4, l4, h4, WARPS, ASM)
    c0, c1, c2, c3 = _multiply(c0, c1, c2, c3, v5, l5, h5, WARPS, ASM)
    c0, c1, c2, c3 = _multiply(c0, c1, c2, c3, v6, l6, h6, WARPS, ASM)
    c0, c1, c2, c3 = _multiply(c0, c1, c2, c3, v7, l7, h7, WARPS, ASM)
    more0, more1 = 136.0, 136.0
    if ZEROS:
        more0 = ((zero >> 8 * word) & 15).to(tl.float32) + 128.0
        more1 = ((zero >> (8 * word + 4)) & 15).to(tl.float32) + 128.0
    scale0, scale1 = _low(scale), _high(scale)
    acc0 += (c0 - d0 * more0) * scale0
    acc1 += (c1 - d1 * more0) * scale0
    acc2 += (c2 - d0 * more1) * scale1
    acc3 += (c3 - d1 * more1) * scale1
    return acc0, acc1, acc2, acc3


@triton.jit
def _put(at, lane, tokens, acc0, acc1, acc2, acc3):
    """Store a warp's sums, in the order of its lanes."""
    even, odd = lane % 4 * 2 < tokens, lane % 4 * 2 + 1 < tokens
    tl.store(at, acc0, mask=even)
    tl.store(at + 128, acc1, mask=odd)
    tl.store(at + 256, acc2, mask=even)
    tl.store(at + 384, acc3, mask=odd)


@triton.jit
def _take(at, known, PARTS: tl.constexpr, EVERY: tl.constexpr):
    """Load and add the sums of the warps, in their order: [8 tokens, 64 outputs]."""
    token, row = tl.arange(0, 8)[:, None], tl.arange(0, 64)[None, :]
    own = at + (row // 8 % 2 * 2 + token % 2) * 128 + (row % 8 * 4 + token // 2) * 4 + row // 16
    total = tl.zeros([8, 64], tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(own + part * EVERY * 512, mask=known[:, None], other=0.0, cache_modifier=".cg")
    return total


@triton.jit(do_not_specialize=["tokens"])
def _fragments(
    x, words, scales, zeros, bias, squares, residual, gain, output, squares_out, partial, arrived,
    tokens, outputs, inputs, share, parts, eps, EPILOGUE: tl.constexpr, GELU: tl.constexpr,
    SCALED: tl.constexpr, BIAS: tl.constexpr, SPLITS: tl.constexpr, WARPS: tl.constexpr,
    PARTS: tl.constexpr, ASM: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    KIND: tl.constexpr = x.dtype.element_ty
    SIDES: tl.constexpr = 2 if EPILOGUE == GATED else 1  # of a gated product warps take turns
    tile = tl.program_id(0)
    warp = tl.arange(0, WARPS)[None, :, None]
    lane = tl.arange(0, 32)[:, None, None]
    word = tl.arange(0, 4)[None, None, :]
    groups = inputs // 128
    first = (tl.program_id(1) * (WARPS // SIDES) + warp // SIDES) * share
    jump = outputs * 2  # words of 16 inputs
    matrix = warp % SIDES * (outputs // 128) + tile  # from a gate to its up are half of all tiles
    at = words + (first * 8).to(tl.int64) * jump + matrix * 128 + lane * 4 + word
    # scales of two outputs in a word, and codes of 0 of eight
    half = scales.to(tl.pointer_type(tl.int32)) + first * (outputs // 2)
    half += matrix * 32 + lane // 4 * 4 + word
    eight = zeros
    if zeros is not None:
        eight = zeros + first * (outputs // 8) + matrix * 8 + lane // 4
    stop = tl.minimum(first + share, groups)
    there = first < groups
    v0, v1, v2, v3, v4, v5, v6, v7 = _loaded(at, jump, there)
    acc0 = tl.zeros([32, WARPS, 4], tl.float32)
    acc1, acc2, acc3 = acc0, acc0, acc0
    wait(OVERLAP)
    token = lane // 4
    pairs = x.to(tl.pointer_type(tl.int32)) + token * (inputs // 2) + first * 64 + lane % 4
    for turn in range(share):
        there = first + turn < groups
        asked = there & (token < tokens)
        l0 = tl.load(pairs, mask=asked, other=0)
        h0 = tl.load(pairs + 4, mask=asked, other=0)
        l1 = tl.load(pairs + 8, mask=asked, other=0)
        h1 = tl.load(pairs + 12, mask=asked, other=0)
        l2 = tl.load(pairs + 16, mask=asked, other=0)
        h2 = tl.load(pairs + 20, mask=asked, other=0)
        l3 = tl.load(pairs + 24, mask=asked, other=0)
        h3 = tl.load(pairs + 28, mask=asked, other=0)
        l4 = tl.load(pairs + 32, mask=asked, other=0)
        h4 = tl.load(pairs + 36, mask=asked, other=0)
        l5 = tl.load(pairs + 40, mask=asked, other=0)
        h5 = tl.load(pairs + 44, mask=asked, other=0)
        l6 = tl.load(pairs + 48, mask=asked, other=0)
        h6 = tl.load(pairs + 52, mask=asked, other=0)
        l7 = tl.load(pairs + 56, mask=asked, other=0)
        h7 = tl.load(pairs + 60, mask=asked, other=0)
        scale = tl.load(half, mask=there, other=0)
        zero = scale
        if zeros is not None:
            zero = tl.load(eight, mask=there, other=0)
        d0 = tl.zeros([32, WARPS, 1], tl.float32)
        d1 = d0
        d0, d1 = _add_up(d0, d1, l0, h0, WARPS, ASM)
        d0, d1 = _add_up(d0, d1, l1, h1, WARPS, ASM)
        d0, d1 = _add_up(d0, d1, l2, h2, WARPS, ASM)
        d0, d1 = _add_up(d0, d1, l3, h3, WARPS, ASM)
        d0, d1 = _add_up(d0, d1, l4, h4, WARPS, ASM)
        d0, d1 = _add_up(d0, d1, l5, h5, WARPS, ASM)
        d0, d1 = _add_up(d0, d1, l6, h6, WARPS, ASM)
        d0, d1 = _add_up(d0, d1, l7, h7, WARPS, ASM)
        acc0, acc1, acc2, acc3 = _group(
            v0, v1, v2, v3, v4, v5, v6, v7, l0, h0, l1, h1, l2, h2, l3, h3, l4, h4, l5, h5, l6, h6, l7,
            h7, d0, d1, scale, zero, acc0, acc1, acc2, acc3, word, zeros is not None, WARPS, ASM,
        )  # fmt: skip
        at += 8 * jump
        more = first + turn + 1 < stop
        v0, v1, v2, v3, v4, v5, v6, v7 = _loaded(at, jump, more)
        half += outputs // 2
        pairs += 64
        if zeros is not None:
            eight += outputs // 8
    own = tl.arange(0, 8)
    known = own < tokens
    column = tile * 64 + tl.arange(0, 64)
    row = column
    if EPILOGUE == GATED:
        row = tile * 64 + tl.arange(0, 128) // 2 + tl.arange(0, 128) % 2 * (outputs // 2)
    # sums of warps meet in memory, where they lie as they are: the compiler must not lay them out anew
    mine = partial + tile * (SPLITS * WARPS * 512)
    at_sums = mine + (tl.program_id(1) * WARPS + warp) * 512 + lane * 4 + word
    _put(at_sums, lane, tokens, acc0, acc1, acc2, acc3)
    tl.debug_barrier()  # all stores of the program are before its arrival
    last = True
    if SPLITS > 1:
        last = tl.atomic_add(arrived + tile, 1, sem="acq_rel", scope="gpu") == SPLITS - 1
    if last:
        if SPLITS > 1:
            tl.store(arrived + tile, 0)
        # asked for together with the sums
        place = own[:, None] * (outputs // SIDES) + column[None, :]
        if SCALED:
            powers = load_squares(squares, own, tokens, parts, PARTS)
        if EPILOGUE == ADD:
            before = tl.load(residual + place, mask=known[:, None], other=0.0)
            gains = tl.load(gain + column).to(tl.float32)
        y = _take(mine, known, SPLITS * WARPS // SIDES, SIDES)
        if EPILOGUE == GATED:
            y = tl.join(y, _take(mine + 512, known, SPLITS * WARPS // SIDES, SIDES))
            y = tl.reshape(y, (8, 128))
        if SCALED:
            y *= tl.rsqrt(tl.sum(powers, 1) / inputs + eps)[:, None]
        if BIAS:
            y += tl.load(bias + row).to(tl.float32)[None, :]
        if EPILOGUE == GATED:
            gate, upper = tl.split(tl.reshape(y, (8, 64, 2)))
            tl.store(output + place, (opened(gate, GELU) * upper).to(KIND), mask=known[:, None])
        elif EPILOGUE == ADD:
            rounded = (y + before.to(tl.float32)).to(KIND)
            tl.store(residual + place, rounded, mask=known[:, None])
            wide = tl.where(known[:, None], rounded.to(tl.float32), 0.0)
            tl.store(output + place, (wide * gains[None, :]).to(KIND), mask=known[:, None])
            at_squares = squares_out + own * (outputs // 64) + tile
            tl.store(at_squares, tl.sum(wide * wide, 1), mask=known)
        else:
            tl.store(output + place, y.to(KIND), mask=known[:, None])
