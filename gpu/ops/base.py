"""The operations that a model is written over, and what they pass on.

`models.decoder` walks the layers once; torch, Triton and the deterministic mode each implement `Ops`.
What fits together in one kernel is one operation: a product with the activation behind it, the residual
sum with the next norm behind it, and the product ahead of it where it is put off (`Projection`). An
implementation for another device is a class with these methods. It need not know families, and
families do not know devices.
"""

from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

import torch
from torch import Tensor

from ramify.gpu.attention.latent import LatentHeads
from ramify.gpu.attention.spec import AttentionSpec
from ramify.gpu.ops.experts import Activation as Activation
from ramify.gpu.ops.experts import LayerExperts
from ramify.gpu.ops.fixed_states import LayerState
from ramify.gpu.ops.linear.base import Linear
from ramify.gpu.ops.rmsnorm import RMSNorm
from ramify.gpu.ops.rotary import Rotary
from ramify.gpu.step.inputs import StepInputs


@dataclass(slots=True)
class ResidualStream:
    """The residual stream, and what the next product reads of it. Both [T, hidden]."""

    residual: Tensor
    normed: Tensor  # the residual behind the norm of what comes next; without one the residual itself


@dataclass(slots=True)
class LayerAttention:
    """What an operation has to know of one layer's attention."""

    index: int  # whose keys and values: an index into the pool's layers
    heads: int
    kv_heads: int
    head_dim: int
    spec: AttentionSpec
    rotary: Rotary
    q_norm: RMSNorm | None  # over a head, or over all heads if it is as wide; before they are rotated
    k_norm: RMSNorm | None
    value_eps: float | None = None  # v is normalised over each head, without a weight
    gated: bool = False  # behind all else come a gate's rows, whose sigmoid opens the output
    kv_parts: Literal[0, 1, 2] = 2  # 0: another layer stores what it reads; 1: values are the plain keys

    @property
    def wide_norms(self) -> bool:
        """Whether q and k are each normalised over all heads together."""
        return self.q_norm is not None and self.heads > 1 and len(self.q_norm.weight) > self.head_dim


