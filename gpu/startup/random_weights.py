"""Random weights in the place of a checkpoint's: speed does not depend on their values."""

import zlib
from collections.abc import Callable

import torch
from torch import Tensor

_ONES = *(f"norm{n}.weight" for n in ("", "_1", "_2", "1", "2")), "layer_scalar", "scale"


def fill_random(
    views: dict[str, Tensor], seed: int = 0, loaded: Callable[[str], None] = lambda name: None,
    begin: Callable[[str], None] = lambda name: None,
) -> None:  # fmt: skip
    """Fill `views` as load format `dummy` does: norms 1, biases 0, others normal with deviation 0.02.

    `begin`, `loaded`: called with each name before and after it is filled; `loaded` may remove views.
    Numbers follow from the name, so that ranks, whose tensors differ, have the same router.
    """
    for name in list(views):
        begin(name)
        view = views[name]
        if name.endswith(_ONES):
            view.fill_(1.0)
        elif name.endswith(".bias"):
            view.zero_()
        else:  # a `Generator` would load torch's tracers, without which a CPU's executor starts
            torch.manual_seed(seed + zlib.crc32(name.encode()))
            view.normal_(0.0, 0.02)
        del view
        loaded(name)
