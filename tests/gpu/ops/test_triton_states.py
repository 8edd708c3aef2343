"""The kernels of delta nets, Mamba-2 and short convolutions against torch's, which has its tests."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

CUDA = torch.cuda.is_available()
# the interpreter of 3.6 does not know numpy 2.4
pytest.importorskip("triton", minversion=None if CUDA else "3.7")

from ramify.gpu.ops import triton_delta, triton_mamba  # noqa: E402
from ramify.gpu.ops.fixed_states import (  # noqa: E402
    CHUNK,
    LayerConv,
    LayerDelta,
    LayerMamba,
    LayerState,
    Sequences,
    accepted_states,
    run,
    state_plan,
    state_room,
    state_tables,
)
from ramify.gpu.ops.linear.base import plain as linear  # noqa: E402
from ramify.gpu.ops.rmsnorm import RMSNorm  # noqa: E402
from ramify.gpu.ops.triton_conv import short_conv, take_back  # noqa: E402
from ramify.gpu.step.buckets import Bucket  # noqa: E402
from ramify.gpu.step.rows import StepRows  # noqa: E402

DEVICE = torch.device("cuda" if CUDA else "cpu")
SLOTS = 12
# the interpreter multiplies no bfloat16
HALF = torch.bfloat16 if CUDA else torch.float16
DTYPES = [torch.float32, HALF]
COUNTS, DECODES = [5, 70, 1], 2
PAIRS = np.array([[0, 1], [7, 4], [2, 5], [2, 6], [0, 10]])
PADDED = Bucket(extended=80, runs=5, decodes=3, sampling=8)


def step(counts: list[int], decodes: int, pairs: np.ndarray) -> StepRows:
    every = np.array(counts + [1] * decodes)
    rows = np.arange(len(every))
    tokens = np.zeros(sum(counts), dtype=np.int32)
    return StepRows(rows, rows * 0, every, len(counts), tokens, rows, rows, states=pairs)


def tables(plan: StepRows, bucket: Bucket, spare: int = 0) -> dict[str, Tensor]:
    """Padded with zeros, as a graph's are."""
    room = state_room(bucket)
    for name, items in state_tables(plan, bucket, spare).items():
        room[name][: len(items)] = items
    return {name: torch.from_numpy(items).to(DEVICE) for name, items in room.items()}


def delta(
    dtype: torch.dtype, heads: tuple[int, int] = (1, 2), dims: tuple[int, int] = (16, 24)
) -> LayerDelta:
    def made(*shape: int, kind: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape).to(DEVICE, kind)

    channels = 2 * heads[0] * dims[0] + heads[1] * dims[1]
    return LayerDelta(
        0, *heads, *dims, made(channels, 1, 4, kind=dtype), made(heads[1]), made(heads[1]),
        RMSNorm(made(dims[1], kind=dtype), 1e-6),
    )  # fmt: skip


def by_channel(
    dtype: torch.dtype, heads: tuple[int, int] = (2, 2), dims: tuple[int, int] = (16, 24)
) -> LayerDelta:
    """Each channel of the keys decays by itself. Rows are as wide as behind the products of `ups`."""
    unused = linear(torch.zeros(1, 1, device=DEVICE))
    bias = torch.randn(heads[0] * dims[0]).to(DEVICE)
    return replace(delta(dtype, heads, dims), decay_bias=bias, ups=(unused, unused))


def mamba(
    dtype: torch.dtype, norm: str = "opened", sizes: tuple[int, int, int, int] = (4, 2, 24, 20)
) -> LayerMamba:
    def made(*shape: int, kind: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape).to(DEVICE, kind)

    heads, groups, dim, state = sizes
    channels = heads * dim + 2 * groups * state
    inner = None if norm == "none" else RMSNorm(made(heads * dim, kind=dtype), 1e-5)
    return LayerMamba(
        0, heads, groups, dim, state, made(channels, 1, 4, kind=dtype), made(channels, kind=dtype),
        made(heads), made(heads), made(heads), inner, norm == "first",
    )  # fmt: skip


Layer = LayerDelta | LayerMamba


def recurrent(rows: Tensor, layer: Layer, *about: Any) -> None:
    kernels(layer).recurrent(rows, layer, *about)


def chunked(rows: Tensor, layer: Layer, *about: Any) -> None:
    kernels(layer).chunked(rows, layer, *about)


def gated_norm(rows: Tensor, layer: Layer, *about: Any) -> None:
    kernels(layer).gated_norm(rows, layer, *about)


def kernels(layer: Layer) -> Any:
    return triton_mamba if isinstance(layer, LayerMamba) else triton_delta


