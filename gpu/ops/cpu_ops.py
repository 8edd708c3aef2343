"""The operations on a CPU: recorded once as a list of kernels, then run by a crew of threads.

A step of a small model is bound by calls as much as by bytes, and every call from Python waits for the
interpreter's lock, which the server wants too. So the walk over the layers happens once: the operations
record instructions, with buffers for the largest step. A step then fills the arrays of `CpuStep` and
runs the recording in one call, without the lock.

Weights are integers of 8 or 4 bits (`native.linear`, `native.grouped`), activations of 8, the residual
and all sums float32, keys and values float16. A row's result depends on that row alone, to the last
bit. This file knows neither families nor the page table.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from ramify.gpu.kv.layout import KVPool
from ramify.gpu.models.definition import Definition, LatentSettings
from ramify.gpu.native.attention import MOST_ROWS, TILE_WORDS
from ramify.gpu.native.experts import OF, RENORMALISE, SHARED, SHARED_GATE, SIGMOID
from ramify.gpu.native.grouped import Grouping, PackedGroups
from ramify.gpu.native.kernels import (
    DrawArrays,
    Grouped,
    Kernels,
    Packed,
    Quantised,
    RoutedTokens,
    empty_quantised,
    empty_routed,
    table_kind,
)
from ramify.gpu.native.linear import GATED, PANEL, WEIGHED
from ramify.gpu.native.threads import Instruction, Words, aligned
from ramify.gpu.ops.base import (
    Activation,
    LayerAttention,
    LayerLatent,
    Projection,
    ResidualStream,
    TokenInputTables,
)
from ramify.gpu.ops.experts import LayerExperts
from ramify.gpu.ops.fixed_states import LayerState
from ramify.gpu.ops.linear.base import Linear
from ramify.gpu.ops.linear.packed import cpu_weight, looked_up
from ramify.gpu.ops.rmsnorm import RMSNorm
from ramify.gpu.ops.rotary import Rotary
from ramify.gpu.step.buckets import Bucket
from ramify.gpu.step.inputs import StepInputs, layout
from ramify.protocol.plan import NO_TOKEN

KV_DTYPE = torch.float16
_ANGLES = 1024  # positions whose angles are computed at a time


@dataclass(slots=True)
class CpuStep:
    """A step's inputs, at fixed addresses, with room for the largest step. Counts are arrays of one."""

    inputs: StepInputs[Any]  # the fields of every step; integers are words, a token's id is its own
    tokens: Words  # how many
    slots: Words
    tiles_count: Words
    tiles: Words  # see `native.attention`
    lines_count: Words  # how many of `lines`
    # as `slots` and `tiles`, of layers that use window pages; None: there are none
    window_slots: Words | None = None
    window_tiles: Words | None = None
    # by top, of how many experts
    routed: dict[tuple[int, int], RoutedTokens] = field(default_factory=dict)

    @property
    def lines(self) -> Words:
        """The lines whose logits are wanted."""
        return cast(Words, self.inputs.sampled_lines)


def empty_step(tokens: int) -> CpuStep:
    fields = layout(Bucket(tokens, tokens, 0, tokens), {})
    parts: dict[str, Any] = {
        name: aligned(*shape) if dtype == "int32" else np.zeros(shape, dtype)
        for name, (dtype, shape) in fields.items()
    }
    return CpuStep(
        StepInputs.from_parts(Bucket(tokens, tokens, 0, tokens), parts), aligned(1), aligned(tokens),
        aligned(1), aligned(TILE_WORDS * tokens), aligned(1), aligned(tokens),
        aligned(TILE_WORDS * tokens),
    )  # fmt: skip


def no_step() -> StepInputs[Tensor]:
    """Make empty inputs for recording: the instructions read a step's inputs from `CpuStep`."""
    return StepInputs.from_parts(Bucket(0, 0, 0, 0), {})


@dataclass(slots=True)
class CpuStream(ResidualStream):
    """The residual; its reader applies `norm`."""

    norm: RMSNorm | None


