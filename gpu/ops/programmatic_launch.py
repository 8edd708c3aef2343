"""Programmatic dependent launch: a kernel starts while the one ahead of it in the stream still ends.

A kernel launched so must wait for the one ahead (`wait`) before it touches anything that a kernel
of the same step writes, and before it writes itself, even if it does not need that one's results:
the kernel after it counts on it. Weights may be read before, and what a step is given: its lines,
page tables and plans. For these are written ahead of the step's first kernel (`embed_norm`), which
is launched without this and so begins when all before it is over, as does every kernel and copy
that is launched without. The GPU is then idle for a fraction of a microsecond between kernels
instead of one or two, inside CUDA graphs too.
Source: CUDA programming guide, "Programmatic Dependent Launch and Synchronization".
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, import-untyped, import-not-found"

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@cache
def overlaps(device: torch.device) -> bool:
    """Whether the device can: a Hopper GPU or a later one."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def launch_options(device: torch.device) -> dict[str, Any]:
    """For the launch of a kernel that calls `wait`, where its OVERLAP is `overlaps(device)`."""
    return {"launch_pdl": True} if overlaps(device) else {}


@triton.jit
def wait(OVERLAP: tl.constexpr):
    """Let the next kernel start, then wait until all that ran before this one is in memory."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def wait_first(OVERLAP: tl.constexpr):
    """The other way round: the next kernel starts only when all that ran before this one is over.

    For a short kernel between a product and attention. Attention that starts while the product still
    runs is up to 5 % slower (docs/log.md), probably because its programs crowd where there is room.
    """
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
