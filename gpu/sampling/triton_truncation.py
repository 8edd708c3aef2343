"""Masks, penalties, top-k, top-p and min-p on the device, without a sort and without waiting.

The rules are those of `torch_sampler` and `truncation`: tokens are kept down to one logit of the row,
ties included, and drawn by inversion of the CDF in the order of their ids. To find that logit, each
token gets a key: the bits of (best logit - logit) / temperature, which order as that number does; 0 is
the best token. A first pass sorts the keys into bins, with the count and the mass of each. Only the
keys of the few bins that can hold the answer are bisected. Masses are added up in float64, in an order
that depends on the vocabulary alone: a row's outcome never depends on its neighbours.

It does not know requests: `cuda_sampler` says which lines of a step need this and how.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, import-untyped, import-not-found"

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from ramify.gpu.sampling.triton_automata import TokenMasks
from ramify.gpu.sampling.triton_bisection import bisect, mass_below, range_of, weights_of

_BLOCK = 4096  # logits of one program
_BINS = 16
_TILE = 1024  # logits that a warp sorts into bins at once
_REACH = 40.0  # bins end where exp(-x) is nothing
EVERY_KEY = 0x7F800000  # the bits of infinity: keeps all tokens

# What one line of a step's logits asks for. The kernels read it as 16 words of 32 bits.
ASK = np.dtype({
    "names": ["line", "row", "counted", "top_k", "key", "temperature", "repetition", "frequency",
              "presence", "drafts", "top_p", "uniform", "first", "kind"],
    "formats": [np.int32] * 5 + [np.float32] * 4 + [np.int32] + [np.float64] * 2 + [np.int32] * 2,
    "offsets": [0, 4, 8, 12, 16, 20, 24, 28, 32, 36, 40, 48, 56, 60],
    "itemsize": 64,
})  # fmt: skip
"""line: of the logits; counted: line of the token counts, -1: not penalised; top_k, 0: off; key: the
last that min-p keeps, EVERY_KEY: off; temperature, 0: greedy; repetition and top_p, 1: off; uniform
in [0, 1); drafts: how many of them a penalised line follows, the first at `first` of `Before.ids`;
kind: which mask, see `triton_automata`."""


@dataclass(slots=True)
class Before:
    """The drafts that penalised lines follow, which count as if they were output.

    ids int32[N]: a token, or -(place + 1) in `inputs` int32[..].
    """

    ids: Tensor
    inputs: Tensor


def resample_into(
    logits: Tensor,
    asks: Tensor,
    truncated: bool,
    counts: Tensor,
    last: Tensor,
    tokens: Tensor,
    before: Before | None = None,
    masks: TokenMasks | None = None,
) -> None:
    """Write the lines' tokens to tokens int32[S] and to last[rows], and count them.

    With `before`, the step has drafts: which tokens are output, and count, is known later. `masks`: of
    all asks, those without a constraint included.

    logits [S, V]; asks int32[N, 16], each an ASK; `truncated`: whether any of them wants top-k or
    top-p; counts int32[rows, V]: twice how often the row sampled a token, plus 1 if the token
    occurs at all. Lines whose logits are not finite get -1, and 0 as their next input.
    """
    n, vocabulary = len(asks), logits.shape[1]
    block = min(_BLOCK, max(32, triton.next_power_of_2(vocabulary)))
    blocks = triton.cdiv(vocabulary, block)
    shapes = {"BLOCK": block, "BLOCKS": max(32, triton.next_power_of_2(blocks)),
              "num_warps": 8, "enable_fp_fusion": False}  # fmt: skip
    tops = torch.empty((n, blocks), dtype=torch.float32, device=logits.device)
    lows, best = torch.empty_like(tops), torch.empty_like(tops, dtype=torch.int32)
    masses = torch.empty_like(tops, dtype=torch.float64)
    ids, inputs = (None, None) if before is None else (before.ids, before.inputs)
    words, places, wide = (None, None, 0) if masks is None else (masks.words, masks.places, masks.width)
    source = (logits, asks, counts, ids, inputs, words, places, wide, tops, vocabulary, blocks)
    grid, bins = (n, blocks), {"BINS": _BINS, "REACH": _REACH}
    _best[grid](*source, lows, best, **shapes)
    kept = best  # not read unless truncated
    if truncated:
        kept = torch.empty(n, dtype=torch.int32, device=logits.device)
        sizes = torch.empty((n, blocks, _BINS), dtype=torch.int32, device=logits.device)
        weights = torch.empty_like(sizes, dtype=torch.float64)
        found = torch.empty((n, vocabulary), dtype=torch.int32, device=logits.device)
        sort = shapes | bins | {"TILE": min(_TILE, block), "num_warps": 1}
        _bins[grid](*source, lows, sizes, weights, **sort)
        _gather[grid](*source, lows, sizes, weights, found, **shapes, **bins)
        _search[(n,)](*source, sizes, weights, found, kept, BINS=_BINS, **shapes)
    final = shapes | {"TRUNCATED": truncated}
    _masses[grid](*source, kept, masses, **final)
    _draw[(n,)](*source, best, kept, masses, last, tokens, **final)


@triton.jit
def _float(ask, word: tl.constexpr):
    return tl.load(ask + word).to(tl.float32, bitcast=True)


@triton.jit
def _double(ask, word: tl.constexpr):
    low = tl.load(ask + word).to(tl.int64) & 0xFFFFFFFF
    return (low | (tl.load(ask + word + 1).to(tl.int64) << 32)).to(tl.float64, bitcast=True)


@triton.jit
def _penalised(logits, ask, counts, drafts, inputs, words, places, wide, n, vocabulary, columns):
    """Load an ask's logits at `columns`, after penalties and mask, as float32; -inf outside."""
    inside = columns < vocabulary
    source = tl.load(ask).to(tl.int64) * vocabulary
    x = tl.load(logits + source + columns, mask=inside, other=-float("inf")).to(tl.float32)
    own = tl.load(ask + 2).to(tl.int64)
    if own >= 0:
        count = tl.load(counts + own * vocabulary + columns, mask=inside, other=0)
        if drafts is not None:
            first = tl.load(ask + 14)
            for index in range(tl.load(ask + 9)):
                draft = tl.load(drafts + first + index)
                if draft < 0:
                    draft = tl.load(inputs + (-draft - 1))
                count = tl.where(columns == draft, (count | 1) + 2, count)
        rate = _float(ask, 6)
        moved = tl.where(x > 0, tl.div_rn(x, rate), x * rate)
        x = tl.where(count > 0, moved, x)
        times = (count >> 1).to(tl.float32)
        x = x - _float(ask, 7) * times
        x = x - _float(ask, 8) * (times > 0).to(tl.float32)
    if words is not None:  # noqa: SIM102  # known when it is compiled
        if tl.load(ask + 15) >= 0:
            place = tl.load(places + columns, mask=inside, other=0)
            word = tl.load(words + n * wide + (place >> 5), mask=inside, other=0)
            legal = ((word >> (place & 31)) & 1) > 0
            # logits that are no numbers are found, legal or not
            x = tl.where(legal | (x != x) | (x == float("inf")), x, -float("inf"))
    return x


