"""Stamps of KV: equal for equal checkpoints, others for other weights and ways to keep numbers."""

from pathlib import Path
from typing import Any

from msgspec import structs

from ramify.gpu.executors.fake import FakeExecutor
from ramify.gpu.startup.stamp import kv_stamp
from ramify.protocol.config import ModelConfig


def test_other_weights_settings_or_types_have_other_stamps(tmp_path: Path) -> None:
    info = FakeExecutor().info

    def stamp(**changes: Any) -> str:
        return kv_stamp(ModelConfig(path=tmp_path, **changes), info)

    (tmp_path / "config.json").write_text("{}")
    weights = bytearray(300_000)
    (tmp_path / "model.safetensors").write_bytes(weights)
    first = stamp()
    assert stamp() == first != stamp(deterministic=True)
    assert len({first, stamp(tensor_parallel=2), stamp(tensor_parallel=4)}) == 3
    assert kv_stamp(ModelConfig(path=tmp_path), structs.replace(info, kv_dtype="fp8")) != first
    (tmp_path / "model.safetensors").write_bytes(bytes(byte ^ 1 for byte in weights))
    assert stamp() != first
