"""The tower of Gemma 3: SigLIP's vision transformer (Zhai et al. 2023), and a mean over neighbours.

Pictures are squares of one size. Means of patches, normalised, are multiplied by one matrix, which
checkpoints have with its inputs first.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ramify.gpu.vision.clip import SquareTower, in_tower
from ramify.gpu.vision.tower import LayeredTowerSettings, places


@dataclass(frozen=True, slots=True, kw_only=True)
class SiglipTowerSettings(LayeredTowerSettings):
    eps: float

    @property
    def unread(self) -> tuple[str, ...]:
        """The tensors of the head that pools a whole picture, which some checkpoints have."""
        return in_tower("head.")

    def empty(self, dtype: torch.dtype, device: torch.device) -> "SiglipTower":
        return SiglipTower(self, dtype, device)


class SiglipTower(SquareTower):
    def __init__(self, settings: SiglipTowerSettings, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(settings, settings.eps, 0, True, dtype, device)
        own, name, self._merge = settings.hidden, "multi_modal_projector", settings.merge
        self._after = self._whole_norm("vision_tower.post_layernorm")
        self._pooled = self._norm(f"{name}.mm_soft_emb_norm", own, settings.eps, bias=False)
        self._projected = self._empty(f"{name}.mm_input_projection_weight", own, settings.output)

    @torch.inference_mode()
    def forward(self, patches: Tensor, rows: int, columns: int) -> Tensor:
        x = self._patches(patches.to(self.device, self.dtype))
        row, column = places(rows, columns, self._merge)
        x = self._through(x + self._places[(row * columns + column).to(self.device)])
        x = self._after(x).view(len(x), -1, self._merge**2, x.shape[-1]).mean(2)
        weight, eps = self._pooled.weight.float() + 1, self._pooled.eps
        x = F.rms_norm(x.float(), x.shape[-1:], weight, eps).to(x.dtype)
        return (x @ self._projected)[:, :, None]