@triton.jit
def _keys(logits, ask, counts, drafts, inputs, words, places, wide, n, vocabulary, columns, best):
    """Compute an ask's keys at `columns`: bits that order as (best - logit) / temperature does."""
    x = _penalised(logits, ask, counts, drafts, inputs, words, places, wide, n, vocabulary, columns)
    return tl.abs(tl.div_rn(x - best, _float(ask, 5))).to(tl.int32, bitcast=True)


@triton.jit
def _bin(keys, scale, BINS: tl.constexpr):
    return tl.minimum(keys.to(tl.float32, bitcast=True) * scale, BINS - 1.0).to(tl.int32)


@triton.jit
def _line(asks, tops, blocks, BLOCKS: tl.constexpr):
    """Load this program's line: number, ask, best logit, whether that is finite, whether to draw."""
    n = tl.program_id(0).to(tl.int64)
    ask = asks + n * 16
    index = tl.arange(0, BLOCKS)
    best = tl.max(tl.load(tops + n * blocks + index, mask=index < blocks, other=-float("inf")), 0)
    finite = (best < float("inf")) & (best > -float("inf"))
    return n, ask, best, finite, (_float(ask, 5) > 0) & finite


@triton.jit
def _cut(ask, drawn):
    """Load top-k and top-p of an ask, and whether its line has to be cut by them."""
    k = tl.load(ask + 3)
    p = _double(ask, 10)
    return k, p, drawn & ((k > 0) | (p < 1.0))


