"""What a device is made of."""

from functools import cache

import torch


@cache
def multiprocessors(device: torch.device) -> int:
    """How many programs run side by side at least; 1 for a CPU."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
