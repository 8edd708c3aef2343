"""The parts that attention kernels share: how a tile of queries takes in keys and values.

A tile keeps, for each of its queries, the largest score so far, the sum of the weights and the
weighted sum of the values (online softmax, Milakov and Gimelshein 2018; FlashAttention, Dao et al.
2022). It may take in keys, or another program's result over other keys. Scores are in base 2. Called
from kernels only; this file knows neither which rows the queries are of nor which keys are theirs.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, import-untyped, import-not-found"

import torch
import triton
import triton.language as tl
from torch import Tensor

from ramify.gpu.attention.spec import AttentionSpec, latent_group
from ramify.gpu.kv.layout import LayerKV
from ramify.gpu.triton_fp8 import halves, widened

LOG2E = 1.4426950408889634
_LOG2E = tl.constexpr(LOG2E)
_NARROWEST, _WIDEST = 32, 256  # of heads: half is the depth of a product, and sums are in registers
_SIXTEENTH = tl.constexpr(0.0625)  # of queries as float16, which end at 65,504
_LARGE = tl.constexpr(32768.0)  # times a weight: float16 rounds off numbers below 2^-14


def tile_sizes(q: Tensor, kv: LayerKV) -> tuple[int, int, int]:
    """Compute KV heads, DIM and TAIL of the kernels, for q [T, heads, DIM + TAIL].

    TAIL: of a latent: numbers of a key that are not of the value; else 0. KV heads of a latent are
    groups of query heads that each read it.
    """
    _, heads, width = q.shape
    if not kv.tail:
        return kv.k.shape[1], width, 0
    return heads // latent_group(heads), width - kv.tail, kv.tail


def score_scale(spec: AttentionSpec) -> tuple[float, float]:
    """Compute `scale` and SOFTCAP of the kernels (see `take_keys`), which use exp2 throughout.

    tanh(x) is 1 - 2 / (exp(2x) + 1): a soft-capped score is scaled by what the exponent needs.
    """
    if spec.softcap is None:
        return spec.scale * LOG2E, 0.0
    return spec.scale / spec.softcap * 2 * LOG2E, spec.softcap * LOG2E


FLOATS, HALF, PAIRS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
"""How keys and values are read: as they are, codes as the queries' type; codes as float16; two codes at
a time as float16. With the first alone a result's bits depend on no other key of a tile."""


def reading(q: Tensor, kv: LayerKV, pairs: bool = False) -> int:
    """Choose READING. `pairs`: the kernel's tiles of queries are multiplied from registers."""
    if kv.k_scales is None or q.dtype == torch.float32:
        return int(FLOATS.value)
    own = pairs and not kv.tail and _NARROWEST <= q.shape[2] <= _WIDEST
    return int((PAIRS if own else HALF).value)


@triton.jit
def begin_with_sinks(sinks, head, real, order):
    """Make top and total of `real` queries that have taken in no key but the sink of their `head` [Q].

    order: the number of this part of a query's keys; only part 0 takes the sink in.
    """
    there = real & (head * 0 + order == 0)
    sink = tl.load(sinks + head, mask=there, other=-float("inf")).to(tl.float32) * _LOG2E
    return sink, (sink > -float("inf")).to(tl.float32)


