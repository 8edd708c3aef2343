"""What a device is made of."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch

_PARAMETERS_A_THREAD = 100_000_000  # to load and round: half a second of work


@cache
def multiprocessors(device: torch.device) -> int:
    """How many programs run side by side at least; 1 for a CPU."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@contextmanager
def loading_threads(parameters: int) -> Iterator[None]:
    """As many of torch's threads as it takes to load a model of this size, at most those it has.

    Between operators threads spin: for a small model that is nine tenths of the CPU's time.
    """
    most = torch.get_num_threads()
    torch.set_num_threads(max(1, min(most, parameters // _PARAMETERS_A_THREAD)))
    try:
        yield
    finally:
        torch.set_num_threads(most)
