"""The operations on torch: the reference for the others, and a CPU's where there is nothing faster.

This file knows neither families nor page tables.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from ramify.gpu.attention.base import AttentionBackend
from ramify.gpu.attention.spec import WINDOW_SLOTS
from ramify.gpu.attention.torch_latent import TorchLatent
from ramify.gpu.kv.layout import KVPool
from ramify.gpu.ops.base import (
    Activation,
    LayerAttention,
    LayerLatent,
    Projection,
    ResidualStream,
    TokenInputTables,
)
from ramify.gpu.ops.experts import LayerExperts, opened
from ramify.gpu.ops.experts import run as run_experts
from ramify.gpu.ops.fixed_states import LayerDelta, LayerState, Sequences, run, state_plan
from ramify.gpu.ops.linear.base import Linear
from ramify.gpu.ops.rmsnorm import RMSNorm
from ramify.gpu.ops.rotary import Rotary
from ramify.gpu.step.buckets import tailored
from ramify.gpu.step.inputs import NO_DRAWS, StepInputs, host_inputs, lay
from ramify.gpu.step.rows import StepRows
from ramify.gpu.vision.placing import RowPictures, turns_of

TURNS = "turns"  # in a plan: int64[3, T], each token's three positions where rows have pictures


def torch_inputs(
    step: StepRows, attention: AttentionBackend, device: torch.device, spare: int = 0,
    pictures: RowPictures = {},  # noqa: B006
) -> StepInputs[Tensor]:  # fmt: skip
    """Lay out a step on the device, unpadded. `spare`: the first spare state slot.

    `pictures`: those of all rows.
    """
    bucket = tailored(step, padded=False)
    plan = attention.plan(step, bucket, captured=False) | state_plan(step, spare)
    host = host_inputs(bucket, plan)
    lay(host, step, NO_DRAWS, plan, spare=0)
    if pictures:
        host.plan[TURNS] = turns_of(host.rows, host.positions, pictures)
    return host.on(device)


class TorchOps:
    """Operations on torch. `last` int[rows]: the token that each row sampled last."""

    def __init__(self, pool: KVPool, last: Tensor, attention: AttentionBackend) -> None:
        self._pool = pool
        self._last = last
        self._attention = attention
        self._angles: dict[Rotary, tuple[Tensor, Tensor]] = {}  # of the step's positions
        self._sequences: Sequences | None = None  # of the step, where the model keeps states

    def begin(self, step: StepInputs[Tensor]) -> None:
        self._angles.clear()
        self._sequences = None if self._pool.states is None else Sequences.of(step)

    def embed(
        self, step: StepInputs[Tensor], table: Tensor, scale: float, norm: RMSNorm | None
    ) -> ResidualStream:
        residual = F.embedding(tokens_of(step.input_ids, self._last), table)
        if scale != 1.0:
            residual = residual * scale
        return self.stream(residual, norm)

    def stream(self, residual: Tensor, norm: RMSNorm | None) -> ResidualStream:
        return ResidualStream(residual, residual if norm is None else norm(residual))

    def whole(self, x: ResidualStream) -> Tensor:
        return x.normed

    def linear(self, x: ResidualStream, linear: Linear) -> Tensor:
        return linear(x.normed)

    def _turns(
        self, rotary: Rotary, step: StepInputs[Tensor], dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        angles = self._angles.get(rotary)
        if angles is None:
            angles = self._angles[rotary] = rotary.angles(step.plan.get(TURNS, step.positions), dtype)
        return angles

    def attend(self, qkv: Tensor, layer: LayerAttention, step: StepInputs[Tensor]) -> Tensor:
        heads, stores = layer.heads, layer.kv_parts > 0
        rotated = heads + layer.kv_heads * stores
        own = (heads + layer.kv_heads * layer.kv_parts) * layer.head_dim
        parts = qkv[:, :own].view(len(qkv), -1, layer.head_dim)
        qk = parts[:, :rotated]
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = parts[:, :heads], parts[:, heads:rotated]
            if layer.wide_norms:
                q, k = layer.q_norm(q.flatten(1)).view_as(q), layer.k_norm(k.flatten(1)).view_as(k)
            else:
                q, k = layer.q_norm(q), layer.k_norm(k)
            qk = torch.cat((q, k), 1)
        elif layer.q_norm is not None:
            qk = layer.q_norm(qk)
        qk = layer.rotary.rotate(qk, *self._turns(layer.rotary, step, qkv.dtype))
        kv = self._pool.layers[layer.index]
        if stores:
            v = parts[:, -layer.kv_heads :]
            if layer.value_eps is not None:
                v = F.rms_norm(v, (layer.head_dim,), eps=layer.value_eps)
            kv.store(step.plan[WINDOW_SLOTS if kv.windowed else "slots"], qk[:, heads:], v)
        output = self._attention.attend(qk[:, :heads], kv, step, layer.spec)
        return output * qkv[:, own:].sigmoid() if layer.gated else output

    def attend_latent(self, rows: Tensor, layer: LayerLatent, step: StepInputs[Tensor]) -> Tensor:
        heads = layer.heads
        queries, latent, turning = latent_parts(rows, layer)
        if layer.q_norm is not None and layer.q_up is not None:
            queries = layer.q_up(layer.q_norm(queries))
        q = queries.view(len(rows), len(heads.up), -1)
        cos, sin = self._turns(layer.rotary, step, rows.dtype)
        turned = layer.rotary.rotate(q[..., heads.nope :], cos, sin)
        q = torch.cat((q[..., : heads.nope], turned), -1)
        if layer.query_growth is not None:
            q = q * layer.growth(step.positions)[:, None, None].to(q.dtype)
        k = torch.cat((layer.norm(latent)[:, None], layer.rotary.rotate(turning[:, None], cos, sin)), -1)
        kv = self._pool.layers[layer.index]
        kv.store(step.plan["slots"], k, k)
        assert isinstance(self._attention, TorchLatent)
        return self._attention.attend_latent(q, kv, heads)

    def recur(self, rows: Tensor, layer: LayerState, step: StepInputs[Tensor]) -> Tensor:
        assert self._pool.states is not None
        assert self._sequences is not None
        if isinstance(layer, LayerDelta):
            rows = layer.widened(rows, lambda x, linear: linear(x))
        return run(rows, layer, self._pool.states.layers[layer.index], self._sequences)

    def project(self, x: Tensor, linear: Linear) -> Projection:
        return Projection(linear(x), None)

    def reduce(self, projection: Projection) -> Projection:
        return projection

    def add_norm(
        self,
        x: ResidualStream,
        projection: Projection,
        norm: RMSNorm | None,
        post: RMSNorm | None = None,
    ) -> ResidualStream:
        added = projection.rows
        residual = x.residual.add_(added if post is None else post(added))
        return ResidualStream(residual, residual if norm is None else norm(residual))

    def gated(self, x: ResidualStream, linear: Linear, activation: Activation) -> Tensor:
        gate, up = linear(x.normed).chunk(2, -1)
        return opened(gate, activation).mul_(up)

    def squared(self, x: ResidualStream, linear: Linear) -> Tensor:
        return linear(x.normed).relu_().square_()

    def experts(self, x: ResidualStream, layer: LayerExperts) -> Projection:
        norm = layer.router_norm
        routed = None if norm is None else norm(x.residual)
        return Projection(run_experts(x.normed, layer, routed), None)

    def behind(self, x: ResidualStream, norm: RMSNorm) -> ResidualStream:
        return ResidualStream(x.residual, norm(x.residual))

    def joined(
        self, first: Projection, first_norm: RMSNorm, second: Projection, second_norm: RMSNorm
    ) -> Projection:
        return Projection(first_norm(first.rows) + second_norm(second.rows), None)

    def token_inputs(
        self, x: ResidualStream, step: StepInputs[Tensor], inputs: TokenInputTables
    ) -> Tensor:
        rows = inputs.product(x.residual) * inputs.product_scale
        table = F.embedding(tokens_of(step.input_ids, self._last), inputs.table)
        return token_inputs(rows, table * inputs.scale, inputs)

    def open_gate(
        self, x: ResidualStream, linear: Linear, scale: float, given: Tensor, activation: Activation
    ) -> Tensor:
        return opened(linear(x.normed) * scale, activation).mul_(given)

    def head(
        self,
        x: ResidualStream,
        lines: Tensor | None,
        linear: Linear,
        softcap: float | None,
        output: Tensor | None = None,
    ) -> Tensor:
        logits = linear(x.normed if lines is None else x.normed.index_select(0, lines))
        if softcap is not None:
            logits = torch.tanh(logits / softcap) * softcap
        return logits if output is None else output.copy_(logits)


def latent_parts(rows: Tensor, layer: LayerLatent) -> tuple[Tensor, Tensor, Tensor]:
    """View the parts of `rows`: queries or their latents, the latent, the rotated part of the key."""
    rank, turned = layer.heads.rank, layer.rotary.dim
    queries, latent, turning = torch.split(rows, [rows.shape[1] - rank - turned, rank, turned], -1)
    return queries, latent, turning


def token_inputs(rows: Tensor, table: Tensor, inputs: TokenInputTables) -> Tensor:
    """Combine the product's and the table's rows, [T, layers * size] each -> [T, layers, size]."""
    size = len(inputs.norm.weight)
    rows = inputs.norm(rows.view(len(rows), -1, size))
    return (rows + table.view_as(rows)) * math.sqrt(0.5)


def tokens_of(input_ids: Tensor, last: Tensor) -> Tensor:
    """Look up each line's token, int64[T]: -(row + 1) in `input_ids` stands for `last` of the row."""
    sampled = last.index_select(0, (-1 - input_ids).clamp_(min=0))
    return torch.where(input_ids < 0, sampled, input_ids)
