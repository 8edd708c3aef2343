"""A matrix product with an optional bias, and several of them merged into one.

Merged weights (q, k and v; gate and up) are one matrix whose row blocks are the checkpoint's
tensors, so that a step launches one product instead of three. `blocks` gives the loader the views
to fill.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(slots=True)
class Linear:
    """y = x W^T + b. weight [outputs, inputs], bias [outputs] or None."""

    weight: Tensor
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """[T, inputs] -> [T, outputs]."""
        return F.linear(x, self.weight, self.bias)


def empty_linear(
    inputs: int, outputs: int, bias: bool, dtype: torch.dtype, device: torch.device
) -> Linear:
    """A product whose weights the loader fills."""
    weight = torch.empty((outputs, inputs), dtype=dtype, device=device)
    return Linear(weight, torch.empty(outputs, dtype=dtype, device=device) if bias else None)


def blocks(linear: Linear, names: Sequence[str], sizes: Sequence[int]) -> dict[str, Tensor]:
    """Views of the row blocks, under the names that checkpoints give them."""
    views = {}
    for name, weight in zip(names, torch.split(linear.weight, list(sizes)), strict=True):
        views[f"{name}.weight"] = weight
    if linear.bias is not None:
        for name, bias in zip(names, torch.split(linear.bias, list(sizes)), strict=True):
            views[f"{name}.bias"] = bias
    return views