@triton.jit
def ask(q, at, dims, real, DIM: tl.constexpr, TAIL: tl.constexpr, READING: tl.constexpr):
    """Load queries at `at` [Q], those `real`: [Q, D] and, of a latent, the tail [Q, TAIL].

    READING in pairs: the numbers at even places and at odd ones, [Q, D / 2] each.
    """
    first = q + at[:, None] * (DIM + TAIL)
    query = tl.load(first + dims[None, :], mask=real[:, None], other=0.0)
    tail = query  # not read without one
    if TAIL:
        tail = tl.load(first + DIM + tl.arange(0, TAIL)[None, :], mask=real[:, None], other=0.0)
    if READING != FLOATS:
        query = (query.to(tl.float32) * _SIXTEENTH).to(tl.float16)
        tail = (tail.to(tl.float32) * _SIXTEENTH).to(tl.float16)
    if READING == PAIRS:
        query, tail = tl.split(tl.reshape(query, (query.shape[0], DIM // 2, 2)))
    return query, tail


@triton.jit
def paged(
    pages, row, columns, keys, there, kv_head, KV_HEADS: tl.constexpr, DIM: tl.constexpr,
    TAIL: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Compute the offsets [keys] in the pool of one kv head's keys at positions `keys` of a row."""
    page = tl.load(pages + row * columns + keys // PAGE, mask=there, other=0).to(tl.int64)
    slot = page * PAGE + keys % PAGE
    if TAIL:
        place = slot * (DIM + TAIL)  # all heads read it
    else:
        place = (slot * KV_HEADS + kv_head) * DIM
    return place


@triton.jit
def take_keys(
    query, tail, k_pool, v_pool, k_scales, v_scales, place, dims, there, seen, scale, top, total, mixed,
    DIM: tl.constexpr, TAIL: tl.constexpr, PRECISION: tl.constexpr, SOFTCAP: tl.constexpr,
    READING: tl.constexpr,
):  # fmt: skip
    """Take in the keys at `place` [K]: of each those `there` [K], of which a query has `seen` [Q, K].

    query, tail: see `ask`. scale, SOFTCAP: see `score_scale`. k_scales, v_scales: factors of codes, for
    each token and head; None: keys and values are no codes. A latent is read once, as key and as value.
    READING: see `reading`. Returns top [Q], total [Q] and mixed, see `apart`.
    """
    known = there[:, None]
    if READING == PAIRS:
        offsets = (place >> 1)[:, None] + tl.arange(0, DIM // 2)[None, :]
        low, high = halves(tl.load(k_pool.to(tl.pointer_type(tl.int16)) + offsets, mask=known, other=0))
        scores = tl.dot(tail, tl.trans(high), tl.dot(query, tl.trans(low)))
    else:
        offsets = place[:, None] + dims[None, :]
        k = widened(tl.load(k_pool + offsets, mask=known, other=0.0), query.dtype)
        scores = tl.dot(query, tl.trans(k), input_precision=PRECISION)
    if TAIL:
        ends = place[:, None] + DIM + tl.arange(0, TAIL)[None, :]
        behind = widened(tl.load(k_pool + ends, mask=known, other=0.0), query.dtype)
        scores += tl.dot(tail, tl.trans(behind), input_precision=PRECISION)
    if k_scales is not None:
        at = place // (DIM + TAIL)
        if READING != FLOATS:
            scale = scale / _SIXTEENTH
        if READING == PAIRS:
            factors = tl.load(k_scales + at, mask=there, other=0.0)
            scales = tl.load(v_scales + at, mask=there, other=0.0)
        else:  # at once: of fewer numbers than threads each thread would load those that it needs
            both = tl.load(tl.join(k_scales + at, v_scales + at), mask=known, other=0.0)
            factors, scales = tl.split(both)
        scores = scores * (scale * factors)[None, :]
    else:
        scores = scores * scale
    if SOFTCAP != 0.0:  # a compiled kernel takes no float for a condition
        scores = SOFTCAP - 2.0 * SOFTCAP / (tl.exp2(scores) + 1.0)
    scores = tl.where(seen, scores, -float("inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))
    # all keys so far may be hidden from a query
    base = tl.where(new_top == -float("inf"), 0.0, new_top)
    weights = tl.exp2(scores - base[:, None])
    fade = tl.exp2(top - base)
    total = total * fade + tl.sum(weights, 1)  # here, so that the weights need not outlive the product
    share = 1.0
    if k_scales is not None:
        if READING != FLOATS:  # of the tile's largest value, so that float16 holds them
            largest = tl.maximum(tl.max(scales, 0), 1e-30)
            share = largest / _LARGE
            scales = scales * (_LARGE / largest)
        weights *= scales[None, :]
    if READING == PAIRS:
        low, high = halves(tl.load(v_pool.to(tl.pointer_type(tl.int16)) + offsets, mask=known, other=0))
        weights = weights.to(tl.float16)
        mixed = mixed * fade[:, None, None]
        mixed += tl.join(tl.dot(weights, low), tl.dot(weights, high)) * share
    else:
        mixed = mixed * fade[:, None]
        if TAIL:
            v = k
        else:
            v = widened(tl.load(v_pool + offsets, mask=known, other=0.0), query.dtype, True)
        if READING == HALF:
            mixed += tl.dot(weights.to(v.dtype), v) * share
        else:
            mixed += tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
    return new_top, total, mixed


@triton.jit
def apart(mixed, QUERIES: tl.constexpr, DIM: tl.constexpr, READING: tl.constexpr):
    """Split sums [Q, D] as `take_keys` adds to them: even and odd places side by side."""
    if READING == PAIRS:
        mixed = tl.reshape(mixed, (QUERIES, DIM // 2, 2))
    return mixed


@triton.jit
def together(mixed, QUERIES: tl.constexpr, DIM: tl.constexpr, READING: tl.constexpr):
    """Join the sums of `apart` to [Q, D]."""
    if READING == PAIRS:
        mixed = tl.reshape(mixed, (QUERIES, DIM))
    return mixed


@triton.jit
def take_part(outputs, sums, at, real, dims, top, total, mixed, DIM: tl.constexpr):
    """Take in other programs' results at `at` [Q]: outputs [.., D] and sums (log-sum-exps).

    A sum of -inf stands for no keys. They may be of the same launch: the L1 cache is bypassed.
    """
    lse = tl.load(sums + at, mask=real, other=0.0, cache_modifier=".cg")
    place = at[:, None] * DIM + dims[None, :]
    part = tl.load(outputs + place, mask=real[:, None], other=0.0, cache_modifier=".cg")
    new_top = tl.maximum(top, lse)
    base = tl.where(new_top == -float("inf"), 0.0, new_top)
    weight = tl.exp2(lse - base)
    fade = tl.exp2(top - base)
    return new_top, total * fade + weight, mixed * fade[:, None] + part * weight[:, None]
