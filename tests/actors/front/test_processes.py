"""What gateway processes are told of the engine: here without processes."""

from types import SimpleNamespace
from typing import Any

from ramify.actors.front.gateway_messages import EngineState
from ramify.actors.front.processes import STATE_SECONDS, ProcessFront
from ramify.actors.kit.report import StoreHealth
from ramify.protocol.config import EngineConfig, ModelConfig
from tests.manual_clock import ManualClock


class StubStatus:
    """An engine that is ready, with replicas of which only `info` tells."""

    ready, phase, fault, store, model = True, "ready", None, StoreHealth(), "stub"

    def __init__(self) -> None:
        self.pid = 1

    def info(self) -> dict[str, Any]:
        return {"replicas": [{"replica": 0, "state": "ready", "pid": self.pid}]}


def test_replicas_that_change_are_told_to_every_process(tmp_path) -> None:
    """/v1/info of a gateway process was what it was at its start."""
    clock, status = ManualClock(), StubStatus()
    config = EngineConfig(model=ModelConfig(path=tmp_path))
    front = ProcessFront(config, 2, status, None, clock, [])  # type: ignore[arg-type]
    told: list[list[Any]] = [[], []]
    front.workers = [SimpleNamespace(process=SimpleNamespace(tell=each.append)) for each in told]  # type: ignore[misc]
    front.status_changed()
    for pid in (1, 2, 2, 3):
        status.pid = pid
        clock.advance(STATE_SECONDS)
        front._tell_state(clock.now())
        status.pid = -1  # too soon
        front._tell_state(clock.now())
    for messages in told:
        assert all(isinstance(message, EngineState) for message in messages)
        assert [message.info["replicas"][0]["pid"] for message in messages] == [1, 2, 3]
