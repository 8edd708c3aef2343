"""Blocks that are right but for rounding are equal; a damaged one differs, whatever its seal says."""

import os
import queue
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ramify.actors.tiers import comparer
from ramify.actors.tiers.comparer import BOUNDS, BlockComparer, difference, open_comparer
from ramify.gpu.kv.host_memory import Bytes, HostMemory
from ramify.protocol.config import ModelConfig
from ramify.protocol.errors import ConfigError
from ramify.protocol.messages import CompareOrder, CompareResult
from ramify.protocol.plan import ExecutorInfo

SIZE, KEY, TWIN = 64 * 256, b"k" * 16, b"t" * 16
DTYPES = [*BOUNDS, "uint64"]
SETTINGS: dict[str, Any] = {"path": Path("model"), "kv_canary": 0.5, "kv_host": 1 << 20}


def coded(values: "np.ndarray[Any, np.dtype[np.float32]]", dtype: str) -> Bytes:
    if dtype == "bfloat16":
        return (values.view(np.uint32) + 0x8000 >> 16).astype(np.uint16).view(np.uint8)
    return values.astype(np.dtype(dtype)).view(np.uint8)


def block(dtype: str, noise: float = 0.0) -> Bytes:
    """Values of which some layers are a hundredth of others, each with a relative error."""
    width = 2 if dtype in ("bfloat16", "float16") else 4
    rng = np.random.default_rng(1)
    values = rng.standard_normal((64, SIZE // 64 // width), dtype=np.float32)
    values[::2] /= 100
    rng = np.random.default_rng(2)
    return coded(
        values * (1 + noise * rng.standard_normal(values.shape, dtype=np.float32)), dtype
    ).ravel()


class Stage:
    def __init__(self, dtype: str) -> None:
        self.memory = HostMemory(4, SIZE)
        self.results: queue.SimpleQueue[CompareResult] = queue.SimpleQueue()
        self.comparer = BlockComparer(dtype, SIZE, self.results.put)
        self.comparer.renew(self.memory.path, 4)

    def fill(self, slot: int, key: bytes, data: Bytes) -> None:
        assert self.memory.write(slot, key, self.memory.seal(key, data), data)

    def compare(self) -> CompareResult:
        self.comparer.submit([CompareOrder(KEY, 0, TWIN, 1)])
        return self.results.get(timeout=30)


@pytest.mark.parametrize("dtype", BOUNDS)
def test_what_rounding_makes_is_equal_and_a_damaged_layer_is_not(dtype: str) -> None:
    stage, right = Stage(dtype), block(dtype)
    rounded = block(dtype, BOUNDS[dtype] / 3)
    assert 0 < (difference(rounded, right, dtype) or 0) < BOUNDS[dtype] / 2
    stage.fill(0, KEY, rounded)
    stage.comparer.submit([CompareOrder(KEY, 0, TWIN, 1)])  # its twin comes later
    with pytest.raises(queue.Empty):
        stage.results.get(timeout=0.02)
    stage.fill(1, TWIN, right)
    assert stage.results.get(timeout=30).verdict == "equal"
    for part in (0, 33):  # one layer of 64 has another one's values, under a right seal
        damaged = rounded.copy()
        damaged.reshape(64, -1)[part] = rounded.reshape(64, -1)[part - 2]
        stage.fill(0, KEY, damaged)
        result = stage.compare()
        assert result.verdict == "differs"
        assert result.difference > 4 * result.bound
    stage.comparer.close()


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_and_what_is_no_float(dtype: str) -> None:
    right = np.zeros(SIZE, dtype=np.uint8)
    bad = right.copy()
    bad[:8] = 255  # not a number, of each kind of float
    assert difference(right, right, dtype) == 0
    assert difference(bad, right, dtype) == np.inf
    if dtype in BOUNDS:
        assert difference(right, bad, dtype) is None


def test_what_cannot_be_compared_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparer, "_GIVE_UP_S", 0.0)
    stage = Stage("float32")
    assert stage.compare().verdict == "unknown"
    stage.fill(0, KEY, block("float32"))
    assert stage.compare().verdict == "unknown"  # no twin comes
    stage.comparer.close()


def test_the_memory_of_an_executor_that_died_at_once() -> None:
    stage = Stage("float32")
    stage.comparer.renew(f"/proc/{os.getpid()}/fd/99999", 4)
    assert stage.compare().verdict == "unknown"
    stage.comparer.renew(stage.memory.path, 4)
    stage.fill(0, KEY, block("float32"))
    stage.fill(1, TWIN, block("float32"))
    assert stage.compare().verdict == "equal"
    stage.comparer.close()


@pytest.mark.parametrize("more", [{"state_slots": 4}, {"window": 16}, {"host_memory": ""}])
async def test_a_model_whose_kv_is_not_compared_is_refused(more: dict[str, Any]) -> None:
    given = {"host_blocks": 4, "host_memory": "somewhere"} | more
    info = ExecutorInfo("m", "M", 0, 10, 64, 1, 8, 1, 8, "cpu", "float32", "none", [], 4, 0.0, **given)
    with pytest.raises(ConfigError, match=r"--kv-canary 0\.5: .*leave it out"):
        open_comparer(ModelConfig(**SETTINGS), info, None)  # type: ignore[arg-type]


@pytest.mark.parametrize("more", [{"kv_host": 0}, {"tensor_parallel": 2}, {"kv_dtype": "fp8"}])
def test_settings_that_do_not_go_together_are_refused(more: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="--kv-canary"):
        ModelConfig(**SETTINGS | more)
