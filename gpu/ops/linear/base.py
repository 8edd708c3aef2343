"""A matrix product with an optional bias, and several of them merged into one.

Merged weights (q, k and v; gate and up) are one matrix whose row blocks are the checkpoint's tensors, so
that a step launches one product instead of three. `blocks` makes the views that the loader fills. A
weight is loaded as a `PlainWeight`; `startup.packing` then brings it into the form that the device reads
fastest. A number format is a class derived from `Weight`, in a file of its own.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Use = Literal["rows", "gated", "logits", "scores"]
"""What a product's rows are: just rows; a gate's rows, then as many of `up`; a vocabulary's logits;
scores of experts, whose order rounding would change."""


@dataclass(frozen=True, slots=True)
class Operand:
    """A weight as Triton's kernels read it. codes [outputs, inputs]: floats, or codes of numbers.

    scales float32 [outputs, groups]: factors of codes, where `group` inputs share one. Codes of 4 bits,
    their scales and `zeros` are laid out as `four_bits` says.
    """

    codes: Tensor
    scales: Tensor | None = None
    group: int = 0
    zeros: Tensor | None = None


class Weight:
    """Base: a matrix [outputs, inputs] in one of the forms that kernels read.

    A number format is a class with those methods that are called for it.
    """

    __slots__ = ()
    coded: ClassVar[bool] = False  # Triton's kernels widen it, and nothing else does

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        raise TypeError(f"a {type(self).__name__} has no shape of its own")

    @property
    def operand(self) -> Operand:
        """The weight as Triton's kernels read it. Raises TypeError for a form that they do not read."""
        raise TypeError(f"Triton's kernels do not read a {type(self).__name__}")

    def floats(self) -> Tensor:
        """Decode the numbers: float32 [outputs, inputs]."""
        raise TypeError(f"a {type(self).__name__} is not made into floats")

    def rows(self, first: int, last: int) -> "Weight":
        """Return rows [first, last) of a stored form."""
        raise TypeError(f"a {type(self).__name__} is not stored in checkpoints")

    def columns(self, first: int, last: int) -> "Weight":
        """Return inputs [first, last) of a stored form. Raises ValueError: they are no whole groups."""
        raise TypeError(f"a {type(self).__name__} is not stored in checkpoints")

    def joined(self, others: "Sequence[Weight]") -> "Weight":
        """Return a stored form with others of its class below it."""
        raise TypeError(f"a {type(self).__name__} is not stored in checkpoints")

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Compute x W^T + bias by torch: [T, inputs] -> [T, outputs].

        Raises TypeError for a form that only kernels of its own read.
        """
        raise TypeError(f"torch has no product with a {type(self).__name__}")

    def in_order(self, order: Tensor) -> "Weight":
        """Return the weight with rows in `order`. Raises TypeError for a form of kernels of its own."""
        raise TypeError(f"the rows of a {type(self).__name__} have their order")


@dataclass(slots=True)
class PlainWeight(Weight):
    """A weight of floats [outputs, inputs], as checkpoints have it."""

    tensor: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.tensor.shape[0], self.tensor.shape[1]

    @property
    def operand(self) -> Operand:
        return Operand(self.tensor)

    def floats(self) -> Tensor:
        return self.tensor.float()

    def joined(self, others: "Sequence[Weight]") -> "Weight":
        tensors = [each.tensor for each in others if isinstance(each, PlainWeight)]
        return PlainWeight(torch.cat([self.tensor, *tensors]) if tensors else self.tensor)

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, self.tensor, bias)

    def in_order(self, order: Tensor) -> "Weight":
        return PlainWeight(self.tensor[order.to(self.tensor.device)])


@dataclass(slots=True)
class Linear:
    """The product y = x W^T + b. bias [outputs] or None.

    `order` int64[outputs]: which row of the checkpoint each of ours is; None: the same. `beside`: the
    checkpoint's tensors are blocks of columns, whose products are added. `stacked`: the number of
    matrices one below another, of experts; 0: one.
    """

    weight: Weight
    bias: Tensor | None = None
    use: Use = "rows"
    order: Tensor | None = None
    beside: bool = False
    stacked: int = 0

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply: [T, inputs] -> [T, outputs]."""
        return self.weight.product(x, self.bias)

    @property
    def tensor(self) -> Tensor:
        """The weight [outputs, inputs] itself. Raises TypeError if its form is not the plain one."""
        if not isinstance(self.weight, PlainWeight):
            raise TypeError(f"this product reads plain weights, not a {type(self.weight).__name__}")
        return self.weight.tensor

    def matrices(self) -> list[tuple[Tensor, Tensor | None]]:
        """List the stacked weights and biases."""
        weights = self.tensor.chunk(self.stacked)
        biases = [None] * len(weights) if self.bias is None else self.bias.chunk(self.stacked)
        return list(zip(weights, biases, strict=True))

    def matrix(self, number: int, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """Return a stacked weight and its bias, as floats."""
        size = self.weight.shape[0] // self.stacked
        first, last = number * size, (number + 1) * size
        if isinstance(self.weight, PlainWeight):
            floats = self.weight.tensor[first:last]
        else:
            floats = self.weight.rows(first, last).floats().to(dtype)
        return floats, None if self.bias is None else self.bias[first:last]

    def release(self) -> None:
        """Free the memory of the plain weight until it is filled: see `allocate`."""
        self.tensor.untyped_storage().resize_(0)

    def allocate(self) -> bool:
        """Allocate memory for the plain weight and its views. Returns whether it had none."""
        storage = self.tensor.untyped_storage()
        late = not storage.nbytes()
        if late:
            storage.resize_(self.tensor.nbytes)
        return late

    def put_in_order(self) -> None:
        """Bring rows from the checkpoint's order into `order`. Call it once."""
        if self.order is not None:
            self.weight = self.weight.in_order(self.order)
            self.bias = None if self.bias is None else self.bias[self.order.to(self.bias.device)]

    def into(self, x: Tensor, output: Tensor) -> None:
        """Multiply as a call does, into output [T, outputs], which is contiguous."""
        if not isinstance(self.weight, PlainWeight):
            output.copy_(self(x))
        elif self.bias is None:
            torch.mm(x, self.weight.tensor.t(), out=output)
        else:
            torch.addmm(self.bias, x, self.weight.tensor.t(), out=output)


Form = Callable[[Linear], Weight]
"""Takes a product with a loaded weight and returns the weight in the form to keep."""


def plain_weight(linear: Linear) -> Weight:
    """Return the weight unchanged."""
    return linear.weight


def plain(weight: Tensor, bias: Tensor | None = None, use: Use = "rows") -> Linear:
    """Make the product with weight [outputs, inputs]."""
    return Linear(PlainWeight(weight), bias, use)


def empty_linear(
    inputs: int, outputs: int, bias: bool, dtype: torch.dtype, device: torch.device, use: Use = "rows",
    stacked: int = 0,
) -> Linear:  # fmt: skip
    """Make a product whose weights the loader fills. `outputs`: of each stacked matrix."""
    rows = outputs * max(1, stacked)
    weight = torch.empty((rows, inputs), dtype=dtype, device=device)
    own = torch.empty(rows, dtype=dtype, device=device) if bias else None
    return Linear(PlainWeight(weight), own, use, stacked=stacked)


def blocks(linear: Linear, names: Sequence[str], sizes: Sequence[int]) -> dict[str, Tensor]:
    """Make views of the blocks of rows or columns, by their names in checkpoints."""
    views, side = {}, int(linear.beside)
    late = linear.allocate()  # torch makes no views of missing memory
    for name, weight in zip(names, torch.split(linear.tensor, list(sizes), side), strict=True):
        views[f"{name}.weight"] = weight
    if linear.bias is not None:
        for name, bias in zip(names, torch.split(linear.bias, list(sizes)), strict=True):
            views[f"{name}.bias"] = bias
    if late:
        linear.release()
    return views