class AngleTable:
    """cos and sin of each position, float32[positions, D / 2], computed when one is first used."""

    def __init__(self, rotary: Rotary, dim: int, positions: int) -> None:
        self._rotary = rotary
        self.cos, self.sin = torch.empty((positions, dim // 2)), torch.empty((positions, dim // 2))
        self._known = 0

    @torch.inference_mode()
    def _compute(self, end: int) -> None:
        cos, sin = self._rotary.table(torch.arange(self._known, end))
        self.cos[self._known : end], self.sin[self._known : end] = cos, sin
        self._known = end

    def reach(self, position: int) -> None:
        """Compute the angles up to `position`."""
        while self._known <= position:
            self._compute(min(self._known + _ANGLES, len(self.cos)))


def obstacle(config: Definition, page_size: int) -> str | None:
    """Say why these operations cannot run a model; None: they can."""
    if config.keeps_states:
        return "layers with fixed states have no kernels in 8 bits"
    if any(one.router.groups > 1 for one in config.experts):
        return "routers that choose among groups of experts have no kernel in 8 bits"
    sizes = config.attention
    if isinstance(sizes, LatentSettings):
        return "latent attention has no kernels in 8 bits"
    if sizes.gated:
        return "attention with a gate has no kernels in 8 bits"
    if not config.equal:
        return "its layers are of unequal sizes"
    if config.token_inputs is not None or sizes.value_norm:
        return "layers with norms of values or inputs of their own have no kernels"
    if sizes.head_dim % 32 or sizes.head_dim > 256:
        return f"heads of {sizes.head_dim} are not a multiple of 32 up to 256"
    if sizes.heads // sizes.kv_heads > MOST_ROWS:
        return f"more than {MOST_ROWS} query heads share a KV head"
    if config.hidden_size % PANEL or config.intermediate_size % 16:
        return f"layers are not a multiple of {PANEL} wide"
    for activation in _activations(config):
        if activation not in GATED:
            return f"the activation {activation} has no kernel"
    if page_size & (page_size - 1):
        return f"pages of {page_size} tokens are not a power of 2"
    if config.logit_softcap is not None and config.vocab_size % PANEL:
        return f"a capped vocabulary is not a multiple of {PANEL}"
    return None


def endings(
    config: Definition, products: Iterable[tuple[Linear, list[str]]], table: Linear
) -> tuple[tuple[str, ...], Grouped, Grouping | str]:
    """List the epilogues of a model's products: with a scale for each output, and in groups.

    Returns also the kind of `table`, the embedding.
    """
    by_use: dict[str, list[str]] = {
        "rows": ["store", "add"],
        "gated": [*_activations(config)],
        "logits": ["store" if config.logit_softcap is None else "softcap"],
    }
    plain, grouped = set(), set()
    for linear, _ in products:
        if linear.use == "scores":
            continue
        packed = cpu_weight(linear).packed
        ends = by_use[linear.use]
        if linear.stacked:
            ends = [f"{OF}{end}" for end in (ends if linear.use == "gated" else [WEIGHED])]
        for end in ends:
            if isinstance(packed, PackedGroups):
                grouped.add((end, packed.grouping))
            else:
                plain.add(end)
    ordered = sorted(grouped, key=lambda each: (each[0], each[1].name))
    return tuple(sorted(plain)), tuple(ordered), table_kind(looked_up(table))


def _activations(config: Definition) -> list[str]:
    parts = (layer.feed_forward for layer in config.layers)
    return list(dict.fromkeys(part.activation for part in parts if part is not None))


class CpuOps:
    """Recorder of `instructions`, for steps of up to `most_tokens` at positions below `context`.

    `table`: the embedding. Instructions read the inputs that `step` is when they are recorded.
    """

    def __init__(
        self, kernels: Kernels, pool: KVPool, most_tokens: int, context: int, table: Linear
    ) -> None:
        self.step = empty_step(most_tokens)
        self.instructions: list[Instruction] = []
        self.angles: dict[Rotary, AngleTable] = {}
        self._kernels = kernels
        self.tile_rows = kernels.tile_rows
        self._table = looked_up(table)
        self.pool = pool
        self._most = most_tokens
        self._context = context
        self._buffers: dict[tuple[str, int, int], Tensor] = {}
        self._activations: dict[tuple[int, bool, int], Quantised] = {}

    def begin(self, step: StepInputs[Tensor]) -> None:
        self.instructions = []

    def embed(
        self, step: StepInputs[Tensor], table: Tensor, scale: float, norm: RMSNorm | None
    ) -> CpuStream:
        residual = self._buffer("residual", table.shape[1])
        own = self.step
        self.instructions.append(
            self._kernels.embed(own.tokens, own.inputs.input_ids, self._table, scale, residual)
        )
        return CpuStream(residual, residual, norm)

    def linear(self, x: CpuStream, linear: Linear) -> Tensor:
        weight = cpu_weight(linear).packed
        out = self._buffer("qkv", weight.outputs)
        self._product(self._normed(x, weight), weight, out, "store")
        return out

    def attend(self, qkv: Tensor, layer: LayerAttention, step: StepInputs[Tensor]) -> Tensor:
        own, kv, kernels = self.step, self.pool.layers[layer.index], self._kernels
        positions = own.inputs.positions
        angles = self.angles.get(layer.rotary)
        if angles is None:
            angles = AngleTable(layer.rotary, layer.head_dim, self._context)
            self.angles[layer.rotary] = angles
        norms = None
        if layer.q_norm is not None and layer.k_norm is not None:
            norms = (layer.q_norm.weight, layer.k_norm.weight, layer.q_norm.eps)
        slots, tiles = own.slots, own.tiles
        if kv.windowed and own.window_slots is not None and own.window_tiles is not None:
            slots, tiles = own.window_slots, own.window_tiles
        heads, pool = (layer.heads, layer.kv_heads), (kv.k, kv.v)
        out = self._buffer("mixed", layer.heads * layer.head_dim)
        spec = layer.spec
        self.instructions += [
            kernels.rotate(own.tokens, qkv, positions, slots, (angles.cos, angles.sin), pool, heads,
                           norms, layer.wide_norms),
            kernels.attend(own.tiles_count, tiles, qkv, pool, out, heads, kv.page_size, spec.scale,
                           spec.softcap, spec.window, spec.sinks),
        ]  # fmt: skip
        return out

    def attend_latent(self, rows: Tensor, layer: LayerLatent, step: StepInputs[Tensor]) -> Tensor:
        raise RuntimeError("`obstacle` refuses models with latent attention")

    def squared(self, x: CpuStream, linear: Linear) -> Tensor:
        raise RuntimeError("`obstacle` refuses models with such feed-forwards")

    def recur(self, rows: Tensor, layer: LayerState, step: StepInputs[Tensor]) -> Tensor:
        raise RuntimeError("`obstacle` refuses models with fixed states")

    def behind(self, x: CpuStream, norm: RMSNorm) -> CpuStream:
        raise RuntimeError("`obstacle` refuses Gemma 4, which alone has experts beside")

    def joined(
        self, first: Projection, first_norm: RMSNorm, second: Projection, second_norm: RMSNorm
    ) -> Projection:
        raise RuntimeError("`obstacle` refuses Gemma 4, which alone has experts beside")

    def experts(self, x: CpuStream, layer: LayerExperts) -> Projection:
        own, kernels, settings = self.step, self._kernels, layer.settings
        gate_up, down = cpu_weight(layer.gate_up), cpu_weight(layer.down)
        top, number, size = settings.top, layer.experts, down.inputs
        to = self._routed(top, number)
        shared = layer.shared
        flags = SIGMOID * (settings.score == "sigmoid") + RENORMALISE * settings.renormalise
        if shared is not None:
            flags += SHARED + SHARED_GATE * shared.gated
        self.instructions += kernels.route(
            own.tokens, x.residual, _norm(x), layer.router.tensor, layer.correction, to, flags,
            settings.scale,
        )  # fmt: skip
        normed = self._normed(x, gate_up.packed)
        opened = self._buffer("opened", gate_up.packed.outputs // 2 // number, top)
        added = self._buffer("of experts", down.packed.outputs // number, top)
        quantised = self._quantised(size, down.packed, top)
        self.instructions += [
            kernels.of_experts(normed, gate_up.packed, to, number, opened, layer.activation),
            kernels.quantise(to.pair_count, opened, size, quantised),
            kernels.of_experts(quantised, down.packed, to, number, added, WEIGHED),
        ]
        beside = None
        if shared is not None:
            weight = cpu_weight(shared.down)
            assert shared.activation != "relu2"  # whose models keep states, which are refused
            rows = self._quantised(weight.inputs, weight.packed)
            gated = self.gated(x, shared.gate_up, shared.activation)
            self.instructions.append(kernels.quantise(own.tokens, gated, weight.inputs, rows))
            beside = self._buffer("beside", weight.packed.outputs)
            self._product(rows, weight.packed, beside, "store")
        out = self._buffer("fed", x.residual.shape[1])
        self.instructions.append(kernels.sum_experts(own.tokens, added, to, beside, out))
        return Projection(out, None)

    def project(self, x: Tensor, linear: Linear) -> Projection:
        return Projection(x, linear)

    def reduce(self, projection: Projection) -> Projection:
        return projection

    def add_norm(
        self, x: CpuStream, projection: Projection, norm: RMSNorm | None, post: RMSNorm | None = None
    ) -> CpuStream:
        own, kernels, y = self.step, self._kernels, projection.rows
        if projection.linear is None:
            behind = None if post is None else (post.weight, post.eps)
            self.instructions.append(kernels.norm_add(own.tokens, y, behind, x.residual))
            return CpuStream(x.residual, x.residual, norm)
        own_weight = cpu_weight(projection.linear)
        weight, inputs = own_weight.packed, own_weight.inputs
        quantised = self._quantised(inputs, weight)
        self.instructions.append(kernels.quantise(own.tokens, y, inputs, quantised))
        if post is None:
            self._product(quantised, weight, x.residual, "add")
        else:
            out = self._buffer("added", weight.outputs)
            self._product(quantised, weight, out, "store")
            self.instructions.append(
                kernels.norm_add(own.tokens, out, (post.weight, post.eps), x.residual)
            )
        return CpuStream(x.residual, x.residual, norm)

    def gated(self, x: CpuStream, linear: Linear, activation: Activation) -> Tensor:
        weight = cpu_weight(linear).packed
        out = self._buffer("gated", weight.outputs // 2)
        self._product(self._normed(x, weight), weight, out, activation)
        return out

    def token_inputs(self, x: CpuStream, step: StepInputs[Tensor], inputs: TokenInputTables) -> Tensor:
        raise RuntimeError("`obstacle` refuses models whose layers are given inputs of tokens")

    def open_gate(
        self, x: CpuStream, linear: Linear, scale: float, given: Tensor, activation: Activation
    ) -> Tensor:
        raise RuntimeError("`obstacle` refuses models whose layers are given inputs of tokens")

    def head(
        self,
        x: CpuStream,
        lines: Tensor | None,
        linear: Linear,
        softcap: float | None,
        output: Tensor | None = None,
    ) -> Tensor:
        """Compute logits of the step's `lines`, into `output` [lines, padded vocabulary]."""
        if output is None:
            raise ValueError("the logits need room of their own")
        own, size = self.step, x.residual.shape[1]
        weight = cpu_weight(linear).packed
        quantised = self._quantised(size, weight)
        norm = _norm(x)
        self.instructions.append(
            self._kernels.quantise(own.lines_count, x.residual, size, quantised, norm, own.lines)
        )
        end = "store" if softcap is None else "softcap"
        self.instructions.append(
            self._kernels.linear(own.lines_count, quantised, weight, output, end, softcap or 0.0)
        )
        return output

    def logits(self, lines: int, vocabulary: int) -> Tensor:
        """Allocate the logits of so many lines."""
        return torch.empty((lines, -(-vocabulary // PANEL) * PANEL))

    def choose(self, logits: Tensor, draws: DrawArrays, bad: int = NO_TOKEN) -> Instruction:
        """Sample a token from each line of logits; `bad` where they are not finite."""
        return self._kernels.choose(self.step.lines_count, logits, draws, bad)

    def reach(self, position: int) -> None:
        """Compute the rotary angles up to `position`."""
        for angles in self.angles.values():
            angles.reach(position)

    def _normed(self, x: CpuStream, weight: Packed) -> Quantised:
        size = x.residual.shape[1]
        quantised = self._quantised(size, weight)
        norm = _norm(x)
        self.instructions.append(
            self._kernels.quantise(self.step.tokens, x.residual, size, quantised, norm)
        )
        return quantised

    def _product(self, x: Quantised, weight: Packed, out: Tensor, end: str) -> None:
        self.instructions.append(self._kernels.linear(self.step.tokens, x, weight, out, end))

    def _quantised(self, size: int, weight: Packed, each: int = 1) -> Quantised:
        """Find or allocate the activations that a product with `weight` reads, `each` rows a token."""
        key = size, isinstance(weight, PackedGroups), each
        if key not in self._activations:
            count = each * self._most
            self._activations[key] = empty_quantised(count, size, self._kernels.isa, key[1])
        return self._activations[key]

    def _buffer(self, name: str, width: int, each: int = 1) -> Tensor:
        """Find or allocate a buffer [each * most_tokens, width], the same for all layers."""
        key = (name, width, each)
        if key not in self._buffers:
            self._buffers[key] = torch.zeros((each * self._most, width))
        return self._buffers[key]

    def _routed(self, top: int, number: int) -> RoutedTokens:
        key = (top, number)
        if key not in self.step.routed:
            self.step.routed[key] = empty_routed(self._most, top, number)
        return self.step.routed[key]


def _norm(x: CpuStream) -> tuple[Tensor, float] | None:
    return None if x.norm is None else (x.norm.weight, x.norm.eps)
