"""What the engine tells of itself."""

from pathlib import Path

import pytest

from ramify.actors import engine
from ramify.actors.kit.metrics import Metrics
from ramify.protocol.config import EngineConfig, ModelConfig


def test_telling_of_itself_reads_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each request of OpenAI's API asks; the version's metadata took 0.6 ms of it."""
    status = engine.EngineStatus(EngineConfig(model=ModelConfig(path=Path("model"))), "e", Metrics())
    told = status.info()
    monkeypatch.setattr(engine, "version", None)
    assert status.info() == told
    assert told["version"]
