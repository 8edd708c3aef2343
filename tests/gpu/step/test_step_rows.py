"""Drafts become decodes of their own, row by row, and what is settled is taken back."""

from typing import Any

import msgspec
import numpy as np
import pytest

from ramify.gpu.executors.fake import FakeExecutor
from ramify.gpu.step.rows import PlanError, RowTable
from ramify.gpu.step.step_rows import within
from ramify.protocol.plan import NO_TOKEN, ExtendRow, OpenRow, StepPlan, pack
from ramify.protocol.sampling import SamplingParams
from tests.gpu.step.test_rows import fields

GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture
def table() -> RowTable:
    """Rows 0 and 1: 3 and 2 tokens, decodable; row 2: a chunk of 2. Pages of 4, two each."""
    fake = FakeExecutor(page_size=4, pages=50, max_rows=8, context=20, step_tokens=32)
    made = RowTable(msgspec.structs.replace(fake.info, max_drafts=3))
    made.apply(
        StepPlan(
            step=1,
            opens=[OpenRow(row, row, pack([2 * row, 2 * row + 1]), 0, GREEDY) for row in range(3)],
            extends=[
                ExtendRow(0, 0, pack([5, 6, 7]), True),
                ExtendRow(1, 0, pack([5, 6]), True),
                ExtendRow(2, 0, pack([5, 6]), False),
            ],
        )
    )
    return made


def test_within() -> None:
    assert within(np.array([2, 0, 1, 3])).tolist() == [0, 1, 0, 0, 1, 2]
    assert within(np.array([], dtype=np.int64)).tolist() == []


def test_drafts_of_decodes_are_decodes_behind_them(table: RowTable) -> None:
    step = table.apply(StepPlan(step=2, decodes=pack([1, 0]), drafts=pack([0, 2])))
    assert step.rows.tolist() == [1, 0, 0, 0]
    assert step.starts.tolist() == [2, 3, 4, 5]
    assert step.counts.tolist() == [1] * 4
    assert step.sampling.tolist() == [0, 1, 2, 3]
    assert step.draws.tolist() == [1, 1, 2, 3]
    assert step.lines is not None
    assert step.lines.tolist() == [1, 3]
    assert (step.extends, step.computed, step.sampled_rows.tolist()) == (0, 4, [1, 0])
    assert (fields(table, 0)["length"], fields(table, 0)["drawn"]) == (6, 4)
    assert (fields(table, 1)["length"], fields(table, 1)["drawn"]) == (3, 2)


def test_fewer_drafts_than_planned(table: RowTable) -> None:
    plan = StepPlan(step=2, decodes=pack([1, 0]), drafts=pack([2, 3]))
    table.change(plan)
    found = table.advance(plan, np.array([1, 0])).guessed(np.array([9], dtype=np.int32))
    assert found.rows.tolist() == [1, 1, 0]
    assert found.starts.tolist() == [2, 3, 3]
    assert found.given.tolist() == [NO_TOKEN, 9, NO_TOKEN]
    assert found.draws.tolist() == [1, 2, 1]
    assert found.sampling.tolist() == [0, 1, 2]
    assert found.lines is not None
    assert found.lines.tolist() == [2, 1]
    assert found.sampled_rows.tolist() == [1, 0]
    assert found.computed == 3
    assert table.lengths[:2].tolist() == [4, 4]
    assert table.unsettled[:2].tolist() == [0, 1]


def test_all_drafts_that_were_planned(table: RowTable) -> None:
    step = table.apply(StepPlan(step=2, decodes=pack([1, 0]), drafts=pack([2, 3])))
    every = step.guessed(np.array([9, 8, 7, 6, 5], dtype=np.int32))
    assert every.given.tolist() == [NO_TOKEN, 9, 8, NO_TOKEN, 7, 6, 5]


def test_no_draft_was_found(table: RowTable) -> None:
    """The step is the one without drafts."""
    plan = StepPlan(step=2, decodes=pack([1, 0]), drafts=pack([2, 3]))
    table.change(plan)
    step = table.advance(plan, np.array([0, 0])).guessed(np.array([], dtype=np.int32))
    assert step.lines is None
    assert step.given.tolist() == []
    assert step.rows.tolist() == [1, 0]
    assert table.lengths[:2].tolist() == [4, 3]
    assert table.unsettled[:2].tolist() == [0, 0]


