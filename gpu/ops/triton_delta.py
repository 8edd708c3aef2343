"""Triton kernels for gated delta nets (Yang et al. 2024), from the first product's rows to the last's.

Decodes are one launch: convolution, norms of q and k, the recurrent rule, the gated norm; a program has
the matrix of one head in registers. Extends are cut into chunks of 64 tokens (the WY form), four
launches. States, sums and decays are float32; of 16-bit models the operands of products are 16-bit.

A program computes one head of one sequence alone, so no result depends on the batch. Deterministic mode
runs extends by the recurrent rule too, whose results do not depend on where a prompt is cut. `items`:
see `triton_conv`. The reference is `ops.fixed_states`. Imported only where Triton is used.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, import-untyped, import-not-found"

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ramify.gpu.ops.fixed_states import CHUNK, LayerDelta
from ramify.gpu.ops.triton_channels import chunk_products
from ramify.gpu.ops.triton_conv import begin, convolved, keep, silu, softplus
from ramify.gpu.programmatic_launch import overlap_options, wait

_L2_EPS = tl.constexpr(1e-6)
# Of products of float32: by tf32x3 Triton 3.6 reads beyond a Hopper's shared memory in such kernels
_PRECISION = tl.constexpr("ieee")
_SOLVED = tl.constexpr(16)  # rows of a system's blocks that are solved one after the other
_VALUES = 32  # of a head's values, how many a program with its state takes
_PREPARED = 16  # lines of a program that convolves


def recurrent(
    rows: Tensor, layer: LayerDelta, states: list[Tensor], items: Tensor, output: Tensor
) -> None:
    """Run each sequence of `items` token by token. rows [T, inputs], output [T, heads * values].

    Of sequences with drafts the state after each token is kept.
    """
    if len(items):
        sizes = _sizes(layer, _VALUES)
        blocks = triton.cdiv(layer.value_dim, sizes["BLOCK_V"])
        _recur[(len(items), layer.value_heads, blocks)](
            rows, rows.shape[1], layer.conv, *states, layer.decay, layer.decay_bias, items, output,
            **sizes, CHANNELS=layer.ups is not None, num_warps=4, **overlap_options(rows.device),
        )  # fmt: skip


def chunked(
    rows: Tensor,
    layer: LayerDelta,
    states: list[Tensor],
    items: Tensor,
    chunks: Tensor,
    lines: int,
    output: Tensor,
) -> None:
    """Run each sequence of `items` chunk by chunk; `chunks`: items of up to 64 tokens.

    The sequences' tokens are among the first `lines` of `rows`.
    """
    if not len(items):
        return
    sizes, device, heads = _sizes(layer), rows.device, layer.value_heads
    options = overlap_options(rows.device)
    qkv = rows.new_empty((lines, layer.parts[0]))
    keys, values = (rows.new_empty((lines, heads, size)) for size in (layer.key_dim, layer.value_dim))
    _prepare[(len(chunks) * CHUNK // _PREPARED, 2 * layer.key_heads + heads)](
        rows, rows.shape[1], layer.conv, states[0], chunks, qkv, **sizes, LINES=_PREPARED, WHOLE=CHUNK,
        num_warps=4, **options,
    )  # fmt: skip
    if layer.ups is None:
        system = scores = None
        passed = torch.empty((lines, heads), dtype=torch.float32, device=device)
    else:
        passed, system, scores = chunk_products(rows, qkv, layer, chunks, options)
    _solve[(len(chunks), heads)](
        rows, rows.shape[1], qkv, layer.decay, layer.decay_bias, chunks, passed, system, keys, values,
        **sizes, LINES=CHUNK, num_warps=8, **options,
    )  # fmt: skip
    sizes = _sizes(layer, _VALUES)
    _chunks[(len(items), heads, triton.cdiv(layer.value_dim, sizes["BLOCK_V"]))](
        qkv, passed, scores, keys, values, states[1], items, output, **sizes, LINES=CHUNK,
        num_warps=4, num_stages=2 if sizes["BLOCK_K"] <= 128 else 1, **options,
    )  # fmt: skip


def gated_norm(rows: Tensor, layer: LayerDelta, items: Tensor, lines: int, output: Tensor) -> None:
    """Apply norm and gates to each head's outputs, in place. An item has up to `lines` tokens."""
    if len(items):
        _open[(len(items), layer.value_heads)](
            rows, rows.shape[1], layer.norm.weight, items, output, layer.norm.eps, **_sizes(layer),
            SIGMOID=layer.ups is not None, LINES=lines, num_warps=4 if lines > 1 else 1,
            **overlap_options(rows.device),
        )  # fmt: skip


