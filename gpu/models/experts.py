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
from ramify.gpu.ops.linear.base import Linear, empty_linear
from ramify.gpu.ops.rmsnorm import RMSNorm


@dataclass(slots=True)
class Experts:
    """A layer's feed-forward."""

    norm: RMSNorm | None
    layer: LayerExperts
    post_norm: RMSNorm | None

    def forward(self, x: AnyStream, ops: Ops[AnyStream]) -> Projection:
        return Projection(ops.experts(x, self.layer), None)

    def products(self, prefix: str, names: TensorNames) -> Iterator[tuple[Linear, list[str], list[int]]]:
        """Those that every token goes through, in the layer that is called `prefix`."""
        part, called, shared = f"{prefix}.{names.feed_forward}", names.experts, self.layer.shared
        if shared is not None and shared.gated:
            routed = [f"{part}.{called.router}", f"{part}.{called.shared_gate}"]
            yield self.layer.router, routed, [len(self.layer.gate_up), 1]
        else:
            yield self.layer.router, [f"{part}.{called.router}"], []
        if shared is not None:
            gate_up = [f"{part}.{called.shared}.{name}" for name in names.gate_up]
            sizes = [shared.size, shared.size] if len(gate_up) > 1 else []
            yield shared.gate_up, gate_up, sizes
            yield shared.down, [f"{part}.{called.shared}.{names.down}"], []

    def views(self, prefix: str, names: TensorNames) -> dict[str, Tensor]:
        """What the loader fills beside products and norms: the experts themselves."""
        part, called, layer = f"{prefix}.{names.feed_forward}", names.experts, self.layer
        views = {} if layer.correction is None else {f"{part}.{called.correction}": layer.correction}
        for number, (gate_up, down) in enumerate(zip(layer.gate_up, layer.down, strict=True)):
            tensors = (*gate_up.chunk(2), down)
            for name, tensor in zip(called.each, tensors, strict=True):
                views[f"{part}.experts.{number}.{name}.weight"] = tensor
        return views


def empty_experts(
    one: ExpertSettings,
    hidden: int,
    norm: RMSNorm | None,
    post: RMSNorm | None,
    dtype: torch.dtype,
    device: torch.device,
) -> Experts:
    """Weights that the loader fills, of a decoder whose stream is `hidden` wide."""

    def linear(inputs: int, outputs: int) -> Linear:
        return empty_linear(inputs, outputs, False, dtype, device)

    shared = None
    if one.shared is not None:
        shared = SharedExpert(
            empty_linear(hidden, 2 * one.shared, False, dtype, device, "gated"),
            linear(one.shared, hidden),
            one.shared,
            one.shared_gated,
            one.activation,
        )
    corrected = one.router.corrected
    layer = LayerExperts(
        router=linear(hidden, one.experts + one.shared_gated),
        correction=torch.empty(one.experts, device=device) if corrected else None,
        gate_up=torch.empty((one.experts, 2 * one.size, hidden), dtype=dtype, device=device),
        down=torch.empty((one.experts, hidden, one.size), dtype=dtype, device=device),
        shared=shared,
        settings=one.router,
        activation=one.activation,
    )
    return Experts(norm, layer, post)
