"""The mixer of latent attention: its weights by their names in checkpoints, and its maker.

The computation is an operation (`Ops.attend_latent`).
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ramify.gpu.attention.latent import LatentHeads
from ramify.gpu.models.definition import LatentSettings, TensorNames
from ramify.gpu.ops.base import AnyStream, LayerLatent, Ops, Projection
from ramify.gpu.ops.linear.base import Linear, empty_linear
from ramify.gpu.ops.rmsnorm import RMSNorm
from ramify.gpu.ops.rotary import Rotary
from ramify.gpu.step.inputs import StepInputs

_EPS = 1e-6  # of the latents' norms, whatever the config says of the others


@dataclass(slots=True)
class Latent:
    """A mixer of latent attention, between two products."""

    norm: RMSNorm | None  # of its input
    input: Linear
    layer: LayerLatent
    output: Linear
    post_norm: RMSNorm | None

    def forward(self, x: AnyStream, ops: Ops[AnyStream], step: StepInputs[Tensor]) -> Projection:
        rows = ops.attend_latent(ops.linear(x, self.input), self.layer, step)
        return ops.project(rows, self.output)

    def products(self, prefix: str, names: TensorNames) -> Iterator[tuple[Linear, list[str], list[int]]]:
        """List the products of the layer `prefix`."""
        part, layer = f"{prefix}.self_attn", self.layer
        heads, turned = layer.heads, layer.rotary.dim
        queries, rows = "q_proj", len(heads.up) * (heads.nope + turned)
        if layer.q_norm is not None:
            queries, rows = "q_a_proj", len(layer.q_norm.weight)
        sizes = [rows, heads.rank + turned]
        yield self.input, [f"{part}.{queries}", f"{part}.kv_a_proj_with_mqa"], sizes
        if layer.q_up is not None:
            yield layer.q_up, [f"{part}.q_b_proj"], []
        yield self.output, [f"{part}.{names.output}"], []

    def norms(self, prefix: str, names: TensorNames) -> Iterator[tuple[str, RMSNorm]]:
        """List the norms inside by name."""
        yield f"{prefix}.self_attn.kv_a_layernorm", self.layer.norm
        if self.layer.q_norm is not None:
            yield f"{prefix}.self_attn.q_a_layernorm", self.layer.q_norm

    def views(self, prefix: str, names: TensorNames) -> dict[str, Tensor]:
        """Map names to the tensors that the loader fills, other than products and norms."""
        return {f"{prefix}.self_attn.kv_b_proj.weight": self.layer.heads.up.flatten(0, 1)}


def empty_latent(
    index: int,
    one: LatentSettings,
    rotary: Rotary,
    hidden: int,
    norm: RMSNorm | None,
    post: RMSNorm | None,
    dtype: torch.dtype,
    device: torch.device,
) -> Latent:
    """Make a mixer whose weights the loader fills; `hidden`: width of the stream."""

    def empty_norm(size: int) -> RMSNorm:
        return RMSNorm(torch.empty(size, dtype=dtype, device=device), _EPS)

    def linear(inputs: int, outputs: int, bias: bool = False) -> Linear:
        return empty_linear(inputs, outputs, bias, dtype, device)

    up = torch.empty((one.heads, one.nope + one.value, one.rank), dtype=dtype, device=device)
    layer = LayerLatent(
        index, LatentHeads(up, one.nope, one.spec), rotary, empty_norm(one.rank), None, None,
        one.query_growth,
    )  # fmt: skip
    mixer = Latent(
        norm, linear(hidden, one.rows, one.bias), layer, linear(one.width, hidden, one.bias), post
    )
    queries = torch.arange(one.rows - one.head_dim)
    if one.q_rank is not None:
        layer.q_norm, layer.q_up = empty_norm(one.q_rank), linear(one.q_rank, one.heads * one.query)
    if one.interleaved:  # our kernels turn halves
        turning = torch.arange(one.turned).view(-1, 2).t().flatten()
        head = torch.cat((torch.arange(one.nope), one.nope + turning))
        order = (torch.arange(one.heads)[:, None] * one.query + head).flatten()
        if layer.q_up is None:
            queries = order
        else:
            layer.q_up.order = order
        latent = len(queries) + torch.arange(one.rank)
        mixer.input.order = torch.cat((queries, latent, len(queries) + one.rank + turning))
    return mixer
