"""Triton kernels for Mamba-2 (Dao & Gu 2024), from the first product's rows to the last's.

Decodes are two launches: convolution and recurrent rule, where a program has a part of one head's
matrix in registers; the gated norm. Extends are cut into chunks of 32 tokens (the dual form), three
launches. States, sums and decays are float32; of 16-bit models the operands of products are 16-bit.

A program computes one sequence alone, so no result depends on the batch. Deterministic mode runs extends
by the recurrent rule too, whose results do not depend on where a prompt is cut. `items`: see
`triton_conv`. The reference is `ops.fixed_states`. Imported only where Triton is used.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, import-untyped, import-not-found"

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ramify.gpu.ops.fixed_states import CHUNK, LayerMamba
from ramify.gpu.ops.triton_conv import begin, convolved, keep, silu, softplus
from ramify.gpu.programmatic_launch import overlap_options, wait

_PRECISION = tl.constexpr("ieee")  # of products of float32
_VALUES = 32  # of a head's values, how many a program with its state takes
_SCANNED = 32  # tokens of a chunk; with 64, Triton 3.6 makes code for Hopper that reads past its memory
_PREPARED = 16  # lines of a program that convolves
_CHANNELS = 64  # ... and channels
_WIDE = 4096  # values of a group, from which on more warps normalise it


def recurrent(
    rows: Tensor, layer: LayerMamba, states: list[Tensor], items: Tensor, output: Tensor
) -> None:
    """Run sequences as `triton_delta.recurrent` does."""
    if len(items):
        sizes = _sizes(layer)
        blocks = triton.cdiv(layer.head_dim, sizes["BLOCK_V"])
        _scan[(len(items), layer.heads, blocks)](
            rows, rows.shape[1], layer.conv, layer.conv_bias, *states, layer.decay, layer.step_bias,
            layer.skip, items, output, TAPS=layer.conv.shape[2], **sizes, num_warps=4,
            **overlap_options(rows.device),
        )  # fmt: skip


def chunked(
    rows: Tensor,
    layer: LayerMamba,
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
    sizes, width = _sizes(layer), layer.parts[1]
    xbc = rows.new_empty((lines, width))
    _convolve[(len(chunks) * CHUNK // _PREPARED, triton.cdiv(width, _CHANNELS))](
        rows, rows.shape[1], layer.conv, layer.conv_bias, states[0], chunks, xbc, GATES=layer.width,
        WIDTH=width, TAPS=layer.conv.shape[2], LINES=_PREPARED, WHOLE=CHUNK, BLOCK=_CHANNELS,
        num_warps=4, **overlap_options(rows.device),
    )  # fmt: skip
    if rows.element_size() == 4:
        sizes["BLOCK_V"] = 16  # of float32, more does not fit the registers
    _scan_chunks[(len(items), layer.heads, triton.cdiv(layer.head_dim, sizes["BLOCK_V"]))](
        rows, rows.shape[1], xbc, states[1], layer.decay, layer.step_bias, layer.skip, items, output,
        **sizes, LINES=_SCANNED, num_warps=4, num_stages=1, **overlap_options(rows.device),
    )  # fmt: skip


def gated_norm(rows: Tensor, layer: LayerMamba, items: Tensor, lines: int, output: Tensor) -> None:
    """Apply gates and norm to each group's outputs, in place. An item has up to `lines` tokens."""
    if len(items):
        size, norm = layer.width // layer.groups, layer.norm
        gain, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
        _open_groups[(len(items) * lines, layer.groups)](
            rows, rows.shape[1], gain, items, output, eps, WIDTH=layer.width, SIZE=size,
            BLOCK=triton.next_power_of_2(size), LINES=lines, NORM_FIRST=layer.norm_first,
            num_warps=8 if size >= _WIDE else 4, **overlap_options(rows.device),
        )  # fmt: skip


def _sizes(layer: LayerMamba) -> dict[str, Any]:
    return {
        "HEADS": layer.heads, "GROUPS": layer.groups, "VALUES": layer.head_dim, "KEYS": layer.state_dim,
        "BLOCK_K": max(16, triton.next_power_of_2(layer.state_dim)),
        "BLOCK_V": min(_VALUES, max(16, triton.next_power_of_2(layer.head_dim))),
    }  # fmt: skip


@triton.jit
def _step(bias, head, x):
    """Compute a head's dt, of its row's value `x`."""
    return softplus(x.to(tl.float32) + tl.load(bias + head))


