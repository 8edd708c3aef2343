"""Where the executor runs."""

from pathlib import Path
from typing import Literal

import pytest

from ramify.actors.layout import VISIBLE, cuda_driver_present, layout_of, visible_gpus
from ramify.protocol.config import EngineConfig, ModelConfig
from ramify.protocol.errors import ConfigError


def never() -> bool:
    raise AssertionError("not asked: the configuration decides")


def config(
    executor: Literal["auto", "thread", "process"],
    device: Literal["auto", "cpu", "cuda"],
    gateways: int | None = None,
) -> EngineConfig:
    model = ModelConfig(path=Path("m"), device=device)
    return EngineConfig(model=model, executor=executor, gateways=gateways)


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda"])
@pytest.mark.parametrize("executor", ["thread", "process"])
def test_explicit_placement_is_obeyed(
    executor: Literal["thread", "process"], device: Literal["auto", "cpu", "cuda"]
) -> None:
    layout = layout_of(config(executor, device, 3), never)
    assert (layout.executor, layout.gateways) == (executor, 3)


def test_explicit_device_decides_an_automatic_placement() -> None:
    for device, gateways in (("cpu", 0), ("cuda", 1)):
        layout = layout_of(config("auto", device), never, 2)
        assert (layout.executor, layout.gateways) == ("process", gateways)


@pytest.mark.parametrize("cuda", [False, True])
def test_automatic_device_looks_for_a_driver(cuda: bool) -> None:
    layout = layout_of(config("auto", "auto"), lambda: cuda, 2)
    assert (layout.executor, layout.gateways) == ("process", int(cuda))
    assert layout.told("executor")["why"]


@pytest.mark.parametrize(("cores", "expected"), [(1, 1), (2, 1), (8, 2), (16, 4), (128, 4)])
def test_gateways_on_cuda_follow_the_cores(cores: int, expected: int) -> None:
    layout = layout_of(config("auto", "cuda"), never, cores)
    assert layout.gateways == expected
    assert layout.told("gateways")["processes"] == expected


def test_a_cpu_keeps_sockets_in_the_engine() -> None:
    layout = layout_of(config("auto", "cpu"), never)
    assert layout.gateways == 0
    assert layout.told("gateways")["processes"] == "in the engine"


@pytest.mark.parametrize("gateways", [-1, 65])
def test_impossible_numbers_of_gateways_are_refused(gateways: int) -> None:
    with pytest.raises(ConfigError, match="--gateways"):
        config("auto", "cpu", gateways)


def test_looking_for_a_driver_is_cheap_and_safe() -> None:
    assert cuda_driver_present() in (True, False)


def test_gpus_are_counted_by_their_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VISIBLE, raising=False)
    assert visible_gpus(tmp_path) == []
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert visible_gpus(tmp_path) == ["0", "1"]
    monkeypatch.setenv(VISIBLE, "4,5,6")
    assert visible_gpus(tmp_path) == ["4", "5", "6"]
