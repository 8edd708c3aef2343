"""Triton kernels for layers of experts: routing, and a path each for a few tokens and for many.

A few tokens: two launches behind the routing, none of which sorts. A program takes some rows of one
expert's weights for one token; neighbours take the same rows for other tokens, so that an expert's bytes
come from memory once. The second product sums over a token's experts in one order. Many tokens: pairs of
a token and an expert are put in the experts' order, tiles of them are multiplied, and a last launch sums
over each token's experts. Every size is bounded by the shapes, so a CUDA graph can hold both paths.

The reference is `ops.experts`. Imported only where Triton is used; runs on a CPU with
TRITON_INTERPRET=1.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, import-untyped, import-not-found"

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ramify.gpu.ops.experts import ExpertActivation, ExpertTile, LayerExperts
from ramify.gpu.ops.linear.base import Linear, Operand
from ramify.gpu.ops.triton_four_codes import packing, row_sums, tile_sums
from ramify.gpu.ops.triton_layer import opened
from ramify.gpu.ops.triton_linear import UnscaledRows
from ramify.gpu.programmatic_launch import launch_options, overlap_options, overlaps, wait
from ramify.gpu.triton_fp8 import widened

MOST_FEW = 16  # tokens up to which pairs of a token and an expert are not sorted
KINDS: dict[ExpertActivation, int] = {"silu": 0, "gelu_tanh": 1, "clamped_swiglu": 2, "relu2": 3}
RELU2 = tl.constexpr(3)  # has no gate: an expert's rows are half as many
_SORTED = 1024  # pairs that a program looks at together; four times as many where there are many
_SUMMED = 1024  # columns of a program that sums over a token's experts


@dataclass(frozen=True, slots=True)
class ExpertRoutes:
    """Where each token goes. chosen int32[T, top]; counts float32[T, top], and the shared expert's."""

    chosen: Tensor
    counts: Tensor


TileTable = tuple[tuple[int, ExpertTile], ...]
"""Up to how many pairs of a token and an expert, on average of an expert, a tile is taken."""

_EXACT = ExpertTile(16, 16, 32, 4, 2)  # float32, which tensor cores do not do
_INVARIANT = ExpertTile(64, 64, 64, 4, 4)  # the same for any number of tokens
_TILES = (
    (16, ExpertTile(16, 64, 128, 4, 4)),
    (32, ExpertTile(32, 64, 128, 4, 4)),
    (96, ExpertTile(64, 128, 64, 8, 4)),
)
_LARGEST = ExpertTile(128, 128, 64, 8, 3)
SERVED_TILES: TileTable = (
    *_TILES,
    (1 << 62, _LARGEST),
)  # where none were measured (`startup.expert_tiles`)


def route_tokens(logits: Tensor, layer: LayerExperts) -> ExpertRoutes:
    """logits [T, experts], behind them that of the shared expert's gate if it has one."""
    settings, experts = layer.settings, layer.experts
    tokens, shared = len(logits), layer.shared
    places = settings.top + (shared is not None)
    chosen = torch.empty((tokens, settings.top), dtype=torch.int32, device=logits.device)
    counts = torch.empty((tokens, places), dtype=torch.float32, device=logits.device)
    block = triton.next_power_of_2(experts)
    _route[(tokens,)](
        logits, layer.correction, layer.weights, chosen, counts, logits.shape[1], settings.scale,
        EXPERTS=experts, BLOCK=block, TOP=settings.top, PLACES=places,
        GATED=shared is not None and shared.gated, SIGMOID=settings.score == "sigmoid",
        RENORMALISE=settings.renormalise, GROUPS=settings.groups, GROUP_BEST=settings.group_best,
        TOP_GROUPS=settings.top_groups, GROUP_BLOCK=triton.next_power_of_2(settings.groups),
        OVERLAP=overlaps(logits.device), num_warps=1 if block <= 256 else 4,
        **launch_options(logits.device),
    )  # fmt: skip
    return ExpertRoutes(chosen, counts)


