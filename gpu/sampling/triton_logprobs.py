"""Log-probabilities of sampled tokens and of the best ones, in two Triton kernels, without a sort.

They are the model's own: before temperature and penalties. Among equal logits the lower id comes
first. The numbers stay on the device until the step's copy back fetches them.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, import-untyped, import-not-found"

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor

from ramify.protocol.sampling import TokenLogprobs

_BLOCK = 4096
_BEST = 32  # a power of two, at least the 20 that a request may ask for
WORDS = 1 + 2 * _BEST  # int32 a line: its token's log-probability, the best ones', their ids


def logprobs_into(logits: Tensor, lines: Tensor, tokens: Tensor, output: Tensor) -> None:
    """Write output int32[N, WORDS] of logits [S, V]; lines int32[N]; tokens int32[S] were sampled."""
    n, vocabulary = len(lines), logits.shape[1]
    block = min(_BLOCK, max(_BEST, triton.next_power_of_2(vocabulary)))
    blocks = triton.cdiv(vocabulary, block)
    tops = logits.new_empty((n, blocks), dtype=torch.float32)
    masses = torch.empty_like(tops)
    best = torch.empty((n, blocks, _BEST), dtype=torch.int64, device=logits.device)
    _blocks[(n, blocks)](
        logits, lines, tops, masses, best, vocabulary, blocks, BLOCK=block, BEST=_BEST, num_warps=8
    )
    _lines[(n,)](
        logits, lines, tokens, tops, masses, best, output, vocabulary, blocks,
        BLOCKS=max(2, triton.next_power_of_2(blocks)), BEST=_BEST, num_warps=8,
    )  # fmt: skip


def read_logprobs(words: npt.NDArray[np.int32], best: int) -> TokenLogprobs:
    """Unpack a line of `output`, with its `best` most likely tokens."""
    values = words[: 1 + _BEST].view(np.float32)
    ids = words[1 + _BEST : 1 + _BEST + best]
    return TokenLogprobs(float(values[0]), ids.tolist(), values[1 : 1 + best].tolist())


@triton.jit
def _blocks(logits, lines, tops, masses, best, vocabulary, blocks, BLOCK: tl.constexpr,
            BEST: tl.constexpr):  # fmt: skip
    n = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    columns = block * BLOCK + tl.arange(0, BLOCK)
    inside = columns < vocabulary
    source = tl.load(lines + n).to(tl.int64) * vocabulary
    x = tl.load(logits + source + columns, mask=inside, other=-float("inf")).to(tl.float32)
    x = tl.where(x == x, x, -float("inf"))
    top = tl.max(x, 0)
    base = tl.where(top == -float("inf"), 0.0, top)
    at = n * blocks + block
    tl.store(tops + at, top)
    tl.store(masses + at, tl.sum(tl.exp(x - base), 0))
    # one integer that orders by logit, then by lower id
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    packed = (order << 32) | (2147483647 - columns).to(tl.int64)
    packed = tl.where(inside, packed, -9223372036854775807)
    tl.store(best + at * BEST + tl.arange(0, BEST), tl.topk(packed, BEST))


@triton.jit
def _lines(logits, lines, tokens, tops, masses, best, output, vocabulary, blocks,
           BLOCKS: tl.constexpr, BEST: tl.constexpr):  # fmt: skip
    n = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, BLOCKS)
    there = index < blocks
    tops_ = tl.load(tops + n * blocks + index, mask=there, other=-float("inf"))
    top = tl.max(tops_, 0)
    mass = tl.load(masses + n * blocks + index, mask=there, other=0.0)
    mass = tl.sum(tl.where(mass > 0, mass * tl.exp(tops_ - top), 0.0), 0)
    norm = top + tl.log(mass)
    many = tl.arange(0, BLOCKS * BEST)
    packed = tl.load(best + n * blocks * BEST + many, mask=many < blocks * BEST,
                     other=-9223372036854775807)  # fmt: skip
    packed = tl.topk(packed, BEST)
    bits = (packed >> 32).to(tl.int32)
    values = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True) - norm
    places = tl.arange(0, BEST)
    own = output + n * (1 + 2 * BEST)
    line = tl.load(lines + n).to(tl.int64)
    token = tl.maximum(tl.load(tokens + line), 0)
    logit = tl.load(logits + line * vocabulary + token).to(tl.float32)
    tl.store(own, (logit - norm).to(tl.int32, bitcast=True))
    tl.store(own + 1 + places, values.to(tl.int32, bitcast=True))
    tl.store(own + 1 + BEST + places, 2147483647 - (packed & 0x7FFFFFFF).to(tl.int32))
