"""The tower of Qwen3-VL and Qwen3.5: a vision transformer (Dosovitskiy et al. 2020) over patches.

Attention sees the whole picture. Positions are learned ones, interpolated, and rotations by row and
column. Four patches become one token; so do those of some layers inside, which are added to the first
layers of the decoder (DeepStack, Meng et al. 2024).
"""

from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

_EPS = 1e-6
PREFIX = "model.visual."


@dataclass(frozen=True, slots=True)
class QwenTowerSettings:
    """As config.json says them."""

    layers: int
    hidden: int
    heads: int
    intermediate: int
    patch: int
    merge: int
    frames: int
    places: int  # a square of learned positions
    output: int  # the decoder's size
    deep: tuple[int, ...]  # behind these layers, what is added to the decoder's first ones
    activation: Literal["tanh", "none"]  # how the GELU of feed-forwards is approximated
    theta: float

    @property
    def unit(self) -> int:
        """Pixels of a token's side."""
        return self.patch * self.merge

    @property
    def width(self) -> int:
        """Numbers that the decoder is given of a token: the embedding, and what is added to layers."""
        return (1 + len(self.deep)) * self.output


@dataclass(slots=True)
class _Product:
    weight: Tensor
    bias: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


@dataclass(slots=True)
class _Norm:
    weight: Tensor
    bias: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, (len(self.weight),), self.weight, self.bias, _EPS)


class QwenTower:
    """Weights and forward pass. Built empty: the loader fills what `weights` names."""

    def __init__(self, settings: QwenTowerSettings, dtype: torch.dtype, device: torch.device) -> None:
        self.settings = settings
        self.dtype, self.device = dtype, device
        self._views: dict[str, Tensor] = {}
        own, merged = settings.hidden, settings.hidden * settings.merge**2
        self._patches = self._product("patch_embed.proj", 3 * settings.frames * settings.patch**2, own)
        self._places = self._empty("pos_embed.weight", settings.places, own)
        self._blocks = [self._block(f"blocks.{index}") for index in range(settings.layers)]
        self._merger = self._merge("merger", own, merged)
        self._deep = {
            layer: self._merge(f"deepstack_merger_list.{index}", merged, merged)
            for index, layer in enumerate(settings.deep)
        }
        quarter = own // settings.heads // 2
        powers = torch.arange(0, quarter, 2, dtype=torch.float32) / quarter
        self._frequencies = (1.0 / settings.theta**powers).to(device)

    def weights(self) -> dict[str, Tensor]:
        """What the loader fills, by its name in checkpoints."""
        return {PREFIX + name: view for name, view in self._views.items()}

    @torch.inference_mode()
    def forward(self, patches: Tensor, rows: int, columns: int) -> Tensor:
        """patches [B, rows * columns, inputs] of pictures of one size -> [B, tokens, 1 + deep, output].

        The decoder's embedding of each token comes first, then what is added behind its layers.
        """
        x = self._patches(patches.to(self.device, self.dtype))
        row, column = (place.to(self.device) for place in self._order(rows, columns))
        x = x + self._learned(row, column, rows, columns).to(x.dtype)
        turns = torch.cat([place[:, None].float() * self._frequencies for place in (row, column)], -1)
        angles = torch.cat((turns, turns), -1)
        cos, sin = angles.cos(), angles.sin()
        deep: list[Tensor] = []
        for index, (norm, qkv, output, post, up, down) in enumerate(self._blocks):
            x = x + output(self._attend(qkv(norm(x)), cos, sin))
            x = x + down(F.gelu(up(post(x)), approximate=self.settings.activation))
            if index in self._deep:
                deep.append(self._deep[index](x))
        return torch.stack((self._merger(x), *deep), 2)

    def _order(self, rows: int, columns: int) -> tuple[Tensor, Tensor]:
        """Row and column of each patch: those of a token follow each other."""
        merge = self.settings.merge
        numbers = torch.arange(rows * columns).view(rows // merge, merge, columns // merge, merge)
        order = numbers.transpose(1, 2).flatten()
        return order // columns, order % columns

    def _learned(self, row: Tensor, column: Tensor, rows: int, columns: int) -> Tensor:
        """The learned positions, interpolated to a grid whose corners are the square's."""
        side = int(self.settings.places**0.5)
        (high, high_by), (wide, wide_by) = (
            _taps(place, size, side) for place, size in ((row, rows), (column, columns))
        )
        indices = (high[:, :, None] * side + wide[:, None, :]).flatten(1)
        by = (high_by[:, :, None] * wide_by[:, None, :]).flatten(1)
        return (F.embedding(indices, self._places) * by[:, :, None]).sum(1)

    def _attend(self, qkv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, patches, _ = qkv.shape
        parts = qkv.view(batch, patches, 3, self.settings.heads, -1)
        q, k, v = parts.permute(2, 0, 3, 1, 4).unbind(0)
        q, k = (_turned(each.float(), cos, sin).to(v.dtype) for each in (q, k))
        attended = F.scaled_dot_product_attention(q, k, v)
        return attended.transpose(1, 2).reshape(batch, patches, -1)

    def _block(self, name: str) -> tuple[_Norm, _Product, _Product, _Norm, _Product, _Product]:
        own, inner = self.settings.hidden, self.settings.intermediate
        return (
            self._norm(f"{name}.norm1", own),
            self._product(f"{name}.attn.qkv", own, 3 * own),
            self._product(f"{name}.attn.proj", own, own),
            self._norm(f"{name}.norm2", own),
            self._product(f"{name}.mlp.linear_fc1", own, inner),
            self._product(f"{name}.mlp.linear_fc2", inner, own),
        )

    def _merge(self, name: str, normed: int, merged: int) -> "partial[Tensor]":
        """A merger's forward pass; its norm is over `normed` values."""
        norm = self._norm(f"{name}.norm", normed)
        up = self._product(f"{name}.linear_fc1", merged, merged)
        down = self._product(f"{name}.linear_fc2", merged, self.settings.output)
        return partial(_merged, norm, up, down, normed, merged)

    def _product(self, name: str, inputs: int, outputs: int) -> _Product:
        weight = self._empty(f"{name}.weight", outputs, inputs)
        return _Product(weight, self._empty(f"{name}.bias", outputs))

    def _norm(self, name: str, size: int) -> _Norm:
        return _Norm(self._empty(f"{name}.weight", size), self._empty(f"{name}.bias", size))

    def _empty(self, name: str, *shape: int) -> Tensor:
        tensor = torch.empty(shape, dtype=self.dtype, device=self.device)
        settings = self.settings
        if name == "patch_embed.proj.weight":  # a convolution in checkpoints
            kernel = (3, settings.frames, settings.patch, settings.patch)
            self._views[name] = tensor.view(-1, *kernel)
        else:
            self._views[name] = tensor
        return tensor


def _merged(norm: _Norm, up: _Product, down: _Product, normed: int, merged: int, x: Tensor) -> Tensor:
    x = norm(x.reshape(len(x), -1, normed)).reshape(len(x), -1, merged)
    return down(F.gelu(up(x)))


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def _taps(place: Tensor, size: int, side: int) -> tuple[Tensor, Tensor]:
    """Two neighbours of `side` for each place of `size`, and their weights."""
    source = place.float() * (side - 1) / max(size - 1, 1)
    floor = source.floor()
    offsets = torch.arange(2, device=place.device)
    taps = (floor.long()[:, None] + offsets).clamp(0, side - 1)
    return taps, (1 - (source[:, None] - floor[:, None] - offsets).abs()).clamp(min=0)