def open_few(x: UnscaledRows, eps: float, layer: LayerExperts, routes: ExpertRoutes) -> Tensor:
    """x [T, hidden] -> [T, top * size, and the shared expert's]: each token's experts, opened."""
    values, hidden, size = x.values, x.values.shape[1], layer.size
    (tokens, top), shared = routes.chosen.shape, layer.shared
    beside = 0 if shared is None else shared.size
    gated = values.new_empty((tokens, top * size + beside))
    beside_up = layer.gate_up if shared is None else shared.gate_up  # not read without one
    gate_up, shared_up = layer.gate_up.weight.operand, beside_up.weight.operand
    packed, shared_packed = (packing(one.weight, values.dtype) for one in (layer.gate_up, beside_up))
    parts = 1 if x.squares is None else x.squares.shape[1]
    many = 32 if packed else 16  # rows of the weights that a program takes
    _open_few[(tokens * (top * triton.cdiv(size, many) + triton.cdiv(beside, many)),)](
        values, x.squares, routes.chosen, gate_up.codes, gate_up.scales, gate_up.zeros,
        layer.gate_up.bias, shared_up.codes, shared_up.scales, shared_up.zeros, gated, tokens, parts,
        eps, layer.gate_up.weight.shape[0], beside_up.weight.shape[0], HIDDEN=hidden, SIZE=size,
        SHARED=beside, TOP=top, KIND=KINDS[layer.activation], PARTS=triton.next_power_of_2(parts),
        GROUP=gate_up.group or hidden, SHARED_GROUP=shared_up.group or hidden, ROWS=many,
        DEPTH=_depth(hidden, gate_up, shared_up), STAGES=3, PACKED=packed,
        SHARED_PACKED=shared_packed, num_warps=4, **overlap_options(values.device),
    )  # fmt: skip
    return gated


def sum_few(gated: Tensor, layer: LayerExperts, routes: ExpertRoutes) -> Tensor:
    """What `open_few` returned -> [T, hidden], the sum over each token's experts."""
    (tokens, top), shared, size = routes.chosen.shape, layer.shared, layer.size
    hidden, down = layer.down.weight.shape[0] // layer.experts, layer.down.weight.operand
    beside = 0 if shared is None else shared.size
    beside_down = layer.down if shared is None else shared.down  # not read without one
    shared_down = beside_down.weight.operand
    packed, shared_packed = (packing(one.weight, gated.dtype) for one in (layer.down, beside_down))
    rows = (8 if tokens <= 4 else 16) << (packed > 0)  # of the weights that a program takes
    output = gated.new_empty((tokens, hidden))
    _sum_few[(tokens * triton.cdiv(hidden, rows),)](
        gated, routes.chosen, routes.counts, down.codes, down.scales, down.zeros, layer.down.bias,
        shared_down.codes, shared_down.scales, shared_down.zeros, output, tokens,
        layer.down.weight.shape[0], beside_down.weight.shape[0], HIDDEN=hidden,
        SIZE=size, SHARED=beside, TOP=top, GROUP=down.group or size,
        SHARED_GROUP=shared_down.group or max(1, beside), ROWS=rows, DEPTH=_depth(size, down),
        SHARED_DEPTH=_depth(max(1, beside), shared_down), STAGES=4, PACKED=packed,
        SHARED_PACKED=shared_packed, num_warps=4,
        **overlap_options(gated.device),
    )  # fmt: skip
    return output


def run_few(x: UnscaledRows, eps: float, layer: LayerExperts, routes: ExpertRoutes) -> Tensor:
    """x [T, hidden], the shared expert included -> [T, hidden]. Reads each expert of each token."""
    return sum_few(open_few(x, eps, layer, routes), layer, routes)


