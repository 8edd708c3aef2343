"""A feed-forward of experts: its weights by their names in checkpoints, and its maker.

The computation is an operation (`ops.experts`).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ramify.gpu.models.definition import DenseSettings, ExpertSettings, TensorNames
from ramify.gpu.models.feed_forward import FeedForward, empty_feed_forward
from ramify.gpu.ops.base import AnyStream, Ops, Projection
from ramify.gpu.ops.experts import LayerExperts, SharedExpert
from ramify.gpu.ops.linear.base import Linear, Use, empty_linear
from ramify.gpu.ops.rmsnorm import RMSNorm


@dataclass(slots=True)
class Experts:
    """A layer's feed-forward of experts."""

    norm: RMSNorm | None
    layer: LayerExperts
    size: int  # of an expert
    hidden: int
    post_norm: RMSNorm | None

    def forward(self, x: AnyStream, ops: Ops[AnyStream]) -> Projection:
        return ops.experts(x, self.layer)

    def products(self, prefix: str, names: TensorNames) -> Iterator[tuple[Linear, list[str], list[int]]]:
        """List the products of the layer `prefix`."""
        part, called, shared = _part(prefix, names), names.experts, self.layer.shared
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
        first, held = self.layer.first, self.layer.held
        every = [f"{part}.experts.{number}" for number in range(first, first + held)]
        both = [f"{expert}.{name}" for expert in every for name in firsts]
        yield self.layer.gate_up, both, [self.size] * len(both)
        yield self.layer.down, [f"{expert}.{down}" for expert in every], [self.hidden] * len(every)

    def views(self, prefix: str, names: TensorNames) -> dict[str, Tensor]:
        """Map names to the tensors that the loader fills, other than products and norms."""
        correction = self.layer.correction
        if correction is None:
            return {}
        return {f"{_part(prefix, names)}.{names.experts.correction}": correction}


def _part(prefix: str, names: TensorNames) -> str:
    part = names.feed_forward if names.experts.part is None else names.experts.part
    return f"{prefix}.{part}" if part else prefix


@dataclass(slots=True)
class ExpertsBeside:
    """Experts, and a dense feed-forward beside them (Gemma 4), whose outputs are added.

    Each has a norm before and one after it; the sum has one, too, which is the dense part's here.
    """

    dense: FeedForward
    dense_norm: RMSNorm  # behind the dense part
    experts: Experts

    @property
    def norm(self) -> RMSNorm | None:
        return self.dense.norm

    @property
    def post_norm(self) -> RMSNorm | None:
        return self.dense.post_norm

    def forward(self, x: AnyStream, ops: Ops[AnyStream]) -> Projection:
        norm, post = self.experts.norm, self.experts.post_norm
        assert norm is not None
        assert post is not None
        dense = self.dense.forward(x, ops)
        return ops.joined(dense, self.dense_norm, self.experts.forward(ops.behind(x, norm), ops), post)

    def products(self, prefix: str, names: TensorNames) -> Iterator[tuple[Linear, list[str], list[int]]]:
        yield from self.dense.products(prefix, names)
        yield from self.experts.products(prefix, names)

    def views(self, prefix: str, names: TensorNames) -> dict[str, Tensor]:
        """Map names to the tensors that the loader fills, other than products and outer norms."""
        one = self.experts
        inside = (
            (self.dense_norm, "post_feedforward_layernorm_1"),
            (one.post_norm, "post_feedforward_layernorm_2"),
        )
        found = {f"{prefix}.{name}.weight": norm.weight for norm, name in inside if norm is not None}
        for norm in self.readers:
            name = (
                "router.scale" if norm is one.layer.router_norm else "pre_feedforward_layernorm_2.weight"
            )
            found[f"{prefix}.{name}"] = norm.weight
        assert one.layer.weights is not None
        return found | {f"{prefix}.router.per_expert_scale": one.layer.weights}

    @property
    def readers(self) -> list[RMSNorm]:
        """The norms that read the stream, besides `norm`."""
        found = (self.experts.norm, self.experts.layer.router_norm)
        return [norm for norm in found if norm is not None]


def empty_beside(
    one: ExpertSettings,
    dense: DenseSettings,
    hidden: int,
    norms: Callable[[], RMSNorm],
    dtype: torch.dtype,
    device: torch.device,
) -> ExpertsBeside:
    """Make a feed-forward whose weights the loader fills."""
    own = empty_feed_forward(dense, hidden, norms(), norms(), dtype, device)
    experts = empty_experts(one, hidden, norms(), norms(), dtype, device)
    experts.layer.router_norm = norms()
    return ExpertsBeside(own, norms(), experts)


def empty_experts(
    one: ExpertSettings,
    hidden: int,
    norm: RMSNorm | None,
    post: RMSNorm | None,
    dtype: torch.dtype,
    device: torch.device,
) -> Experts:
    """Make a feed-forward whose weights the loader fills; `hidden`: width of the stream."""

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
    corrected, (first, last) = one.router.corrected, one.held or (0, one.experts)
    layer = LayerExperts(
        router=linear(hidden, one.experts + one.shared_gated, "scores"),
        correction=torch.empty(one.experts, device=device) if corrected else None,
        weights=torch.empty(one.experts, device=device) if one.router.weighed else None,
        gate_up=linear(hidden, parts * one.size, use, last - first),
        down=linear(one.size, hidden, stacked=last - first),
        shared=shared,
        settings=one.router,
        activation=one.activation,
        first=first,
        total=one.experts,
    )
    return Experts(norm, layer, one.size, hidden, post)
