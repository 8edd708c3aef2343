"""Triton kernels for layers of experts and a few tokens: two launches, without sorting.

A program takes some rows of one expert's weights for one token; neighbours take the same rows for other
tokens, so that an expert's bytes come from memory once. The second product sums over a token's experts
in a fixed order.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, import-untyped, import-not-found"

import triton
import triton.language as tl
from torch import Tensor

from ramify.gpu.ops.experts import LayerExperts
from ramify.gpu.ops.linear.base import Operand
from ramify.gpu.ops.triton_experts import KINDS, RELU2, ExpertRoutes, activated
from ramify.gpu.ops.triton_four_codes import packing, row_sums
from ramify.gpu.ops.triton_linear import UnscaledRows
from ramify.gpu.programmatic_launch import overlap_options, wait
from ramify.gpu.triton_fp8 import widened

_SHORT, _LONG = 256, 512  # inputs of a step, as measured: docs/log/gpu.md


def open_few(x: UnscaledRows, eps: float, layer: LayerExperts, routes: ExpertRoutes) -> Tensor:
    """Compute the activations of experts: x [T, hidden] -> [T, top * size, and the shared expert's]."""
    values, hidden, size = x.values, x.values.shape[1], layer.size
    (tokens, top), shared = routes.chosen.shape, layer.shared
    beside = 0 if shared is None else shared.size
    gated = values.new_empty((tokens, top * size + beside))
    beside_up = layer.gate_up if shared is None else shared.gate_up  # not read without one
    gate_up, shared_up = layer.gate_up.weight.operand, beside_up.weight.operand
    packed, shared_packed = (packing(one.weight, values.dtype) for one in (layer.gate_up, beside_up))
    parts = 1 if x.squares is None else x.squares.shape[1]
    many = 32 if packed else 16  # rows of the weights that a program takes
    most = _LONG if tokens == 1 and gate_up.codes.itemsize == 1 else _SHORT
    _open_few[(tokens * (top * triton.cdiv(size, many) + triton.cdiv(beside, many)),)](
        values, x.squares, routes.chosen, gate_up.codes, gate_up.scales, gate_up.zeros,
        layer.gate_up.bias, shared_up.codes, shared_up.scales, shared_up.zeros, gated, tokens, parts,
        eps, layer.gate_up.weight.shape[0], beside_up.weight.shape[0], HIDDEN=hidden, SIZE=size,
        SHARED=beside, TOP=top, KIND=KINDS[layer.activation], PARTS=triton.next_power_of_2(parts),
        GROUP=gate_up.group or hidden, SHARED_GROUP=shared_up.group or hidden, ROWS=many,
        DEPTH=_depth(hidden, most, gate_up, shared_up), STAGES=3, PACKED=packed,
        SHARED_PACKED=shared_packed, DIVIDED=layer.divided, num_warps=4,
        **overlap_options(values.device),
    )  # fmt: skip
    return gated


def sum_few(gated: Tensor, layer: LayerExperts, routes: ExpertRoutes) -> Tensor:
    """Sum over each token's experts: the result of `open_few` -> [T, hidden]."""
    (tokens, top), shared, size = routes.chosen.shape, layer.shared, layer.size
    hidden, down = layer.down.weight.shape[0] // layer.held, layer.down.weight.operand
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
        SHARED_GROUP=shared_down.group or max(1, beside), ROWS=rows, DEPTH=_depth(size, _LONG, down),
        SHARED_DEPTH=_depth(max(1, beside), _LONG, shared_down), STAGES=4, PACKED=packed,
        SHARED_PACKED=shared_packed, DIVIDED=layer.divided, num_warps=4,
        **overlap_options(gated.device),
    )  # fmt: skip
    return output


def run_few(x: UnscaledRows, eps: float, layer: LayerExperts, routes: ExpertRoutes) -> Tensor:
    """Run experts, the shared one included: x [T, hidden] -> [T, hidden]."""
    return sum_few(open_few(x, eps, layer, routes), layer, routes)


def _depth(size: int, most: int, *operands: Operand) -> int:
    """Choose the inputs of a step of a loop over `size`: at most `most`, and at most a group's."""
    groups = [one.group for one in operands if 16 <= one.group < size]
    most = min([most if size % most == 0 else _SHORT, *groups])
    return min(most, max(16, 1 << (size - 1).bit_length()))


@triton.jit
def _weights(place, there, scales, row, at, WIDTH: tl.constexpr, GROUP: tl.constexpr):
    """Load numbers at `place` [R, D] as float32, of rows [R, 1] of WIDTH inputs; GROUP share a scale.

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
    """Compute output[row] = activation(gate) * up of one token x [HIDDEN], for ROWS from `row_of` on.

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
    SHARED_PACKED: tl.constexpr, DIVIDED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Compute output [T, TOP * SIZE + SHARED]. squares: see `UnscaledRows`."""
    wait(OVERLAP)
    index, pairs = tl.program_id(0), tokens * TOP
    routed = pairs * tl.cdiv(SIZE, ROWS)
    if index < routed:
        pair = index % pairs
        token = (pair // TOP).to(tl.int64)
    else:
        pair = 0
        token = ((index - routed) % tokens).to(tl.int64)
    if DIVIDED:  # noqa: SIM102, the compiler knows it
        if index < routed and tl.load(chosen + pair) * (SIZE if KIND == RELU2 else 2 * SIZE) >= total:
            return
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
    SHARED_PACKED: tl.constexpr, DIVIDED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Compute some columns of one token of output [T, HIDDEN]."""
    wait(OVERLAP)
    token = (tl.program_id(0) % tokens).to(tl.int64)
    row = tl.program_id(0) // tokens * ROWS + tl.arange(0, ROWS)
    inside = row < HIDDEN
    line = tl.minimum(row, HIDDEN - 1)[:, None]
    source = gated + token * (TOP * SIZE + SHARED)
    own_counts = counts + token * (TOP + (SHARED > 0))
    own_chosen = chosen + token * TOP
    places = TOP
    if DIVIDED:  # the first ones are here
        places = 0
        for number in tl.static_range(TOP):
            places += (tl.load(own_chosen + number) * HIDDEN < total).to(tl.int32)
    if PACKED:
        y = tl.zeros([ROWS], tl.float32)
        for place in tl.static_range(TOP):
            if place < places:
                own = tl.load(own_chosen + place).to(tl.int64) * HIDDEN + tl.minimum(row, HIDDEN - 1)
                at_x = source + place * SIZE
                part = row_sums(at_x, SIZE, weight, scales, zeros, own, total, STAGES, PACKED)
                y += part * tl.load(own_counts + place)
    else:
        STEPS: tl.constexpr = (SIZE + DEPTH - 1) // DEPTH
        sums = tl.zeros([ROWS, DEPTH], tl.float32)
        for step in tl.range(0, places * STEPS, num_stages=STAGES):
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
            known = inside
            if DIVIDED:
                known = row < tl.where(place < places, HIDDEN, 0)
            y += tl.load(own_bias, mask=known, other=0.0).to(tl.float32) * tl.load(own_counts + place)
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
