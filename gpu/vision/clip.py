"""The tower of LLaVA: CLIP's vision transformer (Radford et al. 2021), up to a layer before its last.

Its layers are those of SigLIP, too (`siglip.py`).

Pictures are squares of one size. Positions are learned; a token of its own stands in front of the
patches and is left out at the end. Two products make the decoder's embeddings (Liu et al. 2023).
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ramify.gpu.vision.tower import ACTIVATIONS, LayeredTowerSettings, Norm, Product, Tower, attended


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipTowerSettings(LayeredTowerSettings):
    """The settings of CLIP's tower. `layers`: those that run, of `whole`."""

    eps: float
    whole: int
    projector_activation: str
    bias: bool  # the projector has some

    @property
    def unread(self) -> tuple[str, ...]:
        left = (f"encoder.layers.{each}." for each in range(self.layers, self.whole))
        return in_tower("post_layernorm.", *left)

    def empty(self, dtype: torch.dtype, device: torch.device) -> "ClipTower":
        return ClipTower(self, dtype, device)


def in_tower(*names: str) -> tuple[str, ...]:
    """Return the beginnings of names in checkpoints, with the positions that older ones store."""
    ahead = ("vision_tower.vision_model.", "vision_tower.")
    named = tuple(before + name for before in ahead for name in (*names, "embeddings.position_ids"))
    return (*named, *(f"model.{name}" for name in named))


class SquareTower(Tower):
    """A tower over a square of patches with learned positions, `first` of which are of other tokens."""

    def __init__(
        self, settings: LayeredTowerSettings, eps: float, first: int, bias: bool,
        dtype: torch.dtype, device: torch.device,
    ) -> None:  # fmt: skip
        super().__init__(settings, dtype, device)
        assert settings.side is not None
        own, self._heads = settings.hidden, settings.heads
        self._activation = ACTIVATIONS[settings.activation]
        self._whole_norm = partial(self._norm, size=own, eps=eps)
        name, patch = "vision_tower.embeddings", settings.patch
        self._patches = self._convolution(f"{name}.patch_embedding", own, 3, patch, patch, bias=bias)
        self._places = self._empty(
            f"{name}.position_embedding.weight", first + (settings.side // patch) ** 2, own
        )
        self._blocks = [self._block(f"vision_tower.encoder.layers.{index}", settings, self._whole_norm)
                        for index in range(settings.layers)]  # fmt: skip

    def _through(self, x: Tensor) -> Tensor:
        """Run x [B, patches, size] through all layers."""
        for norm, q, k, v, output, post, up, down in self._each(self._blocks):
            y = norm(x)
            x = x + output(attended(q(y), k(y), v(y), self._heads))
            x = x + down(self._activation(up(post(x))))
        return x

    def _block(
        self, name: str, settings: LayeredTowerSettings, norm: "partial[Norm]"
    ) -> tuple[Norm, Product, Product, Product, Product, Norm, Product, Product]:
        own, inner = settings.hidden, settings.intermediate
        q, k, v, output = (
            self._product(f"{name}.self_attn.{each}_proj", own, own) for each in ("q", "k", "v", "out")
        )
        up = self._product(f"{name}.mlp.fc1", own, inner)
        down = self._product(f"{name}.mlp.fc2", inner, own)
        return norm(f"{name}.layer_norm1"), q, k, v, output, norm(f"{name}.layer_norm2"), up, down


class ClipTower(SquareTower):
    def __init__(self, settings: ClipTowerSettings, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(settings, settings.eps, 1, False, dtype, device)
        own = settings.hidden
        self._between = ACTIVATIONS[settings.projector_activation]
        self._first = self._empty("vision_tower.embeddings.class_embedding", own)
        self._before = self._whole_norm("vision_tower.pre_layrnorm")  # so are they called
        name, output, bias = "multi_modal_projector.linear", settings.output, settings.bias
        self._up = self._product(f"{name}_1", own, output, bias)
        self._down = self._product(f"{name}_2", output, output, bias)

    @torch.inference_mode()
    def forward(self, patches: Tensor, rows: int, columns: int) -> Tensor:
        x = self._patches(patches.to(self.device, self.dtype))
        x = torch.cat((self._first.expand(len(x), 1, -1), x), 1)
        x = self._through(self._before(x + self._places))
        return self._down(self._between(self._up(x[:, 1:])))[:, :, None]
