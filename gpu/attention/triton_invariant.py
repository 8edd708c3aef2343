"""Attention whose result for a token depends on the token's own sequence alone.

For the deterministic mode: one kernel for decodes and extends alike, so that a result does not depend on
the batch, on how a prefill was cut or on which part came from the cache. Keys are taken in blocks and
chunks aligned to absolute positions; blocks that a query does not see change nothing, bit for bit.
Chunks are merged in order, in registers or, where few sequences decode, by a second kernel from partial
results: the same additions either way. The other back end, `triton_paged`, is faster and gives the same
up to rounding.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, import-untyped, import-not-found"

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from ramify.gpu.attention.spec import AttentionShape, AttentionSpec
from ramify.gpu.attention.triton_decode import splits_for
from ramify.gpu.attention.triton_tile import (
    FLOATS,
    ask,
    begin_with_sinks,
    paged,
    score_scale,
    take_keys,
    tile_sizes,
)
from ramify.gpu.kv.layout import LayerKV
from ramify.gpu.step.buckets import Bucket
from ramify.gpu.step.inputs import Plan, StepInputs
from ramify.gpu.step.rows import RowTable, StepRows
from ramify.gpu.step.staging import Array
from ramify.gpu.vision.placing import SEEN_BEHIND, seen_behind

_KEYS = 64  # in one block
_CHUNK = 512  # keys at least
_MOST_CHUNKS = 32
_FIELDS = 4


class InvariantPaged:
    """The deterministic back end. `pages` int32[rows, columns]: the page table on the device."""

    static_extends = False  # a step's decodes are tiles beside those of its extends

    def __init__(self, pages: Tensor, table: RowTable, shape: AttentionShape) -> None:
        self._pages, shape = pages, shape.tiled
        self._group = triton.next_power_of_2(shape.group)
        self._pictures = table.pictures if shape.whole else None
        # a step of padding has no plan: one tile without queries
        self._no_query = torch.zeros((1, _FIELDS), dtype=torch.int32, device=pages.device)
        length = pages.shape[1] * table.page_size
        self._chunk = max(_CHUNK, triton.next_power_of_2(triton.cdiv(length, _MOST_CHUNKS)))
        self._chunks = triton.cdiv(length, self._chunk)
        self._exact = shape.dtype == torch.float32
        tall, flat = 128, 64
        self._keys, wide = _KEYS, shape.head_dim > 256
        if wide:  # two outputs of a line are in registers
            tall = flat = self._keys = 32
        elif self._exact:  # of 256 dimensions, 128 lines do not fit into shared memory
            tall = flat
        if not pages.is_cuda:  # numpy's products round by the shape: there one for all
            tall = flat = 16
        self._extend_lines, self._decode_lines = (max(n, self._group) for n in (tall, flat))

    def room(self, bucket: Bucket) -> Plan:
        return {}  # steps with extends are not captured, and which lines share keys follows the batch

    def unlike_decodes(self, most: int) -> list[int]:
        return []

    def plan_decodes(self, rows: Array, positions: Array) -> None:
        pass

    def plan(self, step: StepRows, bucket: Bucket, captured: bool) -> Plan:
        """Plan tiles int32[n, 4]: row, first query's index among the tokens, queries, its position.

        Decodes beside extends are tiles of one query. Tiles with the longest reach come first.
        """
        if not step.extends:
            return {}
        size = self._extend_lines // self._group
        tiles, first = [], 0
        for row, start, count in zip(
            step.rows.tolist(), step.starts.tolist(), step.counts.tolist(), strict=True
        ):
            for offset in range(0, count, size):
                tiles.append((row, first + offset, min(size, count - offset), start + offset))
            first += count
        tiles.sort(key=lambda tile: -(tile[3] + tile[2]))
        plan: Plan = {"tiles": np.array(tiles, dtype=np.int32).reshape(-1, _FIELDS)}
        if self._pictures is not None:
            plan[SEEN_BEHIND] = seen_behind(step, self._pictures)
        return plan

    def attend(self, q: Tensor, kv: LayerKV, step: StepInputs[Tensor], spec: AttentionSpec) -> Tensor:
        tokens, heads, _ = q.shape
        kv_heads, dim, tail = tile_sizes(q, kv)
        output = q.new_empty((tokens, heads * dim))  # of a latent the mixed ones
        decode = not step.extended
        splits = min(self._chunks, splits_for(tokens, kv_heads)) if decode else 1
        partial = sums = output
        if splits > 1:
            shape = (tokens, heads, self._chunks)
            partial = torch.empty((*shape, dim), dtype=torch.float32, device=q.device)
            sums = torch.empty((*shape, 2), dtype=torch.float32, device=q.device)
        tiles = step.rows if decode else step.plan.get("tiles", self._no_query)
        lines = self._decode_lines if decode else self._extend_lines
        exact, behind = self._exact, None
        if spec.whole and not decode:
            behind = step.plan.get(SEEN_BEHIND, self._no_query)
        scale, softcap = score_scale(spec)
        shapes = {"HEADS": heads, "DIM": dim, "WINDOW": spec.window or 0, "CHUNK": self._chunk,
                  "CHUNKS": self._chunks, "enable_fp_fusion": False}  # fmt: skip
        _attend[(len(tiles), kv_heads, splits)](
            q, kv.k, kv.v, kv.k_scales, kv.v_scales, tiles, step.positions, self._pages, output,
            partial, sums, spec.sinks, behind, self._pages.shape[1], scale, KV_HEADS=kv_heads,
            TAIL=tail, PADDED=self._group, LINES=lines, PAGE=kv.page_size, KEYS=self._keys,
            DECODE=decode, SPLITS=splits, PRECISION="ieee" if exact else "tf32", SOFTCAP=softcap,
            num_warps=8 if dim > 256 else lines // 16 if lines >= 64 else 4,
            num_stages=2 if exact or dim > 256 else 3, **shapes,
        )  # fmt: skip
        if splits > 1:
            _merge[(tokens, heads)](
                step.positions, partial, sums, output, spec.sinks, num_warps=2, **shapes
            )
        return output


@triton.jit
def _add(top, total, mixed, other_top, other_total, other_mixed):
    """Add the sums over one more chunk; top, total [...], mixed [..., DIM]. -inf: nothing yet."""
    new_top = tl.maximum(top, other_top)
    base = tl.where(new_top == -float("inf"), 0.0, new_top)
    fade = tl.exp2(top - base)
    share = tl.exp2(other_top - base)
    total = total * fade + other_total * share
    mixed = mixed * tl.expand_dims(fade, -1) + other_mixed * tl.expand_dims(share, -1)
    return new_top, total, mixed


@triton.jit
def _attend(
    q, k_pool, v_pool, k_scales, v_scales, tiles, positions, pages, output, partial, sums, sinks, behind,
    columns, scale, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, TAIL: tl.constexpr,
    PADDED: tl.constexpr,
    LINES: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr, KEYS: tl.constexpr,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, DECODE: tl.constexpr, SPLITS: tl.constexpr,
    PRECISION: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Run a tile. scale, SOFTCAP: see `score_scale`. sinks: float32[heads] or None."""
    index = tl.program_id(0)
    kv_head = tl.program_id(1)
    if DECODE:
        row = tl.load(tiles + index).to(tl.int64)
        first = index.to(tl.int64)
        count = 1
        position = tl.load(positions + index)
    else:
        row = tl.load(tiles + index * 4).to(tl.int64)
        first = tl.load(tiles + index * 4 + 1).to(tl.int64)
        count = tl.load(tiles + index * 4 + 2)
        position = tl.load(positions + first)  # which the host may not know, if drafts are in flight
    GROUP: tl.constexpr = HEADS // KV_HEADS
    lines = tl.arange(0, LINES)
    query = lines // PADDED
    head = kv_head * GROUP + lines % PADDED
    real = (query < count) & (lines % PADDED < GROUP)
    dims = tl.arange(0, DIM)
    place = (first + query) * HEADS + head
    asked, tail = ask(q, place, dims, real, DIM, TAIL, FLOATS)
    own = position + query
    reach = own
    end = position + count
    if behind is not None:
        reach = own + tl.load(behind + first + query, mask=real, other=0)
        end = tl.maximum(end, tl.max(tl.where(real, reach, 0), 0) + 1)
    low = 0
    if WINDOW:
        low = tl.maximum(position - WINDOW + 1, 0)
    top = tl.full([LINES], -float("inf"), tl.float32)
    total = tl.zeros([LINES], tl.float32)
    mixed = tl.zeros([LINES, DIM], tl.float32)
    if sinks is not None:
        top, total = begin_with_sinks(sinks, head, real, 0)
    for chunk in range(low // CHUNK + tl.program_id(2), tl.cdiv(end, CHUNK), SPLITS):
        own_top = tl.full([LINES], -float("inf"), tl.float32)
        own_total = tl.zeros([LINES], tl.float32)
        own_mixed = tl.zeros([LINES, DIM], tl.float32)
        first_key = tl.maximum(chunk * CHUNK, low // KEYS * KEYS)
        for begin in range(first_key, tl.minimum(chunk * CHUNK + CHUNK, end), KEYS):
            keys = begin + tl.arange(0, KEYS)
            there = (keys >= low) & (keys < end)
            source = paged(pages, row, columns, keys, there, kv_head, KV_HEADS, DIM, TAIL, PAGE)
            seen = keys[None, :] <= reach[:, None]
            if WINDOW:
                seen = seen & (keys[None, :] > own[:, None] - WINDOW)
            own_top, own_total, own_mixed = take_keys(
                asked, tail, k_pool, v_pool, k_scales, v_scales, source, dims, there, seen, scale,
                own_top, own_total, own_mixed, DIM, TAIL, PRECISION, SOFTCAP, FLOATS,
            )  # fmt: skip
        if SPLITS == 1:
            top, total, mixed = _add(top, total, mixed, own_top, own_total, own_mixed)
        else:
            at = place * CHUNKS + chunk
            tl.store(partial + at[:, None] * DIM + dims[None, :], own_mixed, mask=real[:, None])
            tl.store(sums + at * 2, own_top, mask=real)
            tl.store(sums + at * 2 + 1, own_total, mask=real)
    if SPLITS == 1:
        mixed = tl.div_rn(mixed, tl.where(total > 0, total, 1.0)[:, None])
        target = output + place[:, None] * DIM + dims[None, :]
        tl.store(target, mixed.to(output.dtype.element_ty), mask=real[:, None])


@triton.jit
def _merge(
    positions, partial, sums, output, sinks, HEADS: tl.constexpr, DIM: tl.constexpr,
    WINDOW: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Merge the chunks of one decode and head, in order."""
    token = tl.program_id(0)
    position = tl.load(positions + token)
    place = token.to(tl.int64) * HEADS + tl.program_id(1)
    one = tl.arange(0, 1)
    dims = tl.arange(0, DIM)
    low = 0
    if WINDOW:
        low = tl.maximum(position - WINDOW + 1, 0) // CHUNK
    top = tl.full([1], -float("inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    mixed = tl.zeros([1, DIM], tl.float32)
    if sinks is not None:
        top, total = begin_with_sinks(sinks, tl.program_id(1) + one, one < 1, 0)
    for chunk in range(low, position // CHUNK + 1):
        at = place * CHUNKS + chunk
        own_mixed = tl.load(partial + (at + one)[:, None] * DIM + dims[None, :])
        own_top = tl.load(sums + (at + one) * 2)
        own_total = tl.load(sums + (at + one) * 2 + 1)
        top, total, mixed = _add(top, total, mixed, own_top, own_total, own_mixed)
    mixed = tl.div_rn(mixed, total[:, None])
    tl.store(output + (place + one)[:, None] * DIM + dims[None, :], mixed.to(output.dtype.element_ty))
