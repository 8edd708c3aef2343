"""Triton kernels for convolutions over a sequence, each channel by itself (Mamba, Gu & Dao 2023).

A step's first inputs of a sequence follow the last ones before, which slot `from` of a state holds; the
last inputs go to slot `to`. `items` int32[n, 5]: from, to, line of the sequence's first token, offset of
the item in the sequence, tokens of the sequence. `to` 0: padding, nothing is done. For whole sequences
with drafts the offset is a slot: that of the state after the first token; the slots after further
tokens, except the last one, follow it. The reference is `ops.fixed_states`. Imported only where Triton
is used.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, import-untyped, import-not-found"

import triton
import triton.language as tl
from torch import Tensor

from ramify.gpu.ops.fixed_states import LayerConv
from ramify.gpu.programmatic_launch import launch_options, overlaps, wait

_BLOCK = 256  # channels of a program
_LINES = 8
_COPIED = 4096  # values that a program copies


def short_conv(
    rows: Tensor,
    layer: LayerConv,
    state: Tensor,
    items: Tensor,
    lines: int,
    output: Tensor,
) -> None:
    """Run LFM2's convolution. rows [T, 3 * width]: input gate, output gate, input; output [T, width].

    Each item has up to `lines` tokens of a sequence. state float32[slots, K - 1, width].
    """
    if not len(items):
        return
    width, _, taps = layer.conv.shape
    block = min(_BLOCK, triton.next_power_of_2(width))
    together = min(lines, _LINES)
    parts = lines // together
    _short_conv[(len(items) * parts, triton.cdiv(width, block))](
        rows, layer.conv, layer.bias, state, items, output, WIDTH=width, TAPS=taps, LINES=together,
        PARTS=parts, BLOCK=block, OVERLAP=overlaps(rows.device), num_warps=4,
        **launch_options(rows.device),
    )  # fmt: skip


@triton.jit
def taken(
    rows, stride, state, origin, first, place, channel, there, WIDTH: tl.constexpr,
    TAPS: tl.constexpr, OPENED: tl.constexpr,
):  # fmt: skip
    """Load a convolution's inputs at `place` of a sequence; those before 0 lie in slot `origin`.

    OPENED: an input is the product of the values at the channel and two widths behind it.
    """
    place += channel * 0  # of their shape
    source = rows + (first + place) * stride + channel
    x = tl.load(source, mask=there & (place >= 0), other=0.0)
    if OPENED:
        y = tl.load(source + 2 * WIDTH, mask=there & (place >= 0), other=0.0)
        x = (x.to(tl.float32) * y.to(tl.float32)).to(rows.dtype.element_ty)
    kept = state + (origin * (TAPS - 1) + TAPS - 1 + place) * WIDTH + channel
    return x.to(tl.float32) + tl.load(kept, mask=there & (place < 0), other=0.0)


@triton.jit
def silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def softplus(x):
    """Compute log(1 + e^x), which is x where that is large."""
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))


@triton.jit
def convolved(
    rows, stride, weight, state, origin, first, at, channel, there, inside, WIDTH: tl.constexpr,
    TAPS: tl.constexpr, OPENED: tl.constexpr,
):  # fmt: skip
    """Convolve channels at positions `at` of a sequence; inside: those that exist."""
    place = at - (TAPS - 1)
    x = taken(rows, stride, state, origin, first, place, channel, there, WIDTH, TAPS, OPENED)
    total = x * tl.load(weight + channel * TAPS, mask=inside, other=0.0).to(tl.float32)
    for tap in tl.static_range(1, TAPS):
        x = taken(rows, stride, state, origin, first, place + tap, channel, there, WIDTH, TAPS, OPENED)
        total += x * tl.load(weight + channel * TAPS + tap, mask=inside, other=0.0).to(tl.float32)
    return total


@triton.jit
def keep(
    rows, stride, state, origin, target, first, count, channel, inside, WIDTH: tl.constexpr,
    TAPS: tl.constexpr, OPENED: tl.constexpr,
):  # fmt: skip
    """Write the last inputs of a sequence of `count` tokens to slot `target`."""
    for index in tl.static_range(TAPS - 1):
        place = count - (TAPS - 1) + index
        x = taken(rows, stride, state, origin, first, place, channel, inside, WIDTH, TAPS, OPENED)
        tl.store(state + (target * (TAPS - 1) + index) * WIDTH + channel, x, mask=inside)


@triton.jit
def begin(
    items, states, HEADS: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Load a program's item and state. Its ids: 0 sequence, 1 head, 2 block of values.

    Returns the item's fields; its keys and values, and where in a slot they lie; the state there. An
    earlier step wrote that, so it may be read before `wait`.
    """
    item = items + tl.program_id(0) * 5
    origin = tl.load(item).to(tl.int64)
    target = tl.load(item + 1).to(tl.int64)
    first = tl.load(item + 2).to(tl.int64)
    spare = tl.load(item + 3).to(tl.int64)
    count = tl.load(item + 4)
    key = tl.arange(0, BLOCK_K)
    value = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    place = tl.program_id(1) * KEYS * VALUES + key[:, None] * VALUES + value[None, :]
    read = (key < tl.where(target > 0, KEYS, 0))[:, None] & (value < VALUES)[None, :]
    state = tl.load(states + origin * (HEADS * KEYS * VALUES) + place, mask=read, other=0.0)
    return origin, target, first, spare, count, key, value, place, state


