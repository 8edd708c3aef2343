"""The operations of one of several ranks on torch: sums over ranks, and the parts of the vocabulary.

Rank 0 looks tokens up and sends the stream to the others, which need no tokens. This file knows neither
which part of a weight a rank has, nor how ranks talk.
"""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from ramify.gpu.attention.base import AttentionBackend
from ramify.gpu.kv.layout import KVPool
from ramify.gpu.ops.base import LayerAttention, Projection, ResidualStream
from ramify.gpu.ops.linear.base import Linear
from ramify.gpu.ops.rmsnorm import RMSNorm
from ramify.gpu.ops.torch_ops import TorchOps
from ramify.gpu.ranks.group import Ranks, RankSums
from ramify.gpu.step.inputs import StepInputs


def normed_widely(qkv: Tensor, layer: LayerAttention, ranks: RankSums) -> LayerAttention:
    """Normalise q and k over the heads of all ranks, in place. Returns `layer` without these norms.

    No head is on several ranks.
    """
    assert layer.q_norm is not None
    assert layer.k_norm is not None
    own, kv = layer.heads * layer.head_dim, layer.kv_heads * layer.head_dim
    parts = qkv[:, :own], qkv[:, own : own + kv]
    squares = torch.stack([part.float().square().sum(-1) for part in parts], -1)
    ranks.sum(squares)
    for part, norm, total in zip(parts, (layer.q_norm, layer.k_norm), squares.t(), strict=True):
        scale = torch.rsqrt(total / (part.shape[1] * ranks.count) + norm.eps)
        part.copy_(part.float() * scale[:, None] * norm.weight.float())
    return replace(layer, q_norm=None, k_norm=None)


class RankedTorchOps(TorchOps):
    """`TorchOps` of a rank. `lines`: the size of the vocabulary."""

    def __init__(
        self, ranks: Ranks, lines: int, pool: KVPool, last: Tensor, attention: AttentionBackend
    ) -> None:
        super().__init__(pool, last, attention)
        self._ranks, self._lines = ranks, lines
        self._whole: Projection | None = None  # the last one that was summed ahead of `reduce`

    def embed(
        self, step: StepInputs[Tensor], table: Tensor, scale: float, norm: RMSNorm | None
    ) -> ResidualStream:
        if self._ranks.rank:
            return self.stream(table.new_empty((len(step.positions), table.shape[1])), norm)
        return super().embed(step, table, scale, norm)

    def stream(self, residual: Tensor, norm: RMSNorm | None) -> ResidualStream:
        """Make a stream of rank 0's residual."""
        return super().stream(self._ranks.from_first(residual), norm)

    def attend(self, qkv: Tensor, layer: LayerAttention, step: StepInputs[Tensor]) -> Tensor:
        if layer.wide_norms:
            layer = normed_widely(qkv, layer, self._ranks)
        return super().attend(qkv, layer, step)

    def reduce(self, projection: Projection) -> Projection:
        if projection is not self._whole:
            self._ranks.sum(projection.rows)
        return projection

    def joined(
        self, first: Projection, first_norm: RMSNorm, second: Projection, second_norm: RMSNorm
    ) -> Projection:
        one, other = self.reduce(first), self.reduce(second)
        self._whole = super().joined(one, first_norm, other, second_norm)
        return self._whole

    def head(
        self,
        x: ResidualStream,
        lines: Tensor | None,
        linear: Linear,
        softcap: float | None,
        output: Tensor | None = None,
    ) -> Tensor:
        own = super().head(x, lines, linear, softcap)
        each = -(-self._lines // self._ranks.count)
        logits = self._ranks.columns(F.pad(own, (0, each - own.shape[1])), self._lines)
        return logits if output is None else output.copy_(logits)
