"""The tower of Pixtral and of Mistral Small 3: Mistral's layers over patches (Agrawal et al. 2024).

Pictures have any size. Attention sees the whole picture; its heads are rotated by row and column. A
merger makes one token of neighbouring patches, and two products make the decoder's embeddings.
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ramify.gpu.vision.tower import (
    ACTIVATIONS,
    LayeredTowerSettings,
    Norm,
    Product,
    Tower,
    attended,
    places,
    turned,
)

_EPS = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class PixtralTowerSettings(LayeredTowerSettings):
    """The settings of Pixtral's tower. `norm_eps`: of the norm before the merger."""

    projector_activation: str
    bias: bool  # the projector has some
    theta: float
    norm_eps: float

    def empty(self, dtype: torch.dtype, device: torch.device) -> "PixtralTower":
        return PixtralTower(self, dtype, device)


class PixtralTower(Tower):
    def __init__(self, settings: PixtralTowerSettings, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(settings, dtype, device)
        own, self._heads, self._merge = settings.hidden, settings.heads, settings.merge
        self._activation = ACTIVATIONS[settings.activation]
        self._between = ACTIVATIONS[settings.projector_activation]
        plain = partial(self._product, bias=False)
        norm = partial(self._norm, size=own, eps=_EPS, bias=False)
        kernel = (3, settings.patch, settings.patch)
        self._patches = self._convolution("vision_tower.patch_conv", own, *kernel, bias=False)
        self._before = norm("vision_tower.ln_pre")
        self._blocks = [self._block(f"vision_tower.transformer.layers.{index}", settings, plain, norm)
                        for index in range(settings.layers)]  # fmt: skip
        name, output, bias = "multi_modal_projector", settings.output, settings.bias
        self._ahead = self._norm(f"{name}.norm", own, settings.norm_eps, bias=False)
        self._merger = plain(f"{name}.patch_merger.merging_layer", own * settings.merge**2, own)
        self._up = self._product(f"{name}.linear_1", own, output, bias)
        self._down = self._product(f"{name}.linear_2", output, output, bias)
        size = own // settings.heads
        powers = torch.arange(0, size, 2, dtype=torch.float32) / size
        frequencies = (1.0 / settings.theta**powers).to(device)
        self._frequencies = frequencies[0::2], frequencies[1::2]  # of rows, and of columns

    @torch.inference_mode()
    def forward(self, patches: Tensor, rows: int, columns: int) -> Tensor:
        x = self._before(self._patches(patches.to(self.device, self.dtype)))
        at = places(rows, columns, self._merge)
        turns = torch.cat([
            place.to(self.device)[:, None] * each
            for place, each in zip(at, self._frequencies, strict=True)
        ], -1)  # fmt: skip
        angles = torch.cat((turns, turns), -1)[:, None]
        cos, sin = angles.cos(), angles.sin()
        for norm, q, k, v, output, post, gate, up, down in self._each(self._blocks):
            y = norm(x)
            queries, keys = (
                turned(each.view(*each.shape[:2], self._heads, -1), cos, sin).flatten(2)
                for each in (q(y), k(y))
            )
            x = x + output(attended(queries, keys, v(y), self._heads))
            y = post(x)
            x = x + down(self._activation(gate(y)) * up(y))
        x = self._ahead(x).view(len(x), -1, self._merge**2, x.shape[-1])
        x = self._merger(x.transpose(2, 3).flatten(2))
        return self._down(self._between(self._up(x)))[:, :, None]

    def _block(
        self, name: str, settings: PixtralTowerSettings, plain: "partial[Product]", norm: "partial[Norm]"
    ) -> tuple[Norm, Product, Product, Product, Product, Norm, Product, Product, Product]:
        own, inner = settings.hidden, settings.intermediate
        q, k, v, output = (plain(f"{name}.attention.{each}_proj", own, own) for each in "qkvo")
        fed = f"{name}.feed_forward"
        gate, up = (plain(f"{fed}.{each}_proj", own, inner) for each in ("gate", "up"))
        before, post = norm(f"{name}.attention_norm"), norm(f"{name}.ffn_norm")
        return before, q, k, v, output, post, gate, up, plain(f"{fed}.down_proj", inner, own)
