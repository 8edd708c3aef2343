"""Logits to token ids in two Triton kernels, without a sort: greedy, or by inversion of the CDF.

The same rule as `torch_sampler` (one uniform number a token, made on the host from the request's seed),
for rows that ask for neither truncation nor penalties. It can be part of a CUDA graph. Rows whose
logits are not finite get -1, and 0 as their next input.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, import-untyped, import-not-found"

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096  # logits of one program


def sample_into(
    logits: Tensor, rows: Tensor, temperatures: Tensor, uniforms: Tensor, last: Tensor, tokens: Tensor
) -> None:
    """Write each line's token to tokens int32[S] and to last[rows].

    logits [S, V] of any float type; rows int32[S]; temperatures float32[S] (0: greedy, ties to the
    lowest id); uniforms float64[S] in [0, 1); last int32[rows].
    """
    lines, vocabulary = logits.shape
    blocks = triton.cdiv(vocabulary, _BLOCK)
    tops = torch.empty((lines, blocks), dtype=torch.float32, device=logits.device)
    masses, ids = torch.empty_like(tops), torch.empty_like(tops, dtype=torch.int32)
    _scan[(lines, blocks)](
        logits, temperatures, tops, masses, ids, vocabulary, blocks, BLOCK=_BLOCK, num_warps=8
    )
    _choose[(lines,)](
        logits, temperatures, uniforms, rows, tops, masses, ids, last, tokens, vocabulary, blocks,
        BLOCK=_BLOCK, BLOCKS=max(32, triton.next_power_of_2(blocks)), num_warps=8,
    )  # fmt: skip


@triton.jit
def _scan(logits, temperatures, tops, masses, ids, vocabulary, blocks, BLOCK: tl.constexpr):
    """Reduce each block to its best logit (inf: one is NaN or infinite), that one's id, a sum of exp."""
    line = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    columns = block * BLOCK + tl.arange(0, BLOCK)
    inside = columns < vocabulary
    x = tl.load(logits + line * vocabulary + columns, mask=inside, other=-float("inf")).to(tl.float32)
    broken = tl.max(((x != x) | (x == float("inf"))).to(tl.int32), 0)
    x = tl.where(x == x, x, -float("inf"))
    top = tl.max(x, 0)
    best = tl.min(tl.where(x == top, columns, 2147483647), 0)
    temperature = tl.load(temperatures + line)
    mass = 0.0
    if temperature > 0:
        base = tl.where(top == -float("inf"), 0.0, top)
        mass = tl.sum(tl.exp((x - base) / temperature), 0)
    at = line * blocks + block
    tl.store(tops + at, tl.where(broken > 0, float("inf"), top))
    tl.store(masses + at, mass)
    tl.store(ids + at, best)


@triton.jit
def _choose(
    logits, temperatures, uniforms, rows, tops, masses, ids, last, tokens, vocabulary, blocks,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    line = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, BLOCKS)
    there = index < blocks
    top = tl.load(tops + line * blocks + index, mask=there, other=-float("inf"))
    best = tl.max(top, 0)
    id = tl.load(ids + line * blocks + index, mask=there, other=2147483647)
    token = tl.min(tl.where(top == best, id, 2147483647), 0)
    finite = (best < float("inf")) & (best > -float("inf"))
    temperature = tl.load(temperatures + line)
    if (temperature > 0) & finite:
        mass = tl.load(masses + line * blocks + index, mask=there, other=0.0)
        mass = (mass * tl.exp((top - best) / temperature)).to(tl.float64)
        sums = tl.cumsum(mass, 0)
        point = tl.load(uniforms + line) * tl.sum(mass, 0)
        block = tl.min(tl.where((sums > point) & there, index, BLOCKS), 0)
        if block < BLOCKS:
            before = tl.sum(tl.where(index < block, mass, 0.0), 0)
            rest = (point - before).to(tl.float32)
            columns = block * BLOCK + tl.arange(0, BLOCK)
            inside = columns < vocabulary
            x = tl.load(logits + line * vocabulary + columns, mask=inside, other=-float("inf"))
            weights = tl.exp((x.to(tl.float32) - best) / temperature)
            passed = (tl.cumsum(weights, 0) > rest) & inside & (weights > 0)
            chosen = tl.min(tl.where(passed, columns, 2147483647), 0)
            # rounding may leave the point just past the end of its block: then its last token
            final = tl.max(tl.where(inside & (weights > 0), columns, -1), 0)
            chosen = tl.where(chosen < vocabulary, chosen, final)
            token = tl.where(chosen >= 0, chosen, token)
    tl.store(tokens + line, tl.where(finite, token, -1))
    tl.store(last + tl.load(rows + line), tl.where(finite, token, 0))