def test_an_extend_that_ends_in_drafts(table: RowTable) -> None:
    """Beside one without, one that does not sample, targets, and a drafted decode."""
    step = table.apply(
        StepPlan(
            step=2,
            opens=[OpenRow(3, 3, pack([6]), 0, GREEDY, sampled=5)],
            extends=[
                ExtendRow(1, 2, pack([10, 11, 12, 13]), True, drafts=2),
                ExtendRow(2, 2, pack([20, 21]), False, pack([2, 3]), pack([1, 1])),
                ExtendRow(3, 0, pack([30]), True),
            ],
            decodes=pack([0]),
            drafts=pack([1]),
        )
    )
    assert step.rows.tolist() == [1, 2, 3, 1, 1, 0, 0]
    assert step.starts.tolist() == [2, 2, 0, 4, 5, 3, 4]
    assert step.counts.tolist() == [2, 2, 1, 1, 1, 1, 1]
    assert step.tokens.tolist() == [10, 11, 20, 21, 30]
    assert step.given.tolist() == [12, 13]
    assert step.sampling.tolist() == [0, 3, 4, 2, 5, 6]
    assert step.draws.tolist() == [1, 2, 3, 5, 1, 2]
    assert step.lines is not None
    assert step.lines.tolist() == [3, 1, 2]
    assert (step.sampled_rows.tolist(), step.computed) == ([1, 3, 0], 9)
    assert step.scored is not None
    assert step.scored.lines.tolist() == [2, 3]
    assert table.lengths[:4].tolist() == [5, 6, 4, 1]
    found = step.guessed(np.array([9], dtype=np.int32))
    assert found.given.tolist() == [12, 13, NO_TOKEN, 9]


def test_drafts_of_an_extend_and_none_of_the_decodes(table: RowTable) -> None:
    plan = StepPlan(
        step=2,
        extends=[ExtendRow(1, 2, pack([10, 11, 12, 13]), True, drafts=2)],
        decodes=pack([0]),
        drafts=pack([1]),
    )
    table.change(plan)
    found = table.advance(plan, np.array([0])).guessed(np.array([], dtype=np.int32))
    assert found.rows.tolist() == [1, 1, 1, 0]
    assert found.given.tolist() == [12, 13, NO_TOKEN]
    assert found.sampling.tolist() == [0, 1, 2, 3]
    assert found.draws.tolist() == [1, 2, 3, 1]


def test_short_extends_of_a_step_with_drafts(table: RowTable) -> None:
    """Row 3 runs one token and samples: as a decode, behind the drafts of row 1's extend."""
    step = table.apply(
        StepPlan(
            step=2,
            opens=[OpenRow(3, 3, pack([6]), 0, GREEDY)],
            extends=[ExtendRow(1, 2, pack([10, 11, 12]), True, drafts=1),
                     ExtendRow(3, 0, pack([30]), True)],
            decodes=pack([0]),
            drafts=pack([1]),
        )
    )  # fmt: skip
    other = step.with_short_extends_as_decodes()
    assert other.rows.tolist() == [1, 1, 3, 0, 0]
    assert other.extends == 1
    assert other.tokens.tolist() == [10, 11]
    assert other.given.tolist() == [12, 30]
    assert other.rows[other.sampling].tolist() == step.rows[step.sampling].tolist() == [1, 1, 3, 0, 0]
    assert other.sampled_rows.tolist() == [1, 3, 0]


def test_short_extends_with_drafts_of_their_own(table: RowTable) -> None:
    """A step of decodes alone, whose lines sample in their order: a row's drafts stand behind it."""
    step = table.apply(
        StepPlan(
            step=2,
            opens=[OpenRow(3, 3, pack([6]), 0, GREEDY)],
            extends=[ExtendRow(1, 2, pack([10, 11, 12]), True, drafts=2),
                     ExtendRow(3, 0, pack([30, 31]), True, drafts=1)],
            decodes=pack([0]),
        )
    )  # fmt: skip
    other = step.with_short_extends_as_decodes()
    assert other.extends == 0
    assert other.sampling.tolist() == list(range(6))
    assert other.rows.tolist() == [1, 1, 1, 3, 3, 0]
    assert other.starts.tolist() == [2, 3, 4, 0, 1, int(table.lengths[0]) - 1]
    assert other.given.tolist() == [10, 11, 12, 30, 31]


def test_refused_drafts_are_taken_back(table: RowTable) -> None:
    """Two steps in flight: the second is planned as if the first one's drafts were accepted."""
    openings = table.openings[[0, 1]]
    table.apply(StepPlan(step=2, decodes=pack([0, 1]), drafts=pack([2, 1])))
    step = table.apply(StepPlan(step=3, decodes=pack([0]), drafts=pack([1])))
    assert step.starts.tolist() == [6, 7]
    table.settle(np.array([0, 1]), np.array([2, 1]), np.array([2, 0]), openings)
    assert table.lengths[:2].tolist() == [6, 4]
    assert table.drawn[:2].tolist() == [4, 3]
    table.settle(np.array([0]), np.array([1]), np.array([1]))
    assert (table.lengths[0], table.drawn[0], table.unsettled[0]) == (5, 3, 0)


