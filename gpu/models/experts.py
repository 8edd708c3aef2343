"""A feed-forward of experts: its weights by their names in checkpoints, and how it is made.

What is computed with them is an operation (`ops.experts`).
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ramify.gpu.models.definition import ExpertSettings, TensorNames
from ramify.gpu.ops.base import AnyStream, Ops, Projection
from ramify.gpu.ops.experts import LayerExperts, SharedExpert
from ramify.gpu.ops.linear.base import Linear, Use, empty_linear
from ramify.gpu.ops.rmsnorm import RMSNorm


@dataclass(slots=True)
class Experts:
    """A layer's feed-forward."""

    norm: RMSNorm | None
    layer: LayerExperts
    size: int  # of an expert
    hidden: int
    post_norm: RMSNorm | None

    def forward(self, x: AnyStream, ops: Ops[AnyStream]) -> Projection:
        return Projection(ops.experts(x, self.layer), None)

    def products(self, prefix: str, names: TensorNames) -> Iterator[tuple[Linear, list[str], list[int]]]:
        """All of them, in the layer that is called `prefix`."""
        part, called, shared = f"{prefix}.{names.feed_forward}", names.experts, self.layer.shared
        if shared is not None and shared.gated:
            routed = [f"{part}.{called.router}", f"{part}.{called.shared_gate}"]
            yield self.layer.router, routed, [self.layer.experts, 1]
        else:
            yield self.layer.router, [f"{part}.{called.router}"], []
        if shared is not None:
            gate_up = [f"{part}.{called.shared}.{name}" for name in names.gate_up]
            sizes = [shared.size, shared.size] if len(gate_up) > 1 else []
            yield shared.gate_up, gate_up, sizes
            yield shared.down, [f"{part}.{called.shared}.{names.down}"], []

        *firsts, down = called.each
        every = [f"{part}.experts.{number}" for number in range(self.layer.experts)]
        both = [f"{expert}.{name}" for expert in every for name in firsts]
        yield self.layer.gate_up, both, [self.size] * len(both)
        yield self.layer.down, [f"{expert}.{down}" for expert in every], [self.hidden] * len(every)

    def views(self, prefix: str, names: TensorNames) -> dict[str, Tensor]:
        """What the loader fills beside products and norms."""
        correction = self.layer.correction
        if correction is None:
            return {}
        return {f"{prefix}.{names.feed_forward}.{names.experts.correction}": correction}


def empty_experts(
    one: ExpertSettings,
    hidden: int,
    norm: RMSNorm | None,
    post: RMSNorm | None,
    dtype: torch.dtype,
    device: torch.device,
) -> Experts:
    """Weights that the loader fills, of a decoder whose stream is `hidden` wide."""

    def linear(inputs: int, outputs: int, use: Use = "rows", stacked: int = 0) -> Linear:
        return empty_linear(inputs, outputs, one.bias, dtype, device, use, stacked)

    use: Use = "rows" if one.activation == "relu2" else "gated"
    parts, shared = 1 + (use == "gated"), None
    if one.shared is not None:
        assert one.activation != "clamped_swiglu"  # no family has both
        shared = SharedExpert(
            linear(hidden, parts * one.shared, use), linear(one.shared, hidden), one.shared,
            one.shared_gated, one.activation,
        )  # fmt: skip
    corrected = one.router.corrected
    layer = LayerExperts(
        router=linear(hidden, one.experts + one.shared_gated, "scores"),
        correction=torch.empty(one.experts, device=device) if corrected else None,
        gate_up=linear(hidden, parts * one.size, use, one.experts),
        down=linear(one.size, hidden, stacked=one.experts),
        shared=shared,
        settings=one.router,
        activation=one.activation,
    )
    return Experts(norm, layer, one.size, hidden, post)
