"""Which actor runs where, decided once from the configuration.

Gateway, directory, sessions, scheduler and cache share the engine's event loop: what they exchange
per step is far cheaper in one process than over a link. Only the executor has a choice.
"""

import os
from collections.abc import Callable
from typing import Literal

import msgspec

from ramify.protocol.config import EngineConfig


class Placement(msgspec.Struct, frozen=True):
    """The decision, and why, for the log."""

    executor: Literal["thread", "process"]
    reason: str


def cuda_driver_present() -> bool:
    """True if this machine has an NVIDIA driver (natively, or in WSL).

    Looks at device nodes, because asking torch would import it into the engine's process, which
    is what a process for the executor avoids. A wrong answer costs speed, never correctness: both
    placements serve both kinds of device.
    """
    return os.path.exists("/dev/nvidiactl") or os.path.exists("/dev/dxg")


def place(config: EngineConfig, has_cuda: Callable[[], bool] = cuda_driver_present) -> Placement:
    """Decide. `has_cuda` is asked only if the device and the placement are both "auto"."""
    if config.executor != "auto":
        return Placement(config.executor, "asked for")
    device = config.model.device
    if device == "cuda" or (device == "auto" and has_cuda()):
        return Placement("process", "kernel launches must not wait for the event loop's thread")
    return Placement("thread", "torch releases the interpreter lock in its CPU kernels")
