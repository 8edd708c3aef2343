"""Triton kernels for chunks of delta nets whose channels decay by themselves (Kimi Delta Attention).

Such a chunk needs more than `triton_delta` computes: the decay of each channel since the chunk began,
and the products of its queries and keys with its keys, decayed in between. The decay between two lines
is the product of two decays, to and from a line between them, each at most 1; within 16 lines, where
there is no such line, channels are multiplied one by one. Imported only where Triton is used.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, import-untyped, import-not-found"

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ramify.gpu.ops.fixed_states import CHUNK, LayerDelta
from ramify.gpu.ops.triton_conv import softplus
from ramify.gpu.programmatic_launch import wait

_BLOCK = 16  # lines of a program of products


def chunk_products(
    rows: Tensor, qkv: Tensor, layer: LayerDelta, chunks: Tensor, options: dict[str, Any]
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute each line's decay since its chunk began, a logarithm float32[lines, heads, keys]; and the
    products of its key, times beta, and its query, with the chunk's keys up to it, [lines, heads, 64].

    `qkv`: normalised.
    """
    lines, heads, device = len(qkv), layer.value_heads, rows.device
    passed = torch.empty((lines, heads, layer.key_dim), dtype=torch.float32, device=device)
    system = torch.empty((lines, heads, CHUNK), dtype=torch.float32, device=device)
    scores = qkv.new_empty((lines, heads, CHUNK))
    sizes = {
        "HEADS": heads, "KEYS": layer.key_dim, "VALUES": layer.value_dim, "LINES": CHUNK,
        "BLOCK_K": max(16, triton.next_power_of_2(layer.key_dim)),
    }  # fmt: skip
    _decays[(len(chunks), heads)](
        rows, rows.shape[1], layer.decay, layer.decay_bias, chunks, passed, **sizes, num_warps=8,
        **options,
    )  # fmt: skip
    _products[(len(chunks) * CHUNK // _BLOCK, heads)](
        rows, rows.shape[1], qkv, passed, chunks, system, scores, **sizes, BLOCK=_BLOCK, num_warps=4,
        **options,
    )  # fmt: skip
    return passed, system, scores


@triton.jit
def _decays(
    rows, stride, rate, rate_bias, chunks, passed, HEADS: tl.constexpr, KEYS: tl.constexpr,
    VALUES: tl.constexpr, LINES: tl.constexpr, BLOCK_K: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    item = chunks + tl.program_id(0) * 5
    head = tl.program_id(1)
    target = tl.load(item + 1)
    first = tl.load(item + 2).to(tl.int64)
    at = tl.load(item + 3) + tl.arange(0, LINES)
    count = tl.load(item + 4)
    key = tl.arange(0, BLOCK_K)
    wait(OVERLAP)
    if target == 0:
        return

    own = head * KEYS + key
    there = (at < count)[:, None] & (key < KEYS)[None, :]
    # behind q, k, v, the gates and the betas
    source = rows + (first + at)[:, None] * stride + HEADS * (2 * KEYS + 2 * VALUES + 1) + own[None, :]
    x = tl.load(source, mask=there, other=0.0).to(tl.float32)
    x += tl.load(rate_bias + own, mask=key < KEYS, other=0.0)[None, :]
    decay = tl.where(there, -tl.exp(tl.load(rate + head)) * softplus(x), 0.0)
    place = (first + at)[:, None] * (HEADS * KEYS) + own[None, :]
    tl.store(passed + place, tl.cumsum(decay, 0), mask=there)


@triton.jit
def _products(
    rows, stride, qkv, passed, chunks, system, scores, HEADS: tl.constexpr, KEYS: tl.constexpr,
    VALUES: tl.constexpr, LINES: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Multiply some lines of a chunk with all of them."""
    WIDTH: tl.constexpr = HEADS * (2 * KEYS + VALUES)
    parts: tl.constexpr = LINES // BLOCK
    item = chunks + tl.program_id(0) // parts * 5
    head = tl.program_id(1)
    first = tl.load(item + 2).to(tl.int64) + tl.load(item + 3)
    count = tl.load(item + 4) - tl.load(item + 3)  # of lines from the chunk's first one on
    begin = tl.program_id(0) % parts * BLOCK
    wait(OVERLAP)
    if begin >= count:
        return

    i = begin + tl.arange(0, BLOCK)
    j = tl.arange(0, LINES)
    key = tl.arange(0, BLOCK_K)
    some = key < KEYS
    own = (i < count)[:, None] & some[None, :]
    line = first + i
    at = head * KEYS + key
    q = tl.load(qkv + line[:, None] * WIDTH + at[None, :], mask=own, other=0.0).to(tl.float32)
    k = tl.load(qkv + line[:, None] * WIDTH + HEADS * KEYS + at[None, :], mask=own, other=0.0)
    kind = k.dtype
    part = rows + line * stride + WIDTH + HEADS * VALUES + head
    beta = 1.0 / (1.0 + tl.exp(-tl.load(part, mask=i < count, other=0.0).to(tl.float32)))
    k = k.to(tl.float32) * beta[:, None]
    sums = tl.load(passed + line[:, None] * (HEADS * KEYS) + at[None, :], mask=own, other=0.0)
    # the lines ahead of these ones, by way of the first of these
    middle = tl.load(passed + (first + begin) * (HEADS * KEYS) + at, mask=some, other=0.0)
    before = (j < begin)[:, None] & some[None, :]
    source = (first + j)[:, None]
    others = tl.load(qkv + source * WIDTH + HEADS * KEYS + at[None, :], mask=before, other=0.0)
    theirs = tl.load(passed + source * (HEADS * KEYS) + at[None, :], mask=before, other=0.0)
    rest = tl.exp(tl.where(before, middle[None, :] - theirs, 0.0))
    others = tl.trans((others.to(tl.float32) * rest).to(kind))
    ours = tl.exp(tl.where(own, sums - middle[None, :], 0.0))
    of_keys = tl.dot((k * ours).to(kind), others, input_precision="ieee")
    of_queries = tl.dot((q * ours).to(kind), others, input_precision="ieee")
    for step in range(BLOCK):
        at_step = first + begin + step
        some_key = key < tl.where(begin + step < count, KEYS, 0)
        one = tl.load(qkv + at_step * WIDTH + HEADS * KEYS + at, mask=some_key, other=0.0).to(tl.float32)
        its = tl.load(passed + at_step * (HEADS * KEYS) + at, mask=some_key, other=0.0)
        later = own & (i >= begin + step)[:, None]
        decayed = one[None, :] * tl.exp(tl.where(later, sums - its[None, :], 0.0))
        column = (j == begin + step)[None, :]
        of_keys = tl.where(column, tl.sum(k * decayed, 1)[:, None], of_keys)
        of_queries = tl.where(column, tl.sum(q * decayed, 1)[:, None], of_queries)
    place = (line * HEADS + head)[:, None] * LINES + j[None, :]
    there = (i < count)[:, None]
    tl.store(system + place, tl.where(i[:, None] > j[None, :], of_keys, 0.0), mask=there)
    of_queries = tl.where(i[:, None] >= j[None, :], of_queries, 0.0)
    tl.store(scores + place, of_queries.to(kind), mask=there)
