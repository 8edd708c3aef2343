"""The operations that a model is written over, and their arguments.

`models.decoder` walks the layers once; torch, Triton and the deterministic mode each implement `Ops`.
Steps that fit in one kernel are one operation: a product and its activation; the residual sum and the
next norm, with the product before them where it is put off (`Projection`). To add a device, write a
class with these methods. It need not know families, and families do not know devices.
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
    """The residual stream, and the input of the next product. Both [T, hidden]."""

    residual: Tensor
    normed: Tensor  # the residual after the next reader's norm; without one the residual itself


@dataclass(slots=True)
class LayerAttention:
    """One layer's attention, as operations need to know it."""

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
    """One layer's latent attention, as operations need to know it.

    A row of its input: queries, or their latents, of which `q_up` makes them; the latent; the part of
    the key that is rotated.
    """

    index: int
    heads: LatentHeads
    rotary: Rotary  # of the part that turns
    norm: RMSNorm  # of the latent
    q_norm: RMSNorm | None
    q_up: Linear | None
    query_growth: tuple[float, int] | None  # as of the layer's settings

    def growth(self, positions: Tensor) -> Tensor:
        """Compute the factors of queries at `positions` [T]: float32[T]; 1 where they do not grow."""
        by, every = self.query_growth or (0.0, 1)
        return 1 + by * torch.log1p((positions // every).float())


@dataclass(slots=True)
class Projection:
    """A term of the stream that may be still to be computed: x W^T + b of `rows` [T, inputs].

    Without `linear`, `rows` [T, hidden] is the result. So operations may compute the product in the
    kernel that adds it, unless something comes in between.
    """

    rows: Tensor
    linear: Linear | None


@dataclass(slots=True)
class TokenInputTables:
    """The tables of per-layer embeddings (Gemma 3n): each layer's inputs of a token.

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
    """Interface: a device's operations. A step is `begin`, `embed`, the layers, `head`; none waits."""

    def begin(self, step: StepInputs[Tensor]) -> None:
        """Compute what the layers of the step share."""
        ...

    def embed(
        self, step: StepInputs[Tensor], table: Tensor, scale: float, norm: RMSNorm | None
    ) -> AnyStream:
        """Look tokens up in table [vocabulary, hidden], times `scale`; `norm`: the first layer's."""
        ...

    def linear(self, x: AnyStream, linear: Linear) -> Tensor:
        """Multiply the normalised stream: [T, outputs]."""
        ...

    def attend(self, qkv: Tensor, layer: LayerAttention, step: StepInputs[Tensor]) -> Tensor:
        """Normalise and rotate queries and keys, store keys and values, attend.

        qkv [T, (heads + kv_parts * kv_heads) * D], and heads * D more for the gate -> [T, heads * D].
        """
        ...

    def attend_latent(self, rows: Tensor, layer: LayerLatent, step: StepInputs[Tensor]) -> Tensor:
        """Attend with latents: rows [T, inputs], see `LayerLatent` -> [T, heads * value]."""
        ...

    def recur(self, rows: Tensor, layer: LayerState, step: StepInputs[Tensor]) -> Tensor:
        """Run a mixer with a fixed state: read the states, run the tokens, write the states after them.

        rows [T, inputs]: their parts are those of `layer`.
        """
        ...

    def project(self, x: Tensor, linear: Linear) -> Projection:
        """Multiply x [T, inputs], or put that off: the term that a layer adds to the stream."""
        ...

    def reduce(self, projection: Projection) -> Projection:
        """Sum over all ranks, where each holds a part of the product's inputs; here there is one."""
        ...

    def add_norm(
        self, x: AnyStream, projection: Projection, norm: RMSNorm | None, post: RMSNorm | None = None
    ) -> AnyStream:
        """Do residual += post(projection), in place; `norm`: that of the stream's next reader.

        At least one of the two norms is there.
        """
        ...

    def gated(self, x: AnyStream, linear: Linear, activation: Activation) -> Tensor:
        """Compute activation(gate) * up, [T, size], of the normalised stream.

        The gate's rows come first in the weight [2 * size, hidden].
        """
        ...

    def squared(self, x: AnyStream, linear: Linear) -> Tensor:
        """Compute max(y, 0)^2 of the product y of the normalised stream: [T, outputs]."""
        ...

    def experts(self, x: AnyStream, layer: LayerExperts) -> Projection:
        """Send each token of the normalised stream through its experts. Returns the term to add."""
        ...

    def behind(self, x: AnyStream, norm: RMSNorm) -> AnyStream:
        """Return the stream with another norm for its next reader."""
        ...

    def joined(
        self, first: Projection, first_norm: RMSNorm, second: Projection, second_norm: RMSNorm
    ) -> Projection:
        """Sum two terms, each after its norm."""
        ...

    def token_inputs(self, x: AnyStream, step: StepInputs[Tensor], inputs: TokenInputTables) -> Tensor:
        """Compute the layers' inputs of tokens, [T, layers, size]. `x`: as `embed` made it."""
        ...

    def open_gate(
        self, x: AnyStream, linear: Linear, scale: float, given: Tensor, activation: Activation
    ) -> Tensor:
        """Compute activation(linear(x) * scale) * given: [T, size]."""
        ...

    def head(
        self,
        x: AnyStream,
        lines: Tensor | None,
        linear: Linear,
        softcap: float | None,
        output: Tensor | None = None,
    ) -> Tensor:
        """Compute logits [S, vocabulary] of `lines` int[S] of the stream, None: of all.

        `softcap`: logits become softcap * tanh(logits / softcap). They are written to `output` if it
        is given.
        """
        ...


class StreamOps(Ops[AnyStream], Protocol[AnyStream]):
    """Interface: operations whose stream may come from elsewhere, and be read elsewhere."""

    def stream(self, residual: Tensor, norm: RMSNorm | None) -> AnyStream:
        """Make a stream of `residual` [T, hidden], which is written to, for a reader after `norm`."""
        ...

    def whole(self, x: AnyStream) -> Tensor:
        """Return the stream after its norm: [T, hidden]."""
        ...


@dataclass(slots=True)
class ShownPictures:
    """The picture vectors of some of a step's tokens, `lines` int64[P].

    `values` [P, 1 + n, hidden]: their embeddings, and the terms to add after each of the first n layers.
    """

    lines: Tensor
    values: Tensor

    def embedded(self, x: AnyStream, norm: RMSNorm | None, ops: Ops[AnyStream]) -> AnyStream:
        """Put the vectors in the place of embeddings; `norm`: the first layer's."""
        x.residual[self.lines] = self.values[:, 0]
        return x if norm is None else ops.behind(x, norm)

    def deepen(self, x: ResidualStream, layer: int) -> None:
        """Add the terms that belong after a layer."""
        if layer + 1 < self.values.shape[1]:
            x.residual[self.lines] += self.values[:, layer + 1]
