"""Patches of pixels, by the arithmetic of `transformers`' processors, bit for bit in float32.

A pixel has 256 values, so the result of each is computed once and looked up.
"""

import numpy as np
import torch
from torch import Tensor

from ramify.protocol.pictures import Picture, PictureSettings


class Patches:
    """Cutter of pictures for a tower that merges `merge` times `merge` patches to a token."""

    def __init__(
        self, settings: PictureSettings, frames: int = 2, device: torch.device | None = None
    ) -> None:
        """`frames`: a picture is so many equal frames. `device`: the tower's; None: a CPU."""
        self._patch, self._merge = settings.patch, settings.unit // settings.patch
        self._frames = frames
        values = (np.arange(256, dtype=np.float64) * (1 / 255)).astype(np.float32)
        mean, std = np.array(settings.mean, np.float32), np.array(settings.std, np.float32)
        table = (values - mean[:, None]) / std[:, None]  # [3, 256]
        self._table = torch.from_numpy(table).to(device)

    def grid(self, picture: Picture) -> tuple[int, int]:
        """Compute rows and columns of patches."""
        return picture.height // self._patch, picture.width // self._patch

    def cut(self, picture: Picture) -> Tensor:
        """Cut into float32[patches, 3 * frames * patch * patch]; those of a token follow each other."""
        pixels = torch.tensor(np.frombuffer(picture.pixels, np.uint8), device=self._table.device)
        planes = pixels.view(-1, 3).t().long()
        values = self._table.gather(1, planes)
        patch, merge, (rows, columns) = self._patch, self._merge, self.grid(picture)
        parts = values.reshape(3, rows // merge, merge, patch, columns // merge, merge, patch)
        parts = parts.permute(1, 4, 2, 5, 0, 3, 6)[:, :, :, :, :, None]
        many = parts.expand(*parts.shape[:5], self._frames, patch, patch)
        return many.reshape(rows * columns, -1)
