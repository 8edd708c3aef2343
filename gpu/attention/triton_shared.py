"""The shared part of decode attention in Triton: keys that several lines share, read once.

Branches of a fork hold the same pages up to where they parted. One program takes the query heads
of many of them as the rows of one tensor-core tile (Hydragen, Juravsky et al. 2024; cascade
inference, Ye et al. 2024) and attends to a stretch of the common keys. `triton_decode` begins a line's
own keys from its results, an output and a log-sum-exp for each query, so no other launch merges them.
Which lines share keys: see `groups`. The reference is `torch_attention`.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, import-untyped, import-not-found"

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ramify.gpu.attention.groups import Grouper, GroupLimits
from ramify.gpu.attention.spec import AttentionShape, AttentionSpec
from ramify.gpu.attention.triton_tile import ask, paged, reading, score_scale, take_keys, tile_sizes
from ramify.gpu.kv.layout import LayerKV
from ramify.gpu.programmatic_launch import overlaps
from ramify.gpu.step.rows import RowTable

TILE = 64  # query heads of one program: a warp group's smallest tile on Hopper
_KEYS = 32
_LATENTS = 64  # keys, where a Hopper GPU's memory has room for two such tiles
_HOPPERS = 227 << 10
_PROGRAMS = 528  # wanted at once: four a multiprocessor of a Hopper GPU
_LATENT_PROGRAMS = 132  # one a multiprocessor: the sums of 64 heads over latents fill its registers
_LEAST_MEMBERS = 3
_LEAST_SAVED = 80 << 20  # bytes a layer that must not be read twice, else the plain pass is faster


@dataclass(slots=True)
class SharedGroups:
    """A decode step's groups on the device: the arrays of `groups.GroupArrays`."""

    items: Tensor  # int32[capacity, 5]
    members: Tensor  # int32[B]
    own: Tensor  # int32[B, 4]


@dataclass(slots=True)
class Parts:
    """The results of the shared pass, for the lines' own passes."""

    own: Tensor  # int32[B, 4]
    outputs: Tensor  # float32[capacity, kv_heads, TILE, D], normalised
    sums: Tensor  # float32[capacity, kv_heads, TILE] log-sum-exps, base 2


def grouper_for(table: RowTable, shape: AttentionShape, lines: int = 1) -> Grouper | None:
    """Make the grouper of a model's decodes, each of up to `lines` lines of a row.

    Limits were measured on an H200 (docs/log/gpu.md), where the L2 cache gives the plain pass most of
    what shared keys could save: it reads them again at 7 to 8 TB/s. None if the query heads of a decode
    fill a tile, which then has no room for another one's.
    """
    tile_lines = TILE * shape.kv_heads // (shape.heads * lines)
    if tile_lines < _LEAST_MEMBERS:
        return None
    tensors = 2 if shape.value_dim is None else 1  # that are read of a key
    limits = GroupLimits(
        least_depth=128,
        least_saved=_LEAST_SAVED
        // (tensors * shape.kv_heads * shape.head_dim * (1 if shape.codes else shape.dtype.itemsize)),
        least_members=_LEAST_MEMBERS,
        tile_lines=tile_lines,
        items=max(1, (_PROGRAMS if tensors == 2 else _LATENT_PROGRAMS) // shape.kv_heads),
    )
    return Grouper(table, limits)


def shared_attention(
    q: Tensor, kv: LayerKV, shared: SharedGroups, pages: Tensor, spec: AttentionSpec
) -> Parts:
    """Attend: q [B, heads, D] over the stretches of `shared`; pages int32[rows, columns].

    Sinks are left to `triton_decode`, which takes them in once.
    """
    heads, (kv_heads, dim, tail) = q.shape[1], tile_sizes(q, kv)
    capacity = len(shared.items)
    outputs = torch.empty((capacity, kv_heads, TILE, dim), dtype=torch.float32, device=q.device)
    sums = torch.empty((capacity, kv_heads, TILE), dtype=torch.float32, device=q.device)
    exact = q.dtype == torch.float32
    scale, softcap = score_scale(spec)
    tiles = (TILE + 2 * _LATENTS) * (dim + tail) * q.dtype.itemsize  # bytes: of queries, and two of keys
    wide = tail > 0 and kv.k_scales is None and overlaps(q.device) and tiles <= _HOPPERS
    _shared[(capacity, kv_heads)](
        q, kv.k, kv.v, kv.k_scales, kv.v_scales, shared.items, shared.members, pages, outputs, sums,
        pages.shape[1], scale, HEADS=heads, KV_HEADS=kv_heads, GROUP=heads // kv_heads,
        TILE=TILE, DIM=dim, TAIL=tail, PAGE=kv.page_size, KEYS=_LATENTS if wide else _KEYS,
        PRECISION="ieee" if exact else "tf32", SOFTCAP=softcap, READING=reading(q, kv),
        num_warps=8 if tail else 4, num_stages=2 if exact or tail else 4,
    )  # fmt: skip
    return Parts(shared.own, outputs, sums)


@triton.jit
def _shared(
    q, k_pool, v_pool, k_scales, v_scales, items, members, pages, outputs, sums, columns, scale,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr, DIM: tl.constexpr,
    TAIL: tl.constexpr, PAGE: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
    SOFTCAP: tl.constexpr, READING: tl.constexpr,
):  # fmt: skip
    """Run an item. scale, SOFTCAP: see `score_scale`."""
    item = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    row = tl.load(items + item * 5).to(tl.int64)
    start = tl.load(items + item * 5 + 1)
    stop = tl.load(items + item * 5 + 2)
    first = tl.load(items + item * 5 + 3)
    count = tl.load(items + item * 5 + 4)
    if start >= stop:
        return

    tile = tl.arange(0, TILE)
    dims = tl.arange(0, DIM)
    real = tile < count * GROUP
    line = tl.load(members + first + tile // GROUP, mask=real, other=0).to(tl.int64)
    head = kv_head * GROUP + tile % GROUP
    query, tail = ask(q, line * HEADS + head, dims, real, DIM, TAIL, READING)
    top = tl.full([TILE], -float("inf"), tl.float32)
    total = tl.zeros([TILE], tl.float32)
    mixed = tl.zeros([TILE, DIM], tl.float32)
    for begin in range(start, stop, KEYS):
        keys = begin + tl.arange(0, KEYS)
        there = keys < stop
        place = paged(pages, row, columns, keys, there, kv_head, KV_HEADS, DIM, TAIL, PAGE)
        top, total, mixed = take_keys(
            query, tail, k_pool, v_pool, k_scales, v_scales, place, dims, there, there[None, :], scale,
            top, total, mixed, DIM, TAIL, PRECISION, SOFTCAP, READING,
        )  # fmt: skip
    at = (item * KV_HEADS + kv_head) * TILE + tile
    tl.store(outputs + at[:, None] * DIM + dims[None, :], mixed / total[:, None], mask=real[:, None])
    tl.store(sums + at, top + tl.log2(total), mask=real)