def pools(layer: LayerState) -> list[Tensor]:
    taps = layer.conv.shape[2]
    shapes: list[tuple[int, ...]] = [(taps - 1, len(layer.conv))]
    if isinstance(layer, LayerDelta):
        shapes.append((layer.value_heads, layer.key_dim, layer.value_dim))
    if isinstance(layer, LayerMamba):
        shapes.append((layer.heads, layer.state_dim, layer.head_dim))
    states = [torch.randn(SLOTS, *shape).to(DEVICE) for shape in shapes]
    for state in states:
        state[0] = 0
    return states


def reference(rows: Tensor, layer: LayerState, states: list[Tensor]) -> Tensor:
    """On the same numbers, in float32."""
    pairs = torch.from_numpy(PAIRS).to(DEVICE)
    wide = wider(layer)
    return run(rows.float(), wide, states, Sequences(COUNTS, pairs[:, 0], pairs[:, 1]))


def wider(layer: LayerState) -> LayerState:
    if isinstance(layer, LayerConv):
        bias = None if layer.bias is None else layer.bias.float()
        return LayerConv(0, layer.conv.float(), bias)
    if isinstance(layer, LayerMamba):
        inner = None if layer.norm is None else RMSNorm(layer.norm.weight.float(), layer.norm.eps)
        biases = None if layer.conv_bias is None else layer.conv_bias.float()
        return replace(layer, conv=layer.conv.float(), conv_bias=biases, norm=inner)
    norm = RMSNorm(layer.norm.weight.float(), layer.norm.eps)
    return replace(layer, conv=layer.conv.float(), norm=norm)


def padded(rows: Tensor) -> Tensor:
    """The lines of a step as `PADDED` has them."""
    extended = sum(COUNTS)
    lines = rows.new_zeros((PADDED.lines, rows.shape[1]))
    lines[:extended] = rows[:extended]
    lines[PADDED.extended : PADDED.extended + DECODES] = rows[extended:]
    return lines


def plain(lines: Tensor) -> Tensor:
    return torch.cat((lines[: sum(COUNTS)], lines[PADDED.extended : PADDED.extended + DECODES]))


def near(ours: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    """Every value in float32; of 16 bits, where a sum of large terms may be small, all together."""
    if dtype == torch.float32:
        few = 1e-4 if CUDA else 2e-5  # a GPU's exp and log are not exact
        torch.testing.assert_close(ours, wanted, atol=few, rtol=few)
    else:
        assert ((ours.float() - wanted).norm() / wanted.norm()).item() < 0.03


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "half"])
@pytest.mark.parametrize("invariant", [False, True], ids=["chunked", "recurrent"])
@pytest.mark.parametrize(
    "mixer", ["delta", "delta by channel", "mamba", "mamba-normed first", "mamba-not normed"]
)
def test_a_mixer_of_matrices(mixer: str, dtype: torch.dtype, invariant: bool) -> None:
    torch.manual_seed(3)
    norms = {"mamba": "opened", "mamba-normed first": "first", "mamba-not normed": "none"}
    deltas: dict[str, Callable[[torch.dtype], Layer]] = {"delta": delta, "delta by channel": by_channel}
    layer = deltas[mixer](dtype) if mixer in deltas else mamba(dtype, norms[mixer])
    states = pools(layer)
    rows = torch.randn(sum(COUNTS) + DECODES, sum(layer.parts)).to(DEVICE, dtype)
    before = [state.clone() for state in states]
    known = [state.clone() for state in states]
    wanted = reference(rows, layer, known)
    plan = tables(step(COUNTS, DECODES, PAIRS), PADDED)
    lines = padded(rows)
    output = lines.new_empty((len(lines), layer.width))
    recurrent(lines, layer, states, plan["state_decodes"], output)
    extends, chunks = plan["state_extends"], plan["state_chunks"]
    if invariant:
        recurrent(lines, layer, states, extends, output)
    else:
        chunked(lines, layer, states, extends, chunks, PADDED.extended, output)
    gated_norm(lines, layer, plan["state_decodes"], 1, output)
    gated_norm(lines, layer, chunks, CHUNK, output)
    near(plain(output), wanted, dtype)
    targets = PAIRS[:, 1].tolist()
    for state, after, old in zip(states, known, before, strict=True):
        near(state[targets], after[targets], dtype)
        others = [slot for slot in range(SLOTS) if slot not in targets]
        assert torch.equal(state[others], old[others])


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "half"])
@pytest.mark.parametrize("biased", [False, True])
def test_a_short_convolution(dtype: torch.dtype, biased: bool) -> None:
    torch.manual_seed(4)
    width, taps = 40, 3
    bias = torch.randn(width).to(DEVICE, dtype) if biased else None
    layer = LayerConv(0, torch.randn(width, 1, taps).to(DEVICE, dtype), bias)
    states = pools(layer)
    if dtype != torch.float32:  # what a model of 16 bits keeps
        states = [state.to(dtype).float() for state in states]
    rows = torch.randn(sum(COUNTS) + DECODES, 3 * width).to(DEVICE, dtype)
    before, known = states[0].clone(), [states[0].clone()]
    wanted = reference(rows, layer, known)
    plan = tables(step(COUNTS, DECODES, PAIRS), PADDED)
    lines = padded(rows)
    output = lines.new_empty((len(lines), width))
    short_conv(lines, layer, states[0], plan["state_decodes"], 1, output)
    short_conv(lines, layer, states[0], plan["state_chunks"], CHUNK, output)
    near(plain(output), wanted, dtype)
    targets = PAIRS[:, 1].tolist()
    near(states[0][targets], known[0][targets], dtype)
    others = [slot for slot in range(SLOTS) if slot not in targets]
    assert torch.equal(states[0][others], before[others])


