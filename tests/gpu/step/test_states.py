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


def test_drafts_of_an_extend_are_refused_with_states() -> None:
    extend = ExtendRow(0, 0, pack([1, 2]), True, drafts=1)
    with pytest.raises(PlanError, match="cannot be taken back"):
        table().apply(StepPlan(step=0, extends=[extend], states=pack([0, 1])))


def drafting(slots: int) -> RowTable:
    fake = FakeExecutor(page_size=4, pages=50, max_rows=8, context=20, drafts=3, state_slots=slots)
    rows = RowTable(fake.info)
    rows.change(StepPlan(0, opens=[OpenRow(row, row, pack([2 * row, 2 * row + 1]), 0, SamplingParams())
                                   for row in range(3)]))  # fmt: skip
    rows.apply(StepPlan(0, extends=extends(0, 1, 2), states=pack([0, 1, 0, 2, 0, 3])))
    return rows


def test_a_row_with_drafts_has_its_slots_on_each_line() -> None:
    rows = drafting(12)
    plan = StepPlan(1, decodes=pack([2, 0, 1]), drafts=pack([2, 0, 2]), states=pack([3, 9, 1, 7, 2, 8]))
    step = rows.apply(plan)
    assert step.states is not None
    assert step.states.tolist() == [[3, 9]] * 3 + [[1, 7]] + [[2, 8]] * 3
    fewer = step.fewer(np.array([2, 0, 1]))
    assert fewer.states is not None
    assert fewer.states.tolist() == [[3, 9]] * 3 + [[1, 7]] + [[2, 8]] * 2
    held = step.without(np.array([False, False, True])).held
    assert held is not None
    assert held.tolist() == [[2, 8]] * 3


def test_more_drafts_than_there_are_states_for() -> None:
    plan = StepPlan(1, decodes=pack([2, 0, 1]), drafts=pack([2, 1, 1]), states=pack([3, 9, 1, 7, 2, 8]))
    with pytest.raises(PlanError, match="runs 4 drafts: there are 3 states"):
        drafting(9).apply(plan)


def test_rows_that_sit_out_keep_what_they_had() -> None:
    rows = table()
    rows.apply(StepPlan(step=0, extends=extends(0, 1, 2), states=pack([0, 1, 0, 2, 0, 3])))
    step = rows.apply(StepPlan(step=1, decodes=pack([0, 1, 2]), states=pack([1, 4, 2, 5, 3, 6])))
    kept = step.without(np.array([False, True, False]))
    assert kept.states is not None
    assert kept.held is not None
    assert kept.states.tolist() == [[1, 4], [3, 6]]
    assert kept.held.tolist() == [[2, 5]]
