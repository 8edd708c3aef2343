"""The kernel that copies blocks of KV between pool and chunk, and sums their seals: a launch a tensor.

A program moves some tokens of one block in one layer. Its part of the seal (`host_memory.seal_weights`)
is a sum modulo 2^64, so the order in which parts are added does not matter.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"
# mypy: disable-error-code="import-untyped, import-not-found"

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ramify.gpu.kv.host_memory import FACTOR

_WORDS = 2048  # of a program


@triton.jit
def _move(
    pool,
    layer_stride,
    places,
    chunk,
    chunk_stride,
    seals,
    first,
    FACTOR: tl.constexpr,
    TOKENS: tl.constexpr,
    INNER: tl.constexpr,
    GROUP: tl.constexpr,
    INNER_PADDED: tl.constexpr,
    SAVE: tl.constexpr,
):
    block, layer = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    token = tl.program_id(2) * GROUP + tl.arange(0, GROUP)
    inner = tl.arange(0, INNER_PADDED)
    mask = (inner < INNER)[None, :] & (token < TOKENS)[:, None]
    place = tl.load(places + block * TOKENS + token, mask=token < TOKENS, other=0)
    at = pool + layer * layer_stride + place[:, None] * INNER + inner[None, :]
    word = first + (layer * TOKENS + token)[:, None] * INNER + inner[None, :]
    own = chunk + block * chunk_stride + word
    if SAVE:
        value = tl.load(at, mask=mask, other=0)
        tl.store(own, value, mask=mask)
    else:
        value = tl.load(own, mask=mask, other=0)
        tl.store(at, value, mask=mask)
    weight = ((word + 1) * FACTOR) | 1
    tl.atomic_add(seals + block, tl.sum(tl.sum(value * weight, 1), 0))


def slot_words(tensor: Tensor) -> Tensor:
    """View a tensor as int64[layers, slots, words], or as uint8 where a slot has no whole words."""
    data = tensor.view(*tensor.shape[:2], -1).view(torch.uint8)
    return data if data.shape[-1] % 8 else data.view(torch.int64)


def move_blocks(
    memory: Sequence[Tensor], places: Tensor, chunk: Tensor, seals: Tensor, *, save: bool
) -> None:
    """Copy blocks from `memory` to `chunk` if `save`, else from `chunk` to `memory`. Adds to `seals`.

    `memory`: the pool's tensors, see `slot_words`; `places` int64[n * tokens]: slots of each block's
    tokens; `chunk` int64[n, words of a block]; `seals` int64[n]: gets the blocks' sums added.
    """
    count, first = len(chunk), 0
    tokens = len(places) // count
    for tensor in memory:
        layers, _, inner = tensor.shape
        if tensor.dtype == torch.uint8:
            words = layers * tokens * inner // 8
            own = chunk[:, first : first + words]
            _move_bytes(tensor, places, own, save=save)
            order = torch.arange(first + 1, first + words + 1, device=chunk.device)
            seals += (own * (order * FACTOR | 1)).sum(1)
            first += words
            continue
        padded = triton.next_power_of_2(inner)
        group = max(1, min(triton.next_power_of_2(tokens), _WORDS // padded))
        _move[(count, layers, triton.cdiv(tokens, group))](
            tensor,
            tensor.stride(0),
            places,
            chunk,
            chunk.stride(0),
            seals,
            first,
            FACTOR,
            tokens,
            inner,
            group,
            padded,
            save,
            num_warps=4,
        )
        first += layers * tokens * inner


def _move_bytes(tensor: Tensor, places: Tensor, own: Tensor, *, save: bool) -> None:
    """Copy as `move_blocks` between tensor uint8[layers, slots, n] and `own` int64[blocks, ..]."""
    count = len(own)
    if save:
        part = tensor.index_select(1, places).unflatten(1, (count, -1)).transpose(0, 1)
        own.copy_(part.reshape(count, -1).view(torch.int64))
        return
    part = own.contiguous().view(torch.uint8).view(count, len(tensor), -1, tensor.shape[2])
    tensor.index_copy_(1, places, part.transpose(0, 1).flatten(1, 2))