def test_a_row_that_was_opened_again_is_not_settled(table: RowTable) -> None:
    openings = table.openings[[0, 1]]
    table.apply(StepPlan(step=2, decodes=pack([0, 1]), drafts=pack([2, 2])))
    table.apply(StepPlan(step=3, closes=pack([0]), opens=[OpenRow(0, 9, pack([9]), 3, GREEDY)]))
    table.settle(np.array([0, 1]), np.array([2, 2]), np.array([2, 1]), openings)
    assert table.lengths[:2].tolist() == [3, 4]


@pytest.mark.parametrize(("drafted", "refused"), [(2, 0), (1, 2), (1, -1)])
def test_more_than_was_drafted_is_never_settled(table: RowTable, drafted: int, refused: int) -> None:
    table.apply(StepPlan(step=2, decodes=pack([0]), drafts=pack([1])))
    with pytest.raises(PlanError, match="row 0 settles"):
        table.settle(np.array([0]), np.array([drafted]), np.array([refused]))
    with pytest.raises(PlanError, match="an earlier plan failed"):
        table.apply(StepPlan(step=3))


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ({"drafts": pack([1])}, "1 numbers of drafts for 0 decodes"),
        ({"decodes": pack([0, 1]), "drafts": pack([1])}, "1 numbers of drafts for 2 decodes"),
        ({"decodes": pack([0]), "drafts": pack([4])}, "4 to 4 drafts: a decode has 0 to 3"),
        ({"decodes": pack([0]), "drafts": pack([-1])}, "-1 to -1 drafts"),
        ({"decodes": pack([0, 1]), "drafts": pack([3, 3])}, None),
        ({"decodes": pack([0]), "drafts": b"abc"}, "buffer size"),
        ({"extends": [ExtendRow(2, 2, pack([1, 2]), False, drafts=1)]}, "does not sample"),
        ({"extends": [ExtendRow(2, 2, pack([1, 2]), True, drafts=2)]}, "2 drafts among the 2 tokens"),
        ({"extends": [ExtendRow(2, 2, pack([1, 2]), True, drafts=-1)]}, "-1 drafts"),
        ({"extends": [ExtendRow(2, 2, pack([1] * 6), True, drafts=5)]}, None),
        ({"extends": [ExtendRow(2, 2, pack([1] * 7), True, drafts=2)]}, "too few"),
        ({"extends": [ExtendRow(2, 2, pack([1] * 6), True, drafts=5)], "decodes": pack([0]),
          "drafts": pack([2])}, "9 lines sample, drafts included: at most 8"),
        ({"extends": [ExtendRow(2, 2, pack([1, 2]), True, pack([2]), pack([3]), 1)]},
         "targets and drafts"),
    ],
)  # fmt: skip
def test_what_a_plan_with_drafts_may_ask(
    table: RowTable, plan: dict[str, Any], words: str | None
) -> None:
    if words is None:
        table.apply(StepPlan(step=2, **plan))
        return
    with pytest.raises(PlanError, match="step 2: ") as caught:
        table.apply(StepPlan(step=2, **plan))
    assert words in str(caught.value)


def test_drafts_need_pages(table: RowTable) -> None:
    """Row 0 has 3 of 8 slots: a decode, 3 drafts and one more fit; then nothing does."""
    table.apply(StepPlan(step=2, decodes=pack([0]), drafts=pack([3])))
    table.apply(StepPlan(step=3, decodes=pack([0])))
    with pytest.raises(PlanError, match="too few"):
        table.apply(StepPlan(step=4, decodes=pack([0])))


def test_a_row_is_not_extended_before_its_drafts_are_settled(table: RowTable) -> None:
    table.apply(StepPlan(step=2, decodes=pack([0]), drafts=pack([1])))
    with pytest.raises(PlanError, match="before its drafts were settled"):
        table.apply(StepPlan(step=3, extends=[ExtendRow(0, 5, pack([1]), True)]))


def test_a_step_that_runs_fewer_drafts(table: RowTable) -> None:
    """For executors whose rows were advanced by all that was planned."""
    step = table.apply(StepPlan(step=2, decodes=pack([1, 0]), drafts=pack([2, 3])))
    found = step.fewer(np.array([1, 0]))
    assert found.rows.tolist() == [1, 1, 0]
    assert found.starts.tolist() == [2, 3, 3]
    assert found.draws.tolist() == [1, 2, 1]
    assert found.sampling.tolist() == [0, 1, 2]
    assert found.lines is not None
    assert found.lines.tolist() == [2, 1]
    assert step.fewer(np.array([2, 3])) is step
