"""The conversion of weights while a checkpoint is read, each when its last tensor is there.

So tensors are freed again on the way, and a model in 8 bits never lies in memory as floats.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from ramify.gpu.ops.linear.base import Form, Linear, Weight

_WEIGHT = ".weight"


class Packing:
    """The weights of `products`, each with the names of its tensors among the `views` to fill.

    The views of a product that has its form are removed.
    """

    def __init__(
        self,
        views: dict[str, Tensor],
        products: Iterable[tuple[Linear, list[str]]],
        form: Form,
        stored: tuple[type[Weight], ...] = (),
    ) -> None:
        """`stored`: classes of weights that `form` reads as the checkpoint stores them, see `keeps`."""
        self._views = views
        self._form = form
        self._stored = stored
        self._parts: dict[str, Weight] = {}
        waiting = [(linear, names, set(names)) for linear, names in products]
        self._of = {name: each for each in waiting for name in each[1]}

    def keeps(self, name: str, stored: type[Weight]) -> bool:
        """Whether `loaded` takes this tensor as it is stored."""
        return stored in self._stored and name in self._of and name.endswith(_WEIGHT)

    def begin(self, name: str) -> None:
        """Allocate the memory of a tensor that is about to be filled."""
        if name in self._of:
            self._of[name][0].allocate()

    @torch.inference_mode()
    def loaded(self, name: str, weight: Weight | None = None) -> None:
        """Note that a tensor is filled, or take `weight` in its stead; convert complete products."""
        if name not in self._of:
            return
        if weight is not None:
            self._parts[name] = weight
        linear, names, missing = self._of[name]
        missing.discard(name)
        if missing:
            return
        self._put_together(linear, [each for each in names if each.endswith(_WEIGHT)])
        linear.put_in_order()
        linear.weight = self._form(linear)
        for each in names:
            del self._views[each], self._of[each]

    def _put_together(self, linear: Linear, names: list[str]) -> None:
        """Join the stored parts of a product; where they cannot be joined, they become floats."""
        stored = [name for name in names if name in self._parts]
        apart = linear.beside and len(names) > 1
        alike = len({type(self._parts[name]) for name in stored}) == 1
        if alike and len(stored) == len(names) and not apart:
            first, *others = (self._parts.pop(name) for name in names)
            linear.weight = first.joined(others)
            return
        for name in stored:
            linear.allocate()
            self._views[name].copy_(self._parts.pop(name).floats())
