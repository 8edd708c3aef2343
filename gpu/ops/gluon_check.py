"""A check of the Gluon kernel of `gluon_linear` on this machine, and its call.

Gluon is an experimental part of Triton: names change between versions, and code that compiles with one
may not with the next. So a small product is tried before a model relies on the kernel. This file knows
neither models nor requests.
"""

import logging
from functools import cache

import torch
from torch import Tensor

from ramify.gpu.ops.tilings import GROUP_TOKENS, GluonTiling

_LOG = logging.getLogger("ramify.gpu.ops.gluon")
_TRIAL = GluonTiling(2, 256, 64, 4)  # the tiling of most products, so that it is compiled by then


@cache
def gluon_works(device: torch.device) -> bool:
    """Whether the kernel runs on the device. It needs a Hopper GPU and a suitable Triton.

    If Triton alone is not suitable, a warning says so once, and torch's library computes the products.
    """
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        return False
    try:
        with torch.inference_mode(), torch.cuda.device(device):
            ones = torch.ones((256, 256), dtype=torch.bfloat16, device=device)
            tried = gluon_product(ones[:GROUP_TOKENS], None, ones, True, 0.0, _TRIAL)  # silu(256) * 256
            if bool((tried == 256 * 256).all()):
                return True
        reason = "a trial product is wrong"
    except Exception as error:  # whatever a compiler raises
        reason = f"{type(error).__name__}: {error}"[:300]
    _LOG.warning(
        "large matrix products run on torch's library, slower by a few percent, because the Gluon "
        "kernel does not work with this Triton (%s): install triton 3.6",
        reason,
    )
    return False


def gluon_product(
    x: Tensor, squares: "Tensor | None", weight: Tensor, gated: bool, eps: float, tiling: GluonTiling,
    output: "Tensor | None" = None,
) -> Tensor:  # fmt: skip
    """Call `gluon_linear.gluon_product`, imported here because the import alone may fail."""
    from ramify.gpu.ops import gluon_linear

    y: Tensor = gluon_linear.gluon_product(x, squares, weight, gated, eps, tiling, output)
    return y
