"""A check of the kernel of `triton_fragments` on this machine.

The kernel relies on the layout of the package humming-kernels and on Triton's assignment of numbers to
threads: either may change with a version. So products with some of a model's weights are tried first.
"""

import logging

import torch
import torch.nn.functional as F
from torch import Tensor

from ramify.gpu.ops.tilings import FragmentTiling

_LOG = logging.getLogger("ramify.gpu.startup")
_STORE, _ADD, _GATED = 0, 1, 2
_TOKENS = 8  # the most that the kernel takes
_TOLERATED = 0.01  # of the norm; an H200 was off by 0.003


def fragment_obstacle(
    tensors: dict[str, Tensor], wide: Tensor, tiling: FragmentTiling, gated: bool
) -> str:
    """Say why the product of eight tokens does not compile or is not within 1 % of float32; "": it is.

    tensors: the package's; wide float32 [outputs, inputs]: the same numbers. The reason is logged as a
    warning, too.
    """
    try:
        epilogues = (_GATED,) if gated else (_STORE, _ADD)
        off = max(_off(tensors, wide, tiling, epilogue) for epilogue in epilogues)
        if off < _TOLERATED:
            return ""
        reason = f"a trial product is off by {off:.3f} of its norm"
    except Exception as error:  # whatever a compiler raises
        reason = f"{type(error).__name__}: {error}"[:300]
    _LOG.warning("humming-kernels multiplies few tokens by 4 bits, too: our kernel fails: %s", reason)
    return reason


def _off(tensors: dict[str, Tensor], wide: Tensor, tiling: FragmentTiling, epilogue: int) -> float:
    from ramify.gpu.ops.triton_fragments import fragment_product  # Triton may not be there

    (outputs, inputs), device = wide.shape, wide.device
    draw = torch.Generator(device).manual_seed(0)
    x = torch.randn((_TOKENS, inputs), generator=draw, device=device).bfloat16()
    squares = torch.full((_TOKENS, inputs // 64), 64.0, device=device)  # of rows that are divided
    residual = torch.randn((_TOKENS, outputs), generator=draw, device=device).bfloat16()
    gain = torch.rand(outputs, generator=draw, device=device).bfloat16()
    wanted = x.float() @ wide.t()
    if epilogue == _ADD:
        wanted = (wanted + residual.float()) * gain.float()
    elif epilogue == _GATED:
        gate, up = wanted.chunk(2, 1)
        wanted = F.silu(gate) * up
    output = x.new_full(wanted.shape, torch.nan)
    arrived = torch.zeros(outputs, dtype=torch.int32, device=device)
    fragment_product(
        epilogue, x, tensors["weight"], tensors["weight_scale"], tensors.get("zero_point"), None,
        output, arrived, tiling.warps, tiling.splits, None if epilogue == _ADD else squares, 0.0,
        residual, gain, squares.new_empty((_TOKENS, outputs // tiling.outputs)),
    )  # fmt: skip
    off = (output.float() - wanted).norm(dim=1) / wanted.norm(dim=1)
    return float(off.nan_to_num(1.0).max())
