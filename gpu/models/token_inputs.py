"""The layers' inputs of tokens besides the stream: per-layer embeddings (Gemma 3n and 4)."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from ramify.gpu.ops.base import Activation, AnyStream, Ops, Projection, TokenInputTables
from ramify.gpu.ops.linear.base import Linear
from ramify.gpu.ops.rmsnorm import RMSNorm

TABLE = "model.embed_tokens_per_layer.weight"
_PRODUCT = "model.per_layer_model_projection"
_NORM = "model.per_layer_projection_norm"


@dataclass(slots=True)
class TokenGate:
    """A layer's part: a gate of the stream on its inputs, and a product of the result."""

    gate: Linear  # [size, hidden]
    output: Linear  # [hidden, size]
    norm: RMSNorm  # of the term that is added to the stream
    activation: Activation
    scale: float = 1.0  # the divisor of the stream: the gate reads the stream itself

    def forward(self, x: AnyStream, given: Tensor, ops: Ops[AnyStream]) -> Projection:
        """Gate the layer's inputs `given` [T, size], and multiply."""
        return ops.project(ops.open_gate(x, self.gate, self.scale, given, self.activation), self.output)

    def products(self, prefix: str) -> Iterator[tuple[Linear, list[str], list[int]]]:
        """List the products of the layer `prefix`."""
        yield self.gate, [f"{prefix}.per_layer_input_gate"], []
        yield self.output, [f"{prefix}.per_layer_projection"], []

    def named_norm(self, prefix: str) -> tuple[str, RMSNorm]:
        return f"{prefix}.post_per_layer_input_norm", self.norm


def table_views(tables: TokenInputTables) -> dict[str, Tensor]:
    """Map names to the tensors that the loader fills, other than products."""
    return {TABLE: tables.table, f"{_NORM}.weight": tables.norm.weight}


def table_product(tables: TokenInputTables) -> tuple[Linear, list[str]]:
    return tables.product, [_PRODUCT]
