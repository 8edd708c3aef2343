"""A dense feed-forward: its weights by their names in checkpoints, and its maker."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from ramify.gpu.models.definition import DenseSettings, TensorNames
from ramify.gpu.ops.base import Activation, AnyStream, Ops, Projection
from ramify.gpu.ops.linear.base import Linear, empty_linear
from ramify.gpu.ops.rmsnorm import RMSNorm

Product = tuple[Linear, list[str], list[int]]
"""A product and its blocks of rows: their names in checkpoints and, of several, their sizes."""


@dataclass(slots=True)
class FeedForward:
    """The feed-forward down(activation(gate(x)) * up(x)) (Shazeer 2020), or down(max(up(x), 0)^2)."""

    norm: RMSNorm | None
    gate_up: Linear  # [2 * size, hidden], the gate's rows first; without a gate [size, hidden]
    down: Linear
    size: int
    activation: Activation | Literal["relu2"]  # the latter has no gate
    post_norm: RMSNorm | None

    def forward(self, x: AnyStream, ops: Ops[AnyStream]) -> Projection:
        if self.activation == "relu2":
            return ops.project(ops.squared(x, self.gate_up), self.down)
        return ops.project(ops.gated(x, self.gate_up, self.activation), self.down)

    def products(self, prefix: str, names: TensorNames) -> Iterator[Product]:
        part = f"{prefix}.{names.feed_forward}"
        yield product(self.gate_up, part, names.gate_up, [self.size, self.size])
        yield product(self.down, part, (names.down,))


def product(linear: Linear, prefix: str, names: tuple[str, ...], sizes: Sequence[int] = ()) -> Product:
    """Name a product's blocks. `sizes`: of its blocks, where the checkpoint has each as a tensor."""
    return linear, [f"{prefix}.{name}" for name in names], list(sizes) if len(names) > 1 else []


def empty_feed_forward(
    one: DenseSettings,
    hidden: int,
    norm: RMSNorm | None,
    post: RMSNorm | None,
    dtype: torch.dtype,
    device: torch.device,
) -> FeedForward:
    """Make a feed-forward whose weights the loader fills; `hidden`: width of the stream."""
    if one.activation == "relu2":
        first = empty_linear(hidden, one.size, one.bias, dtype, device)
    else:
        first = empty_linear(hidden, 2 * one.size, one.bias, dtype, device, "gated")
    down = empty_linear(one.size, hidden, one.bias, dtype, device)
    return FeedForward(norm, first, down, one.size, one.activation, post)
