"""Root mean square layer normalisation (Zhang and Sennrich 2019), over the last dimension."""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor


@dataclass(slots=True)
class RMSNorm:
    """The norm y = x / sqrt(mean(x^2) + eps) * weight; the mean in float32 whatever x is.

    The weight may be float32 where x is not.
    """

    weight: Tensor  # [size]
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        """Normalise [..., size] -> [..., size]."""
        if self.weight.dtype == x.dtype:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        return F.rms_norm(x.float(), self.weight.shape, self.weight, self.eps).to(x.dtype)
