"""Mixers with fixed states on torch: gated delta net, Mamba-2 and short convolution.

Each runs all sequences of a step: extends one by one, except for convolutions in chunks of 64 tokens;
decodes together, in the recurrent form. A sequence reads the state in slot `state_from` of the pool and
writes the state after its last token to slot `state_to`. Drafts are sequences of their own: each writes
its state to a spare slot, and reads that of the line before it. Sums and states are float32.

This file knows neither the layers around them nor which rows have the slots.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ramify.gpu.ops.linear.base import Linear
from ramify.gpu.ops.rmsnorm import RMSNorm
from ramify.gpu.step.buckets import Bucket
from ramify.gpu.step.inputs import Plan, StepInputs
from ramify.gpu.step.rows import StepRows
from ramify.gpu.step.step_rows import Flags, Ints, within

CHUNK = 64  # tokens of a sequence that are computed together
_FEW = 16  # ... where each channel decays by itself: every pair of tokens has as many numbers
_ITEM_FIELDS = 5
_L2_EPS = 1e-6


@dataclass(slots=True)
class LayerDelta:
    """A gated delta net (Yang et al. 2024), as operations need to know it.

    A row of its input: q and k of the key heads, v of the value heads, the output's gates, one beta and
    one decay for each value head. Consecutive value heads share a key head.

    `ups`: each channel of a key decays by itself (Kimi Delta Attention, 2025). In place of gates and
    decays the rows have the inputs of products that give them, and gates are sigmoids.
    """

    index: int  # of its state, among the pool's layers
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv: Tensor  # [2 * keys + values, 1, K], in front of q, k and v
    decay: Tensor  # float32[value heads]: the logarithm of each head's rate
    decay_bias: Tensor  # float32[value heads], or of their channels
    norm: RMSNorm  # of each head's output, which its gate then opens
    ups: tuple[Linear, Linear] | None = None  # of gates, of decays

    @property
    def width(self) -> int:
        """The width of its output."""
        return self.value_heads * self.value_dim

    @property
    def parts(self) -> list[int]:
        """The widths of a row's parts: q, k, v together, gates, betas, decays."""
        convolved, heads = 2 * self.key_heads * self.key_dim + self.width, self.value_heads
        return [convolved, self.width, heads, heads * (1 if self.ups is None else self.key_dim)]

    def widened(self, rows: Tensor, product: Callable[[Tensor, Linear], Tensor]) -> Tensor:
        """Return rows with the parts of `parts`: with `ups`, gates and decays are computed."""
        if self.ups is None:
            return rows
        gate_up, decay_up = self.ups
        rank = (rows.shape[1] - self.parts[0] - self.value_heads) // 2
        sizes = [self.parts[0], rank, self.value_heads, rank]
        qkv, gates, betas, decays = torch.split(rows, sizes, -1)
        gates, decays = product(gates.contiguous(), gate_up), product(decays.contiguous(), decay_up)
        return torch.cat((qkv, gates, betas, decays), -1)


@dataclass(slots=True)
class LayerConv:
    """A short convolution between two gates (LFM2), as operations need to know it.

    A row of its input: the gate of the convolution's input, that of its output, and the input itself.
    """

    index: int
    conv: Tensor  # [width, 1, K]
    bias: Tensor | None  # [width]

    @property
    def width(self) -> int:
        """The width of its output."""
        return len(self.conv)


@dataclass(slots=True)
class LayerMamba:
    """A Mamba-2 mixer (Dao & Gu 2024), as operations need to know it.

    A row of its input: the output's gates; x of the heads, B and C of the groups; one dt for each head.
    Consecutive heads share a group.
    """

    index: int
    heads: int
    groups: int
    head_dim: int
    state_dim: int
    conv: Tensor  # [heads * head_dim + 2 * groups * state_dim, 1, K], in front of x, B and C
    conv_bias: Tensor | None
    decay: Tensor  # float32[heads]: the logarithm of each head's rate
    step_bias: Tensor  # float32[heads], of dt
    skip: Tensor  # float32[heads]: how much of x is added to its output
    norm: RMSNorm | None  # of each group of outputs
    norm_first: bool  # the norm precedes the gate; else the gate precedes the norm

    @property
    def width(self) -> int:
        """The width of its output."""
        return self.heads * self.head_dim

    @property
    def parts(self) -> list[int]:
        """The widths of a row's parts: gates; x, B, C together; steps."""
        return [self.width, self.width + 2 * self.groups * self.state_dim, self.heads]


