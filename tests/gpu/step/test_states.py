"""The state slots that a plan names, and those of rows that sit a step out."""

import msgspec
import numpy as np
import pytest

from ramify.gpu.executors.fake import FakeExecutor
from ramify.gpu.step.rows import PlanError, RowTable
from ramify.protocol.plan import ExtendRow, OpenRow, StepPlan, pack
from ramify.protocol.sampling import SamplingParams


def table(slots: int = 9) -> RowTable:
    fake = FakeExecutor(page_size=4, pages=50, max_rows=8, context=20, step_tokens=32)
    table = RowTable(msgspec.structs.replace(fake.info, state_slots=slots))
    for row in range(3):
        table.change(StepPlan(step=0, opens=[OpenRow(row, row, pack([row]), 0, SamplingParams())]))
    return table


def extends(*rows: int) -> list[ExtendRow]:
    return [ExtendRow(row, 0, pack([1]), True) for row in rows]


def test_a_pair_for_each_sequence() -> None:
    rows = table()
    step = rows.apply(StepPlan(step=0, extends=extends(0, 1), states=pack([0, 1, 0, 2])))
    assert step.states is not None
    assert step.states.tolist() == [[0, 1], [0, 2]]
    plan = StepPlan(step=1, extends=extends(2), decodes=pack([1, 0]), states=pack([0, 3, 2, 4, 1, 5]))
    step = rows.apply(plan)
    assert step.states is not None
    assert step.states.tolist() == [[0, 3], [2, 4], [1, 5]]


@pytest.mark.parametrize(
    ("states", "told"),
    [
        ([0, 1], "2 state slots for 2 sequences"),
        ([], "0 state slots for 2 sequences"),
        ([0, 1, 0, 0], "only read"),
        ([0, 1, 0, 10], "only read, to 9"),
        ([-1, 1, 0, 2], "only read"),
        ([0, 1, 0, 1], "written twice"),
        ([0, 1, 1, 2], "or read as well"),
        ([3, 3, 0, 2], "or read as well"),
    ],
)
def test_slots_that_contradict_each_other(states: list[int], told: str) -> None:
    with pytest.raises(PlanError, match=told):
        table().apply(StepPlan(step=0, extends=extends(0, 1), states=pack(states)))


def test_a_model_without_states_is_given_none() -> None:
    with pytest.raises(PlanError, match="the model has none"):
        table(0).apply(StepPlan(step=0, extends=extends(0), states=pack([0, 1])))


def test_drafts_are_refused_with_states() -> None:
    extend = ExtendRow(0, 0, pack([1, 2]), True, drafts=1)
    with pytest.raises(PlanError, match="cannot be taken back"):
        table().apply(StepPlan(step=0, extends=[extend], states=pack([0, 1])))


def test_rows_that_sit_out_keep_what_they_had() -> None:
    rows = table()
    rows.apply(StepPlan(step=0, extends=extends(0, 1, 2), states=pack([0, 1, 0, 2, 0, 3])))
    step = rows.apply(StepPlan(step=1, decodes=pack([0, 1, 2]), states=pack([1, 4, 2, 5, 3, 6])))
    kept = step.without(np.array([False, True, False]))
    assert kept.states is not None
    assert kept.held is not None
    assert kept.states.tolist() == [[1, 4], [3, 6]]
    assert kept.held.tolist() == [[2, 5]]
