"""What a cluster does beside starting processes, which `e2e/test_replicas.py` tests."""

from pathlib import Path
from typing import Any

from ramify.actors.cluster.cluster import DEATHS, WITHIN_SECONDS, Cluster
from ramify.actors.cluster.metrics import ClusterMetrics
from ramify.actors.kit.clock import ManualClock
from ramify.protocol import messages as m
from ramify.protocol.config import EngineConfig, ModelConfig, ReplicasConfig


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


async def test_a_session_under_which_every_replica_dies_is_ended() -> None:
    """It may be why they die. One that meets as many deaths in a longer time goes on."""
    clock, told, metrics = ManualClock(), Told(), ClusterMetrics()
    config = EngineConfig(model=ModelConfig(path=Path("m")), replicas=ReplicasConfig(count=2))
    cluster = Cluster(config, spec=None, clock=clock, metrics=metrics, check_idle=False, epoch="e")
    cluster._spread = told
    for death in range(DEATHS):
        cluster._move([1] if death % 2 else [1, 2], died=True)
        clock.advance(1.0)
    cluster._move([1, 3])  # nothing died under these
    ends = [(session, type(message)) for session, message in told.messages]
    assert ends.count((1, m.Lost)) == 1
    assert ends.count((1, m.ChangeCore)) == DEATHS
    assert ends.count((2, m.ChangeCore)) == DEATHS // 2
    assert metrics.moves == len(ends) - 1
    told.messages.clear()
    for _ in range(2 * DEATHS):
        clock.advance(WITHIN_SECONDS / 4)
        cluster._move([9], died=True)
    assert all(isinstance(message, m.ChangeCore) for _, message in told.messages)