@pytest.mark.parametrize("mixer", ["delta", "delta by channel", "mamba", "conv"])
def test_a_state_for_each_draft(mixer: str) -> None:
    """Of three rows, which run 2, 0 and 1 drafts; the first one's second draft is refused."""
    torch.manual_seed(5)
    made: dict[str, Any] = {"delta": delta, "delta by channel": by_channel, "mamba": mamba}
    layer: Any = LayerConv(0, torch.randn(40, 1, 3).to(DEVICE), None)
    layer = made[mixer](torch.float32) if mixer in made else layer
    states = pools(layer)
    lines, pairs = np.array([3, 1, 2]), np.array([[1, 4], [0, 5], [2, 6]])
    rows, every = np.repeat(np.arange(3), lines), np.arange(6)
    plan = StepRows(
        rows, every * 0, every * 0 + 1, 0, np.zeros(0, dtype=np.int32), every, every, lines=lines,
        states=np.repeat(pairs, lines, axis=0),
    )  # fmt: skip
    inputs = torch.randn(8, 120 if mixer == "conv" else sum(layer.parts)).to(DEVICE)
    known = [state.clone() for state in states]
    named = {name: torch.from_numpy(part).to(DEVICE) for name, part in state_plan(plan, 8).items()}
    assert named["state_from"].tolist() == [1, 8, 9, 0, 2, 10]
    assert named["state_to"].tolist() == [8, 9, 4, 5, 10, 6]
    firsts, numbers = named["state_from"], named["state_numbers"]
    rounds = [torch.nonzero(numbers == at)[:, 0] for at in range(3)]
    sequences = Sequences([], firsts, named["state_to"], [*rounds])
    wanted = run(inputs[:6], layer, known, sequences)
    room = tables(plan, Bucket(0, 0, 8, 8, drafted=True), 8)
    output = inputs.new_empty((8, layer.width))
    if mixer == "conv":
        short_conv(inputs, layer, states[0], room["state_lines"], 1, output)
    else:
        recurrent(inputs, layer, states, room["state_decodes"], output)
        gated_norm(inputs, layer, room["state_lines"], 1, output)
    near(output[:6], wanted, torch.float32)
    for state, after in zip(states, known, strict=True):
        near(state, after, torch.float32)
    drafts = room["state_drafts"][:3]
    assert accepted_states(plan, 8).tolist() == [[0, 8, 4], [1, 9, 4], [4, 10, 6]]
    kept = torch.tensor([1, 1, 0, 1, 1, 1], dtype=torch.int32, device=DEVICE)
    for state in states:
        before = state.clone()
        take_back(state[None], kept, drafts)
        assert torch.equal(state[4], before[9])
        state[4] = before[4]
        assert torch.equal(state, before)


def after(layer: Layer, rows: Tensor, cuts: list[int], invariant: bool) -> tuple[Tensor, list[Tensor]]:
    """One sequence, run in pieces from slot to slot: its outputs, and its last state."""
    states = pools(layer)
    outputs, slot = [], 0
    for first, last in zip([0, *cuts], [*cuts, len(rows)], strict=True):
        own = rows[first:last].contiguous()
        bucket = Bucket(len(own), 1, 0, 1)
        plan = tables(step([len(own)], 0, np.array([[slot, slot + 1]])), bucket)
        output = own.new_empty((len(own), layer.width))
        if invariant:
            recurrent(own, layer, states, plan["state_extends"], output)
        else:
            chunked(own, layer, states, plan["state_extends"], plan["state_chunks"], len(own), output)
        gated_norm(own, layer, plan["state_chunks"], CHUNK, output)
        outputs.append(output)
        slot += 1
    return torch.cat(outputs), [state[slot] for state in states]