@triton.jit
def _scale(lows, n, ask, blocks, best, BLOCKS: tl.constexpr, BINS: tl.constexpr,
           REACH: tl.constexpr):  # fmt: skip
    """Compute how many bins a unit of scaled logit has, so that they span the line's logits or REACH."""
    index = tl.arange(0, BLOCKS)
    values = tl.load(lows + n * blocks + index, mask=index < blocks, other=float("inf"))
    span = tl.minimum(tl.div_rn(best - tl.min(values, 0), _float(ask, 5)), REACH)
    return BINS / tl.maximum(span, 1e-20)


@triton.jit
def _best(
    logits, asks, counts, drafts, inputs, words, places, wide,
    tops, vocabulary, blocks, lows, ids,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Reduce each block to its best logit (inf: one is NaN or infinite), that one's id, its lowest."""
    n = tl.program_id(0).to(tl.int64)
    ask = asks + n * 16
    block = tl.program_id(1)
    columns = block * BLOCK + tl.arange(0, BLOCK)
    x = _penalised(logits, ask, counts, drafts, inputs, words, places, wide, n, vocabulary, columns)
    broken = tl.max(((x != x) | (x == float("inf"))).to(tl.int32), 0)
    x = tl.where(x == x, x, -float("inf"))
    top = tl.max(x, 0)
    at = n * blocks + block
    tl.store(tops + at, tl.where(broken > 0, float("inf"), top))
    tl.store(lows + at, tl.min(tl.where(x == -float("inf"), float("inf"), x), 0))
    tl.store(ids + at, tl.min(tl.where(x == top, columns, 2147483647), 0))


@triton.jit
def _bins(
    logits, asks, counts, drafts, inputs, words, places, wide,
    tops, vocabulary, blocks, lows, sizes, weights,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, BINS: tl.constexpr, TILE: tl.constexpr,
    REACH: tl.constexpr,
):  # fmt: skip
    """Count the tokens of each block in each bin of keys, and sum their mass."""
    n, ask, best, _finite, drawn = _line(asks, tops, blocks, BLOCKS)
    _k, _p, cut = _cut(ask, drawn)
    block = tl.program_id(1)
    if cut:
        scale = _scale(lows, n, ask, blocks, best, BLOCKS, BINS, REACH)
        own = tl.arange(0, BINS)
        size = tl.zeros([BINS], tl.int32)
        mass = tl.zeros([BINS], tl.float64)
        for start in range(0, BLOCK, TILE):
            columns = block * BLOCK + start + tl.arange(0, TILE)
            keys = _keys(
                logits, ask, counts, drafts, inputs, words, places, wide, n, vocabulary, columns, best
            )
            bins = tl.where(columns < vocabulary, _bin(keys, scale, BINS), BINS)
            weight = weights_of(keys)
            for index in tl.static_range(BINS):
                here = bins == index
                size += tl.where(own == index, tl.sum(here.to(tl.int32), 0), 0)
                some = tl.sum(tl.where(here, weight, 0.0), 0)
                mass += tl.where(own == index, some, 0.0).to(tl.float64)
        at = (n * blocks + block) * BINS + own
        tl.store(sizes + at, size)
        tl.store(weights + at, mass)


@triton.jit
def _interval(sizes, weights, n, blocks, k, p, BLOCKS: tl.constexpr, BINS: tl.constexpr):
    """Find the bins [first, last] in which the k-th key and the nucleus' last key may lie.

    Returns also how many keys of these each block has, count and mass before `first`, and the mass of
    all keys.
    """
    bins = tl.arange(0, BINS)
    index = tl.arange(0, BLOCKS)
    at = (n * blocks + index[:, None]) * BINS + bins[None, :]
    there = index[:, None] < blocks
    each = tl.load(sizes + at, mask=there, other=0)
    size = tl.sum(each, 0)
    mass = tl.sum(tl.load(weights + at, mask=there, other=0.0), 0)
    size_before = tl.cumsum(size, 0) - size
    mass_before = tl.cumsum(mass, 0) - mass
    total = tl.sum(mass, 0)
    last = tl.max(bins, 0)
    least = total
    if k > 0:
        last = tl.max(tl.where(size_before < k, bins, 0), 0)
        least = tl.sum(tl.where(bins < last, mass, 0.0), 0)
    first = last
    if p < 1.0:
        first = tl.max(tl.where((mass_before < p * least) & (bins <= last), bins, 0), 0)
        if k == 0:
            last = first
    size_above = tl.sum(tl.where(bins < first, size, 0), 0)
    mass_above = tl.sum(tl.where(bins < first, mass, 0.0), 0)
    inside = (bins >= first) & (bins <= last)
    own = tl.sum(tl.where(inside[None, :], each, 0), 1)  # [BLOCKS]
    return first, last, own, size_above, mass_above, total


@triton.jit
def _gather(
    logits, asks, counts, drafts, inputs, words, places, wide,
    tops, vocabulary, blocks, lows, sizes, weights, found,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, BINS: tl.constexpr, REACH: tl.constexpr,
):  # fmt: skip
    """Write the keys of the bins of `_interval` one after another to found int32[N, vocabulary]."""
    n, ask, best, _finite, drawn = _line(asks, tops, blocks, BLOCKS)
    k, p, cut = _cut(ask, drawn)
    block = tl.program_id(1)
    if cut:
        first, last, own, _size, _mass, _total = _interval(sizes, weights, n, blocks, k, p, BLOCKS, BINS)
        index = tl.arange(0, BLOCKS)
        if tl.sum(tl.where(index == block, own, 0), 0) > 0:
            before = tl.sum(tl.where(index < block, own, 0), 0)
            scale = _scale(lows, n, ask, blocks, best, BLOCKS, BINS, REACH)
            columns = block * BLOCK + tl.arange(0, BLOCK)
            keys = _keys(
                logits, ask, counts, drafts, inputs, words, places, wide, n, vocabulary, columns, best
            )
            bins = _bin(keys, scale, BINS)
            wanted = (columns < vocabulary) & (bins >= first) & (bins <= last)
            place = before + tl.cumsum(wanted.to(tl.int32), 0) - 1
            tl.store(found + n * vocabulary + place, keys, mask=wanted)


@triton.jit
def _search(
    logits, asks, counts, drafts, inputs, words, places, wide,
    tops, vocabulary, blocks, sizes, weights, found, kept,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """Find the last key of each line that is kept."""
    n, ask, _best_logit, _finite, drawn = _line(asks, tops, blocks, BLOCKS)
    k, p, cut = _cut(ask, drawn)
    limit = tl.load(ask + 4)
    if cut:
        _first, _last, each, size_above, mass_above, total = _interval(
            sizes, weights, n, blocks, k, p, BLOCKS, BINS
        )
        length = tl.sum(each, 0)
        own = found + n * vocabulary
        low, reach = range_of(own, length, BLOCK)
        if k > 0:
            reach = bisect(own, length, size_above.to(tl.float64), k.to(tl.float64), low, reach,
                            False, BLOCK)  # fmt: skip
            if p < 1.0:
                total = mass_above + mass_below(own, length, reach + 1, BLOCK)
        if p < 1.0:
            reach = bisect(own, length, mass_above, p * total, low, reach, True, BLOCK)
        limit = tl.minimum(limit, reach)
    tl.store(kept + n, limit)


@triton.jit
def _kept(logits, ask, counts, drafts, inputs, words, places, wide, n, vocabulary, columns, best, kept,
          TRUNCATED: tl.constexpr):  # fmt: skip
    """Compute the weights at `columns`, in float64: 0 above the key that was found, or of min-p."""
    limit = tl.load(kept if TRUNCATED else ask + 4)
    keys = _keys(logits, ask, counts, drafts, inputs, words, places, wide, n, vocabulary, columns, best)
    return tl.where(keys <= limit, weights_of(keys), 0.0).to(tl.float64)


@triton.jit
def _masses(
    logits, asks, counts, drafts, inputs, words, places, wide,
    tops, vocabulary, blocks, kept, masses,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, TRUNCATED: tl.constexpr,
):  # fmt: skip
    """Sum the mass of each block's tokens that are kept."""
    n, ask, best, _finite, drawn = _line(asks, tops, blocks, BLOCKS)
    block = tl.program_id(1)
    if drawn:
        columns = block * BLOCK + tl.arange(0, BLOCK)
        weight = _kept(logits, ask, counts, drafts, inputs, words, places, wide, n, vocabulary,
                       columns, best, kept + n, TRUNCATED)  # fmt: skip
        tl.store(masses + n * blocks + block, tl.sum(weight, 0))


@triton.jit
def _draw(
    logits, asks, counts, drafts, inputs, words, places, wide,
    tops, vocabulary, blocks, ids, kept, masses, last, tokens,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, TRUNCATED: tl.constexpr,
):  # fmt: skip
    """Choose each line's token, by its random number or the best one; write and count it."""
    n, ask, best, finite, drawn = _line(asks, tops, blocks, BLOCKS)
    index = tl.arange(0, BLOCKS)
    there = index < blocks
    top = tl.load(tops + n * blocks + index, mask=there, other=-float("inf"))
    id = tl.load(ids + n * blocks + index, mask=there, other=2147483647)
    token = tl.min(tl.where(top == best, id, 2147483647), 0)
    if drawn:
        mass = tl.load(masses + n * blocks + index, mask=there, other=0.0)
        point = _double(ask, 12) * tl.sum(mass, 0)
        block = tl.min(tl.where((tl.cumsum(mass, 0) > point) & there, index, BLOCKS), 0)
        if block < BLOCKS:
            before = tl.sum(tl.where(index < block, mass, 0.0), 0)
            columns = block * BLOCK + tl.arange(0, BLOCK)
            weight = _kept(logits, ask, counts, drafts, inputs, words, places, wide, n, vocabulary,
                           columns, best, kept + n, TRUNCATED)  # fmt: skip
            passed = (before + tl.cumsum(weight, 0) > point) & (weight > 0)
            chosen = tl.min(tl.where(passed, columns, 2147483647), 0)
            # rounding may leave the point just past the end of its block: then its last token
            final = tl.max(tl.where(weight > 0, columns, -1), 0)
            chosen = tl.where(chosen < vocabulary, chosen, final)
            token = tl.where(chosen >= 0, chosen, token)
    tl.store(tokens + tl.load(ask), tl.where(finite, token, -1))
    tl.store(last + tl.load(ask + 1), tl.where(finite, token, 0))
    own = tl.load(ask + 2).to(tl.int64)
    if drafts is None:  # noqa: SIM102  # known when it is compiled
        if (own >= 0) & finite:
            at = counts + own * vocabulary + token
            tl.store(at, (tl.load(at) | 1) + 2)
