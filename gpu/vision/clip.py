"""The tower of LLaVA: CLIP's vision transformer (Radford et al. 2021), up to a layer before its last.

Pictures are squares of one size. Positions are learned; a token of its own stands in front of the
patches and is left out at the end. Two products make the decoder's embeddings (Liu et al. 2023).
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ramify.gpu.vision.tower import ACTIVATIONS, Norm, Product, Tower, TowerSettings, attended


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipTowerSettings(TowerSettings):
    """As config.json says them. `layers`: those that run, of `whole`."""

    layers: int
    whole: int
    hidden: int
    heads: int
    intermediate: int
    activation: str
    projector_activation: str
    bias: bool  # the projector has some
    eps: float

    @property
    def unread(self) -> tuple[str, ...]:
        left = [
            "post_layernorm.",
            *(f"encoder.layers.{each}." for each in range(self.layers, self.whole)),
        ]
        ahead = ("vision_tower.vision_model.", "vision_tower.")
        named = tuple(before + name for before in ahead for name in (*left, "embeddings.position_ids"))
        return (*named, *(f"model.{name}" for name in named))

    def empty(self, dtype: torch.dtype, device: torch.device) -> "ClipTower":
        return ClipTower(self, dtype, device)


class ClipTower(Tower):
    def __init__(self, settings: ClipTowerSettings, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(settings, dtype, device)
        assert settings.side is not None
        own, self._heads = settings.hidden, settings.heads
        self._activation = ACTIVATIONS[settings.activation]
        self._between = ACTIVATIONS[settings.projector_activation]
        norm = partial(self._norm, size=own, eps=settings.eps)
        name, patch = "vision_tower.embeddings", settings.patch
        self._first = self._empty(f"{name}.class_embedding", own)
        self._patches = self._convolution(f"{name}.patch_embedding", own, 3, patch, patch, bias=False)
        self._places = self._empty(
            f"{name}.position_embedding.weight", 1 + (settings.side // patch) ** 2, own
        )
        self._before = norm("vision_tower.pre_layrnorm")  # so are they called
        self._blocks = [self._block(f"vision_tower.encoder.layers.{index}", settings, norm)
                        for index in range(settings.layers)]  # fmt: skip
        name, output, bias = "multi_modal_projector.linear", settings.output, settings.bias
        self._up = self._product(f"{name}_1", own, output, bias)
        self._down = self._product(f"{name}_2", output, output, bias)

    @torch.inference_mode()
    def forward(self, patches: Tensor, rows: int, columns: int) -> Tensor:
        x = self._patches(patches.to(self.device, self.dtype))
        x = torch.cat((self._first.expand(len(x), 1, -1), x), 1)
        x = self._before(x + self._places)
        for norm, q, k, v, output, post, up, down in self._blocks:
            y = norm(x)
            x = x + output(attended(q(y), k(y), v(y), self._heads))
            x = x + down(self._activation(up(post(x))))
        return self._down(self._between(self._up(x[:, 1:])))[:, :, None]

    def _block(
        self, name: str, settings: ClipTowerSettings, norm: "partial[Norm]"
    ) -> tuple[Norm, Product, Product, Product, Product, Norm, Product, Product]:
        own, inner = settings.hidden, settings.intermediate
        q, k, v, output = (
            self._product(f"{name}.self_attn.{each}_proj", own, own) for each in ("q", "k", "v", "out")
        )
        up = self._product(f"{name}.mlp.fc1", own, inner)
        down = self._product(f"{name}.mlp.fc2", inner, own)
        return norm(f"{name}.layer_norm1"), q, k, v, output, norm(f"{name}.layer_norm2"), up, down
