"""The operations that a model is written over, and what they pass on.

`models.decoder` walks the layers once; torch, Triton and the deterministic mode each implement `Ops`.
What fits together in one kernel is one operation: a product with the activation behind it, a product
with the residual sum and the next norm behind it. An implementation for another device is a class with
these methods. It need not know families, and families do not know devices.
"""

from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

from torch import Tensor

from ramify.gpu.attention.spec import AttentionSpec
from ramify.gpu.ops.linear import Linear
from ramify.gpu.ops.rmsnorm import RMSNorm
from ramify.gpu.ops.rotary import Rotary
from ramify.gpu.step.inputs import StepInputs

Activation = Literal["silu", "gelu_tanh"]
"""Of the gate: x * sigmoid(x) (SwiGLU), or GELU by its tanh formula (GeGLU; Shazeer 2020)."""


@dataclass(slots=True)
class Stream:
    """The residual stream, and what the next product reads of it. Both [T, hidden]."""

    residual: Tensor
    normed: Tensor  # the residual behind the norm of what comes next


@dataclass(slots=True)
class LayerAttention:
    """What an operation has to know of one layer's attention."""

    index: int  # whose keys and values: an index into the pool's layers
    heads: int
    kv_heads: int
    head_dim: int
    spec: AttentionSpec
    rotary: Rotary
    q_norm: RMSNorm | None  # over a head, before it is rotated
    k_norm: RMSNorm | None


AnyStream = TypeVar("AnyStream", bound=Stream)


class Ops(Protocol[AnyStream]):
    """One step after another: `begin`, `embed`, the layers, `head`. Nothing waits for the device."""

    def begin(self, step: StepInputs[Tensor]) -> None:
        """Prepare what the layers of the step share."""
        ...

    def embed(self, step: StepInputs[Tensor], table: Tensor, scale: float, norm: RMSNorm) -> AnyStream:
        """Look the tokens up in table [vocabulary, hidden], times `scale`; `norm`: the first layer's."""
        ...

    def linear(self, x: AnyStream, linear: Linear) -> Tensor:
        """[T, outputs], of the normalised stream."""
        ...

    def attend(self, qkv: Tensor, layer: LayerAttention, step: StepInputs[Tensor]) -> Tensor:
        """Normalise and rotate queries and keys, store keys and values, attend.

        qkv [T, (heads + 2 * kv_heads) * D] -> [T, heads * D].
        """
        ...

    def add(
        self, x: AnyStream, y: Tensor, linear: Linear, norm: RMSNorm, post: RMSNorm | None = None
    ) -> AnyStream:
        """residual += post(linear(y)), in place; `norm`: that of what reads the stream next.

        The one place where parts of a sum meet: where ranks hold parts of `linear`, the all-reduce
        between them belongs here, ahead of `post` and of the sum.
        """
        ...

    def gated(self, x: AnyStream, linear: Linear, activation: Activation) -> Tensor:
        """activation(gate) * up: the gate's rows come first in the weight [2 * size, hidden].

        Returns [T, size].
        """
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
