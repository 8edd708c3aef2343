"""The mixers that keep a fixed state of a sequence: gated delta net, Mamba-2, short convolution.

Their weights by their names in checkpoints, and their two products; the computation between these is an
operation (`ops.fixed_states`).
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ramify.gpu.models.definition import (
    ConvSettings,
    DeltaSettings,
    FixedSettings,
    MambaSettings,
    TensorNames,
)
from ramify.gpu.ops.base import AnyStream, Ops, Projection
from ramify.gpu.ops.fixed_states import LayerConv, LayerDelta, LayerMamba, LayerState
from ramify.gpu.ops.linear.base import Linear, empty_linear
from ramify.gpu.ops.rmsnorm import RMSNorm
from ramify.gpu.step.inputs import StepInputs


@dataclass(slots=True)
class Recurrent:
    """A mixer with a fixed state, between two products. `name`: of its part in checkpoints."""

    norm: RMSNorm | None  # of its input
    input: Linear
    layer: LayerState
    output: Linear
    post_norm: RMSNorm | None
    name: str
    blocks: tuple[tuple[str, int], ...]  # the checkpoint's tensors that the first product is made of
    tensors: dict[str, Tensor]  # beside products and norms
    last: str = "out_proj"

    def forward(self, x: AnyStream, ops: Ops[AnyStream], step: StepInputs[Tensor]) -> Projection:
        return ops.project(self.mixed(x, ops, step), self.output)

    def mixed(self, x: AnyStream, ops: Ops[AnyStream], step: StepInputs[Tensor]) -> Tensor:
        """Compute the input of the last product."""
        return ops.recur(ops.linear(x, self.input), self.layer, step)

    def products(self, prefix: str, names: TensorNames) -> Iterator[tuple[Linear, list[str], list[int]]]:
        """List the products, as of attention, under names of their own."""
        own = [f"{prefix}.{self.name}.{name}" for name, _ in self.blocks]
        yield self.input, own, [rows for _, rows in self.blocks] if len(own) > 1 else []
        yield self.output, [f"{prefix}.{self.name}.{self.last}"], []
        if isinstance(self.layer, LayerDelta) and self.layer.ups is not None:
            for name, up in zip(("g_b_proj", "f_b_proj"), self.layer.ups, strict=True):
                yield up, [f"{prefix}.{self.name}.{name}"], []

    def views(self, prefix: str, names: TensorNames) -> dict[str, Tensor]:
        """Map names to the tensors that the loader fills, other than products and norms."""
        return {f"{prefix}.{self.name}.{name}": tensor for name, tensor in self.tensors.items()}


@dataclass(frozen=True, slots=True)
class Maker:
    """Maker of empty mixers. `hidden`: width of the stream."""

    hidden: int
    rms_eps: float
    dtype: torch.dtype
    device: torch.device

    def made(
        self, index: int, one: FixedSettings, norm: RMSNorm | None, post: RMSNorm | None
    ) -> Recurrent:
        """Make a mixer. `index`: of its state; `norm`, `post`: of its input and its output."""
        if isinstance(one, DeltaSettings):
            return (self.delta if one.rank is None else self.channels)(index, one, norm, post)
        if isinstance(one, MambaSettings):
            return self.mamba(index, one, norm, post)
        return self.conv(index, one, norm, post)

    def delta(
        self, index: int, one: DeltaSettings, norm: RMSNorm | None, post: RMSNorm | None
    ) -> Recurrent:
        conv = self._empty(one.convolved, 1, one.kernel)
        decay, bias = (self._empty(one.value_heads, dtype=torch.float32) for _ in range(2))
        inner = RMSNorm(self._empty(one.value_dim), self.rms_eps)
        layer = LayerDelta(
            index, one.key_heads, one.value_heads, one.key_dim, one.value_dim, conv, decay, bias, inner
        )
        first, (qkv, z, b, a) = self._linear(self.hidden, sum(layer.parts)), layer.parts
        blocks = [("in_proj_qkv", qkv), ("in_proj_z", z), ("in_proj_b", b), ("in_proj_a", a)]
        if one.fused:
            first.order = _of_key_heads(one)
            blocks = [("in_proj_qkvz", qkv + z), ("in_proj_ba", b + a)]
        return Recurrent(
            norm, first, layer, self._linear(one.width, self.hidden), post, "linear_attn", tuple(blocks),
            {"conv1d.weight": conv, "A_log": decay, "dt_bias": bias, "norm.weight": inner.weight},
        )  # fmt: skip

    def channels(
        self, index: int, one: DeltaSettings, norm: RMSNorm | None, post: RMSNorm | None
    ) -> Recurrent:
        """Make a delta net whose channels decay by themselves."""
        assert one.rank is not None
        heads, width, rank = one.key_heads, one.width, one.rank
        conv = self._empty(one.convolved, 1, one.kernel)
        decay, bias = (self._empty(size, dtype=torch.float32) for size in (heads, width))
        inner = RMSNorm(self._empty(one.value_dim), self.rms_eps)
        ups = self._linear(rank, width), self._linear(rank, width)
        layer = LayerDelta(
            index, heads, heads, one.key_dim, one.value_dim, conv, decay, bias, inner, ups
        )
        blocks = [(f"{name}_proj", width) for name in "qkv"]
        blocks += [("g_a_proj", rank), ("b_proj", heads), ("f_a_proj", rank)]
        tensors = {
            f"{name}_conv1d.weight": part for name, part in zip("qkv", conv.chunk(3), strict=True)
        }
        tensors |= {"A_log": decay.view(1, 1, -1, 1), "dt_bias": bias, "o_norm.weight": inner.weight}
        first = self._linear(self.hidden, sum(rows for _, rows in blocks))
        return Recurrent(
            norm, first, layer, self._linear(width, self.hidden), post, "self_attn", tuple(blocks),
            tensors, "o_proj",
        )  # fmt: skip

    def mamba(
        self, index: int, one: MambaSettings, norm: RMSNorm | None, post: RMSNorm | None
    ) -> Recurrent:
        conv = self._empty(one.convolved, 1, one.kernel)
        conv_bias = self._empty(one.convolved) if one.conv_bias else None
        decay, bias, skip = (self._empty(one.heads, dtype=torch.float32) for _ in range(3))
        inner = None if one.norm_eps is None else RMSNorm(self._empty(one.width), one.norm_eps)
        layer = LayerMamba(
            index, one.heads, one.groups, one.head_dim, one.state_dim, conv, conv_bias, decay, bias,
            skip, inner, one.norm_first,
        )  # fmt: skip
        tensors = {"conv1d.weight": conv, "A_log": decay, "dt_bias": bias, "D": skip}
        tensors |= {} if conv_bias is None else {"conv1d.bias": conv_bias}
        tensors |= {} if inner is None else {"norm.weight": inner.weight}
        rows = sum(layer.parts)
        return Recurrent(
            norm, self._linear(self.hidden, rows, one.bias), layer,
            self._linear(one.width, self.hidden, one.bias), post, "mamba", (("in_proj", rows),), tensors,
        )  # fmt: skip

    def conv(
        self, index: int, one: ConvSettings, norm: RMSNorm | None, post: RMSNorm | None
    ) -> Recurrent:
        channels = self.hidden // one.ranks
        conv = self._empty(channels, 1, one.kernel)
        bias = self._empty(channels) if one.bias else None
        tensors = {"conv.weight": conv} | ({} if bias is None else {"conv.bias": bias})
        return Recurrent(
            norm, self._linear(self.hidden, 3 * channels, one.bias), LayerConv(index, conv, bias),
            self._linear(channels, self.hidden, one.bias), post, "conv",
            (("in_proj", 3 * channels),), tensors,
        )  # fmt: skip

    def _linear(self, inputs: int, outputs: int, bias: bool = False) -> Linear:
        return empty_linear(inputs, outputs, bias, self.dtype, self.device)

    def _empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(shape, dtype=dtype or self.dtype, device=self.device)


def _of_key_heads(one: DeltaSettings) -> Tensor:
    """Compute which row each of ours is, of rows by key head: q, k, v, gates; betas, decays."""
    heads, shared = one.key_heads, one.value_heads // one.key_heads
    values = shared * one.value_dim
    wide = torch.arange(2 * heads * (one.key_dim + values)).view(heads, -1)
    few = wide.numel() + torch.arange(2 * one.value_heads).view(heads, -1)
    parts = [*torch.split(wide, [one.key_dim, one.key_dim, values, values], 1), *few.chunk(2, 1)]
    return torch.cat([part.flatten() for part in parts])
