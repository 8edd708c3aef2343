"""Triton kernels for layers of experts, a few tokens at once: an expert's rows for all that chose it.

Nothing is sorted: a program compares its expert with what the tokens chose, and multiplies on tensor
cores for all 16 of a tile. So an expert's bytes are read once, and not for each token that chose it, as
by `triton_experts`. It pays from five tokens on (docs/log/gpu.md). For floats and 8-bit floats.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, import-untyped, import-not-found"

import torch
import triton
import triton.language as tl
from torch import Tensor

from ramify.gpu.ops.experts import LayerExperts
from ramify.gpu.ops.linear.four_bits import FourBitWeight
from ramify.gpu.ops.rmsnorm import RMSNorm
from ramify.gpu.ops.triton_experts import (
    KINDS,
    MOST_FEW,
    RELU2,
    ExpertRoutes,
    activated,
    dot_of_codes,
)
from ramify.gpu.ops.triton_layer import load_squares
from ramify.gpu.ops.triton_linear import UnscaledRows
from ramify.gpu.programmatic_launch import overlap_options, wait

MOST_APART = 4  # tokens up to which experts are read for each token by itself
_ROWS, _DEPTH = 16, 128  # of the weights that a program takes, and of a step of its loop
_PARTS = 8  # programs that share the experts of some columns


def together(layer: LayerExperts, tokens: int) -> bool:
    """Whether so many tokens are taken together."""
    shared = layer.shared
    linears = [layer.gate_up, layer.down]
    linears += [] if shared is None else [shared.gate_up, shared.down]
    packed = any(isinstance(one.weight, FourBitWeight) for one in linears)
    return MOST_APART < tokens <= MOST_FEW and not packed


def open_together(x: UnscaledRows, eps: float, layer: LayerExperts, routes: ExpertRoutes) -> Tensor:
    """As `open_few`, of up to MOST_FEW tokens."""
    values, hidden, size = x.values, x.values.shape[1], layer.size
    (tokens, top), shared = routes.chosen.shape, layer.shared
    beside = 0 if shared is None else shared.size
    gated = values.new_empty((tokens, top * size + beside))
    gate_up = layer.gate_up.weight.operand
    shared_up = gate_up if shared is None else shared.gate_up.weight.operand  # not read without one
    groups = [one.group if 0 < one.group < hidden else 0 for one in (gate_up, shared_up)]
    parts = 1 if x.squares is None else x.squares.shape[1]
    _open_together[(layer.experts * triton.cdiv(size, _ROWS) + triton.cdiv(beside, _ROWS),)](
        values, x.squares, routes.chosen, gate_up.codes, gate_up.scales, layer.gate_up.bias,
        shared_up.codes, shared_up.scales, gated, tokens, parts, eps, HIDDEN=hidden, SIZE=size,
        SHARED=beside, TOP=top, KIND=KINDS[layer.activation], PARTS=triton.next_power_of_2(parts),
        EXPERTS=layer.experts, PLACES=triton.next_power_of_2(top), ROWS=_ROWS,
        DEPTH=min([_DEPTH, *filter(None, groups)]), GROUP=groups[0], SHARED_GROUP=groups[1],
        PRECISION="ieee" if values.dtype == torch.float32 else "tf32", num_warps=2, num_stages=4,
        **overlap_options(values.device),
    )  # fmt: skip
    return gated


def sum_together(
    gated: Tensor,
    layer: LayerExperts,
    routes: ExpertRoutes,
    residual: "Tensor | None" = None,
    norm: "RMSNorm | None" = None,
) -> Tensor:
    """What `open_together` returned -> [T, hidden], the sum over each token's experts.

    `residual` [T, hidden]: it grows by the sum, and its rows are returned behind `norm`. Programs share
    the experts of some columns, and a second launch adds what they leave.
    """
    (tokens, top), shared, size = routes.chosen.shape, layer.shared, layer.size
    hidden, down = layer.down.weight.shape[0] // layer.experts, layer.down.weight.operand
    beside = 0 if shared is None else shared.size
    shared_down = down if shared is None else shared.down.weight.operand  # not read without one
    groups = [
        one.group if 0 < one.group < inputs else 0
        for one, inputs in ((down, size), (shared_down, max(1, beside)))
    ]
    rows, parts = 32, _PARTS + (beside > 0)
    partial = torch.empty((parts, tokens, hidden), dtype=torch.float32, device=gated.device)
    _sum_together[(triton.cdiv(hidden, rows), parts)](
        gated, routes.chosen, routes.counts, down.codes, down.scales, layer.down.bias,
        shared_down.codes, shared_down.scales, partial, tokens, HIDDEN=hidden, SIZE=size, SHARED=beside,
        TOP=top, EXPERTS=layer.experts, PLACES=triton.next_power_of_2(top), PARTS=_PARTS, ROWS=rows,
        DEPTH=min([_DEPTH, *filter(None, groups)]), GROUP=groups[0], SHARED_GROUP=groups[1],
        PRECISION="ieee" if gated.dtype == torch.float32 else "tf32", num_warps=4, num_stages=4,
        **overlap_options(gated.device),
    )  # fmt: skip
    output = gated.new_empty((tokens, hidden))
    gain, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
    _fold[(tokens,)](
        partial, residual, gain, output, tokens, hidden, eps, PARTS=parts,
        BLOCK=triton.next_power_of_2(hidden), num_warps=4, **overlap_options(gated.device),
    )  # fmt: skip
    return output


@triton.jit(do_not_specialize=["tokens"])
def _open_together(
    x, squares, chosen, weight, scales, bias, shared, shared_scales, output, tokens, parts, eps,
    HIDDEN: tl.constexpr, SIZE: tl.constexpr, SHARED: tl.constexpr, TOP: tl.constexpr,
    KIND: tl.constexpr, PARTS: tl.constexpr, EXPERTS: tl.constexpr, PLACES: tl.constexpr,
    ROWS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr, SHARED_GROUP: tl.constexpr,
    PRECISION: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """As `_open_few`, an expert's rows for all of up to 16 tokens: those that chose it are kept."""
    wait(OVERLAP)
    BLOCKS: tl.constexpr = (SIZE + ROWS - 1) // ROWS
    index = tl.program_id(0)
    token = tl.arange(0, 16)
    real = token < tokens
    lane = tl.arange(0, ROWS)
    source = x + token.to(tl.int64)[None, :] * HIDDEN
    target = output + token.to(tl.int64) * (TOP * SIZE + SHARED)
    if index < EXPERTS * BLOCKS:
        place = tl.arange(0, PLACES)[None, :]
        known = real[:, None] & (place < TOP)
        picked = tl.load(chosen + token[:, None] * TOP + place, mask=known, other=-1) == index // BLOCKS
        kept = tl.max(picked.to(tl.int32), 1) > 0
        if tl.max(kept.to(tl.int32)) > 0:
            first = (index // BLOCKS).to(tl.int64) * (SIZE if KIND == RELU2 else 2 * SIZE)
            target += tl.sum(tl.where(picked, place, 0), 1) * SIZE
            _open_tile(
                source, squares, weight, scales, bias, target, token, tokens, kept, first,
                index % BLOCKS * ROWS + lane, parts, eps, HIDDEN, SIZE, KIND, PARTS, ROWS, DEPTH, GROUP,
                PRECISION,
            )  # fmt: skip
    elif SHARED > 0:
        _open_tile(
            source, squares, shared, shared_scales, None, target + TOP * SIZE, token, tokens, real,
            (index * 0).to(tl.int64), (index - EXPERTS * BLOCKS) * ROWS + lane, parts, eps, HIDDEN,
            SHARED, KIND, PARTS, ROWS, DEPTH, SHARED_GROUP, PRECISION,
        )  # fmt: skip


@triton.jit
def _open_tile(
    source, squares, weight, scales, bias, target, token, tokens, kept, first, row, parts, eps,
    HIDDEN: tl.constexpr, SIZE: tl.constexpr, KIND: tl.constexpr, PARTS: tl.constexpr,
    ROWS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Rows of an expert, whose first one is `first`, for the tokens that are `kept`."""
    known = row < SIZE
    line = first + tl.minimum(row, SIZE - 1)
    step = tl.arange(0, DEPTH)
    w_at = weight + line[:, None] * HIDDEN + step[None, :]
    x_at = source + step[:, None]
    gate, up = tl.zeros([ROWS, 16], tl.float32), tl.zeros([ROWS, 16], tl.float32)
    for at in range(0, HIDDEN, DEPTH):
        inside = at + step < HIDDEN
        values = tl.load(x_at + at, mask=inside[:, None] & kept[None, :], other=0.0)
        w = tl.load(w_at + at, mask=inside[None, :], other=0.0)
        gate = dot_of_codes(w, values, gate, scales, line, at, HIDDEN, GROUP, PRECISION)
        if KIND != RELU2:
            w = tl.load(w_at + SIZE * HIDDEN + at, mask=inside[None, :], other=0.0)
            up = dot_of_codes(w, values, up, scales, line + SIZE, at, HIDDEN, GROUP, PRECISION)
    if scales is not None and GROUP == 0:
        gate *= tl.load(scales + line)[:, None]
        if KIND != RELU2:
            up *= tl.load(scales + line + SIZE)[:, None]
    if squares is not None:
        sums = tl.sum(load_squares(squares, token, tokens, parts, PARTS), 1)
        scale = tl.rsqrt(sums / HIDDEN + eps)[None, :]
        gate *= scale
        up *= scale
    if bias is not None:
        gate += tl.load(bias + line).to(tl.float32)[:, None]
        if KIND != RELU2:
            up += tl.load(bias + line + SIZE).to(tl.float32)[:, None]
    y = tl.trans(activated(gate, up, KIND).to(target.dtype.element_ty))
    tl.store(target[:, None] + row[None, :], y, mask=kept[:, None] & known[None, :])


@triton.jit(do_not_specialize=["tokens"])
def _sum_together(
    gated, chosen, counts, weight, scales, bias, shared, shared_scales, partial, tokens,
    HIDDEN: tl.constexpr, SIZE: tl.constexpr, SHARED: tl.constexpr, TOP: tl.constexpr,
    EXPERTS: tl.constexpr, PLACES: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr,
    DEPTH: tl.constexpr, GROUP: tl.constexpr, SHARED_GROUP: tl.constexpr, PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """partial float32[parts, T, HIDDEN]: some columns of all of up to 16 tokens, over some experts."""
    wait(OVERLAP)
    part = tl.program_id(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = tl.arange(0, 16)
    real = token < tokens
    source = gated + token.to(tl.int64) * (TOP * SIZE + SHARED)
    sums = tl.zeros([ROWS, 16], tl.float32)
    if part < PARTS:
        place = tl.arange(0, PLACES)[None, :]
        known = real[:, None] & (place < TOP)
        experts = tl.load(chosen + token[:, None] * TOP + place, mask=known, other=-1)
        count = tl.load(
            counts + token[:, None] * (TOP + (SHARED > 0)) + place, mask=known, other=0.0
        )  # fmt: skip
        for expert in range(part, EXPERTS, PARTS):
            picked = experts == expert
            kept = tl.max(picked.to(tl.int32), 1) > 0
            if tl.max(kept.to(tl.int32)) > 0:
                column = tl.sum(tl.where(picked, place, 0), 1) * SIZE
                y = _sum_tile(
                    source + column, weight, scales, bias, kept, part * 0 + expert, row, HIDDEN, SIZE,
                    ROWS, DEPTH, GROUP, PRECISION,
                )  # fmt: skip
                sums += y * tl.sum(tl.where(picked, count, 0.0), 1)[None, :]
    elif SHARED > 0:
        y = _sum_tile(
            source + TOP * SIZE, shared, shared_scales, None, real, part * 0, row, HIDDEN, SHARED, ROWS,
            DEPTH, SHARED_GROUP, PRECISION,
        )  # fmt: skip
        sums = y * tl.load(counts + token * (TOP + 1) + TOP, mask=real, other=0.0)[None, :]
    target = partial + (part * tokens + token).to(tl.int64)[:, None] * HIDDEN + row[None, :]
    tl.store(target, tl.trans(sums), mask=real[:, None] & (row < HIDDEN)[None, :])


@triton.jit
def _sum_tile(
    source, weight, scales, bias, kept, expert, row, HIDDEN: tl.constexpr, SIZE: tl.constexpr,
    ROWS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Some rows of an expert's second product for the tokens that are `kept`: [ROWS, 16]."""
    line = expert.to(tl.int64) * HIDDEN + tl.minimum(row, HIDDEN - 1)
    step = tl.arange(0, DEPTH)
    w_at = weight + line[:, None] * SIZE + step[None, :]
    x_at = source[None, :] + step[:, None]
    y = tl.zeros([ROWS, 16], tl.float32)
    for at in range(0, SIZE, DEPTH):
        inside = at + step < SIZE
        values = tl.load(x_at + at, mask=inside[:, None] & kept[None, :], other=0.0)
        w = tl.load(w_at + at, mask=inside[None, :], other=0.0)
        y = dot_of_codes(w, values, y, scales, line, at, SIZE, GROUP, PRECISION)
    if scales is not None and GROUP == 0:
        y *= tl.load(scales + line)[:, None]
    if bias is not None:
        y += tl.load(bias + line).to(tl.float32)[:, None]
    return y


@triton.jit(do_not_specialize=["tokens"])
def _fold(
    partial, residual, gain, output, tokens, hidden, eps, PARTS: tl.constexpr, BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """One token's sum over the parts; with a residual that grows by it, and is normalised."""
    wait(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < hidden
    y = tl.zeros([BLOCK], tl.float32)
    for part in tl.static_range(PARTS):
        y += tl.load(partial + (part * tokens + token) * hidden + column, mask=inside, other=0.0)
    at = token * hidden + column
    if residual is not None:
        y += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
        rounded = y.to(residual.dtype.element_ty)
        tl.store(residual + at, rounded, mask=inside)
        wide = rounded.to(tl.float32)
        scale = tl.rsqrt(tl.sum(wide * wide) / hidden + eps)
        y = wide * scale * tl.load(gain + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(output + at, y.to(output.dtype.element_ty), mask=inside)
