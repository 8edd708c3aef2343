"""Packing, and plans and results across a process boundary."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ramify.protocol.plan import (
    ExecutorDown,
    ExtendRow,
    GrowRow,
    OpenRow,
    StepPlan,
    StepResult,
    StopExecutor,
    pack,
    pack_floats,
    unpack,
    unpack_floats,
)
from ramify.protocol.sampling import SamplingParams, TokenLogprobs


@given(st.lists(st.integers(-(2**31), 2**31 - 1)))
@settings(derandomize=True, deadline=None)
def test_pack_round_trip(values: list[int]) -> None:
    data = pack(values)
    assert len(data) == 4 * len(values)
    assert list(unpack(data)) == values


def test_pack_refuses_what_does_not_fit() -> None:
    with pytest.raises(OverflowError):
        pack([2**31])
    with pytest.raises(ValueError, match="bytes"):
        unpack(b"\0\0\0")
    assert pack([1]) == b"\1\0\0\0"  # little-endian


def test_plan_and_result_round_trip() -> None:
    plan = StepPlan(
        7,
        closes=pack([3]),
        opens=[
            OpenRow(
                0, 1 << 33, pack([5, 6]), 1, SamplingParams(temperature=0.5, seed=9), 2, pack([1, 2])
            )
        ],
        grows=[GrowRow(0, pack([7]))],
        extends=[ExtendRow(0, 1, pack([4, 4]), True, pack([1, 2]), pack([4, 9]))],
        decodes=pack([1, 2]),
    )
    logprobs = [TokenLogprobs(-0.5, [8], [-0.5]), None]
    scores = pack_floats([-1.5, float("nan")])
    assert unpack_floats(scores)[0] == -1.5
    result = StepResult(7, pack([0, 1]), pack([8, 9]), 4, 123, logprobs, scores)
    encode = msgspec.msgpack.encode
    decoder = msgspec.msgpack.Decoder(StepPlan | StopExecutor)
    assert decoder.decode(encode(plan)) == plan
    assert decoder.decode(encode(StopExecutor())) == StopExecutor()
    results = msgspec.msgpack.Decoder(StepResult | ExecutorDown)
    assert results.decode(encode(result)) == result
    assert results.decode(encode(ExecutorDown("gone"))) == ExecutorDown("gone")


def test_sampling_properties() -> None:
    assert SamplingParams(temperature=0.0).greedy
    assert not SamplingParams().penalized
    for name, value in (
        ("frequency_penalty", 0.1),
        ("presence_penalty", -0.1),
        ("repetition_penalty", 1.1),
    ):
        assert SamplingParams(**{name: value}).penalized
