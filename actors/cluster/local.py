"""What replicas on one machine share: of several GPUs each has one, of the cores of a CPU its part."""

import os
from pathlib import Path

from ramify.actors.layout import VISIBLE, visible_gpus
from ramify.protocol.config import EngineConfig


def environment(number: int, config: EngineConfig) -> dict[str, str]:
    """Variables of replica `number`: which of several GPUs is its own."""
    mine = gpus(config)
    return {VISIBLE: mine[number % len(mine)]} if len(mine) > 1 else {}


def gpus(config: EngineConfig) -> list[str]:
    """The GPUs that replicas here may have: one each, or as many as a replica has ranks, "0,1"."""
    if config.model.device == "cpu":
        return []
    found, each = visible_gpus(), config.model.tensor_parallel
    return [",".join(found[at : at + each]) for at in range(0, len(found) - each + 1, each)]


def room_beside(config: EngineConfig, new: int, old: int, pid: int) -> bool:
    """Whether replica `new` can have the model while replica `old`, the only one, still has it.

    On another GPU; on a CPU if a fourth more memory is free than the process `pid` of `old` takes.
    """
    found = gpus(config)
    if found:
        return new % len(found) != old % len(found)
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        free = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
        pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
    except (OSError, StopIteration):
        return False
    return free > pages * os.sysconf("SC_PAGE_SIZE") * 5 // 4


def threads(config: EngineConfig) -> int:
    """CPU threads of each replica, or of each of its ranks: its part of the cores."""
    assert config.replicas is not None
    count = config.replicas.count * config.model.tensor_parallel
    return config.model.threads or max(1, (os.cpu_count() or 1) // count)