@triton.jit
def _take_back(
    memory, kept, drafts, slots, SIZE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    draft = drafts + tl.program_id(0) * 3
    place = tl.load(draft)
    target = tl.load(draft + 2).to(tl.int64)
    if (target == 0) | (tl.load(kept + place) == 0) | (tl.load(kept + place + 1) != 0):
        return

    layer = memory + tl.program_id(2).to(tl.int64) * slots * SIZE
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    found = tl.load(layer + tl.load(draft + 1).to(tl.int64) * SIZE + at, mask=at < SIZE, other=0.0)
    tl.store(layer + target * SIZE + at, found, mask=at < SIZE)


def take_back(memory: Tensor, kept: Tensor, drafts: Tensor) -> None:
    """Copy to rows whose drafts were refused the states after their last accepted token.

    memory float32[layers, slots, ..]; drafts int32[n, 3]: `fixed_states.accepted_states`; kept int32:
    whether each line that samples was accepted.
    """
    layers, slots = memory.shape[:2]
    size = memory[0, 0].numel()
    _take_back[(len(drafts), triton.cdiv(size, _COPIED), layers)](
        memory, kept, drafts, slots, SIZE=size, BLOCK=_COPIED, num_warps=4
    )


@triton.jit
def _short_conv(
    rows, weight, bias, state, items, output, WIDTH: tl.constexpr, TAPS: tl.constexpr,
    LINES: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    item = items + tl.program_id(0) // PARTS * 5
    origin = tl.load(item).to(tl.int64)
    target = tl.load(item + 1).to(tl.int64)
    first = tl.load(item + 2).to(tl.int64)
    offset = tl.load(item + 3) + tl.program_id(0) % PARTS * LINES
    count = tl.load(item + 4)
    wait(OVERLAP)
    if offset >= count:
        return

    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < WIDTH
    at = (offset + tl.arange(0, LINES))[:, None]
    there = (at < count) & inside[None, :]
    y = convolved(
        rows, 3 * WIDTH, weight, state, origin, first, at, channel[None, :], there, inside[None, :],
        WIDTH, TAPS, True,
    )  # fmt: skip
    if bias is not None:
        y += tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)[None, :]
    line = first + at
    closing = tl.load(rows + line * 3 * WIDTH + WIDTH + channel[None, :], mask=there, other=0.0)
    y = (y * closing.to(tl.float32)).to(output.dtype.element_ty)
    tl.store(output + line * WIDTH + channel[None, :], y, mask=there)
    if offset + LINES >= count:
        keep(rows, 3 * WIDTH, state, origin, target, first, count, channel, inside, WIDTH, TAPS, True)