@pytest.mark.parametrize(
    ("cuts", "invariant"), [([64, 128], False), ([1, 9], True)], ids=["chunked", "recurrent"]
)
@pytest.mark.parametrize("mixer", [delta, by_channel, mamba])
def test_a_hit_is_a_miss_bit_by_bit(
    mixer: Callable[[torch.dtype], Layer], cuts: list[int], invariant: bool, ordered_dots: None
) -> None:
    """What goes on from a snapshot equals what ran through: at whole chunks, and recurrent anywhere."""
    torch.manual_seed(5)
    layer = mixer(HALF)
    rows = torch.randn(20 if invariant else 140, sum(layer.parts)).to(DEVICE, HALF)
    through, last = after(layer, rows, [], invariant)
    pieces, own = after(layer, rows, cuts, invariant)
    assert torch.equal(through, pieces)
    assert all(map(torch.equal, last, own))


def test_keys_that_are_all_alike() -> None:
    """The system of a chunk has an inverse of ones, though its powers are as large as 1e18."""
    torch.manual_seed(6)
    layer = delta(torch.float32, (1, 1), (16, 16))
    layer.decay.fill_(-30.0)  # nothing is forgotten
    rows = torch.randn(1, sum(layer.parts)).repeat(128, 1).to(DEVICE)
    rows[:, layer.parts[0] + layer.parts[1]] = 30.0  # beta is 1
    layer.conv[:, 0, :-1] = 0
    states = pools(layer)
    output = rows.new_empty((128, layer.width))
    plan = tables(step([128], 0, np.array([[0, 1]])), Bucket(128, 1, 0, 1))
    chunked(rows, layer, states, plan["state_extends"], plan["state_chunks"], 128, output)
    gated_norm(rows, layer, plan["state_chunks"], CHUNK, output)
    known = pools(layer)
    one = torch.tensor([0]), torch.tensor([1])
    wanted = run(rows, layer, known, Sequences([128], *(x.to(DEVICE) for x in one)))
    torch.testing.assert_close(output, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("scale", [0.3, 40.0])
def test_channels_that_remember_much_and_nothing(scale: float) -> None:
    """Decays of a chunk from e^-0.01 to e^-10000, side by side: no quotient of two is too large."""
    torch.manual_seed(8)
    layer = by_channel(torch.float32, (1, 1), (16, 16))
    rows = torch.randn(100, sum(layer.parts)).to(DEVICE)
    rows[:, -16:] *= scale
    one = [torch.tensor([slot], device=DEVICE) for slot in (0, 1)]
    wanted = run(rows, layer, pools(layer), Sequences([100], *one))
    near(after(layer, rows, [64], False)[0], wanted, torch.float32)


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
@pytest.mark.parametrize(
    ("mixer", "heads", "size"),
    [(delta, (16, 32), 128), (by_channel, (32, 32), 128), (by_channel, (32, 32), 256)],
)
def test_a_delta_net_of_real_size(
    mixer: Callable[..., LayerDelta], heads: tuple[int, int], size: int
) -> None:
    """Heads of Qwen3.5-9B and Kimi-Linear in bfloat16: chunks and single tokens nearly agree."""
    torch.manual_seed(7)
    layer = mixer(HALF, heads, (size, size))
    layer.decay.uniform_(-6.0, -1.0)  # much is remembered
    rows = torch.randn(2048, sum(layer.parts)).to(DEVICE, HALF)
    exact, (_, wanted) = after(layer, rows, [], True)
    fast, (_, own) = after(layer, rows, [1000], False)
    assert torch.isfinite(fast).all()
    assert ((own - wanted).norm() / wanted.norm()).item() < 0.02
    assert ((fast - exact).float().norm() / exact.float().norm()).item() < 0.03


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
@pytest.mark.parametrize("sizes", [(8, 1, 64, 128), (48, 1, 64, 128), (24, 1, 64, 256), (6, 2, 16, 24)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mamba_of_real_sizes(sizes: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    """Chunks and tokens one by one give about the same outputs and states. Triton 3.6 once did not."""
    torch.manual_seed(7)
    layer = mamba(dtype, sizes=sizes)
    rows = torch.randn(300, sum(layer.parts)).to(DEVICE, dtype)
    exact, (_, wanted) = after(layer, rows, [], True)
    fast, (_, own) = after(layer, rows, [40, 170], False)
    near = 1e-5 if dtype == torch.float32 else 0.02
    assert ((own - wanted).norm() / wanted.norm()).item() < near
    assert ((fast - exact).float().norm() / exact.float().norm()).item() < near
