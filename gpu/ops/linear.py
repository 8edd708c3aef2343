"""A matrix product with an optional bias, and several of them merged into one.

Merged weights (q, k and v; gate and up) are one matrix whose row blocks are the checkpoint's
tensors, so that a step launches one product instead of three. `blocks` gives the loader the views
to fill; `packed` then lays the weight out for the CPU.
"""

import platform
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

WHOLE = (256, 128, 64)  # rows of a product that oneDNN runs unpadded, the largest first


@dataclass(slots=True)
class Linear:
    """y = x W^T + b. weight [outputs, inputs], bias [outputs] or None."""

    weight: Tensor
    bias: Tensor | None = None
    packed: bool = False  # weight is in oneDNN's own layout and good for nothing else

    def __call__(self, x: Tensor) -> Tensor:
        """[T, inputs] -> [T, outputs]."""
        if not self.packed:
            return F.linear(x, self.weight, self.bias)
        rows = x.shape[0]
        sizes = parts(rows)
        if len(sizes) == 1:
            return self._product(x, sizes[0])
        y, first = x.new_empty((rows, self.weight.shape[0])), 0
        for size in sizes:
            y[first : first + size] = self._product(x[first : first + size], size)
            first += size
        return y

    def _product(self, x: Tensor, size: int) -> Tensor:
        """By oneDNN, padded to `size` rows."""
        rows = x.shape[0]
        more = size - rows
        if more:
            x = F.pad(x, (0, 0, 0, more))
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return y[:rows] if more else y

    def into(self, x: Tensor, output: Tensor) -> None:
        """The same, written to output [T, outputs], which is contiguous."""
        if self.packed or self.bias is not None:
            output.copy_(self(x))
        else:
            torch.mm(x, self.weight.t(), out=output)


def packed(linear: Linear) -> Linear:
    """The product with its weight reordered for oneDNN, where that is the faster library.

    A float32 product of 1 to 128 rows takes a third of what torch's default (MKL) takes on a Zen 5, and
    rows need not be many for it. These are the operators of torch's own compiler. The weight is
    opaque afterwards.
    """
    if linear.packed or not _onednn_serves(linear.weight):
        return linear
    weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight, None)
    return Linear(weight, linear.bias, packed=True)


def parts(rows: int) -> list[int]:
    """The products that `rows` rows are computed in: of `WHOLE` rows, and a last one of up to 64.

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
    """`rows`, or at most 1/4 more: there are four sizes from one power of 2 to the next."""
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
