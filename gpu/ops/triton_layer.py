"""Triton kernels for the operations between the matrix products of a decoder layer.

Each replaces several torch operations by one launch. On a GPU the number of kernels limits a small
model's step: each takes about 1 us inside a CUDA graph, whatever it does. Sums are in float32; a result
is rounded once. The references are the plain layers beside this file. This file knows neither models nor
requests. Imported only where Triton is used; runs on a CPU with TRITON_INTERPRET=1.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, import-untyped, import-not-found"

import torch
import triton
import triton.language as tl
from torch import Tensor

from ramify.gpu.kv.layout import LayerKV
from ramify.gpu.ops.base import Activation, LayerAttention
from ramify.gpu.ops.rmsnorm import RMSNorm
from ramify.gpu.programmatic_launch import (
    launch_options,
    overlap_options,
    overlaps,
    wait,
    wait_first,
)
from ramify.gpu.triton_fp8 import narrowed, scale_of


def embed_norm(
    input_ids: Tensor, last: Tensor, table: Tensor, scale: float, norm: "RMSNorm | None"
) -> tuple[Tensor, Tensor]:
    """Look inputs up, times `scale`, and normalise them for the first layer.

    input_ids int32[T]: a token, or -(row + 1) for the token that `last` int32[rows] holds of a row.
    Returns (embeddings, normalised), both [T, hidden] in the table's type; without a norm one twice.
    """
    tokens, hidden = len(input_ids), table.shape[1]
    residual = table.new_empty((tokens, hidden))
    normed = residual if norm is None else torch.empty_like(residual)
    block = triton.next_power_of_2(hidden)
    weight, eps = (residual, 0.0) if norm is None else (norm.weight, norm.eps)  # not read without one
    _embed_norm[(tokens,)](
        input_ids, last, table, weight, residual, normed, hidden, eps, BLOCK=block, SCALE=scale,
        NORM=norm is not None, num_warps=_warps(block),
    )  # fmt: skip
    return residual, normed


def add_norm(
    x: "Tensor | None",
    residual: Tensor,
    norm: "RMSNorm | None",
    other: "Tensor | None" = None,
    normed: "Tensor | None" = None,
) -> Tensor:
    """Add x, if there is one, to residual in place. Returns that, normalised if there is a norm.

    All [T, hidden]. `other`: is added to x. `normed`: gets the result; None: new memory does. With
    `other` the kernel starts only when the one before it is over.
    """
    if normed is None:
        normed = residual if norm is None else torch.empty_like(residual)
    weight, eps = (residual, 0.0) if norm is None else (norm.weight, norm.eps)  # not read without one
    (tokens, hidden), device = residual.shape, residual.device
    block = triton.next_power_of_2(hidden)
    early = overlap_options(device) if other is None else {"OVERLAP": False}
    _add_norm[(tokens,)](
        x, other, residual, weight, normed, hidden, eps, BLOCK=block, ADD=x is not None,
        NORM=norm is not None, num_warps=_warps(block), **early,
    )  # fmt: skip
    return normed


def divide_rows(values: Tensor, squares: Tensor, which: "Tensor | None", eps: float) -> Tensor:
    """Complete an RMS norm that `triton_linear` began: divide rows by their root mean square.

    values [T, hidden]; squares float32[T, parts] add up to the sum of squares of each row; which
    int[S]: the rows wanted, None: all. Returns [S, hidden].
    """
    hidden = values.shape[1]
    output = values.new_empty((len(values) if which is None else len(which), hidden))
    block = triton.next_power_of_2(hidden)
    _divide_rows[(len(output),)](
        values, squares, which, output, hidden, squares.shape[1], eps, BLOCK=block,
        PARTS=triton.next_power_of_2(squares.shape[1]), CHOSEN=which is not None,
        OVERLAP=overlaps(values.device), num_warps=_warps(block), **launch_options(values.device),
    )  # fmt: skip
    return output


def gate_mul(gate_up: Tensor, activation: Activation, output: "Tensor | None" = None) -> Tensor:
    """Compute activation(gate) * up of [T, 2 * size], the gate first -> [T, size], in `output`."""
    tokens, size = len(gate_up), gate_up.shape[1] // 2
    if output is None:
        output = gate_up.new_empty((tokens, size))
    block = min(1024, triton.next_power_of_2(size))
    _gate_mul[(tokens, triton.cdiv(size, block))](
        gate_up, output, size, BLOCK=block, GELU=activation == "gelu_tanh",
        OVERLAP=overlaps(gate_up.device), num_warps=4, **launch_options(gate_up.device),
    )  # fmt: skip
    return output


def rope_store(
    qkv: Tensor,
    layer: LayerAttention,
    cos_sin: "tuple[Tensor, Tensor]",
    rows: Tensor,
    positions: Tensor,
    pages: Tensor,
    kv: LayerKV,
    turns: "Tensor | None" = None,
) -> Tensor:
    """Normalise (if the layer does) and rotate q and k, write k and v into `kv`. Returns q [T, heads,
    D].

    A layer that reads another one's keys and values writes none. With norms over all heads each program
    reads all of q, or of k: they are few, and lie in the cache.

    qkv [T, (heads + kv_parts * kv_heads) * D, or more]; cos_sin: each float32[positions, D / 2]; rows,
    positions int32[T]; pages int32[rows, columns]. turns int32[3, T]: is added to each token's position
    for its rotation by time, row and column (M-RoPE); the layer's rotary says which of them rotates
    which pair. None: nothing is added.
    """
    heads, kv_heads, dim = layer.heads, layer.kv_heads, layer.head_dim
    tokens, norms = len(qkv), layer.q_norm is not None
    q = qkv.new_empty((tokens, heads, dim))
    # heads that one program takes: the largest power of two in both counts, so that none is mixed
    together = min(16, heads & -heads, kv_heads & -kv_heads)
    q_weight, k_weight, eps = qkv, qkv, 0.0  # not read without norms
    if layer.q_norm is not None:
        k_norm = layer.q_norm if layer.k_norm is None else layer.k_norm  # not read without keys
        q_weight, k_weight, eps = layer.q_norm.weight, k_norm.weight, layer.q_norm.eps
    stored = 2 * kv_heads if layer.kv_parts else 0
    _rope_store[(tokens, (heads + stored) // together)](
        qkv, q, kv.k, kv.v, kv.k_scales, kv.v_scales, q_weight, k_weight, cos_sin[0], cos_sin[1], rows,
        positions, pages, turns, None if turns is None else layer.rotary.axes,
        qkv.shape[1], pages.shape[1], len(rows), eps, layer.value_eps or 0.0, HEADS=heads,
        KV_HEADS=kv_heads, DIM=dim, HALF=dim // 2, TOGETHER=together, PAGE=kv.page_size,
        NORM=norms, WIDE=layer.wide_norms,
        KV_PARTS=layer.kv_parts, VALUE_NORM=layer.value_eps is not None,
        BLOCK=min(1024, triton.next_power_of_2(heads * dim)), OVERLAP=overlaps(qkv.device),
        num_warps=2, **launch_options(qkv.device),
    )  # fmt: skip
    return q


def open_heads(output: Tensor, qkv: Tensor) -> Tensor:
    """Multiply output [T, width] in place by the sigmoid of the last columns of qkv [T, ..]."""
    tokens, width = output.shape
    block = min(1024, triton.next_power_of_2(width))
    _open_heads[(tokens, triton.cdiv(width, block))](
        output, qkv, width, qkv.shape[1], BLOCK=block, OVERLAP=overlaps(output.device), num_warps=4,
        **launch_options(output.device),
    )  # fmt: skip
    return output


def _warps(block: int) -> int:
    return min(16, max(1, block // 512))


@triton.jit
def _embed_norm(
    input_ids, last, table, weight, residual, normed, hidden, eps, BLOCK: tl.constexpr,
    SCALE: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64)
    token = tl.load(input_ids + index)
    if token < 0:
        token = tl.load(last + (-token - 1))
    columns = tl.arange(0, BLOCK)
    inside = columns < hidden
    x = tl.load(table + token.to(tl.int64) * hidden + columns, mask=inside, other=0.0)
    if SCALE != 1.0:
        x = (x.to(tl.float32) * SCALE).to(residual.dtype.element_ty)
    tl.store(residual + index * hidden + columns, x, mask=inside)
    if NORM:
        wide = x.to(tl.float32)
        scale = tl.rsqrt(tl.sum(wide * wide) / hidden + eps)
        gain = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
        y = (wide * scale * gain).to(normed.dtype.element_ty)
        tl.store(normed + index * hidden + columns, y, mask=inside)


@triton.jit
def _add_norm(
    x, other, residual, weight, normed, hidden, eps, BLOCK: tl.constexpr, ADD: tl.constexpr,
    NORM: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    wait(OVERLAP)
    start = tl.program_id(0).to(tl.int64) * hidden
    columns = tl.arange(0, BLOCK)
    inside = columns < hidden
    total = tl.load(residual + start + columns, mask=inside, other=0.0)
    if ADD:
        added = tl.load(x + start + columns, mask=inside, other=0.0).to(tl.float32)
        if other is not None:
            added += tl.load(other + start + columns, mask=inside, other=0.0).to(tl.float32)
        total = (added + total.to(tl.float32)).to(residual.dtype.element_ty)
        tl.store(residual + start + columns, total, mask=inside)
    if NORM:
        wide = total.to(tl.float32)
        scale = tl.rsqrt(tl.sum(wide * wide) / hidden + eps)
        gain = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
        y = (wide * scale * gain).to(normed.dtype.element_ty)
        tl.store(normed + start + columns, y, mask=inside)


@triton.jit(do_not_specialize_on_alignment=["which"])  # it may be a slice
def _divide_rows(
    values, squares, which, output, hidden, parts, eps, BLOCK: tl.constexpr, PARTS: tl.constexpr,
    CHOSEN: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    wait(OVERLAP)
    place = tl.program_id(0).to(tl.int64)
    row = place
    if CHOSEN:
        row = tl.load(which + place).to(tl.int64)
    part = tl.arange(0, PARTS)
    total = tl.sum(tl.load(squares + row * parts + part, mask=part < parts, other=0.0))
    columns = tl.arange(0, BLOCK)
    inside = columns < hidden
    x = tl.load(values + row * hidden + columns, mask=inside, other=0.0).to(tl.float32)
    y = x * tl.rsqrt(total / hidden + eps)
    tl.store(output + place * hidden + columns, y.to(output.dtype.element_ty), mask=inside)


@triton.jit
def opened(gate, GELU: tl.constexpr):
    """Apply a gate's activation, float32: SiLU, or GELU by its tanh formula."""
    if GELU:
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        y = gate - gate / (1.0 + tl.exp(2.0 * inner))  # gate / 2 * (1 + tanh(inner))
    else:
        y = gate / (1.0 + tl.exp(-gate))
    return y


