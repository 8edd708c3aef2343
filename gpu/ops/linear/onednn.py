"""Weights in oneDNN's own layout, for floats on a CPU."""

import platform
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ramify.gpu.ops.linear.base import Linear, Weight

WHOLE = (256, 128, 64)  # rows of a product that oneDNN runs unpadded, the largest first


@dataclass(slots=True)
class OneDnnWeight(Weight):
    """A weight [outputs, inputs] in oneDNN's opaque layout."""

    tensor: Tensor
    sizes: tuple[int, int]

    @property
    def shape(self) -> tuple[int, int]:
        return self.sizes

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        rows = x.shape[0]
        sizes = parts(rows)
        if len(sizes) == 1:
            return self._padded(x, bias, sizes[0])
        y, first = x.new_empty((rows, self.sizes[0])), 0
        for size in sizes:
            y[first : first + size] = self._padded(x[first : first + size], bias, size)
            first += size
        return y

    def _padded(self, x: Tensor, bias: Tensor | None, size: int) -> Tensor:
        """Multiply x, padded to `size` rows."""
        rows = x.shape[0]
        more = size - rows
        if more:
            x = F.pad(x, (0, 0, 0, more))
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.tensor, bias, "none", [], "")
        return y[:rows] if more else y


def float_weight(linear: Linear) -> Weight:
    """Reorder a weight for oneDNN, where that is the faster library; else return it as it is.

    A float32 product of 1 to 128 rows takes a third of the time of torch's default (MKL) on a Zen 5. The
    operators are those of torch's own compiler.
    """
    tensor = linear.tensor
    if linear.stacked or not _onednn_serves(tensor):
        return linear.weight
    packed = torch.ops.mkldnn._reorder_linear_weight(tensor, None)
    return OneDnnWeight(packed, (tensor.shape[0], tensor.shape[1]))


def parts(rows: int) -> list[int]:
    """Cut `rows` rows into products: of `WHOLE` rows, and a last one of up to 64.

    oneDNN compiles a kernel for each number of rows, each weight's shape and each number of threads,
    which takes about a millisecond and 0.8 MB, and keeps a thousand of them; its own bound on their
    number frees little of that. There are 22 sizes in all, and a server soon has met every one.
    """
    sizes: list[int] = []
    for whole in WHOLE:
        count, rows = divmod(rows, whole)
        sizes += [whole] * count
    return [*sizes, few_sizes(rows)] if rows else sizes


def few_sizes(rows: int) -> int:
    """Round `rows` up by at most 1/4: there are four sizes from one power of 2 to the next."""
    step = 1 << max(0, (rows - 1).bit_length() - 3)
    return -(-rows // step) * step


def _onednn_serves(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or platform.machine() not in ("x86_64", "AMD64"):
        return False
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if weight.dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return weight.dtype == torch.float32