def run_many(
    x: Tensor, layer: LayerExperts, routes: ExpertRoutes, shared: "Tensor | None", invariant: bool
) -> Tensor:
    """x [T, hidden]; shared [T, hidden]: what the shared expert made of it -> [T, hidden].

    `invariant`: what a token gets depends on no other one, to the last bit.
    """
    (tokens, top), experts, hidden = routes.chosen.shape, layer.experts, x.shape[1]
    size, pairs, device = layer.size, tokens * top, x.device
    overlap, options = overlaps(device), launch_options(device)
    order, starts = sort_pairs(routes.chosen, experts)
    tile = tile_for(pairs, experts, x.dtype, invariant, layer.tiles)
    tiles = triton.cdiv(pairs, tile.rows) + min(experts, pairs)  # as many as there can be
    sizes = {
        "EXPERTS": experts, "BLOCK": triton.next_power_of_2(experts), "HIDDEN": hidden, "SIZE": size,
        "TOP": top, "ROWS": tile.rows, "COLUMNS": tile.columns,
        "PRECISION": "ieee" if x.dtype == torch.float32 else "tf32", "OVERLAP": overlap,
        "num_warps": tile.warps, "num_stages": tile.stages, **options,
    }  # fmt: skip
    gate_up, down = layer.gate_up.weight.operand, layer.down.weight.operand
    gated, sums = x.new_empty((pairs, size)), x.new_empty((pairs, hidden))
    _open_many[(tiles * triton.cdiv(size, tile.columns),)](
        x, order, starts, gate_up.codes, gate_up.scales, gate_up.zeros, layer.gate_up.bias, gated,
        KIND=KINDS[layer.activation], **_steps(layer.gate_up, x, tile), **sizes,
    )  # fmt: skip
    places = routes.counts.shape[1]
    _down_many[(tiles * triton.cdiv(hidden, tile.columns),)](
        gated, order, starts, routes.counts, down.codes, down.scales, down.zeros, layer.down.bias, sums,
        PLACES=places, **_steps(layer.down, gated, tile), **sizes,
    )  # fmt: skip
    output = torch.empty_like(x)
    block = min(_SUMMED, triton.next_power_of_2(hidden))
    _sum_many[(tokens, triton.cdiv(hidden, block))](
        sums, shared, routes.counts, output, HIDDEN=hidden, TOP=top, PLACES=places, BLOCK=block,
        OVERLAP=overlap, num_warps=4, **options,
    )  # fmt: skip
    return output