@triton.jit
def _gate_mul(
    gate_up, output, size, BLOCK: tl.constexpr, GELU: tl.constexpr, OVERLAP: tl.constexpr
):  # fmt: skip
    wait(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    gate = tl.load(gate_up + token * 2 * size + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + token * 2 * size + size + columns, mask=inside, other=0.0).to(tl.float32)
    y = opened(gate, GELU) * up
    tl.store(output + token * size + columns, y.to(output.dtype.element_ty), mask=inside)


@triton.jit
def _open_heads(output, qkv, width, stride, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    wait(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    gate = tl.load(qkv + (token + 1) * stride - width + columns, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(output + token * width + columns, mask=inside, other=0.0).to(tl.float32)
    y = y / (1.0 + tl.exp(-gate))
    tl.store(output + token * width + columns, y.to(output.dtype.element_ty), mask=inside)


@triton.jit
def _mean_square(row, size: tl.constexpr, BLOCK: tl.constexpr):
    columns = tl.arange(0, BLOCK)
    squares = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, size, BLOCK):
        x = tl.load(row + start + columns, mask=start + columns < size, other=0.0).to(tl.float32)
        squares += x * x
    return tl.sum(squares) / size


@triton.jit
def _rope_store(
    qkv, q_out, k_pool, v_pool, k_scales, v_scales, q_weight, k_weight, cos, sin, rows, positions, pages,
    turns, axes, stride, columns, lines, eps, value_eps, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    DIM: tl.constexpr, HALF: tl.constexpr, TOGETHER: tl.constexpr, PAGE: tl.constexpr,
    NORM: tl.constexpr, WIDE: tl.constexpr, KV_PARTS: tl.constexpr, VALUE_NORM: tl.constexpr,
    BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Run `rope_store` for some heads. k_scales, v_scales: see `triton_tile.take_keys`."""
    token = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * TOGETHER
    taken = first
    if KV_PARTS == 1 and first >= HEADS + KV_HEADS:
        taken = first - KV_HEADS
    heads = tl.arange(0, TOGETHER)[:, None]
    half = tl.arange(0, HALF)[None, :]
    position = tl.load(positions + token)
    row = tl.load(rows + token).to(tl.int64)
    page = tl.load(pages + row * columns + position // PAGE).to(tl.int64)
    slot = page * PAGE + position % PAGE
    wait_first(OVERLAP)
    source = qkv + token * stride + (taken + heads) * DIM + half
    low = tl.load(source)
    high = tl.load(source + HALF)
    if first >= HEADS + KV_HEADS:
        if VALUE_NORM:
            low_value, high_value = low.to(tl.float32), high.to(tl.float32)
            power = tl.sum(low_value * low_value + high_value * high_value, 1) / DIM
            factor = tl.rsqrt(power + value_eps)[:, None]
            low = (low_value * factor).to(qkv.dtype.element_ty)
            high = (high_value * factor).to(qkv.dtype.element_ty)
        own = slot * KV_HEADS + first - HEADS - KV_HEADS + heads
        _keep(v_pool, v_scales, own, low, high, half, DIM, HALF)
    else:
        low_wide, high_wide = low.to(tl.float32), high.to(tl.float32)
        is_q = first < HEADS
        if NORM:
            if WIDE:
                whole = qkv + token * stride
                if is_q:
                    scale = tl.rsqrt(_mean_square(whole, HEADS * DIM, BLOCK) + eps)
                else:
                    scale = tl.rsqrt(_mean_square(whole + HEADS * DIM, KV_HEADS * DIM, BLOCK) + eps)
                place = (first + heads) * DIM + half
            else:
                square = tl.sum(low_wide * low_wide + high_wide * high_wide, 1) / DIM
                scale = tl.rsqrt(square + eps)[:, None]
                place = half
            if is_q:
                gains = q_weight + place
            else:
                gains = k_weight + place
                if WIDE:
                    gains -= HEADS * DIM
            gain_low, gain_high = tl.load(gains), tl.load(gains + HALF)
            low_wide = low_wide * scale * gain_low.to(tl.float32)
            high_wide = high_wide * scale * gain_high.to(tl.float32)
        turned = position.to(tl.int64)
        if turns is not None:
            turned += tl.load(turns + tl.load(axes + half).to(tl.int64) * lines + token)
        c = tl.load(cos + turned * HALF + half)
        s = tl.load(sin + turned * HALF + half)
        turned_low = (low_wide * c - high_wide * s).to(q_out.dtype.element_ty)
        turned_high = (high_wide * c + low_wide * s).to(q_out.dtype.element_ty)
        if is_q:
            target = q_out + token * HEADS * DIM + (first + heads) * DIM + half
            tl.store(target, turned_low)
            tl.store(target + HALF, turned_high)
        else:
            own = slot * KV_HEADS + first - HEADS + heads
            _keep(k_pool, k_scales, own, turned_low, turned_high, half, DIM, HALF)


@triton.jit
def _keep(pool, scales, own, low, high, half, DIM: tl.constexpr, HALF: tl.constexpr):
    """Store both halves of heads, `own` [heads, 1] of the pool; as codes, if there are scales."""
    if scales is not None:
        low, high = low.to(tl.float32), high.to(tl.float32)
        scale = scale_of(tl.max(tl.maximum(tl.abs(low), tl.abs(high)), 1, keep_dims=True))
        tl.store(scales + own, scale)
        low, high = narrowed(low / scale), narrowed(high / scale)
    tl.store(pool + own * DIM + half, low)
    tl.store(pool + own * DIM + half + HALF, high)


@triton.jit
def gather(acc, partial, place, inside, arrived, tokens, outputs, SPLITS: tl.constexpr):
    """Store this program's sums. The last program of the tile gets (the sum of all, True).

    The sum is made in the order of the splits, not in that of their arrival.
    """
    layer = tokens.to(tl.int64) * outputs
    tl.store(partial + tl.program_id(1) * layer + place, acc, mask=inside)
    tl.debug_barrier()  # all stores of the program are before its arrival
    counter = arrived + tl.program_id(0)
    last = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == SPLITS - 1
    total = tl.zeros_like(acc)
    if last:
        tl.store(counter, 0)
        for split in tl.static_range(SPLITS):
            total += tl.load(
                partial + split * layer + place, mask=inside, other=0.0, cache_modifier=".cg"
            )
    return total, last


@triton.jit
def load_squares(squares, token, tokens, parts, PARTS: tl.constexpr):
    part = tl.arange(0, PARTS)
    there = (token < tokens)[:, None] & (part < parts)[None, :]
    return tl.load(squares + token[:, None] * parts + part[None, :], mask=there, other=0.0)