@dataclass(slots=True)
class LayerLatent:
    """What an operation has to know of one layer's latent attention.

    Rows of its input: queries, or their latents with `q_up` to make them; the latent, and what turns.
    """

    index: int
    heads: LatentHeads
    rotary: Rotary  # of the part that turns
    norm: RMSNorm  # of the latent
    q_norm: RMSNorm | None
    q_up: Linear | None
    query_growth: tuple[float, int] | None  # as of the layer's settings

    def growth(self, positions: Tensor) -> Tensor:
        """What queries at `positions` [T] are multiplied by, float32[T], where they grow."""
        by, every = self.query_growth or (0.0, 1)
        return 1 + by * torch.log1p((positions // every).float())


@dataclass(slots=True)
class Projection:
    """What is to be added to the stream: x W^T + b of `rows` [T, inputs], which is still to be computed.

    Without `linear`, `rows` [T, hidden] is the result. So operations may compute the product in the
    kernel that adds it, unless something comes in between.
    """

    rows: Tensor
    linear: Linear | None


@dataclass(slots=True)
class TokenInputTables:
    """Where inputs of tokens for each layer come from (per-layer embeddings, Gemma 3n).

    `table` [vocabulary, layers * size], times `scale`; `product`: of the embedding, times
    `product_scale`, with `norm` over each layer's values. Their sum is divided by the root of 2.
    """

    table: Tensor
    scale: float
    product: Linear
    product_scale: float
    norm: RMSNorm


AnyStream = TypeVar("AnyStream", bound=ResidualStream)


class Ops(Protocol[AnyStream]):
    """One step after another: `begin`, `embed`, the layers, `head`. Nothing waits for the device."""

    def begin(self, step: StepInputs[Tensor]) -> None:
        """Prepare what the layers of the step share."""
        ...

    def embed(
        self, step: StepInputs[Tensor], table: Tensor, scale: float, norm: RMSNorm | None
    ) -> AnyStream:
        """Look the tokens up in table [vocabulary, hidden], times `scale`; `norm`: the first layer's."""
        ...

    def linear(self, x: AnyStream, linear: Linear) -> Tensor:
        """[T, outputs], of the normalised stream."""
        ...

    def attend(self, qkv: Tensor, layer: LayerAttention, step: StepInputs[Tensor]) -> Tensor:
        """Normalise and rotate queries and keys, store keys and values, attend.

        qkv [T, (heads + kv_parts * kv_heads) * D], and heads * D more for the gate -> [T, heads * D].
        """
        ...

    def attend_latent(self, rows: Tensor, layer: LayerLatent, step: StepInputs[Tensor]) -> Tensor:
        """The same with latents: rows [T, inputs], as `layer` says -> [T, heads * value]."""
        ...

    def recur(self, rows: Tensor, layer: LayerState, step: StepInputs[Tensor]) -> Tensor:
        """Run a mixer with a fixed state: read it, run the sequences' tokens, write the one behind them.

        rows [T, inputs], as `layer` says of its parts.
        """
        ...

    def project(self, x: Tensor, linear: Linear) -> Projection:
        """x [T, inputs] -> what a layer adds to the stream."""
        ...

    def reduce(self, projection: Projection) -> Projection:
        """The sum over all ranks, where each holds a part of the product's inputs; here there is one."""
        ...

    def add_norm(
        self, x: AnyStream, projection: Projection, norm: RMSNorm | None, post: RMSNorm | None = None
    ) -> AnyStream:
        """residual += post(projection), in place; `norm`: that of what reads the stream next.

        At least one of the two norms is there.
        """
        ...

    def gated(self, x: AnyStream, linear: Linear, activation: Activation) -> Tensor:
        """activation(gate) * up: the gate's rows come first in the weight [2 * size, hidden].

        Returns [T, size].
        """
        ...

    def squared(self, x: AnyStream, linear: Linear) -> Tensor:
        """max(y, 0)^2 of the product y of the normalised stream: [T, outputs]."""
        ...

    def experts(self, x: AnyStream, layer: LayerExperts) -> Projection:
        """Send each token of the normalised stream through its experts: what they add to the stream."""
        ...

    def behind(self, x: AnyStream, norm: RMSNorm) -> AnyStream:
        """The same stream for what reads it behind another norm."""
        ...

    def joined(
        self, first: Projection, first_norm: RMSNorm, second: Projection, second_norm: RMSNorm
    ) -> Projection:
        """The sum of two, each behind its norm."""
        ...

    def token_inputs(self, x: AnyStream, step: StepInputs[Tensor], inputs: TokenInputTables) -> Tensor:
        """[T, layers, size]: what layers are given of the step's tokens. `x` is as `embed` made it."""
        ...

    def open_gate(
        self, x: AnyStream, linear: Linear, scale: float, given: Tensor, activation: Activation
    ) -> Tensor:
        """activation(linear(x) * scale) * given: [T, size]."""
        ...

    def head(
        self,
        x: AnyStream,
        lines: Tensor | None,
        linear: Linear,
        softcap: float | None,
        output: Tensor | None = None,
    ) -> Tensor:
        """Logits [S, vocabulary] of `lines` int[S] of the stream, None: of all.

        `softcap`: logits become softcap * tanh(logits / softcap). They are written to `output` if it
        is given.
        """
        ...


class StreamOps(Ops[AnyStream], Protocol[AnyStream]):
    """Operations whose stream may begin and end elsewhere."""

    def stream(self, residual: Tensor, norm: RMSNorm | None) -> AnyStream:
        """A stream [T, hidden] for what reads it behind `norm`. It is written to."""
        ...

    def whole(self, x: AnyStream) -> Tensor:
        """[T, hidden]: the stream behind its norm."""
        ...


@dataclass(slots=True)
class ShownPictures:
    """What a tower made of some of a step's tokens: `lines` int64[P].

    `values` [P, 1 + n, hidden]: their embeddings, and what is added behind each of the first n layers.
    """

    lines: Tensor
    values: Tensor

    def embedded(self, x: AnyStream, norm: RMSNorm | None, ops: Ops[AnyStream]) -> AnyStream:
        """Put them in the place of embeddings; `norm`: the first layer's."""
        x.residual[self.lines] = self.values[:, 0]
        return x if norm is None else ops.behind(x, norm)

    def deepen(self, x: ResidualStream, layer: int) -> None:
        """Add what belongs behind this layer."""
        if layer + 1 < self.values.shape[1]:
            x.residual[self.lines] += self.values[:, layer + 1]
