"""Where the executor runs."""

from pathlib import Path
from typing import Literal

import pytest

from ramify.actors.placement import cuda_driver_present, place
from ramify.protocol.config import EngineConfig, ModelConfig


def never() -> bool:
    raise AssertionError("not asked: the configuration decides")


def config(
    executor: Literal["auto", "thread", "process"], device: Literal["auto", "cpu", "cuda"]
) -> EngineConfig:
    return EngineConfig(model=ModelConfig(path=Path("m"), device=device), executor=executor)


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda"])
@pytest.mark.parametrize("executor", ["thread", "process"])
def test_explicit_placement_is_obeyed(
    executor: Literal["thread", "process"], device: Literal["auto", "cpu", "cuda"]
) -> None:
    assert place(config(executor, device), never).executor == executor


def test_explicit_device_decides_an_automatic_placement() -> None:
    assert place(config("auto", "cpu"), never).executor == "thread"
    assert place(config("auto", "cuda"), never).executor == "process"


@pytest.mark.parametrize(("cuda", "expected"), [(True, "process"), (False, "thread")])
def test_automatic_device_looks_for_a_driver(cuda: bool, expected: str) -> None:
    placement = place(config("auto", "auto"), lambda: cuda)
    assert placement.executor == expected
    assert placement.reason


def test_looking_for_a_driver_is_cheap_and_safe() -> None:
    assert cuda_driver_present() in (True, False)
