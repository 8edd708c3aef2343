"""The tower of Gemma 4: layers with norms on both sides of each part, and a mean over neighbours.

Pictures have any size. Positions are learned, of columns and of rows; half of a head is rotated by the
column, the other half by the row. Products of some checkpoints clip their inputs and outputs. Means of
patches, standardised in some checkpoints, are normalised and multiplied by one matrix.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ramify.gpu.vision.tower import (
    ACTIVATIONS,
    LayeredTowerSettings,
    Product,
    Tower,
    attended,
    places,
    turned,
)

_BOUNDS = ("input_min", "input_max", "output_min", "output_max")


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma4TowerSettings(LayeredTowerSettings):
    """The settings of Gemma 4's tower. `places`: positions of an axis. `clips`: products have bounds."""

    eps: float
    theta: float
    places: int
    clips: bool
    standardizes: bool

    parts = ("vision_tower.", "embed_vision.")
    renamed = (("model.vision_tower.", "vision_tower."), ("model.embed_vision.", "embed_vision."))

    def empty(self, dtype: torch.dtype, device: torch.device) -> "Gemma4Tower":
        return Gemma4Tower(self, dtype, device)


@dataclass(slots=True)
class _Clipped:
    """A product. `bounds`: least and most of its input, and of its output; (): there are none."""

    product: Product
    bounds: tuple[Tensor, ...]

    def __call__(self, x: Tensor) -> Tensor:
        if not self.bounds:
            return self.product(x)
        low, high, least, most = self.bounds
        return self.product(x.clamp(low, high)).clamp(least, most)


class Gemma4Tower(Tower):
    def __init__(self, settings: Gemma4TowerSettings, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(settings, dtype, device)
        self._settings = settings
        own, name = settings.hidden, "vision_tower"
        self._patches = self._product(f"{name}.patch_embedder.input_proj", 3 * settings.patch**2, own,
                                      bias=False)  # fmt: skip
        table = f"{name}.patch_embedder.position_embedding_table"
        self._places = self._empty(table, 2, settings.places, own)
        self._blocks = [self._block(f"{name}.encoder.layers.{index}")
                        for index in range(settings.layers)]  # fmt: skip
        means = ("std_bias", "std_scale") if settings.standardizes else ()
        self._standard = [self._empty(f"{name}.{each}", own) for each in means]
        self._projected = self._product("embed_vision.embedding_projection", own, settings.output,
                                        bias=False)  # fmt: skip
        half = own // settings.heads // 2
        powers = torch.arange(0, half, 2, dtype=torch.float32) / half
        self._frequencies = (1.0 / settings.theta**powers).to(device)

    @torch.inference_mode()
    def forward(self, patches: Tensor, rows: int, columns: int) -> Tensor:
        row, column = (each.to(self.device) for each in places(rows, columns, self.settings.merge))
        channels_last = patches.view(*patches.shape[:2], 3, -1).transpose(2, 3).flatten(2)
        x = self._patches(channels_last.to(self.device, self.dtype))
        x = x + (self._places[0][column] + self._places[1][row])
        angles = torch.stack([each[:, None] * self._frequencies for each in (column, row)], 1)
        angles = torch.cat((angles, angles), -1)[:, None]  # [patches, 1, 2, half of a head]
        cos, sin = angles.cos(), angles.sin()
        activation = ACTIVATIONS[self._settings.activation]
        for (before, post, ahead, after), mixer, (gate, up, down) in self._each(self._blocks):
            x = x + self._normed(mixer(self._normed(x, before), cos, sin), post)
            y = self._normed(x, ahead)
            x = x + self._normed(down(activation(gate(y)) * up(y)), after)
        x = x.view(len(x), -1, self.settings.merge**2, x.shape[-1]).float().mean(2).to(x.dtype)
        x = x.float() * self._settings.hidden**0.5
        if self._standard:
            bias, scale = self._standard
            x = (x - bias.float()) * scale.float()
        return self._projected(self._normed(x.to(self.dtype)))[:, :, None]

    def _normed(self, x: Tensor, weight: Tensor | None = None) -> Tensor:
        """Divide by the root of the mean square of the last dimension, in float32."""
        weight = None if weight is None else weight.float()
        return F.rms_norm(x.float(), x.shape[-1:], weight, self._settings.eps).to(x.dtype)

    def _block(
        self, name: str
    ) -> tuple[list[Tensor], Callable[[Tensor, Tensor, Tensor], Tensor], list[_Clipped]]:
        """Make a layer's norms, its attention, and the products of its feed-forward."""
        own, inner, heads = self._settings.hidden, self._settings.intermediate, self._settings.heads
        norms = [
            self._empty(f"{name}.{each}_layernorm.weight", own)
            for each in ("input", "post_attention", "pre_feedforward", "post_feedforward")
        ]
        q, k, v, output = (self._clipped(f"{name}.self_attn.{each}_proj", own, own) for each in "qkvo")
        q_norm, k_norm = (
            self._empty(f"{name}.self_attn.{each}_norm.weight", own // heads) for each in "qk"
        )

        def mixer(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
            queries, keys, values = (
                self._normed(each(x).view(*x.shape[:2], heads, -1), norm)
                for each, norm in ((q, q_norm), (k, k_norm), (v, None))
            )
            queries, keys = (
                turned(each.view(*each.shape[:3], 2, -1), cos, sin).flatten(2)
                for each in (queries, keys)
            )
            return output(attended(queries, keys, values.flatten(2), heads, 1.0))

        gate, up = (self._clipped(f"{name}.mlp.{each}_proj", own, inner) for each in ("gate", "up"))
        return norms, mixer, [gate, up, self._clipped(f"{name}.mlp.down_proj", inner, own)]

    def _clipped(self, name: str, inputs: int, outputs: int) -> _Clipped:
        product = self._product(f"{name}.linear", inputs, outputs, bias=False)
        bounds = _BOUNDS if self._settings.clips else ()
        return _Clipped(product, tuple(self._empty(f"{name}.{each}") for each in bounds))
