"""Brings weights into their form while a checkpoint is read, each when its last tensor is there.

So what was read is freed again on the way, and a model in 8 bits never lies in memory as floats.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from ramify.gpu.ops.linear.base import Form, Linear


class Packing:
    """Of the `products`, each with the names of its tensors among the `views` that the loader fills.

    The views of a product that has its form are taken out.
    """

    def __init__(
        self, views: dict[str, Tensor], products: Iterable[tuple[Linear, list[str]]], form: Form
    ) -> None:
        self._views = views
        self._form = form
        waiting = [(linear, names, set(names)) for linear, names in products]
        self._of = {name: each for each in waiting for name in each[1]}

    @torch.inference_mode()
    def loaded(self, name: str) -> None:
        """The tensor of this name is filled."""
        if name not in self._of:
            return
        linear, names, missing = self._of[name]
        missing.discard(name)
        if missing:
            return
        linear.put_in_order()
        linear.weight = self._form(linear)
        for each in names:
            del self._views[each], self._of[each]