LayerState = LayerDelta | LayerMamba | LayerConv


@dataclass(slots=True)
class Sequences:
    """The sequences of a step: extends of `counts` tokens, then decodes. Slots int64[B].

    `rounds`: which decodes run together, one round after another; a draft is in the round after that of
    the line before it.
    """

    counts: list[int]
    sources: Tensor
    targets: Tensor
    rounds: list[Tensor | slice] = field(default_factory=lambda: [slice(None)])

    @classmethod
    def of(cls, step: StepInputs[Tensor]) -> "Sequences":
        plan = step.plan
        counts, numbers = plan["state_counts"].tolist(), plan["state_numbers"]
        found = cls(counts, plan["state_from"], plan["state_to"])
        most = int(numbers.max()) if len(numbers) else 0
        if most:
            found.rounds = [torch.nonzero(numbers == at)[:, 0] for at in range(most + 1)]
        return found

    def decodes(self) -> Iterator[tuple[Tensor | slice, Tensor, Tensor]]:
        """Yield each round: its decodes, the slots that they read, and those that they write."""
        n = len(self.counts)
        for lines in self.rounds:
            yield lines, self.sources[n:][lines], self.targets[n:][lines]


@dataclass(slots=True)
class DecodeLines:
    """The decodes of a step, drafts included, and how they follow each other. [n] each."""

    firsts: Ints  # [rows] which ones are no drafts
    lengths: Ints  # [rows] lines of each row
    numbers: Ints  # of a draft in its row, from 1 on; 0: it is none
    is_last: Flags  # of its row
    sources: Ints  # the slot that the row reads
    targets: Ints  # the slot that the row writes
    own: Ints  # the slot that the line writes: a spare one but for a row's last line

    @classmethod
    def of(cls, step: StepRows, spare: int) -> "DecodeLines":
        """Find the lines of a step. `spare`: the first spare slot."""
        assert step.states is not None
        rows, (sources, targets) = step.rows[step.extends :], step.states[step.extends :].T
        is_first = np.ones(len(rows), dtype=np.bool_)
        np.not_equal(rows[1:], rows[:-1], out=is_first[1:])
        firsts = np.flatnonzero(is_first)
        is_last, own = np.append(is_first[1:], True)[: len(rows)], targets.copy()
        own[~is_last] = spare + np.arange(len(rows) - len(firsts))
        lengths = np.diff(np.append(firsts, len(rows)))
        return cls(firsts, lengths, within(lengths), is_last, sources, targets, own)


def accepted_states(step: StepRows, spare: int) -> Ints:
    """List lines whose next one is a draft, [drafts, 3]: the line's place among those that sample, the
    slot with its state, and the slot that gets that state if the draft is refused."""
    lines = DecodeLines.of(step, spare)
    places = np.empty(len(step.rows), dtype=np.int64)
    places[step.sampling] = np.arange(len(step.sampling))
    found = np.column_stack([places[step.extends :], lines.own, lines.targets])
    return found[~lines.is_last]


def state_plan(step: StepRows, spare: int) -> Plan:
    """Plan a step for this file; empty where the model has no states. `spare`: the first spare slot."""
    if step.states is None:
        return {}
    lines, n = DecodeLines.of(step, spare), step.extends
    sources = np.where(lines.numbers > 0, np.roll(lines.own, 1), lines.sources)
    return {
        "state_counts": step.counts[:n],
        "state_from": np.concatenate([step.states[:n, 0], sources]),
        "state_to": np.concatenate([step.states[:n, 1], lines.own]),
        "state_numbers": lines.numbers,
    }


