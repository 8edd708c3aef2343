"""Which GPU and how many threads a replica on this machine gets. `e2e/test_replicas.py` starts them."""

import os
from pathlib import Path
from typing import Any

import pytest

from ramify.actors.cluster import local
from ramify.actors.layout import VISIBLE
from ramify.protocol.config import EngineConfig, ModelConfig, ReplicasConfig


def config(**model: Any) -> EngineConfig:
    return EngineConfig(model=ModelConfig(path=Path("m"), **model), replicas=ReplicasConfig(count=4))


def test_each_replica_has_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VISIBLE, "2,5")
    assert [local.environment(n, config()) for n in range(3)] == [
        {VISIBLE: "2"},
        {VISIBLE: "5"},
        {VISIBLE: "2"},
    ]
    assert local.environment(0, config(device="cpu")) == {}
    monkeypatch.delenv(VISIBLE)
    monkeypatch.setattr(local, "visible_gpus", lambda: ["0"])
    assert local.environment(3, config(device="cuda")) == {}
    assert local.gpus(config(device="cuda")) == ["0"]


def test_the_ranks_of_a_replica_have_a_gpu_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VISIBLE, "2,5,6,7,8")
    two = config(device="cuda", tensor_parallel=2)
    assert [local.environment(n, two)[VISIBLE] for n in range(3)] == ["2,5", "6,7", "2,5"]
    assert local.gpus(config(tensor_parallel=8)) == []
    monkeypatch.setattr("os.cpu_count", lambda: 16)
    assert local.threads(config(device="cpu", tensor_parallel=2)) == 2


def test_on_a_cpu_they_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 10)
    assert local.threads(config()) == 2
    assert local.threads(config(threads=7)) == 7
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    assert local.threads(config()) == 1


def test_a_second_process_beside_the_first_one_needs_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU of its own, or memory."""
    monkeypatch.setenv(VISIBLE, "2,5")
    assert local.room_beside(config(), 1, 0, 1)
    assert not local.room_beside(config(), 2, 0, 1)
    monkeypatch.setenv(VISIBLE, "2")
    assert not local.room_beside(config(), 1, 0, 1)
    files = {"/proc/meminfo": "MemTotal: 9 kB\nMemAvailable: 400 kB\n", "/proc/7/statm": "900 {} 3"}
    page = os.sysconf("SC_PAGE_SIZE")

    def read(path: Path, encoding: str) -> str:
        try:
            return files[str(path)].format((300 << 10) // page)
        except KeyError:
            raise FileNotFoundError(path) from None

    monkeypatch.setattr(Path, "read_text", read)
    assert local.room_beside(config(device="cpu"), 1, 0, 7)
    assert not local.room_beside(config(device="cpu"), 1, 0, 8)
    files["/proc/meminfo"] = "MemTotal: 9 kB\nMemAvailable: 350 kB\n"
    assert not local.room_beside(config(device="cpu"), 1, 0, 7)
    del files["/proc/meminfo"]
    assert not local.room_beside(config(device="cpu"), 1, 0, 7)
