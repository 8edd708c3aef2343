"""The tower of Qwen3-VL and Qwen3.5: a vision transformer (Dosovitskiy et al. 2020) over patches.

Attention sees the whole picture. Positions are learned ones, interpolated, and rotations by row and
column. Four patches become one token; so do those of some layers inside, which are added to the first
layers of the decoder (DeepStack, Meng et al. 2024).
"""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ramify.gpu.vision.tower import Norm, Product, Tower, TowerSettings, attended, places, turned

_EPS = 1e-6
_PREFIX = "model.visual."


@dataclass(frozen=True, slots=True, kw_only=True)
class QwenTowerSettings(TowerSettings):
    """The settings of Qwen's tower, as of config.json."""

    layers: int
    hidden: int
    heads: int
    intermediate: int
    places: int  # a square of learned positions
    activation: Literal["tanh", "none"]  # how the GELU of feed-forwards is approximated
    theta: float
    turned: bool = True

    parts: ClassVar[tuple[str, ...]] = ("visual.", _PREFIX)
    renamed: ClassVar[tuple[tuple[str, str], ...]] = (("visual.", _PREFIX),)

    def empty(self, dtype: torch.dtype, device: torch.device) -> "QwenTower":
        return QwenTower(self, dtype, device)


class QwenTower(Tower):
    def __init__(self, settings: QwenTowerSettings, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(settings, dtype, device)
        self._settings = settings
        own, merged = settings.hidden, settings.hidden * settings.merge**2
        kernel = 3, settings.frames, settings.patch, settings.patch
        self._patches = self._convolution(f"{_PREFIX}patch_embed.proj", own, *kernel)
        self._places = self._empty(f"{_PREFIX}pos_embed.weight", settings.places, own)
        self._blocks = [self._block(f"{_PREFIX}blocks.{index}") for index in range(settings.layers)]
        self._merger = self._merge(f"{_PREFIX}merger", own, merged)
        self._deep = {
            layer: self._merge(f"{_PREFIX}deepstack_merger_list.{index}", merged, merged)
            for index, layer in enumerate(settings.deep)
        }
        quarter = own // settings.heads // 2
        powers = torch.arange(0, quarter, 2, dtype=torch.float32) / quarter
        self._frequencies = (1.0 / settings.theta**powers).to(device)

    @torch.inference_mode()
    def forward(self, patches: Tensor, rows: int, columns: int) -> Tensor:
        x = self._patches(patches.to(self.device, self.dtype))
        row, column = (each.to(self.device) for each in places(rows, columns, self._settings.merge))
        x = x + self._learned(row, column, rows, columns).to(x.dtype)
        turns = torch.cat([place[:, None].float() * self._frequencies for place in (row, column)], -1)
        angles = torch.cat((turns, turns), -1)[:, None]
        cos, sin = angles.cos(), angles.sin()
        deep: list[Tensor] = []
        for index, (norm, qkv, output, post, up, down) in enumerate(self._each(self._blocks)):
            x = x + output(self._attend(qkv(norm(x)), cos, sin))
            x = x + down(F.gelu(up(post(x)), approximate=self._settings.activation))
            if index in self._deep:
                deep.append(self._deep[index](x))
        return torch.stack((self._merger(x), *deep), 2)

    def _learned(self, row: Tensor, column: Tensor, rows: int, columns: int) -> Tensor:
        """Interpolate the learned positions to a grid whose corners are the square's."""
        side = int(self._settings.places**0.5)
        (high, high_by), (wide, wide_by) = (
            _taps(place, size, side) for place, size in ((row, rows), (column, columns))
        )
        indices = (high[:, :, None] * side + wide[:, None, :]).flatten(1)
        by = (high_by[:, :, None] * wide_by[:, None, :]).flatten(1)
        return (F.embedding(indices, self._places) * by[:, :, None]).sum(1)

    def _attend(self, qkv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        heads = self._settings.heads
        q, k, v = qkv.chunk(3, -1)
        q, k = (turned(each.reshape(*each.shape[:2], heads, -1), cos, sin).flatten(2) for each in (q, k))
        return attended(q, k, v, heads)

    def _block(self, name: str) -> tuple[Norm, Product, Product, Norm, Product, Product]:
        own, inner = self._settings.hidden, self._settings.intermediate
        return (
            self._norm(f"{name}.norm1", own, _EPS),
            self._product(f"{name}.attn.qkv", own, 3 * own),
            self._product(f"{name}.attn.proj", own, own),
            self._norm(f"{name}.norm2", own, _EPS),
            self._product(f"{name}.mlp.linear_fc1", own, inner),
            self._product(f"{name}.mlp.linear_fc2", inner, own),
        )

    def _merge(self, name: str, normed: int, merged: int) -> "partial[Tensor]":
        """Make a merger's forward pass; its norm is over `normed` values."""
        norm = self._norm(f"{name}.norm", normed, _EPS)
        up = self._product(f"{name}.linear_fc1", merged, merged)
        down = self._product(f"{name}.linear_fc2", merged, self._settings.output)
        return partial(_merged, norm, up, down, normed, merged)


def _merged(norm: Norm, up: Product, down: Product, normed: int, merged: int, x: Tensor) -> Tensor:
    x = norm(x.reshape(len(x), -1, normed)).reshape(len(x), -1, merged)
    return down(F.gelu(up(x)))


def _taps(place: Tensor, size: int, side: int) -> tuple[Tensor, Tensor]:
    """Find two neighbours of `side` for each place of `size`, and their weights."""
    source = place.float() * (side - 1) / max(size - 1, 1)
    floor = source.floor()
    offsets = torch.arange(2, device=place.device)
    taps = (floor.long()[:, None] + offsets).clamp(0, side - 1)
    return taps, (1 - (source[:, None] - floor[:, None] - offsets).abs()).clamp(min=0)