def state_tables(step: StepRows, bucket: Bucket, spare: int = 0) -> Plan:
    """Plan a step for kernels, in tables of items: see `ops.triton_conv`.

    `state_extends` and `state_decodes`: whole sequences, drafts included; `state_chunks` and
    `state_lines`: these cut into pieces. `state_drafts`: `accepted_states`.
    """
    if step.states is None:
        return {}
    n, lines = step.extends, DecodeLines.of(step, spare)
    places = bucket.extended + np.arange(len(lines.own))
    begins = lines.firsts
    spares = np.where(lines.lengths > 1, lines.own[begins], 0)
    decodes = [lines.sources[begins], lines.targets[begins], places[begins], spares, lines.lengths]
    numbers = lines.numbers
    pieces = [lines.sources, lines.own, places - numbers, numbers, numbers + 1]
    plan: Plan = {
        "state_decodes": np.column_stack(decodes).astype(np.int32),
        "state_lines": np.column_stack(pieces).astype(np.int32),
    }
    if step.lines is not None:
        plan["state_drafts"] = accepted_states(step, spare).astype(np.int32)
    if not bucket.extended:
        return plan
    counts = step.counts[:n]
    firsts = np.cumsum(counts) - counts
    items = np.column_stack([step.states[:n], firsts, np.zeros_like(counts), counts]).astype(np.int32)
    pieces_of = -(-counts // CHUNK)
    chunks = np.repeat(items, pieces_of, axis=0)
    chunks[:, 3] = within(pieces_of) * CHUNK
    return {"state_extends": items, "state_chunks": chunks, **plan}


def state_room(bucket: Bucket) -> Plan:
    """Make zeros as large as the tables of a step in `bucket` can be; items of zeros do nothing."""
    sizes = {"state_decodes": bucket.decodes, "state_lines": bucket.decodes}
    if bucket.extended:
        sizes["state_extends"] = bucket.runs
        sizes["state_chunks"] = bucket.extended // CHUNK + bucket.runs
    room: Plan = {name: np.zeros((size, _ITEM_FIELDS), dtype=np.int32) for name, size in sizes.items()}
    return room | {"state_drafts": np.zeros((bucket.decodes, 3), dtype=np.int32)}


def run(rows: Tensor, layer: LayerState, states: list[Tensor], sequences: Sequences) -> Tensor:
    """Run a mixer: rows [T, inputs], of the layer's first product -> the input of its last one."""
    if isinstance(layer, LayerDelta):
        return _delta(rows, layer, states, sequences)
    if isinstance(layer, LayerMamba):
        return _mamba(rows, layer, states, sequences)
    opening, closing, x = rows.chunk(3, -1)
    return closing * convolve(opening * x, layer.conv, layer.bias, states[0], sequences)


def convolve(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, sequences: Sequences
) -> Tensor:
    """Convolve each channel of x [T, C] over K inputs; state [slots, K - 1, C] has those before."""
    first, parts = 0, []
    for count, source, target in zip(
        sequences.counts, sequences.sources, sequences.targets, strict=False
    ):
        window = torch.cat((state[source].to(x.dtype), x[first : first + count]))
        parts.append(F.conv1d(window.t()[None], weight, bias, groups=len(weight))[0].t())
        state[target] = window[count:].float()
        first += count
    if first < len(x):
        decodes = x[first:]
        output = torch.empty_like(decodes)
        for lines, sources, targets in sequences.decodes():
            before = state.index_select(0, sources).to(x.dtype)
            windows = torch.cat((before, decodes[lines][:, None]), 1)  # [B, K, C]
            output[lines] = (windows * weight[:, 0].t()).sum(1)
            state.index_copy_(0, targets, windows[:, 1:].float())
        parts.append(output if bias is None else output + bias)
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def _delta(rows: Tensor, layer: LayerDelta, states: list[Tensor], sequences: Sequences) -> Tensor:
    qkv, gates, betas, decays = torch.split(rows, layer.parts, -1)
    qkv = F.silu(convolve(qkv, layer.conv, None, states[0], sequences)).float()
    keys, values = layer.key_heads * layer.key_dim, layer.value_heads * layer.value_dim
    q, k, v = torch.split(qkv, [keys, keys, values], -1)
    shared = layer.value_heads // layer.key_heads
    q, k = (_normed(x.view(len(x), -1, layer.key_dim)) for x in (q, k))
    q, k = ((x.repeat_interleave(shared, 1) if shared > 1 else x) for x in (q, k))
    v = v.view(len(v), -1, layer.value_dim)
    beta = betas.float().sigmoid()
    decay = F.softplus(decays.float() + layer.decay_bias).view(len(rows), layer.value_heads, -1)
    decay = -layer.decay.exp()[:, None] * decay
    mixed = delta_rule(q * layer.key_dim**-0.5, k, v, beta, decay, states[1], sequences)
    opening = F.silu if layer.ups is None else torch.sigmoid
    output = layer.norm(mixed.to(rows.dtype)) * opening(gates.view_as(mixed).float())
    return output.to(rows.dtype).flatten(1)


def _mamba(rows: Tensor, layer: LayerMamba, states: list[Tensor], sequences: Sequences) -> Tensor:
    gates, xbc, steps = torch.split(rows, layer.parts, -1)
    xbc = F.silu(convolve(xbc, layer.conv, layer.conv_bias, states[0], sequences)).float()
    grouped = layer.groups * layer.state_dim
    x, b, c = torch.split(xbc, [layer.width, grouped, grouped], -1)
    shared = layer.heads // layer.groups
    b, c = (y.view(len(y), layer.groups, -1).repeat_interleave(shared, 1) for y in (b, c))
    x = x.view(len(x), layer.heads, -1)
    dt = F.softplus(steps.float() + layer.step_bias)
    decay = (-layer.decay.exp() * dt)[..., None]
    output = delta_rule(c, b, x * dt[..., None], None, decay, states[1], sequences)
    output = (output + x * layer.skip[:, None]).flatten(1)
    opened = F.silu(gates.float())
    if layer.norm is None:
        return (output * opened).to(rows.dtype)
    if not layer.norm_first:
        output = output * opened
    by_group = output.view(len(output), layer.groups, -1)
    normed = F.rms_norm(by_group, by_group.shape[-1:], None, layer.norm.eps).view_as(output)
    normed = normed * layer.norm.weight.float()
    return (normed * opened if layer.norm_first else normed).to(rows.dtype)


def _normed(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _L2_EPS)


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None,
    decay: Tensor,
    state: Tensor,
    sequences: Sequences,
) -> Tensor:
    """Run the gated delta rule. q, k [T, H, K], v [T, H, V], beta [T, H]; state [slots, H, K, V].

    decay (a logarithm) [T, H, 1] of the whole state, or [T, H, K] of each channel of the keys.

    A token decays the state, and adds at k the difference between v and the state at k, times beta; its
    output [T, H, V] is that state at q. Without beta all of v is added (Mamba-2).
    """
    first, parts = 0, []
    size = CHUNK if decay.shape[-1] == 1 else _FEW
    for at, count in enumerate(sequences.counts):
        own = state.index_select(0, sequences.sources[at : at + 1])[0]
        for begin in range(first, first + count, size):
            piece = slice(begin, min(begin + size, first + count))
            weights = None if beta is None else beta[piece]
            output, own = _chunk(q[piece], k[piece], v[piece], weights, decay[piece], own)
            parts.append(output)
        state[sequences.targets[at]] = own
        first += count
    if first < len(q):
        output = torch.empty_like(v[first:])
        for lines, sources, targets in sequences.decodes():
            own_q, own_k, own_v, own_decay = (x[first:][lines] for x in (q, k, v, decay))
            before = state.index_select(0, sources) * own_decay.exp()[..., None]
            if beta is not None:
                seen = (before * own_k[..., None]).sum(2)
                own_v = (own_v - seen) * beta[first:][lines][..., None]
            after = before + own_k[..., None] * own_v[:, :, None]
            state.index_copy_(0, targets, after)
            output[lines] = (after * own_q[..., None]).sum(2)
        parts.append(output)
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def _chunk(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, decay: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Run a chunk of n tokens, [n, H, ..] each, with beta by the UT transform (Yang et al. 2024).

    Returns outputs [n, H, V] and the state [H, K, V] after the last token.
    """
    q, k, values, decay = (x.transpose(0, 1) for x in (q, k, v, decay))
    passed = decay.cumsum(1)
    later = torch.ones(q.shape[1], q.shape[1], device=q.device).tril()[..., None]
    # decay between two positions of the chunk, 0 where the second one comes later
    between = ((passed[:, :, None] - passed[:, None]) * later).exp() * later

    def scores(x: Tensor) -> Tensor:
        """Multiply x and the keys, decayed: [H, n, n]."""
        if decay.shape[-1] == 1:
            return (x @ k.transpose(1, 2)) * between[..., 0]
        return torch.einsum("hic,hjc,hijc->hij", x, k, between)

    if beta is not None:
        beta = beta.t()[..., None]
        scaled = k * beta
        system = scores(scaled)
        wanted = torch.cat((values * beta, scaled * passed.exp()), -1)
        solved = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
        values, keys = torch.split(solved, [v.shape[-1], k.shape[-1]], -1)
        values = values - keys @ state
    output = (q * passed.exp()) @ state + scores(q) @ values
    left = (passed[:, -1:] - passed).exp()
    state = state * passed[:, -1].exp()[..., None] + (k * left).transpose(1, 2) @ values
    return output.transpose(0, 1), state
