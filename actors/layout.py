"""Which actor runs where, decided once from the configuration.

Scheduler and cache share the engine's event loop: what they exchange per step is far cheaper in one
process than over a link. The executor has a choice, and so have the gateways with their sessions.
"""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import msgspec

from ramify.protocol.config import EngineConfig

VISIBLE = "CUDA_VISIBLE_DEVICES"
CORES_PER_GATEWAY, MOST_GATEWAYS = 4, 4  # on CUDA; measured with 256 sockets and steps of 2 ms


class ProcessLayout(msgspec.Struct, frozen=True):
    """The decisions, and why, for the log. `gateways`: processes; 0: in the engine's own."""

    executor: Literal["thread", "process"]
    gateways: int
    reasons: dict[str, str]

    def told(self, what: Literal["executor", "gateways"]) -> dict[str, Any]:
        """One decision as fields of a log record."""
        where: str | int = self.executor if what == "executor" else self.gateways or "in the engine"
        return {"where" if what == "executor" else "processes": where, "why": self.reasons[what]}


def cuda_driver_present() -> bool:
    """True if this machine has an NVIDIA driver (natively, or in WSL).

    Looks at device nodes, because asking torch would import it into the engine's process, which
    is what a process for the executor avoids. A wrong answer costs speed, never correctness: both
    layouts serve both kinds of device.
    """
    return os.path.exists("/dev/nvidiactl") or os.path.exists("/dev/dxg")


def visible_gpus(devices: Path = Path("/dev")) -> list[str]:
    """NVIDIA GPUs that processes of this one may use, as CUDA numbers them. None where the system hides
    their nodes (WSL).
    """
    if given := os.environ.get(VISIBLE):
        return given.split(",")
    found = [each for each in devices.glob("nvidia*") if re.fullmatch(r"nvidia\d+", each.name)]
    return [str(number) for number in range(len(found))]


def expects_cuda(device: str, has_cuda: Callable[[], bool] = cuda_driver_present) -> bool:
    """Whether a model for `device` (as configured) will most likely compute with CUDA."""
    return device == "cuda" or (device == "auto" and has_cuda())


def layout_of(
    config: EngineConfig,
    has_cuda: Callable[[], bool] = cuda_driver_present,
    cores: int | None = None,
) -> ProcessLayout:
    """Decide. `has_cuda` is asked only if the device is not said and a decision depends on it.

    The executor has a process on CPUs as well: a thread that hangs cannot be ended, so the server would
    have to. With the bundled model the process costs 20 to 40 MB of memory, and of CPU nothing at the
    start, 5% for a token of a lone stream, nothing with 16 of them.

    `cores`: of this machine. On CUDA, sockets and sessions get up to four processes. With steps of
    2 ms and 256 sockets, one process for all is busy to 100% and the next plan waits 1.6 ms at the
    median; with four gateways it waits 0.2 ms, and each of them has a quarter of a core to spare.
    """
    executor: Literal["thread", "process"]
    if config.executor != "auto":
        executor, why_executor = config.executor, "asked for"
    else:
        executor, why_executor = "process", "one that hangs, or takes all memory, is replaced"
    if config.gateways is not None:
        gateways, why_gateways = config.gateways, "asked for"
    elif config.replicas is not None:
        gateways, why_gateways = 0, "no step waits for this process: replicas compute in others"
    elif expects_cuda(config.model.device, has_cuda):
        have = cores if cores is not None else os.cpu_count() or 1
        gateways = min(MOST_GATEWAYS, max(1, have // CORES_PER_GATEWAY))
        why_gateways = "sockets must not delay the next plan; one for each four cores, at most four"
    else:
        gateways, why_gateways = 0, "steps on a CPU are long, and its cores are the model's"
    return ProcessLayout(executor, gateways, {"executor": why_executor, "gateways": why_gateways})
