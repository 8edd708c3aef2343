"""Brings weights into their form while a checkpoint is read, each when its last tensor is there.

So what was read is freed again on the way, and a model in 8 bits never lies in memory as floats.
"""

from collections.abc import Iterable, Set

import torch
from torch import Tensor

from ramify.gpu.ops.linear.base import Form, Linear
from ramify.gpu.ops.linear.grouped import GroupedWeight, joined

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
        blocks: bool = False,
    ) -> None:
        """`blocks`: the form reads them, see `keeps`."""
        self._views = views
        self._form = form
        self._reads_blocks = blocks
        self._blocks: dict[str, GroupedWeight] = {}
        waiting = [(linear, names, set(names)) for linear, names in products]
        self._of = {name: each for each in waiting for name in each[1]}

    def keeps(self, name: str, blocks: Set[str]) -> bool:
        """Whether `loaded` wants the blocks of this tensor: a file has those of its whole product."""
        if not self._reads_blocks or name not in self._of or not name.endswith(_WEIGHT):
            return False
        return all(each in blocks for each in self._of[name][1] if each.endswith(_WEIGHT))

    @torch.inference_mode()
    def loaded(self, name: str, blocks: GroupedWeight | None = None) -> None:
        """The tensor of this name is filled, or these are its `blocks`."""
        if name not in self._of:
            return
        if blocks is not None:
            self._blocks[name] = blocks
        linear, names, missing = self._of[name]
        missing.discard(name)
        if missing:
            return
        parts = [self._blocks.pop(each) for each in names if each in self._blocks]
        if parts:
            linear.weight = joined(parts)
        linear.put_in_order()
        linear.weight = self._form(linear)
        for each in names:
            del self._views[each], self._of[each]
