"""Replicas in processes of this machine: started, watched, started again.

On a machine with several
GPUs each gets one of them; on a CPU each gets its part of the cores.

It does not know what the messages mean.
"""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from ramify.actors.cluster.member import Member
from ramify.actors.cluster.replica_messages import MAX_FRAME, Begin, FromFront, ToFront
from ramify.actors.processes.child_process import ChildProcess
from ramify.actors.processes.messages import encoder
from ramify.protocol.config import EngineConfig

PROGRAM = "ramify.actors.cluster.replica"
VISIBLE = "CUDA_VISIBLE_DEVICES"


class LocalReplica:
    """One process. `run` lets it live."""

    def __init__(self, number: int) -> None:
        self.member = Member(number, self._kill)
        self._child: ChildProcess[FromFront, ToFront] | None = None

    async def run(
        self,
        begin: Begin,
        decoder: "msgspec.msgpack.Decoder[Any]",
        receive: Callable[[Member, ToFront], None],
        gone: Callable[[Member], None],
        variables: dict[str, str],
    ) -> str:
        """Start it; return why it has ended. Cancelled, it is killed. Raises OSError.

        `gone` is called as soon as its link has ended. `variables`: of its environment.
        """
        child: ChildProcess[FromFront, ToFront] = await ChildProcess.start(
            f"replica {self.member.number}",
            PROGRAM,
            decoder,
            encoder(),
            lambda message: receive(self.member, message),
            max_frame=MAX_FRAME,
            environment=variables,
            on_end=lambda: gone(self.member),
        )
        self._child = child
        self.member.pid = child.pid
        self.member.attach(child.link, begin)
        code = await child.ended()
        return self.member.why or child.explain(code)

    def _kill(self) -> None:
        if self._child is not None:
            self._child.kill()


def environment(number: int, config: EngineConfig) -> dict[str, str]:
    """Variables of replica `number`: which of several GPUs is its own."""
    mine = gpus(config)
    return {VISIBLE: mine[number % len(mine)]} if len(mine) > 1 else {}


def gpus(config: EngineConfig) -> list[str]:
    """The GPUs that replicas here may have."""
    if config.model.device == "cpu":
        return []
    given = os.environ.get(VISIBLE)
    return given.split(",") if given else _gpus()


def _gpus() -> list[str]:
    """The GPUs of this machine, as CUDA counts them."""
    found = [each for each in Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", each.name)]
    return [str(number) for number in range(len(found))]


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
    """CPU threads of each replica: its part of the cores."""
    assert config.replicas is not None
    return config.model.threads or max(1, (os.cpu_count() or 1) // config.replicas.count)