def _sizes(layer: LayerDelta, most: int = 1 << 30) -> dict[str, Any]:
    """Compute a kernel's sizes. `most`: values of a head that a program takes."""
    return {
        "KEY_HEADS": layer.key_heads, "VALUE_HEADS": layer.value_heads, "KEYS": layer.key_dim,
        "VALUES": layer.value_dim, "BLOCK_K": max(16, triton.next_power_of_2(layer.key_dim)),
        "BLOCK_V": min(most, max(16, triton.next_power_of_2(layer.value_dim))),
        "TAPS": layer.conv.shape[2],
    }  # fmt: skip


@triton.jit
def _decay(rate, bias, head, x):
    """Compute the logarithm of a head's decay, of its row's value `x`."""
    x = x.to(tl.float32) + tl.load(bias + head)
    return -tl.exp(tl.load(rate + head)) * softplus(x)


@triton.jit
def _recur(
    rows, stride, conv, inputs, states, rate, rate_bias, items, output,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, TAPS: tl.constexpr, CHANNELS: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    WIDTH: tl.constexpr = 2 * KEY_HEADS * KEYS + VALUE_HEADS * VALUES
    SHARED: tl.constexpr = VALUE_HEADS // KEY_HEADS
    SIZE: tl.constexpr = KEYS * VALUES
    head = tl.program_id(1)
    origin, target, first, spare, count, key, value, place, state = begin(
        items, states, VALUE_HEADS, KEYS, VALUES, BLOCK_K, BLOCK_V
    )
    there = (key < KEYS)[:, None] & (value < VALUES)[None, :]
    wait(OVERLAP)
    if target == 0:
        return

    some_keys = key < KEYS
    some_values = value < VALUES
    q_channel = head // SHARED * KEYS + key
    k_channel = KEY_HEADS * KEYS + q_channel
    v_channel = 2 * KEY_HEADS * KEYS + head * VALUES + value
    for at in range(count):
        q = silu(convolved(rows, stride, conv, inputs, origin, first, at, q_channel, some_keys,
                            some_keys, WIDTH, TAPS, False))  # fmt: skip
        k = silu(convolved(rows, stride, conv, inputs, origin, first, at, k_channel, some_keys,
                            some_keys, WIDTH, TAPS, False))  # fmt: skip
        v = silu(convolved(rows, stride, conv, inputs, origin, first, at, v_channel, some_values,
                            some_values, WIDTH, TAPS, False))  # fmt: skip
        q *= tl.rsqrt(tl.sum(q * q) + _L2_EPS) * KEYS**-0.5
        k *= tl.rsqrt(tl.sum(k * k) + _L2_EPS)
        line = rows + (first + at) * stride + WIDTH + VALUE_HEADS * VALUES + head
        beta = 1.0 / (1.0 + tl.exp(-tl.load(line).to(tl.float32)))
        if CHANNELS:  # each of the keys decays by itself
            own = head * KEYS + key
            x = tl.load(line - head + VALUE_HEADS + own, mask=some_keys, other=0.0).to(tl.float32)
            x += tl.load(rate_bias + own, mask=some_keys, other=0.0)
            state *= tl.exp(-tl.exp(tl.load(rate + head)) * softplus(x))[:, None]
        else:
            state *= tl.exp(_decay(rate, rate_bias, head, tl.load(line + VALUE_HEADS)))
        seen = tl.sum(state * k[:, None], 0)
        state += k[:, None] * ((v - seen) * beta)[None, :]
        y = tl.sum(state * q[:, None], 0)
        token = output + (first + at) * (VALUE_HEADS * VALUES) + head * VALUES + value
        tl.store(token, y.to(output.dtype.element_ty), mask=some_values)
        if (at + 1 == count) | (spare > 0):
            slot = tl.where(at + 1 == count, target, spare + at)
            tl.store(states + slot * (VALUE_HEADS * SIZE) + place, state, mask=there)
            keep(rows, stride, inputs, origin, slot, first, at + 1, v_channel, some_values, WIDTH, TAPS,
                 False)  # fmt: skip
            if (head % SHARED == 0) & (tl.program_id(2) == 0):
                keep(rows, stride, inputs, origin, slot, first, at + 1, q_channel, some_keys, WIDTH,
                     TAPS, False)  # fmt: skip
                keep(rows, stride, inputs, origin, slot, first, at + 1, k_channel, some_keys, WIDTH,
                     TAPS, False)  # fmt: skip


@triton.jit
def _prepare(
    rows, stride, conv, inputs, chunks, qkv, KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr,
    KEYS: tl.constexpr, VALUES: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    TAPS: tl.constexpr, LINES: tl.constexpr, WHOLE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Convolve one head's channels: q, then k, then v; normalise q and k."""
    WIDTH: tl.constexpr = 2 * KEY_HEADS * KEYS + VALUE_HEADS * VALUES
    BLOCK: tl.constexpr = BLOCK_K if BLOCK_K > BLOCK_V else BLOCK_V
    parts: tl.constexpr = WHOLE // LINES
    item = chunks + tl.program_id(0) // parts * 5
    head = tl.program_id(1)
    origin = tl.load(item).to(tl.int64)
    target = tl.load(item + 1).to(tl.int64)
    first = tl.load(item + 2).to(tl.int64)
    offset = tl.load(item + 3) + tl.program_id(0) % parts * LINES
    count = tl.load(item + 4)
    wait(OVERLAP)
    if offset >= count:
        return

    is_value = head >= 2 * KEY_HEADS
    size = tl.where(is_value, VALUES, KEYS)
    begin = head * KEYS
    if is_value:
        begin = 2 * KEY_HEADS * KEYS + (head - 2 * KEY_HEADS) * VALUES
    inside = tl.arange(0, BLOCK) < size
    channel = begin + tl.arange(0, BLOCK)
    at = (offset + tl.arange(0, LINES))[:, None]
    there = (at < count) & inside[None, :]
    x = silu(convolved(rows, stride, conv, inputs, origin, first, at, channel[None, :], there,
                        inside[None, :], WIDTH, TAPS, False))  # fmt: skip
    if not is_value:
        scale = tl.rsqrt(tl.sum(x * x, 1) + _L2_EPS)
        scale *= tl.where(head < KEY_HEADS, KEYS**-0.5, 1.0)
        x *= scale[:, None]
    tl.store(qkv + (first + at) * WIDTH + channel[None, :], x.to(qkv.dtype.element_ty), mask=there)
    if offset + LINES >= count:
        keep(rows, stride, inputs, origin, target, first, count, channel, inside, WIDTH, TAPS, False)


@triton.jit
def _inverse(system, LINES: tl.constexpr, PRECISION: tl.constexpr):
    """Invert 1 + system, of a strictly lower triangular matrix: small blocks by elimination, then pairs
    of blocks by products (the UT transform). No power of the matrix is formed: they may be huge."""
    i = tl.arange(0, LINES)[:, None]
    j = tl.arange(0, LINES)[None, :]
    solved = tl.where(i == j, 1.0, 0.0)
    block = i // _SOLVED == j // _SOLVED
    for step in range(_SOLVED - 1):
        column = tl.sum(tl.where(j == i // _SOLVED * _SOLVED + step, system, 0.0), 1)
        row = tl.sum(tl.where(i == j // _SOLVED * _SOLVED + step, solved, 0.0), 0)
        solved -= tl.where(block, column[:, None] * row[None, :], 0.0)
    size: tl.constexpr = _SOLVED
    for level in tl.static_range(2):
        side = size << level
        below = tl.where((i // side % 2 == 1) & (j // side == i // side - 1), system, 0.0)
        inner = tl.dot(below, solved, input_precision=PRECISION)
        solved -= tl.dot(solved, inner, input_precision=PRECISION)
    return solved


@triton.jit
def _solve(
    rows, stride, qkv, rate, rate_bias, chunks, passed, system, keys, values, KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, TAPS: tl.constexpr, LINES: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Compute `values` and `keys` of a chunk's WY form, which do not depend on the state.

    passed float32[lines, heads]: the decay since the chunk began, a logarithm. Where channels decay by
    themselves `passed` and `system` are `chunk_products`', and q and k are replaced by what is
    multiplied with the state: q decayed since the chunk began, k up to its end.
    """
    WIDTH: tl.constexpr = 2 * KEY_HEADS * KEYS + VALUE_HEADS * VALUES
    item = chunks + tl.program_id(0) * 5
    head = tl.program_id(1)
    target = tl.load(item + 1)
    first = tl.load(item + 2).to(tl.int64)
    offset = tl.load(item + 3)
    count = tl.load(item + 4)
    wait(OVERLAP)
    if target == 0:
        return

    lines = tl.arange(0, LINES)
    there = offset + lines < count
    line = first + offset + lines
    key = tl.arange(0, BLOCK_K)
    value = tl.arange(0, BLOCK_V)
    own_keys = there[:, None] & (key < KEYS)[None, :]
    own_values = there[:, None] & (value < VALUES)[None, :]
    part = rows + line * stride + WIDTH + VALUE_HEADS * VALUES + head
    beta = 1.0 / (1.0 + tl.exp(-tl.load(part, mask=there, other=0.0).to(tl.float32)))
    source = qkv + line[:, None] * WIDTH
    group: tl.constexpr = VALUE_HEADS // KEY_HEADS
    at_keys = (KEY_HEADS + head // group) * KEYS + key[None, :]
    at_values = 2 * KEY_HEADS * KEYS + head * VALUES + value[None, :]
    place = line[:, None] * VALUE_HEADS + head
    kind: tl.constexpr = qkv.dtype.element_ty
    # in 16-bit models the system alone is float32, and tf32x3 was seen to be right
    precision: tl.constexpr = "ieee" if kind == tl.float32 else "tf32x3"
    if system is None:
        decay = _decay(rate, rate_bias, head, tl.load(part + VALUE_HEADS, mask=there, other=0.0))
        sums = tl.cumsum(tl.where(there, decay, 0.0), 0)
        k = tl.load(source + at_keys, mask=own_keys, other=0.0)
        near = (k.to(tl.float32) * beta[:, None]).to(kind)
        lower = tl.dot(near, tl.trans(k), input_precision=_PRECISION)
        later = lines[:, None] > lines[None, :]
        between = tl.exp(tl.where(later, sums[:, None] - sums[None, :], 0.0))
        lower = tl.where(later, lower * between, 0.0)
        tl.store(passed + line * VALUE_HEADS + head, sums, mask=there)
        weight = (beta * tl.exp(sums))[:, None]
    else:
        weight = beta[:, None]
        lower = tl.load(system + place * LINES + lines[None, :], mask=there[:, None], other=0.0)
    solved = _inverse(lower, LINES, precision).to(kind)
    # loaded here, and the keys again, because there are no registers for them above
    v = tl.load(source + at_values, mask=own_values, other=0.0).to(tl.float32)
    written = tl.dot(solved, (v * beta[:, None]).to(kind), input_precision=_PRECISION)
    tl.store(values + place * VALUES + value[None, :], written.to(kind), mask=own_values)
    k = tl.load(source + at_keys, mask=own_keys, other=0.0)
    if system is not None:
        inside = (key < KEYS)[None, :]
        sums = tl.load(passed + place * KEYS + key[None, :], mask=own_keys, other=0.0)
        end = (first + tl.minimum(offset + LINES, count) - 1) * VALUE_HEADS + head
        last = tl.load(passed + end * KEYS + key[None, :], mask=inside, other=0.0)
        q = tl.load(qkv + line[:, None] * WIDTH + head * KEYS + key[None, :], mask=own_keys, other=0.0)
        q = (q.to(tl.float32) * tl.exp(sums)).to(kind)
        tl.store(qkv + line[:, None] * WIDTH + head * KEYS + key[None, :], q, mask=own_keys)
        left = (k.to(tl.float32) * tl.exp(tl.where(own_keys, last - sums, 0.0))).to(kind)
        tl.store(qkv + line[:, None] * WIDTH + at_keys, left, mask=own_keys)
        weight *= tl.exp(sums)
    read = tl.dot(solved, (k.to(tl.float32) * weight).to(kind), input_precision=_PRECISION)
    tl.store(keys + place * KEYS + key[None, :], read.to(kind), mask=own_keys)


@triton.jit
def _chunks(
    qkv, passed, decayed, keys, values, states, items, output, KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, TAPS: tl.constexpr, LINES: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Update the state chunk after chunk, and compute outputs, for some of a head's values.

    `decayed`: the products of q and k where channels decay by themselves.
    """
    WIDTH: tl.constexpr = 2 * KEY_HEADS * KEYS + VALUE_HEADS * VALUES
    SIZE: tl.constexpr = KEYS * VALUES
    head = tl.program_id(1)
    _, target, first, _, count, key, value, place, state = begin(
        items, states, VALUE_HEADS, KEYS, VALUES, BLOCK_K, BLOCK_V
    )
    some_keys = (key < KEYS)[None, :]
    some_values = (value < VALUES)[None, :]
    whole = (key < KEYS)[:, None] & some_values
    wait(OVERLAP)
    if target == 0:
        return

    lines = tl.arange(0, LINES)
    group: tl.constexpr = VALUE_HEADS // KEY_HEADS
    at_q = head // group * KEYS + key[None, :]
    for offset in range(0, count, LINES):
        there = offset + lines < count
        line = first + offset + lines
        source = qkv + line[:, None] * WIDTH + at_q
        at = line[:, None] * VALUE_HEADS + head
        own_keys = there[:, None] & some_keys
        own_values = there[:, None] & some_values
        q = tl.load(source, mask=own_keys, other=0.0)
        k = tl.load(source + KEY_HEADS * KEYS, mask=own_keys, other=0.0)
        read = tl.load(keys + at * KEYS + key[None, :], mask=own_keys, other=0.0)
        written = tl.load(values + at * VALUES + value[None, :], mask=own_values, other=0.0)
        end = (first + tl.minimum(offset + LINES, count) - 1) * VALUE_HEADS + head
        kind = q.dtype
        held = state.to(kind)
        added = written.to(tl.float32) - tl.dot(read, held, input_precision=_PRECISION)
        y = tl.dot(q, held, input_precision=_PRECISION)
        if decayed is None:
            last = tl.load(passed + end)
            sums = tl.load(passed + line * VALUE_HEADS + head, mask=there, other=0.0)
            sums = tl.where(there, sums, last)
            seen = lines[:, None] >= lines[None, :]
            between = tl.exp(tl.where(seen, sums[:, None] - sums[None, :], 0.0))
            scores = tl.dot(q, tl.trans(k), input_precision=_PRECISION)
            scores = tl.where(seen, scores * between, 0.0).to(kind)
            y *= tl.exp(sums)[:, None]
            left = added * tl.exp(last - sums)[:, None]
            kept = tl.exp(last)
        else:
            scores = tl.load(decayed + at * LINES + lines[None, :], mask=there[:, None], other=0.0)
            left = added
            kept = tl.exp(tl.load(passed + end * KEYS + key, mask=key < KEYS, other=0.0))[:, None]
        y += tl.dot(scores, added.to(kind), input_precision=_PRECISION)
        tl.store(output + at * VALUES + value[None, :], y.to(output.dtype.element_ty), mask=own_values)
        state = state * kept + tl.dot(tl.trans(k), left.to(kind), input_precision=_PRECISION)
    tl.store(states + target * (VALUE_HEADS * SIZE) + place, state, mask=whole)


@triton.jit
def _open(
    rows, stride, gain, chunks, output, eps, KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr,
    KEYS: tl.constexpr, VALUES: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    TAPS: tl.constexpr, SIGMOID: tl.constexpr, LINES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Normalise a head's outputs and open their gates, in place."""
    WIDTH: tl.constexpr = 2 * KEY_HEADS * KEYS + VALUE_HEADS * VALUES
    item = chunks + tl.program_id(0) * 5
    first = tl.load(item + 2).to(tl.int64)
    offset = tl.load(item + 3)
    count = tl.load(item + 4)
    at = (offset + tl.arange(0, LINES))[:, None]
    value = tl.arange(0, BLOCK_V)[None, :]
    there = (at < count) & (value < VALUES)
    place = tl.program_id(1) * VALUES + value
    gains = tl.load(gain + value, mask=value < VALUES, other=0.0).to(tl.float32)
    wait(OVERLAP)
    token = output + (first + at) * (VALUE_HEADS * VALUES) + place
    mixed = tl.load(token, mask=there, other=0.0).to(tl.float32)
    gate = tl.load(rows + (first + at) * stride + WIDTH + place, mask=there, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(mixed * mixed, 1) / VALUES + eps)
    opened = silu(gate)
    if SIGMOID:
        opened = 1.0 / (1.0 + tl.exp(-gate))
    y = mixed * scale[:, None] * gains * opened
    tl.store(token, y.to(output.dtype.element_ty), mask=there)
