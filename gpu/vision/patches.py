"""From pixels to patches, with the arithmetic of `transformers`' processors, bit for bit in float32.

A pixel has 256 values, so what becomes of each is computed once and looked up.
"""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ramify.protocol.pictures import Picture, PictureSettings


class Patches:
    """Cuts pictures for a tower that merges `merge` times `merge` patches to a token."""

    def __init__(self, settings: PictureSettings, frames: int = 2) -> None:
        """`frames`: how many equal ones a picture is for the tower."""
        self._patch, self._merge = settings.patch, settings.unit // settings.patch
        self._frames = frames
        values = (np.arange(256, dtype=np.float64) * (1 / 255)).astype(np.float32)
        mean, std = np.array(settings.mean, np.float32), np.array(settings.std, np.float32)
        self._table: npt.NDArray[np.float32] = (values - mean[:, None]) / std[:, None]  # [3, 256]

    def grid(self, picture: Picture) -> tuple[int, int]:
        """Rows and columns of patches."""
        return picture.height // self._patch, picture.width // self._patch

    def cut(self, picture: Picture) -> Tensor:
        """float32[patches, 3 * frames * patch * patch]; the patches of a token follow each other."""
        shape = picture.height, picture.width, 3
        pixels = np.frombuffer(picture.pixels, np.uint8).reshape(shape).transpose(2, 0, 1)
        values = np.stack([own[plane] for own, plane in zip(self._table, pixels, strict=True)])
        patch, merge, (rows, columns) = self._patch, self._merge, self.grid(picture)
        parts = values.reshape(3, rows // merge, merge, patch, columns // merge, merge, patch)
        parts = parts.transpose(1, 4, 2, 5, 0, 3, 6)[:, :, :, :, :, None]
        many = np.broadcast_to(parts, (*parts.shape[:5], self._frames, patch, patch))
        return torch.from_numpy(many.reshape(rows * columns, -1))