@triton.jit
def _convolved(
    rows, stride, weight, bias, state, origin, first, at, channel, there, inside, WIDTH: tl.constexpr,
    TAPS: tl.constexpr,
):  # fmt: skip
    x = convolved(rows, stride, weight, state, origin, first, at, channel, there, inside, WIDTH, TAPS,
                  False)  # fmt: skip
    if bias is not None:
        x += tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)
    return silu(x)


@triton.jit
def _scan(
    rows, stride, conv, conv_bias, inputs, states, rate, step_bias, skip, items, output,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, VALUES: tl.constexpr, KEYS: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, TAPS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    GATES: tl.constexpr = HEADS * VALUES
    WIDTH: tl.constexpr = GATES + 2 * GROUPS * KEYS
    SIZE: tl.constexpr = KEYS * VALUES
    SHARED: tl.constexpr = HEADS // GROUPS
    head = tl.program_id(1)
    origin, target, first, spare, count, key, value, place, state = begin(
        items, states, HEADS, KEYS, VALUES, BLOCK_K, BLOCK_V
    )
    there = (key < KEYS)[:, None] & (value < VALUES)[None, :]
    wait(OVERLAP)
    if target == 0:
        return

    some_keys = key < KEYS
    some_values = value < VALUES
    x_channel = head * VALUES + value
    b_channel = GATES + head // SHARED * KEYS + key
    c_channel = b_channel + GROUPS * KEYS
    source = rows + GATES
    decay = -tl.exp(tl.load(rate + head))
    skipped = tl.load(skip + head)
    for at in range(count):
        x = _convolved(source, stride, conv, conv_bias, inputs, origin, first, at, x_channel,
                       some_values, some_values, WIDTH, TAPS)  # fmt: skip
        b = _convolved(source, stride, conv, conv_bias, inputs, origin, first, at, b_channel, some_keys,
                       some_keys, WIDTH, TAPS)  # fmt: skip
        c = _convolved(source, stride, conv, conv_bias, inputs, origin, first, at, c_channel, some_keys,
                       some_keys, WIDTH, TAPS)  # fmt: skip
        dt = _step(step_bias, head, tl.load(source + (first + at) * stride + WIDTH + head))
        state = state * tl.exp(decay * dt) + b[:, None] * (x * dt)[None, :]
        y = tl.sum(state * c[:, None], 0) + x * skipped
        token = output + (first + at) * GATES + x_channel
        tl.store(token, y.to(output.dtype.element_ty), mask=some_values)
        if (at + 1 == count) | (spare > 0):
            slot = tl.where(at + 1 == count, target, spare + at)
            tl.store(states + slot * (HEADS * SIZE) + place, state, mask=there)
            keep(source, stride, inputs, origin, slot, first, at + 1, x_channel, some_values, WIDTH,
                 TAPS, False)  # fmt: skip
            if (head % SHARED == 0) & (tl.program_id(2) == 0):
                keep(source, stride, inputs, origin, slot, first, at + 1, b_channel, some_keys, WIDTH,
                     TAPS, False)  # fmt: skip
                keep(source, stride, inputs, origin, slot, first, at + 1, c_channel, some_keys, WIDTH,
                     TAPS, False)  # fmt: skip


@triton.jit
def _convolve(
    rows, stride, conv, conv_bias, inputs, chunks, xbc, GATES: tl.constexpr, WIDTH: tl.constexpr,
    TAPS: tl.constexpr, LINES: tl.constexpr, WHOLE: tl.constexpr, BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Convolve some channels of x, B and C."""
    parts: tl.constexpr = WHOLE // LINES
    item = chunks + tl.program_id(0) // parts * 5
    origin = tl.load(item).to(tl.int64)
    target = tl.load(item + 1).to(tl.int64)
    first = tl.load(item + 2).to(tl.int64)
    offset = tl.load(item + 3) + tl.program_id(0) % parts * LINES
    count = tl.load(item + 4)
    wait(OVERLAP)
    if offset >= count:
        return

    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < WIDTH
    at = (offset + tl.arange(0, LINES))[:, None]
    there = (at < count) & inside[None, :]
    x = _convolved(rows + GATES, stride, conv, conv_bias, inputs, origin, first, at, channel[None, :],
                   there, inside[None, :], WIDTH, TAPS)  # fmt: skip
    tl.store(xbc + (first + at) * WIDTH + channel[None, :], x.to(xbc.dtype.element_ty), mask=there)
    if offset + LINES >= count:
        keep(rows + GATES, stride, inputs, origin, target, first, count, channel, inside, WIDTH, TAPS,
             False)  # fmt: skip


@triton.jit
def _scan_chunks(
    rows, stride, xbc, states, rate, step_bias, skip, items, output, HEADS: tl.constexpr,
    GROUPS: tl.constexpr, VALUES: tl.constexpr, KEYS: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, LINES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Update the state chunk after chunk, and compute outputs, for some of a head's values.

    The state is held transposed: [values, keys].
    """
    GATES: tl.constexpr = HEADS * VALUES
    WIDTH: tl.constexpr = GATES + 2 * GROUPS * KEYS
    SIZE: tl.constexpr = KEYS * VALUES
    SHARED: tl.constexpr = HEADS // GROUPS
    item = items + tl.program_id(0) * 5
    head = tl.program_id(1)
    origin = tl.load(item).to(tl.int64)
    target = tl.load(item + 1).to(tl.int64)
    first = tl.load(item + 2).to(tl.int64)
    count = tl.load(item + 4)
    key = tl.arange(0, BLOCK_K)
    value = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    some_keys = (key < KEYS)[None, :]
    some_values = (value < VALUES)[None, :]
    whole = (value < VALUES)[:, None] & some_keys
    place = head * SIZE + key[None, :] * VALUES + value[:, None]
    begun = (value < VALUES)[:, None] & (key < tl.where(target > 0, KEYS, 0))[None, :]
    state = tl.load(states + origin * (HEADS * SIZE) + place, mask=begun, other=0.0)
    wait(OVERLAP)
    if target == 0:
        return

    lines = tl.arange(0, LINES)
    decay = -tl.exp(tl.load(rate + head))
    skipped = tl.load(skip + head)
    at_b = GATES + head // SHARED * KEYS + key[None, :]
    for offset in range(0, count, LINES):
        there = offset + lines < count
        line = first + offset + lines
        source = xbc + line[:, None] * WIDTH
        own_values = there[:, None] & some_values
        x = tl.load(source + head * VALUES + value[None, :], mask=own_values, other=0.0)
        b = tl.load(source + at_b, mask=there[:, None] & some_keys, other=0.0)
        c = tl.load(source + at_b + GROUPS * KEYS, mask=there[:, None] & some_keys, other=0.0)
        step = tl.load(rows + line * stride + GATES + WIDTH + head, mask=there, other=0.0)
        dt = tl.where(there, _step(step_bias, head, step), 0.0)
        kind = x.dtype
        sums = tl.cumsum(decay * dt, 0)
        last = tl.sum(decay * dt, 0)
        seen = lines[:, None] >= lines[None, :]
        between = tl.exp(tl.where(seen, sums[:, None] - sums[None, :], 0.0))
        scores = tl.dot(c, tl.trans(b), input_precision=_PRECISION) * between * dt[None, :]
        scores = tl.where(seen, scores, 0.0).to(kind)
        y = tl.dot(c, tl.trans(state.to(kind)), input_precision=_PRECISION) * tl.exp(sums)[:, None]
        y += tl.dot(scores, x, input_precision=_PRECISION) + x.to(tl.float32) * skipped
        token = output + line[:, None] * GATES + head * VALUES + value[None, :]
        tl.store(token, y.to(output.dtype.element_ty), mask=own_values)
        left = (b.to(tl.float32) * (tl.exp(last - sums) * dt)[:, None]).to(kind)
        state = state * tl.exp(last) + tl.dot(tl.trans(x), left, input_precision=_PRECISION)
    tl.store(states + target * (HEADS * SIZE) + place, state, mask=whole)


@triton.jit
def _open_groups(
    rows, stride, gain, items, output, eps, WIDTH: tl.constexpr, SIZE: tl.constexpr,
    BLOCK: tl.constexpr, LINES: tl.constexpr, NORM_FIRST: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Apply the gates of a group's outputs and normalise them, in place; without `gain` gates alone."""
    item = items + tl.program_id(0) // LINES * 5
    first = tl.load(item + 2).to(tl.int64)
    at = tl.load(item + 3) + tl.program_id(0) % LINES
    count = tl.load(item + 4)
    value = tl.arange(0, BLOCK)
    place = tl.program_id(1) * SIZE + value
    inside = value < SIZE
    wait(OVERLAP)
    if at >= count:
        return

    token = output + (first + at) * WIDTH + place
    y = tl.load(token, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(rows + (first + at) * stride + place, mask=inside, other=0.0).to(tl.float32)
    opened = silu(gate)
    if not NORM_FIRST:
        y *= opened
    if gain is not None:
        gains = tl.load(gain + place, mask=inside, other=0.0).to(tl.float32)
        y *= tl.rsqrt(tl.sum(y * y, 0) / SIZE + eps) * gains
    if NORM_FIRST:
        y *= opened
    tl.store(token, y.to(output.dtype.element_ty), mask=inside)