def sort_pairs(chosen: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """chosen int32[T, top] -> its places in the experts' order, and where each expert's begin.

    int32[T * top], int32[experts + 1].
    """
    pairs, device = chosen.numel(), chosen.device
    order = torch.empty(pairs, dtype=torch.int32, device=device)
    starts = torch.empty(experts + 1, dtype=torch.int32, device=device)
    block = _SORTED if pairs <= 8 * _SORTED else 4 * _SORTED
    _sort[(experts,)](
        chosen, order, starts, pairs, EXPERTS=experts, BLOCK=block, OVERLAP=overlaps(device),
        num_warps=4, **launch_options(device),
    )  # fmt: skip
    return order, starts


def tile_for(
    pairs: int, experts: int, dtype: torch.dtype, invariant: bool, tiles: TileTable | None = None
) -> ExpertTile:
    """By how many of the `pairs` an expert has on average. `tiles`: None: those that are guesses."""
    if dtype == torch.float32:
        return _EXACT
    if invariant:
        return _INVARIANT
    return next(tile for most, tile in tiles or SERVED_TILES if pairs <= most * experts)


def _depth(size: int, *operands: Operand) -> int:
    """Inputs of one step of a loop over `size`, of which a group has as many or more."""
    most = min([256, *(one.group for one in operands if 16 <= one.group < size)])
    return min(most, max(16, 1 << (size - 1).bit_length()))


def _steps(linear: Linear, x: Tensor, tile: ExpertTile) -> dict[str, int]:
    """Inputs of one step, and of a group; 0: a row is one. Packed codes have steps of their own."""
    group, packed = linear.weight.operand.group, packing(linear.weight, x.dtype)
    if packed or not 0 < group < x.shape[1]:
        group = 0
    return {"GROUP": group, "DEPTH": min(tile.depth, group or tile.depth), "PACKED": packed}


@triton.jit
def _best(scores, BLOCK: tl.constexpr):
    """The index of the highest, the lowest one of equal ones."""
    lane = tl.arange(0, BLOCK)
    return tl.min(tl.where(scores == tl.max(scores), lane, BLOCK))


@triton.jit
def _route(
    logits, correction, weights, chosen, counts, stride, scale, EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr, TOP: tl.constexpr, PLACES: tl.constexpr, GATED: tl.constexpr,
    SIGMOID: tl.constexpr, RENORMALISE: tl.constexpr, GROUPS: tl.constexpr, GROUP_BEST: tl.constexpr,
    TOP_GROUPS: tl.constexpr, GROUP_BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One token."""
    wait(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    there = expert < EXPERTS
    x = tl.load(logits + token * stride + expert, mask=there, other=float("-inf")).to(tl.float32)
    if SIGMOID:
        low = tl.exp(-tl.abs(x))
        scores = tl.where(x < 0, low, 1.0) / (1.0 + low)
    else:
        likely = tl.exp(x - tl.max(x))
        scores = likely / tl.sum(likely)
    ranked = tl.where(there, scores, float("-inf"))
    if correction is not None:
        ranked += tl.load(correction + expert, mask=there, other=0.0)
    if GROUPS > 1:
        EACH: tl.constexpr = EXPERTS // GROUPS
        groups = tl.arange(0, GROUP_BLOCK)
        sums = tl.full([GROUP_BLOCK], float("-inf"), tl.float32)
        for group in tl.static_range(GROUPS):
            own = tl.where(expert // EACH == group, ranked, float("-inf"))
            total = tl.max(own)
            for _ in tl.static_range(1, min(GROUP_BEST, EACH)):
                own = tl.where(expert == _best(own, BLOCK), float("-inf"), own)
                total += tl.max(own)
            sums = tl.where(groups == group, total, sums)
        allowed = expert < 0
        for _ in tl.static_range(TOP_GROUPS):
            group = _best(sums, GROUP_BLOCK)
            allowed = allowed | (expert // EACH == group)
            sums = tl.where(groups == group, float("-inf"), sums)
        ranked = tl.where(allowed & there, ranked, float("-inf"))
    place = tl.arange(0, BLOCK)  # of the chosen ones
    own_counts = tl.zeros([BLOCK], tl.float32)
    own_chosen = tl.zeros([BLOCK], tl.int32)
    own_weights = tl.zeros([BLOCK], tl.float32) + scale
    for number in tl.static_range(TOP):
        best = tl.minimum(_best(ranked, BLOCK), EXPERTS - 1)  # where nothing is a number
        score = tl.sum(tl.where(expert == best, scores, 0.0))
        own_counts = tl.where(place == number, score, own_counts)
        own_chosen = tl.where(place == number, best, own_chosen)
        if weights is not None:
            own_weights = tl.where(place == number, tl.load(weights + best) * scale, own_weights)
        ranked = tl.where(expert == best, float("-inf"), ranked)
    if RENORMALISE:
        own_counts = own_counts / tl.maximum(tl.sum(own_counts), 1e-20)
    kept = place < TOP
    tl.store(chosen + token * TOP + place, own_chosen, mask=kept)
    tl.store(counts + token * PLACES + place, own_counts * own_weights, mask=kept)
    if PLACES > TOP:
        count = 1.0
        if GATED:
            gate = tl.load(logits + token * stride + EXPERTS).to(tl.float32)
            count = 1.0 / (1.0 + tl.exp(-gate))
        tl.store(counts + token * PLACES + TOP, count)


@triton.jit
def activated(gate, up, KIND: tl.constexpr):
    """An expert's activation: see `ops.experts.gated`."""
    if KIND == RELU2:
        y = tl.maximum(gate, 0.0)
        y = y * y
    elif KIND == 2:
        gate = tl.minimum(gate, 7.0)
        y = gate / (1.0 + tl.exp(-1.702 * gate)) * (tl.clamp(up, -7.0, 7.0) + 1.0)
    else:
        y = opened(gate, KIND == 1) * up
    return y


# --- a few tokens ---


@triton.jit
def _weights(place, there, scales, row, at, WIDTH: tl.constexpr, GROUP: tl.constexpr):
    """Numbers at `place` [R, D], float32, of rows [R, 1] of WIDTH inputs, GROUP of which share a scale.

    `at`: their first input. scales: of the first row's groups, or None.
    """
    codes = tl.load(place, mask=there, other=0.0)
    if scales is None:
        numbers = codes.to(tl.float32)
    else:
        own = tl.load(scales + row.to(tl.int64) * ((WIDTH + GROUP - 1) // GROUP) + at // GROUP)
        numbers = widened(codes, tl.bfloat16).to(tl.float32) * own
    return numbers


@triton.jit
def _open_rows(
    x, scale, weight, scales, zeros, bias, output, row_of, first, total, SIZE: tl.constexpr,
    HIDDEN: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
    DEPTH: tl.constexpr, STAGES: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """output[row] = activation(gate) * up of one token x [HIDDEN], for ROWS from `row_of` on.

    `first` of `total` rows is the expert's; weight, scales and bias begin there, if they are not packed.
    """
    row = row_of + tl.arange(0, ROWS)
    line = tl.minimum(row, SIZE - 1)[:, None]
    if PACKED:
        if KIND == RELU2:
            own = first + tl.minimum(row, SIZE - 1)
            gates = row_sums(x, HIDDEN, weight, scales, zeros, own, total, STAGES, PACKED)
            ups = gates
        else:  # rows of gate and up take turns
            turn = tl.arange(0, 2 * ROWS)
            own = first + tl.minimum(row_of + turn // 2, SIZE - 1) + turn % 2 * SIZE
            both = row_sums(x, HIDDEN, weight, scales, zeros, own, total, STAGES, PACKED)
            gates, ups = tl.split(tl.reshape(both, (ROWS, 2)))
    else:
        gate, up = tl.zeros([ROWS, DEPTH], tl.float32), tl.zeros([ROWS, DEPTH], tl.float32)
        for at in tl.range(0, HIDDEN, DEPTH, num_stages=STAGES):
            column = at + tl.arange(0, DEPTH)
            there = column < HIDDEN
            value = tl.load(x + column, mask=there, other=0.0).to(tl.float32)[None, :]
            place, known = weight + line * HIDDEN + column[None, :], there[None, :]
            gate += _weights(place, known, scales, line, at, HIDDEN, GROUP) * value
            if KIND != RELU2:
                place, behind = place + SIZE * HIDDEN, line + SIZE
                up += _weights(place, known, scales, behind, at, HIDDEN, GROUP) * value
        gates, ups = tl.sum(gate, 1), tl.sum(up, 1)
    gates, ups = gates * scale, ups * scale
    inside = row < SIZE
    if bias is not None:
        gates += tl.load(bias + row, mask=inside, other=0.0).to(tl.float32)
        if KIND != RELU2:
            ups += tl.load(bias + SIZE + row, mask=inside, other=0.0).to(tl.float32)
    y = activated(gates, ups, KIND)
    tl.store(output + row, y.to(output.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["tokens"])
def _open_few(
    x, squares, chosen, weight, scales, zeros, bias, shared, shared_scales, shared_zeros, output, tokens,
    parts, eps, total, shared_total,
    HIDDEN: tl.constexpr, SIZE: tl.constexpr, SHARED: tl.constexpr, TOP: tl.constexpr,
    KIND: tl.constexpr, PARTS: tl.constexpr, GROUP: tl.constexpr, SHARED_GROUP: tl.constexpr,
    ROWS: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr, PACKED: tl.constexpr,
    SHARED_PACKED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """output [T, TOP * SIZE + SHARED]. squares: see `UnscaledRows`."""
    wait(OVERLAP)
    index, pairs = tl.program_id(0), tokens * TOP
    routed = pairs * tl.cdiv(SIZE, ROWS)
    if index < routed:
        pair = index % pairs
        token = (pair // TOP).to(tl.int64)
    else:
        pair = 0
        token = ((index - routed) % tokens).to(tl.int64)
    scale = 1.0
    if squares is not None:
        part = tl.arange(0, PARTS)
        added_up = tl.sum(tl.load(squares + token * parts + part, mask=part < parts, other=0.0))
        scale = tl.rsqrt(added_up / HIDDEN + eps)
    source = x + token * HIDDEN
    target = output + token * (TOP * SIZE + SHARED)
    if index < routed:
        first = tl.load(chosen + pair).to(tl.int64) * (SIZE if KIND == RELU2 else 2 * SIZE)
        own_bias = bias
        if bias is not None:
            own_bias = bias + first
        own_weight, own_scales = weight, scales
        if PACKED == 0:
            own_weight = weight + first * HIDDEN
            if scales is not None:
                own_scales = scales + first * ((HIDDEN + GROUP - 1) // GROUP)
        _open_rows(
            source, scale, own_weight, own_scales, zeros, own_bias, target + pair % TOP * SIZE,
            index // pairs * ROWS, first, total, SIZE, HIDDEN, KIND, GROUP, ROWS, DEPTH, STAGES,
            PACKED,
        )  # fmt: skip
    elif SHARED > 0:
        _open_rows(
            source, scale, shared, shared_scales, shared_zeros, None, target + TOP * SIZE,
            (index - routed) // tokens * ROWS, token * 0, shared_total, SHARED, HIDDEN, KIND,
            SHARED_GROUP, ROWS, DEPTH, STAGES, SHARED_PACKED,
        )  # fmt: skip


@triton.jit(do_not_specialize=["tokens"])
def _sum_few(
    gated, chosen, counts, weight, scales, zeros, bias, shared, shared_scales, shared_zeros, output,
    tokens, total, shared_total,
    HIDDEN: tl.constexpr, SIZE: tl.constexpr, SHARED: tl.constexpr, TOP: tl.constexpr,
    GROUP: tl.constexpr, SHARED_GROUP: tl.constexpr, ROWS: tl.constexpr,
    DEPTH: tl.constexpr, SHARED_DEPTH: tl.constexpr, STAGES: tl.constexpr, PACKED: tl.constexpr,
    SHARED_PACKED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """output [T, HIDDEN]: some columns of one token."""
    wait(OVERLAP)
    token = (tl.program_id(0) % tokens).to(tl.int64)
    row = tl.program_id(0) // tokens * ROWS + tl.arange(0, ROWS)
    inside = row < HIDDEN
    line = tl.minimum(row, HIDDEN - 1)[:, None]
    source = gated + token * (TOP * SIZE + SHARED)
    own_counts = counts + token * (TOP + (SHARED > 0))
    own_chosen = chosen + token * TOP
    if PACKED:
        y = tl.zeros([ROWS], tl.float32)
        for place in tl.static_range(TOP):
            own = tl.load(own_chosen + place).to(tl.int64) * HIDDEN + tl.minimum(row, HIDDEN - 1)
            at_x = source + place * SIZE
            part = row_sums(at_x, SIZE, weight, scales, zeros, own, total, STAGES, PACKED)
            y += part * tl.load(own_counts + place)
    else:
        STEPS: tl.constexpr = (SIZE + DEPTH - 1) // DEPTH
        sums = tl.zeros([ROWS, DEPTH], tl.float32)
        for step in tl.range(0, TOP * STEPS, num_stages=STAGES):
            place = step // STEPS
            at = step % STEPS * DEPTH
            column = at + tl.arange(0, DEPTH)
            there = column < SIZE
            value = tl.load(source + place * SIZE + column, mask=there, other=0.0).to(tl.float32)
            value *= tl.load(own_counts + place)
            own = line + tl.load(own_chosen + place).to(tl.int64) * HIDDEN  # a row of all experts'
            at_weights = weight + own * SIZE + column[None, :]
            sums += _weights(at_weights, there[None, :], scales, own, at, SIZE, GROUP) * value[None, :]
        y = tl.sum(sums, 1)
    if bias is not None:
        for place in tl.static_range(TOP):
            own_bias = bias + tl.load(own_chosen + place).to(tl.int64) * HIDDEN + row
            y += tl.load(own_bias, mask=inside, other=0.0).to(tl.float32) * tl.load(own_counts + place)
    if SHARED > 0:
        if SHARED_PACKED:
            own, behind = token * 0 + tl.minimum(row, HIDDEN - 1), source + TOP * SIZE
            besides = row_sums(
                behind, SHARED, shared, shared_scales, shared_zeros, own, shared_total, STAGES,
                SHARED_PACKED,
            )  # fmt: skip
        else:
            beside = tl.zeros([ROWS, SHARED_DEPTH], tl.float32)
            for at in tl.range(0, SHARED, SHARED_DEPTH, num_stages=STAGES):
                column = at + tl.arange(0, SHARED_DEPTH)
                there = column < SHARED
                value = tl.load(source + TOP * SIZE + column, mask=there, other=0.0).to(tl.float32)
                at_weights = shared + line * SHARED + column[None, :]
                known = there[None, :]
                w = _weights(at_weights, known, shared_scales, line, at, SHARED, SHARED_GROUP)
                beside += w * value[None, :]
            besides = tl.sum(beside, 1)
        y += besides * tl.load(own_counts + TOP)
    tl.store(output + token * HIDDEN + row, y.to(output.dtype.element_ty), mask=inside)


# --- many tokens ---


@triton.jit(do_not_specialize=["pairs"])
def _sort(
    chosen, order, starts, pairs, EXPERTS: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr
):  # fmt: skip
    """order: the pairs of expert 0, then those of 1, .., each in their order; starts: each one's first.

    A program for each expert: it counts the pairs of those below, and puts down its own.
    """
    wait(OVERLAP)
    expert = tl.program_id(0)
    lower = tl.zeros([BLOCK], tl.int32)
    for at in range(0, pairs, BLOCK):
        pair = at + tl.arange(0, BLOCK)
        lower += (tl.load(chosen + pair, mask=pair < pairs, other=EXPERTS) < expert).to(tl.int32)
    first = tl.sum(lower)
    tl.store(starts + expert, first)
    for at in range(0, pairs, BLOCK):
        pair = at + tl.arange(0, BLOCK)
        own = (tl.load(chosen + pair, mask=pair < pairs, other=EXPERTS) == expert).to(tl.int32)
        tl.store(order + first + tl.cumsum(own, 0) - 1, pair, mask=own > 0)
        first += tl.sum(own)
    if expert == EXPERTS - 1:
        tl.store(starts + EXPERTS, first)


@triton.jit
def _tile(starts, tile, EXPERTS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """Of the tiles of all experts one behind the other: (its expert, its first pair, the expert's end).

    Behind the last tile the expert is EXPERTS or more.
    """
    lane = tl.arange(0, BLOCK)
    there = lane < EXPERTS
    begin = tl.load(starts + lane, mask=there, other=0)
    end = tl.load(starts + lane + 1, mask=there, other=0)
    tiles = (end - begin + ROWS - 1) // ROWS
    ends = tl.cumsum(tiles, 0)
    expert = tl.sum((ends <= tile).to(tl.int32))
    own = lane == expert
    first = tl.sum(tl.where(own, begin + (tile - ends + tiles) * ROWS, 0))
    return expert, first, tl.sum(tl.where(own, end, 0))


@triton.jit
def dot_of_codes(
    w, values, acc, scales, row, at, WIDTH: tl.constexpr, GROUP: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """acc plus w times `values`; of codes in groups, each row's times the scale of input `at`."""
    w = widened(w, values.dtype)
    if GROUP:
        own = tl.load(scales + row * ((WIDTH + GROUP - 1) // GROUP) + at // GROUP)
        total = acc + tl.dot(w, values, input_precision=PRECISION) * own[:, None]
    else:
        total = tl.dot(w, values, acc, input_precision=PRECISION)
    return total


@triton.jit
def _open_many(
    x, order, starts, weight, scales, zeros, bias, output, EXPERTS: tl.constexpr, BLOCK: tl.constexpr,
    HIDDEN: tl.constexpr, SIZE: tl.constexpr, TOP: tl.constexpr, KIND: tl.constexpr,
    GROUP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    PRECISION: tl.constexpr, PACKED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """output [pairs, SIZE], in the experts' order."""
    wait(OVERLAP)
    BLOCKS: tl.constexpr = (SIZE + COLUMNS - 1) // COLUMNS
    expert, first, end = _tile(starts, tl.program_id(0) // BLOCKS, EXPERTS, BLOCK, ROWS)
    if expert >= EXPERTS:
        return
    place = first + tl.arange(0, ROWS)
    there = place < end
    token = (tl.load(order + place, mask=there, other=0) // TOP).to(tl.int64)
    column = tl.program_id(0) % BLOCKS * COLUMNS + tl.arange(0, COLUMNS)
    step = tl.arange(0, DEPTH)
    first_row = expert.to(tl.int64) * (SIZE if KIND == RELU2 else 2 * SIZE)
    start = weight + first_row * HIDDEN
    w_at = start + tl.minimum(column, SIZE - 1)[:, None] * HIDDEN + step[None, :]
    own = first_row + column
    first_row += tl.minimum(column, SIZE - 1)
    x_at = x + token[None, :] * HIDDEN + step[:, None]
    gate, up = tl.zeros([COLUMNS, ROWS], tl.float32), tl.zeros([COLUMNS, ROWS], tl.float32)
    if PACKED:
        total, source = EXPERTS * (SIZE if KIND == RELU2 else 2 * SIZE), x + token[None, :] * HIDDEN
        if KIND == RELU2:
            gate = tile_sums(
                source, there, HIDDEN, weight, scales, zeros, first_row, total, PRECISION, PACKED
            )
        else:  # rows of gate and up take turns
            turn = tl.arange(0, 2 * COLUMNS)
            place_of = tl.program_id(0) % BLOCKS * COLUMNS + turn // 2
            behind = expert.to(tl.int64) * (2 * SIZE) + turn % 2 * SIZE
            own_rows = behind + tl.minimum(place_of, SIZE - 1)
            both = tile_sums(
                source, there, HIDDEN, weight, scales, zeros, own_rows, total, PRECISION, PACKED
            )
            gate, up = tl.split(tl.reshape(tl.trans(both), (ROWS, COLUMNS, 2)))
            gate, up = tl.trans(gate), tl.trans(up)
    else:
        for at in range(0, HIDDEN, DEPTH):
            inside = at + step < HIDDEN
            values = tl.load(x_at + at, mask=inside[:, None] & there[None, :], other=0.0)
            w = tl.load(w_at + at, mask=inside[None, :], other=0.0)
            gate = dot_of_codes(w, values, gate, scales, first_row, at, HIDDEN, GROUP, PRECISION)
            if KIND != RELU2:
                w = tl.load(w_at + SIZE * HIDDEN + at, mask=inside[None, :], other=0.0)
                up = dot_of_codes(w, values, up, scales, first_row + SIZE, at, HIDDEN, GROUP, PRECISION)
    known = column < SIZE
    if scales is not None and GROUP == 0 and PACKED == 0:
        gate *= tl.load(scales + first_row)[:, None]
        if KIND != RELU2:
            up *= tl.load(scales + first_row + SIZE)[:, None]
    if bias is not None:
        gate += tl.load(bias + own, mask=known, other=0.0).to(tl.float32)[:, None]
        if KIND != RELU2:
            up += tl.load(bias + own + SIZE, mask=known, other=0.0).to(tl.float32)[:, None]
    y = tl.trans(activated(gate, up, KIND).to(output.dtype.element_ty))
    target = output + place.to(tl.int64)[:, None] * SIZE + column[None, :]
    tl.store(target, y, mask=there[:, None] & known[None, :])


@triton.jit
def _down_many(
    gated, order, starts, counts, weight, scales, zeros, bias, output, EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr, HIDDEN: tl.constexpr, SIZE: tl.constexpr, TOP: tl.constexpr,
    PLACES: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr, PRECISION: tl.constexpr, PACKED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """output [pairs, HIDDEN], in the tokens' order, times what each counts."""
    wait(OVERLAP)
    BLOCKS: tl.constexpr = (HIDDEN + COLUMNS - 1) // COLUMNS
    expert, first, end = _tile(starts, tl.program_id(0) // BLOCKS, EXPERTS, BLOCK, ROWS)
    if expert >= EXPERTS:
        return
    place = first + tl.arange(0, ROWS)
    there = place < end
    pair = tl.load(order + place, mask=there, other=0)
    column = tl.program_id(0) % BLOCKS * COLUMNS + tl.arange(0, COLUMNS)
    step = tl.arange(0, DEPTH)
    start = weight + expert.to(tl.int64) * HIDDEN * SIZE
    w_at = start + tl.minimum(column, HIDDEN - 1)[:, None] * SIZE + step[None, :]
    row = expert.to(tl.int64) * HIDDEN + tl.minimum(column, HIDDEN - 1)
    x_at = gated + place.to(tl.int64)[None, :] * SIZE + step[:, None]
    sums = tl.zeros([COLUMNS, ROWS], tl.float32)
    if PACKED:
        source = gated + place.to(tl.int64)[None, :] * SIZE
        sums = tile_sums(
            source, there, SIZE, weight, scales, zeros, row, EXPERTS * HIDDEN, PRECISION, PACKED
        )
    else:
        for at in range(0, SIZE, DEPTH):
            inside = at + step < SIZE
            values = tl.load(x_at + at, mask=inside[:, None] & there[None, :], other=0.0)
            w = tl.load(w_at + at, mask=inside[None, :], other=0.0)
            sums = dot_of_codes(w, values, sums, scales, row, at, SIZE, GROUP, PRECISION)
    known = column < HIDDEN
    if scales is not None and GROUP == 0 and PACKED == 0:
        sums *= tl.load(scales + row)[:, None]
    if bias is not None:
        own = bias + expert * HIDDEN + column
        sums += tl.load(own, mask=known, other=0.0).to(tl.float32)[:, None]
    count = tl.load(counts + pair // TOP * PLACES + pair % TOP, mask=there, other=0.0)
    y = tl.trans((sums * count[None, :]).to(output.dtype.element_ty))
    target = output + pair.to(tl.int64)[:, None] * HIDDEN + column[None, :]
    tl.store(target, y, mask=there[:, None] & known[None, :])


@triton.jit
def _sum_many(
    added, shared, counts, output, HIDDEN: tl.constexpr, TOP: tl.constexpr, PLACES: tl.constexpr,
    BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    wait(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < HIDDEN
    y = tl.zeros([BLOCK], tl.float32)
    for place in tl.static_range(TOP):
        y += tl.load(added + (token * TOP + place) * HIDDEN + column, mask=inside, other=0.0)
    if shared is not None:
        row = tl.load(shared + token * HIDDEN + column, mask=inside, other=0.0).to(tl.float32)
        y += row * tl.load(counts + token * PLACES + TOP)
    tl.store(output + token * HIDDEN + column, y.to(output.dtype.element_ty), mask=inside)
