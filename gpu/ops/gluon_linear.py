"""Matrix products of many tokens in Gluon: one warp fetches tiles, the others only multiply.

A program keeps a ring of stages in shared memory. Its last warp asks the hardware for the tiles of
x and of the weights (TMA) as soon as a stage is free, across the ends of output tiles and, for the
first weights, ahead of the kernel before (programmatic dependent launch). Each of the other warp
groups multiplies 64 tokens with the stage's weights (wgmma), finishes its rows in registers and
lets the hardware write them while it goes on. The activation of a gated product is free: one thread
holds both the gate's and the up row's sum of a column.

The method is that of CUTLASS's warp-specialised persistent kernels; the API is Triton's
`experimental.gluon`, of which 3.6 and 3.9 are known to work. This file knows neither models nor
requests. The reference is `linear` with the plain layers beside this file. Hopper GPUs only; no
interpreter.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, import-untyped, import-not-found"

from functools import cache

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ramify.gpu.devices import multiprocessors
from ramify.gpu.ops.tilings import GROUP_TOKENS, GluonTiling

# The names since Triton 3.7, and those of 3.6.
_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global

_SWIZZLE = 128  # bytes of a row of shared memory in which TMA and wgmma swap columns
# A thread's, of the 168 that each has where two warp groups multiply.
_MULTIPLIES, _FETCHES = gl.constexpr(232), gl.constexpr(40)
_ROWS = gl.constexpr(GROUP_TOKENS)


def gluon_product(
    x: Tensor, squares: "Tensor | None", weight: Tensor, gated: bool, eps: float, tiling: GluonTiling,
    output: "Tensor | None" = None,
) -> Tensor:  # fmt: skip
    """Multiply x [T, inputs] by the transpose of weight [outputs, inputs], all bfloat16.

    squares float32[T, parts]: partial sums of the squares of rows of x, which are still to be divided by
    their root mean square. gated: the first half of the weight's rows is the gate; returns
    silu(gate) * up [T, outputs / 2], else [T, outputs], written to `output`. Raises ValueError for
    fewer inputs than the ring holds.
    """
    tokens, (outputs, inputs) = len(x), weight.shape
    if inputs < tiling.inputs * tiling.stages:
        raise ValueError(f"{inputs} inputs are fewer than {tiling} holds: give fewer stages")
    size, columns = (outputs // 2, tiling.outputs // 2) if gated else (outputs, tiling.outputs)
    if output is None:
        output = x.new_empty((tokens, size))
    layout = _layout()
    tiles = triton.cdiv(tokens, GROUP_TOKENS * tiling.groups) * triton.cdiv(size, columns)
    parts = squares.shape[1] if squares is not None else 1
    _ring[(min(tiles, multiprocessors(x.device)),)](
        TensorDescriptor.from_tensor(x, [GROUP_TOKENS, tiling.inputs], layout),
        TensorDescriptor.from_tensor(weight, [columns, tiling.inputs], layout),
        TensorDescriptor.from_tensor(output, [GROUP_TOKENS, tiling.outputs // 2], layout),
        squares, tokens, size, inputs, parts, eps,
        GROUPS=tiling.groups, OUTPUTS=tiling.outputs, INPUTS=tiling.inputs, STAGES=tiling.stages,
        BAND=tiling.band, GATED=gated, PARTS=triton.next_power_of_2(parts),
        num_warps=4, launch_pdl=True,
    )  # fmt: skip
    return output


@cache
def _layout() -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout(swizzle_byte_width=_SWIZZLE, element_bitwidth=16, rank=2)


@gluon.jit(do_not_specialize=["tokens"])
def _ring(
    x, weight, output, squares, tokens, size, inputs, parts, eps,
    GROUPS: gl.constexpr, OUTPUTS: gl.constexpr, INPUTS: gl.constexpr, STAGES: gl.constexpr,
    BAND: gl.constexpr, GATED: gl.constexpr, PARTS: gl.constexpr,
):  # fmt: skip
    """Run the ring. x, weight, output: descriptors of a warp group's tokens, of a tile's rows of the
    weight (of its gate, if gated) and of half a warp group's sums. size: the columns to write."""
    gdc_launch_dependents()
    x_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES * GROUPS, _ROWS, INPUTS], x.layout)
    w_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, OUTPUTS, INPUTS], weight.layout)
    leaving = gl.allocate_shared_memory(gl.bfloat16, [GROUPS, _ROWS, OUTPUTS // 2], output.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(free.index(stage), count=GROUPS)
    fence_async_shared()
    COLUMNS: gl.constexpr = OUTPUTS // 2 if GATED else OUTPUTS
    ring = (x_ring, w_ring, full, free)
    grid = (gl.cdiv(size, COLUMNS), gl.cdiv(tokens, GROUPS * _ROWS), gl.cdiv(inputs, INPUTS))
    rest = (squares, tokens, inputs, parts, eps)
    if GROUPS == 1:
        gl.warp_specialize([
            (_consume, (output, ring, leaving, grid, rest, 0, 1, STAGES, BAND, GATED, PARTS)),
            (_produce, (x, weight, ring, grid, tokens, size, 1, STAGES, BAND, GATED)),
        ], [1], [_FETCHES])  # fmt: skip
    else:
        gl.static_assert(GROUPS == 2)
        gl.warp_specialize([
            (_consume, (output, ring, leaving, grid, rest, 0, 2, STAGES, BAND, GATED, PARTS)),
            (_consume, (output, ring, leaving, grid, rest, 1, 2, STAGES, BAND, GATED, PARTS)),
            (_produce, (x, weight, ring, grid, tokens, size, 2, STAGES, BAND, GATED)),
        ], [4, 1], [_MULTIPLIES, _FETCHES])  # fmt: skip


@gluon.jit
def _place(tile, grid, BAND: gl.constexpr):
    """Find (tile of columns, block of tokens) of a program's tile.

    BAND blocks of tokens share their columns' weights at a time, so that the reads of all running
    programs fit the L2 cache.
    """
    columns, blocks, _ = grid
    band = tile // (BAND * columns)
    height = gl.minimum(blocks - band * BAND, BAND)
    within = tile % (BAND * columns)
    return within // height, band * BAND + within % height


@gluon.jit
def _first_token(block, group, tokens, GROUPS: gl.constexpr):
    """Find the first token of a warp group's rows. The last rows are taken twice, with the same result,
    instead of rows beyond the end: filling a tile with zeros costs TMA more time than reading it."""
    return gl.minimum((block * GROUPS + group) * _ROWS, gl.maximum(tokens - _ROWS, 0))


@gluon.jit
def _produce(
    x, weight, ring, grid, tokens, size,
    GROUPS: gl.constexpr, STAGES: gl.constexpr, BAND: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    x_ring, w_ring, full, free = ring
    columns, blocks, steps = grid
    first = gl.program_id(0)
    column, block = _place(first, grid, BAND)
    for stage in gl.static_range(STAGES):
        _expect(x, w_ring, full.index(stage), GROUPS)
        _load_weights(weight, column, stage, size, full.index(stage), w_ring.index(stage), GATED)
    gdc_wait()
    for stage in gl.static_range(STAGES):
        _load_tokens(x, block, tokens, stage, full.index(stage), x_ring, stage, GROUPS)
    stage = 0
    phase = 0
    for tile in range(first, columns * blocks, gl.num_programs(0)):
        column, block = _place(tile, grid, BAND)
        # not a variable that the loop sets: the compiler takes a number for a constant
        for step in range(gl.where(tile == first, STAGES, 0), steps):
            mbarrier.wait(free.index(stage), phase)
            _expect(x, w_ring, full.index(stage), GROUPS)
            _load_weights(weight, column, step, size, full.index(stage), w_ring.index(stage), GATED)
            _load_tokens(x, block, tokens, step, full.index(stage), x_ring, stage, GROUPS)
            stage, phase = _next(stage, phase, STAGES)


@gluon.jit
def _next(stage, phase, STAGES: gl.constexpr):
    stage += 1
    return gl.where(stage == STAGES, 0, stage), gl.where(stage == STAGES, phase ^ 1, phase)


@gluon.jit
def _expect(x, w_ring, full, GROUPS: gl.constexpr):
    """Let the barrier count the bytes of a stage."""
    INPUTS: gl.constexpr = x.block_type.shape[1]
    mbarrier.expect(full, (GROUPS * _ROWS + w_ring.shape[1]) * INPUTS * 2)


@gluon.jit
def _load_weights(weight, column, step, size, full, tile, GATED: gl.constexpr):
    ROWS: gl.constexpr = weight.block_type.shape[0]
    INPUTS: gl.constexpr = weight.block_type.shape[1]
    if GATED:
        _load(weight, [column * ROWS, step * INPUTS], full, tile.slice(0, ROWS, 0))
        _load(weight, [size + column * ROWS, step * INPUTS], full, tile.slice(ROWS, ROWS, 0))
    else:
        _load(weight, [column * ROWS, step * INPUTS], full, tile)


@gluon.jit
def _load_tokens(x, block, tokens, step, full, x_ring, stage, GROUPS: gl.constexpr):
    INPUTS: gl.constexpr = x.block_type.shape[1]
    for group in gl.static_range(GROUPS):
        token = _first_token(block, group, tokens, GROUPS)
        _load(x, [token, step * INPUTS], full, x_ring.index(stage * GROUPS + group))


@gluon.jit
def _consume(
    output, ring, leaving, grid, rest, GROUP: gl.constexpr,
    GROUPS: gl.constexpr, STAGES: gl.constexpr, BAND: gl.constexpr, GATED: gl.constexpr,
    PARTS: gl.constexpr,
):  # fmt: skip
    """Multiply as one warp group: the rows of GROUP in each of the program's tiles."""
    x_ring, w_ring, full, free = ring
    columns, blocks, steps = grid
    squares, tokens, inputs, parts, eps = rest
    OUTPUTS: gl.constexpr = w_ring.shape[1]
    HALF: gl.constexpr = OUTPUTS // 2
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, OUTPUTS, 16])
    gdc_wait()
    stage = 0
    phase = 0
    for tile in range(gl.program_id(0), columns * blocks, gl.num_programs(0)):
        sums = gl.zeros([_ROWS, OUTPUTS], gl.float32, SUMS)
        for step in range(steps):
            mbarrier.wait(full.index(stage), phase)
            values, weights = x_ring.index(stage * GROUPS + GROUP), w_ring.index(stage)
            sums = warpgroup_mma(values, weights.permute((1, 0)), sums, use_acc=step > 0, is_async=True)
            sums = warpgroup_mma_wait(1, deps=(sums,))  # the step before has been read
            mbarrier.arrive(free.index(gl.where(stage == 0, STAGES, stage) - 1), pred=step > 0)
            stage, phase = _next(stage, phase, STAGES)
        sums = warpgroup_mma_wait(0, deps=(sums,))
        mbarrier.arrive(free.index(gl.where(stage == 0, STAGES, stage) - 1))

        column, block = _place(tile, grid, BAND)
        token = _first_token(block, GROUP, tokens, GROUPS)
        if squares is not None:
            sums *= _scale(squares, token, tokens, inputs, parts, eps, PARTS, SUMS)
        # columns c and c + HALF are in one thread: nothing moves
        left, right = gl.split(sums.reshape([_ROWS, 2, HALF]).permute([0, 2, 1]))
        tma.store_wait(0)
        if GATED:
            _write(
                output, left / (1.0 + gl.exp(-left)) * right, token, column * HALF, leaving.index(GROUP)
            )
        else:
            _write(output, left, token, column * OUTPUTS, leaving.index(GROUP))
            tma.store_wait(0)
            _write(output, right, token, column * OUTPUTS + HALF, leaving.index(GROUP))
    tma.store_wait(0)


@gluon.jit
def _scale(
    squares, token, tokens, inputs, parts, eps, PARTS: gl.constexpr, SUMS: gl.constexpr
):  # fmt: skip
    """Compute the inverse root mean squares of a warp group's rows, as a column."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0])
    rows = token + gl.arange(0, _ROWS, gl.SliceLayout(1, LAYOUT))
    part = gl.arange(0, PARTS, gl.SliceLayout(0, LAYOUT))
    there = (rows < tokens)[:, None] & (part < parts)[None, :]
    loaded = gl.load(squares + rows[:, None] * parts + part[None, :], mask=there, other=0.0)
    scale = gl.rsqrt(gl.sum(loaded, 1) / inputs + eps)
    return gl.convert_layout(scale, gl.SliceLayout(1, SUMS))[:, None]


@gluon.jit
def _write(output, values, token, column, place):
    place.store(values.to(output.dtype))
    fence_async_shared()
    _store(output, [token, column], place)
