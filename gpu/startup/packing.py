"""Brings weights into their form while a checkpoint is read, each when its last tensor is there.

So what was read is freed again on the way, and a model in 8 bits never lies in memory as floats.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from ramify.gpu.ops.linear.base import Form, Linear, Weight

_WEIGHT = ".weight"


class Packing:
    """Of the `products`, each with the names of its tensors among the `views` that the loader fills.

    The views of a product that has its form are taken out.
    """

    def __init__(
        self,
        views: dict[str, Tensor],
        products: Iterable[tuple[Linear, list[str]]],
        form: Form,
        stored: tuple[type[Weight], ...] = (),
    ) -> None:
        """`stored`: classes of weights that the form reads as a checkpoint has them, see `keeps`."""
        self._views = views
        self._form = form
        self._stored = stored
        self._parts: dict[str, Weight] = {}
        waiting = [(linear, names, set(names)) for linear, names in products]
        self._of = {name: each for each in waiting for name in each[1]}

    def keeps(self, name: str, stored: type[Weight]) -> bool:
        """Whether `loaded` wants this tensor as it is stored."""
        return stored in self._stored and name in self._of and name.endswith(_WEIGHT)

    def begin(self, name: str) -> None:
        """The tensor of this name is about to be filled."""
        if name in self._of:
            self._of[name][0].allocate()

    @torch.inference_mode()
    def loaded(self, name: str, weight: Weight | None = None) -> None:
        """The tensor of this name is filled, or this is the weight in its stead."""
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
        """Join what was stored; beside floats, or beside each other, parts become floats."""
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
