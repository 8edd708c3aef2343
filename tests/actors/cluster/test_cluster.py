"""What a cluster does beside starting processes, which `e2e/test_replicas.py` tests."""

import asyncio
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from ramify.actors.cluster.cluster import (
    DEATHS,
    LOOK_SECONDS,
    WITHIN_SECONDS,
    WITHOUT_SECONDS,
    Cluster,
    NoReplicas,
)
from ramify.actors.cluster.member import Member
from ramify.actors.cluster.metrics import ClusterMetrics
from ramify.actors.cluster.wire import Up
from ramify.actors.kit.clock import ManualClock
from ramify.protocol import messages as m
from ramify.protocol.config import EngineConfig, ModelConfig, ReplicasConfig
from ramify.protocol.plan import ExecutorInfo


class Told:
    """A `Spread` that keeps what sessions are told."""

    def __init__(self) -> None:
        self.messages: list[tuple[int, Any]] = []

    def put(self, key: int, message: Any) -> None:
        self.messages.append((key, message))

    def start(self) -> None:
        pass

    def flush(self) -> None:
        pass


async def test_a_replica_that_loads_for_long_is_waited_for() -> None:
    """Only a front with none at all gives up."""
    clock = ManualClock()
    config = EngineConfig(model=ModelConfig(path=Path("m")), replicas=ReplicasConfig(count=1))
    cluster = Cluster(
        config, spec=None, clock=clock, metrics=ClusterMetrics(), check_idle=False, epoch="e"
    )

    async def pass_time() -> None:
        for _ in range(round(1.5 * WITHOUT_SECONDS / LOOK_SECONDS)):
            clock.advance(LOOK_SECONDS)
            for _ in range(3):
                await asyncio.sleep(0)

    cluster._members[0] = Member(0, lambda: None)
    with pytest.raises(ExceptionGroup, match="unhandled") as failed:
        async with anyio.create_task_group() as group:
            await group.start(cluster._watch)
            await pass_time()
            del cluster._members[0]
            await pass_time()
            group.cancel_scope.cancel()
    assert cluster._without > WITHOUT_SECONDS
    assert isinstance(failed.value.exceptions[0], NoReplicas)


async def test_a_session_under_which_every_replica_dies_is_ended() -> None:
    """It may be why they die. One that meets as many deaths in a longer time goes on."""
    clock, told, metrics = ManualClock(), Told(), ClusterMetrics()
    config = EngineConfig(model=ModelConfig(path=Path("m")), replicas=ReplicasConfig(count=2))
    cluster = Cluster(config, spec=None, clock=clock, metrics=metrics, check_idle=False, epoch="e")
    cluster._spread = told
    for death in range(DEATHS):
        cluster._move([1, 4] if death % 2 else [1, 2, 4], ran={1, 2})
        clock.advance(1.0)
    cluster._move([1, 3])  # nothing died under these
    ends = [(session, type(message)) for session, message in told.messages]
    assert ends.count((1, m.Lost)) == 1
    assert ends.count((1, m.ChangeCore)) == DEATHS
    assert ends.count((2, m.ChangeCore)) == DEATHS // 2
    assert ends.count((4, m.ChangeCore)) == DEATHS  # nothing ran in it: it cannot be why
    assert metrics.moves == len(ends) - 1
    told.messages.clear()
    for _ in range(2 * DEATHS):
        clock.advance(WITHIN_SECONDS / 4)
        cluster._move([9], ran={9})
    assert all(isinstance(message, m.ChangeCore) for _, message in told.messages)


def test_a_replica_whose_texts_would_be_others_is_sent_away() -> None:
    """A session that moves to another precision, or other weights, would not say the same."""
    config = EngineConfig(model=ModelConfig(path=Path("m")), replicas=ReplicasConfig(count=2))
    cluster = Cluster(
        config, spec=None, clock=ManualClock(), metrics=ClusterMetrics(), check_idle=False, epoch="e"
    )
    first = ExecutorInfo(
        model="m",
        architecture="A",
        parameters=8,
        vocab_size=16,
        context=32,
        page_size=1,
        pages=64,
        max_rows=4,
        step_tokens=8,
        device="cpu",
        dtype="float32",
        attention="torch",
        eos_token_ids=[2],
        kv_bytes_per_token=1,
        load_seconds=0.0,
    )
    more = msgspec.structs.replace(first, pages=128, device="cuda", attention="triton")
    other = msgspec.structs.replace(first, quantization="int8", eos_token_ids=[2, 3])
    killed: list[int] = []
    for number, info in enumerate((first, more, other)):
        member = cluster._members[number] = Member(number, lambda n=number: killed.append(n))  # type: ignore[misc]
        cluster._joined(member, Up(info, pid=1, host="h"))
    assert killed == [2]
    assert [member.state for member in cluster._members.values()] == ["ready", "ready", "starting"]
    why = cluster._members[2].why
    assert "its quantization is 'int8', the others' 'none'" in why
    assert "its eos_token_ids is [2, 3], the others' [2]" in why
    assert "--quantization" in why
