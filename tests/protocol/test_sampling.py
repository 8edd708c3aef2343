"""Sampling settings out of range cannot be made, by whomever."""

from typing import Any

import msgspec
import pytest

from ramify.protocol.errors import InvalidField
from ramify.protocol.sampling import MIN_TEMPERATURE, RANGES, SamplingParams
from ramify.protocol.wire import Generate


@pytest.mark.parametrize("name", list(RANGES))
def test_the_range_is_the_same_for_clients_and_inside(name: str) -> None:
    low, high = RANGES[name]
    for value in (low, high):
        SamplingParams(**{name: value})
        Generate(id=1, **{name: value})
    for value in (low - 1, high * 2 + 1, float("nan"), float("inf")):
        with pytest.raises(InvalidField, match=name):
            SamplingParams(**{name: value})
        with pytest.raises((msgspec.ValidationError, TypeError)):
            msgspec.convert({"type": "generate", "id": 1, name: value}, Generate)


@pytest.mark.parametrize("value", [5e-324, 1e-45, MIN_TEMPERATURE / 2])
def test_a_temperature_is_0_or_a_float32(value: float) -> None:
    for make in (SamplingParams, lambda **fields: Generate(id=1, **fields)):
        made: Any = make
        with pytest.raises(InvalidField, match="temperature"):
            made(temperature=value)
    assert not SamplingParams(temperature=MIN_TEMPERATURE).greedy


def test_what_another_process_sends_is_checked_too() -> None:
    data = msgspec.msgpack.encode([1.0, 2**40])
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(data, type=SamplingParams)
