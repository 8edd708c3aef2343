"""Triton kernels for layers of experts: an expert's rows for all of a few tokens that chose it.

Nothing is sorted: a program compares its expert with what the tokens chose, and multiplies on tensor
cores for all 16 of a tile. So an expert's bytes are read once, not for each token that chose it, as by
`triton_experts_few`. It pays where many tokens share an expert (docs/log/gpu.md). For floats and 8-bit
floats.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, import-untyped, import-not-found"

import torch
import triton
import triton.language as tl
from torch import Tensor

from ramify.gpu.ops.experts import LayerExperts
from ramify.gpu.ops.linear.four_bits import FourBitWeight
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

_SHARING = 0.75  # pairs of a token and an expert for each expert, from which on many share one
_ROWS, _DEPTH = 16, 128  # of the weights that a program takes, and of a step of its loop


def together(layer: LayerExperts, tokens: int) -> bool:
    """Whether so many tokens are computed together."""
    shared = layer.shared
    linears = [layer.gate_up] if shared is None else [layer.gate_up, shared.gate_up]
    packed = any(isinstance(one.weight, FourBitWeight) for one in linears)
    pairs = tokens * layer.settings.top
    return _SHARING * layer.experts <= pairs and 1 < tokens <= MOST_FEW and not packed


def open_together(x: UnscaledRows, eps: float, layer: LayerExperts, routes: ExpertRoutes) -> Tensor:
    """Compute `open_few` for up to MOST_FEW tokens."""
    values, hidden, size = x.values, x.values.shape[1], layer.size
    (tokens, top), shared = routes.chosen.shape, layer.shared
    beside = 0 if shared is None else shared.size
    gated = values.new_empty((tokens, top * size + beside))
    gate_up = layer.gate_up.weight.operand
    shared_up = gate_up if shared is None else shared.gate_up.weight.operand  # not read without one
    groups = [one.group if 0 < one.group < hidden else 0 for one in (gate_up, shared_up)]
    parts = 1 if x.squares is None else x.squares.shape[1]
    _open_together[(layer.held * triton.cdiv(size, _ROWS) + triton.cdiv(beside, _ROWS),)](
        values, x.squares, routes.chosen, gate_up.codes, gate_up.scales, layer.gate_up.bias,
        shared_up.codes, shared_up.scales, gated, tokens, parts, eps, HIDDEN=hidden, SIZE=size,
        SHARED=beside, TOP=top, KIND=KINDS[layer.activation], PARTS=triton.next_power_of_2(parts),
        EXPERTS=layer.held, PLACES=triton.next_power_of_2(top), ROWS=_ROWS,
        DEPTH=min([_DEPTH, *filter(None, groups)]), GROUP=groups[0], SHARED_GROUP=groups[1],
        PRECISION="ieee" if values.dtype == torch.float32 else "tf32", num_warps=2, num_stages=4,
        **overlap_options(values.device),
    )  # fmt: skip
    return gated


@triton.jit(do_not_specialize=["tokens"])
def _open_together(
    x, squares, chosen, weight, scales, bias, shared, shared_scales, output, tokens, parts, eps,
    HIDDEN: tl.constexpr, SIZE: tl.constexpr, SHARED: tl.constexpr, TOP: tl.constexpr,
    KIND: tl.constexpr, PARTS: tl.constexpr, EXPERTS: tl.constexpr, PLACES: tl.constexpr,
    ROWS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr, SHARED_GROUP: tl.constexpr,
    PRECISION: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Compute `_open_few`: an expert's rows for up to 16 tokens; those that chose it are kept."""
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
    """Compute rows of an expert, whose first one is `first`, for the tokens that are `kept`."""
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
