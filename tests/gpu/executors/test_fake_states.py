"""The fake executor refuses a step that reads another state than that of its row's tokens."""

import pytest

from ramify.gpu.executors.fake import FakeExecutor
from ramify.gpu.step.rows import PlanError
from ramify.protocol.plan import ExtendRow, OpenRow, StepPlan, pack
from ramify.protocol.sampling import SamplingParams


def opened(row: int, cached: int = 0) -> OpenRow:
    pages = pack(range(32 * row, 32 * row + 32))
    return OpenRow(row, row, pages, cached, SamplingParams(temperature=0.0))


def executor() -> FakeExecutor:
    """Row 0 has run five tokens, whose state is in slot 1."""
    executor = FakeExecutor(pages=128, context=32, state_slots=4)
    extend = ExtendRow(0, 0, pack([5, 6, 7, 8, 9]), True)
    executor.launch(StepPlan(1, opens=[opened(0)], extends=[extend], states=pack([0, 1]))).result()
    return executor


def test_states_follow_their_rows() -> None:
    runs = executor()
    assert runs.info.state_slots == 4
    for step, pair in enumerate([(1, 2), (2, 3), (3, 1)], 2):
        runs.launch(StepPlan(step, decodes=pack([0]), states=pack(pair))).result()


@pytest.mark.parametrize(
    ("pairs", "reason"),
    [
        ([0, 2], "another state"),
        ([3, 2], "another state"),
        ([1, 1], "or read as well"),
        ([1, 0], "only read, to 4"),
        ([1, 5], "only read, to 4"),
        ([], "0 state slots for 1 sequences"),
        ([1, 2, 1, 3], "4 state slots for 1 sequences"),
    ],
)
def test_a_wrong_pair_ends_the_step(pairs: list[int], reason: str) -> None:
    with pytest.raises(PlanError, match=reason):
        executor().launch(StepPlan(2, decodes=pack([0]), states=pack(pairs)))


def test_a_state_that_is_not_finite_spoils_what_follows() -> None:
    runs = FakeExecutor(pages=128, context=32, state_slots=4)
    runs.faults = {8: 1}
    extend = ExtendRow(0, 0, pack([5, 8]), False)
    runs.launch(StepPlan(1, opens=[opened(0)], extends=[extend], states=pack([0, 1]))).result()
    # another row has the KV of the same tokens, which is finite, but begins from that state
    extend = ExtendRow(1, 0, pack([5, 8]), False)
    runs.launch(StepPlan(2, opens=[opened(1)], extends=[extend], states=pack([0, 2]))).result()
    extend = ExtendRow(1, 2, pack([7]), True)
    result = runs.launch(StepPlan(3, extends=[extend], states=pack([1, 3])))
    with pytest.raises(Exception, match="not finite"):
        result.result()
