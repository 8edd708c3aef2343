"""Several ranks behind one handle: the end of one is the end of all, and says which one it was."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from ramify.actors.executor.actor import start_executor
from ramify.actors.executor.process_executor import ProcessExecutor
from ramify.actors.executor.spec import FactorySpec, ModelSpec
from ramify.actors.kit.mailbox import Mailbox
from ramify.protocol.config import ModelConfig
from ramify.protocol.errors import ModelError
from ramify.protocol.messages import SchedulerEvent
from ramify.protocol.plan import ExecutorDown, StepPlan, unpack
from tests.forked_children import FRESH

MODULE = '''
import os
import time
from msgspec.structs import replace
from stand_ins import Scripted
from ramify.gpu.executors.base import Follower
from ramify.gpu.ranks.ring import StepRing
from ramify.protocol.errors import ModelError


class Leader(Scripted):
    """Tells each plan's number."""

    def __init__(self, place):
        super().__init__()
        self.info = replace(self.info, rank_memory="0")
        self.ring = StepRing(place)

    def launch(self, plan):
        self.ring.put(str(plan.step).encode())
        return super().launch(plan)

    def close(self):
        self.ring.put(b"")


class Follows(Follower):
    """Step 500 raises here."""

    def __init__(self, place):
        self.info = replace(Scripted().info, rank_memory=str(place.rank))
        self.ring = StepRing(place)

    def follow(self, idle):
        while (message := self.ring.take(0.05)) != b"":
            if message is None:
                idle()
            elif message == b"500":
                raise RuntimeError("out of memory")

    def close(self):
        pass


def rank(place, fails=False):
    if fails and place.rank == 2:
        raise ModelError("5 heads are not divisible by 3")
    return Follows(place) if place.rank else Leader(place)
'''


@pytest.fixture
def ranks(stand_ins: None, tmp_path: Path) -> FactorySpec:
    (tmp_path / "ranks_stand_in.py").write_text(MODULE)
    return FactorySpec("ranks_stand_in:rank", ranks=3)


def box() -> Mailbox[SchedulerEvent]:
    return Mailbox("scheduler", 100)


async def events(mailbox: Mailbox[SchedulerEvent], count: int) -> list[Any]:
    found: list[Any] = []
    while len(found) < count:
        found += await asyncio.wait_for(mailbox.drain(), 30)
    return found


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


async def test_plans_are_told_once_and_answered_by_rank_0(
    ranks: FactorySpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FRESH, "1")  # one that is forked may have run for less than is counted
    before, mailbox = descriptors(), box()
    handle = await start_executor(ranks, "process", mailbox)
    assert isinstance(handle, ProcessExecutor)
    assert len(set(handle.pids)) == 3
    assert handle.info.host_memory == "0:1:2"  # whose parts are a block
    for step in range(30):
        handle.tell(StepPlan(step))
    assert [unpack(event.tokens)[0] for event in await events(mailbox, 30)] == list(range(30))
    while [each.steps for each in handle.ranks()] != [30, 30, 30]:
        await asyncio.sleep(0.01)
    assert [(each.rank, each.behind, each.pid) for each in handle.ranks()] == [
        (rank, 0, pid) for rank, pid in enumerate(handle.pids)
    ]
    assert all(each.resident_bytes > 1 << 20 and each.cpu_s > 0 for each in handle.ranks())
    assert await handle.stop(10)
    assert descriptors() == before


@pytest.mark.parametrize("rank", [0, 2])
async def test_a_rank_that_is_killed_ends_all_with_its_reason(ranks: FactorySpec, rank: int) -> None:
    mailbox = box()
    handle = await start_executor(ranks, "process", mailbox)
    assert isinstance(handle, ProcessExecutor)
    os.kill(handle.pids[rank], signal.SIGKILL)
    (down,) = await events(mailbox, 1)
    pid = handle.pids[rank]
    assert down == ExecutorDown(f"rank {rank}: its process {pid} was killed by SIGKILL")
    await handle.stop(10)
    for pid in handle.pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


async def test_a_rank_that_fails_says_why(ranks: FactorySpec) -> None:
    mailbox = box()
    handle = await start_executor(ranks, "process", mailbox)
    handle.tell(StepPlan(500))
    found = await events(mailbox, 2)
    assert found[-1].reason.startswith("rank ")
    assert found[-1].reason.endswith("RuntimeError: out of memory")
    await handle.stop(10)


async def test_a_stopped_rank_gives_no_sign_of_life(ranks: FactorySpec) -> None:
    """The others alone are not heard; so the watchdog ends all."""
    mailbox = box()
    handle = await start_executor(ranks, "process", mailbox)
    assert isinstance(handle, ProcessExecutor)
    signs = handle.signs
    while handle.signs == signs:
        await asyncio.sleep(0.02)
    os.kill(handle.pids[1], signal.SIGSTOP)
    await asyncio.sleep(0.1)
    signs = handle.signs
    await asyncio.sleep(1.5)
    assert handle.signs <= signs + 1  # what was on its way
    handle.tell(StepPlan(1))
    await events(mailbox, 1)
    while [each.behind for each in handle.ranks()] != [0, 1, 0]:
        await asyncio.sleep(0.01)
    assert [each.state == "stopped" for each in handle.ranks()] == [False, True, False]
    handle.give_up("silence")
    await handle.stop(10)


async def test_a_rank_that_cannot_load_says_why(ranks: FactorySpec) -> None:
    before = descriptors()
    failing = FactorySpec(ranks.factory, {"fails": True}, ranks=3)
    with pytest.raises(ModelError, match="5 heads are not divisible by 3"):
        await start_executor(failing, "process", box())
    assert descriptors() == before


async def test_threads_are_no_ranks(tmp_path: Path) -> None:
    config = ModelConfig(path=Path("gpu/default_model"), tensor_parallel=2)
    with pytest.raises(ModelError, match="ranks are processes; give --executor process"):
        await start_executor(ModelSpec(config), "thread", box())


async def test_no_process_is_started_for_ranks_that_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ProcessExecutor, "_start_rank", None)
    config = ModelConfig(path=Path("gpu/default_model"), tensor_parallel=64)
    with pytest.raises(ModelError, match="8 heads are not divisible by 64"):
        await start_executor(ModelSpec(config), "process", box())
