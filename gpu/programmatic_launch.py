"""Programmatic dependent launch: a kernel starts while the one ahead of it in the stream still ends.

A kernel that is launched this way must call `wait` before it reads what a kernel of the same step
writes, and before it writes anything itself. That holds even if it does not need the results of the
kernel ahead, because the kernel after it relies on both. Before `wait` it may read weights and the
step's inputs: those are written ahead of the step's first kernel (`embed_norm`). That kernel is
launched normally, and so begins when everything before it is over, as do all kernels and copies that
are launched normally. Between kernels the GPU is then idle for a fraction of a microsecond instead of
one or two, inside CUDA graphs too.
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
    """Whether the device can launch so: a Hopper GPU or a later one."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def launch_options(device: torch.device) -> dict[str, Any]:
    """Make the launch options of a kernel that calls `wait` with OVERLAP = `overlaps(device)`."""
    return {"launch_pdl": True} if overlaps(device) else {}


def overlap_options(device: torch.device) -> dict[str, Any]:
    """Make `launch_options` and the kernel's argument OVERLAP."""
    return {"OVERLAP": overlaps(device), **launch_options(device)}


@triton.jit
def wait(OVERLAP: tl.constexpr):
    """Let the next kernel start, then wait until all that ran before this one is in memory."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def wait_first(OVERLAP: tl.constexpr):
    """Wait first, then let the next kernel start.

    For a short kernel between a product and attention. If attention starts while the product still runs,
    it is up to 5 % slower (docs/log/gpu.md), probably because its programs crowd onto the few
    multiprocessors that are free.
    """
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
