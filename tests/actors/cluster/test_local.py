"""Which GPU and how many threads a replica on this machine gets. `e2e/test_replicas.py` starts them."""

from pathlib import Path
from typing import Any

import pytest

from ramify.actors.cluster import local
from ramify.protocol.config import EngineConfig, ModelConfig, ReplicasConfig


def config(**model: Any) -> EngineConfig:
    return EngineConfig(model=ModelConfig(path=Path("m"), **model), replicas=ReplicasConfig(count=4))


def test_each_replica_has_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(local.VISIBLE, "2,5")
    assert [local.environment(n, config()) for n in range(3)] == [
        {local.VISIBLE: "2"},
        {local.VISIBLE: "5"},
        {local.VISIBLE: "2"},
    ]
    assert local.environment(0, config(device="cpu")) == {}
    monkeypatch.delenv(local.VISIBLE)
    monkeypatch.setattr(local, "_gpus", lambda: ["0"])
    assert local.environment(3, config(device="cuda")) == {}
    assert local.gpus(config(device="cuda")) == ["0"]


def test_on_a_cpu_they_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 10)
    assert local.threads(config()) == 2
    assert local.threads(config(threads=7)) == 7
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    assert local.threads(config()) == 1
