"""Triton kernels for layers of experts and many tokens: sorted by expert, multiplied in tiles.

Pairs of a token and an expert are put in the experts' order, tiles of them are multiplied, and a last
launch sums over each token's experts.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, import-untyped, import-not-found"

import torch
import triton
import triton.language as tl
from torch import Tensor

from ramify.gpu.ops.experts import ExpertTile, LayerExperts
from ramify.gpu.ops.linear.base import Linear
from ramify.gpu.ops.triton_experts import KINDS, RELU2, ExpertRoutes, activated, dot_of_codes
from ramify.gpu.ops.triton_four_codes import packing, tile_sums
from ramify.gpu.programmatic_launch import launch_options, overlaps, wait

_SORTED = 1024  # pairs that a program looks at together; four times as many where there are many
_SUMMED = 1024  # columns of a program that sums over a token's experts

TileTable = tuple[tuple[int, ExpertTile], ...]
"""Tiles, each with the most pairs of a token and an expert, on average an expert, that it serves."""

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


def run_many(
    x: Tensor, layer: LayerExperts, routes: ExpertRoutes, shared: "Tensor | None", invariant: bool
) -> Tensor:
    """Run experts: x [T, hidden], and shared [T, hidden], the shared expert's output -> [T, hidden].

    `invariant`: a token's result depends on no other token, to the last bit.
    """
    (tokens, top), experts, hidden = routes.chosen.shape, layer.held, x.shape[1]
    size, pairs, device = layer.size, tokens * top, x.device
    overlap, options = overlaps(device), launch_options(device)
    order, starts = sort_pairs(routes.chosen, experts)
    tile = tile_for(pairs, layer.experts, x.dtype, invariant, layer.tiles)
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
        sums, shared, routes.counts, routes.chosen if layer.divided else None, output, HIDDEN=hidden,
        TOP=top, PLACES=places, EXPERTS=experts, BLOCK=block, OVERLAP=overlap, num_warps=4, **options,
    )  # fmt: skip
    return output


def sort_pairs(chosen: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Sort chosen int32[T, top] by expert. Returns the order int32[T * top], and where each expert's
    pairs begin, int32[experts + 1].
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
    """Choose the tile by how many `pairs` an expert has on average. `tiles`: None: not measured."""
    if dtype == torch.float32:
        return _EXACT
    if invariant:
        return _INVARIANT
    return next(tile for most, tile in tiles or SERVED_TILES if pairs <= most * experts)


def _steps(linear: Linear, x: Tensor, tile: ExpertTile) -> dict[str, int]:
    """Compute the inputs of a step, and of a group; 0: a row. Packed codes have steps of their own."""
    group, packed = linear.weight.operand.group, packing(linear.weight, x.dtype)
    if packed or not 0 < group < x.shape[1]:
        group = 0
    return {"GROUP": group, "DEPTH": min(tile.depth, group or tile.depth), "PACKED": packed}


@triton.jit(do_not_specialize=["pairs"])
def _sort(
    chosen, order, starts, pairs, EXPERTS: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr
):  # fmt: skip
    """Write order: the pairs of expert 0, then those of 1, ..; and starts: each expert's first.

    A program for each expert: it counts the pairs of lower experts, and writes its own.
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
    """Find tile number `tile`, of all experts in order: (its expert, its first pair, the expert's end).

    Beyond the last tile the expert is EXPERTS or more.
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
def _open_many(
    x, order, starts, weight, scales, zeros, bias, output, EXPERTS: tl.constexpr, BLOCK: tl.constexpr,
    HIDDEN: tl.constexpr, SIZE: tl.constexpr, TOP: tl.constexpr, KIND: tl.constexpr,
    GROUP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    PRECISION: tl.constexpr, PACKED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Compute output [pairs, SIZE], in the experts' order."""
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
    """Compute output [pairs, HIDDEN], in the tokens' order, times each pair's weight."""
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
    added, shared, counts, chosen, output, HIDDEN: tl.constexpr, TOP: tl.constexpr,
    PLACES: tl.constexpr, EXPERTS: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Sum a token's pairs. chosen: given where other ranks have experts, whose rows are missing."""
    wait(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < HIDDEN
    y = tl.zeros([BLOCK], tl.float32)
    for place in tl.static_range(TOP):
        there = inside
        if chosen is not None:
            own = tl.load(chosen + token * TOP + place)
            there = column < tl.where(own < EXPERTS, HIDDEN, 0)
        y += tl.load(added + (token * TOP + place) * HIDDEN + column, mask=there, other=0.0)
    if shared is not None:
        row = tl.load(shared + token * HIDDEN + column, mask=inside, other=0.0).to(tl.float32)
        y += row * tl.load(counts + token * PLACES + TOP)
    tl.store(output + token * HIDDEN + column, y.to(output.dtype.element_ty), mask=inside)
