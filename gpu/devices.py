"""The multiprocessors and cores of a device, and threads to load a model with."""

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

import torch

_PARAMETERS_A_THREAD = 100_000_000  # to load and round: half a second of work


@cache
def multiprocessors(device: torch.device) -> int:
    """Count the multiprocessors of a GPU: so many programs at least run side by side. 1 for a CPU."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def cores(groups: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int:
    """Count the cores that this process may use: by its affinity mask and its control groups' shares.

    `groups`: where control groups are mounted; `own`: the file that names those of the process.
    """
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with suppress(OSError, ValueError):
        for line in own.read_text().splitlines():
            _, controllers, name = line.split(":", 2)
            if controllers and "cpu" not in controllers.split(","):
                continue
            root = groups / controllers if controllers else groups  # version 2 has no name
            place = root / name.lstrip("/")
            for folder in (place, *place.parents[: len(place.parts) - len(root.parts)]):
                count = min(count, _share(folder))
    return count


def _share(folder: Path) -> int:
    """Read a control group's share in whole cores; without a limit more than any machine has."""
    with suppress(OSError, ValueError):
        quota, period = (folder / "cpu.max").read_text().split()
        return max(1, math.ceil(int(quota) / int(period)))
    with suppress(OSError, ValueError):
        quota = (folder / "cpu.cfs_quota_us").read_text()
        period = (folder / "cpu.cfs_period_us").read_text()
        if int(quota) > 0:
            return max(1, math.ceil(int(quota) / int(period)))
    return 1 << 16


@contextmanager
def loading_threads(parameters: int) -> Iterator[None]:
    """Let torch use as many threads as pay for loading a model of this size, at most those it has.

    Between operators threads spin: for a small model that is nine tenths of the CPU's time.
    """
    most = torch.get_num_threads()
    torch.set_num_threads(max(1, min(most, parameters // _PARAMETERS_A_THREAD)))
    try:
        yield
    finally:
        torch.set_num_threads(most)
