"""Plans that contradict the rows are refused by name, and nothing runs after one."""

from typing import Any

import numpy as np
import pytest

from ramify.gpu.executors.fake import FakeExecutor
from ramify.gpu.step.rows import PlanError, RowTable, StepRows
from ramify.protocol.plan import ExtendRow, GrowRow, OpenRow, StepPlan, pack
from ramify.protocol.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0.0)


def fields(rows: RowTable, row: int) -> dict[str, Any]:
    """What the table holds of one row."""
    return {
        "request": int(rows.requests[row]),
        "length": int(rows.lengths[row]),
        "pages": rows.pages[row, : rows.page_counts[row]].tolist(),
        "drawn": int(rows.drawn[row]),
    }


def opened(row: int, pages: list[int], cached: int = 0, request: int = 1, **more: Any) -> OpenRow:
    return OpenRow(row, request, pack(pages), cached, GREEDY, **more)


@pytest.fixture
def executor() -> FakeExecutor:
    """Row 0: 4 tokens, decodable, 2 pages of 4. Row 1: a chunk of 2 tokens, not decodable."""
    made = FakeExecutor(page_size=4, pages=50, max_rows=4, context=20, step_tokens=32)
    made.launch(
        StepPlan(
            step=1,
            opens=[opened(0, [3, 4]), opened(1, [9], request=2)],
            extends=[ExtendRow(0, 0, pack([5, 6, 7, 8]), True), ExtendRow(1, 0, pack([5, 6]), False)],
        )
    )
    return made


def test_what_the_table_holds(executor: FakeExecutor) -> None:
    assert fields(executor.rows, 0) == {"request": 1, "length": 4, "pages": [3, 4], "drawn": 1}
    assert executor.rows.slots(0, 3, 6).tolist() == [15, 16, 17]
    executor.launch(StepPlan(step=2, closes=pack([1]), decodes=pack([0])))
    assert fields(executor.rows, 0)["length"] == 5
    assert (executor.rows.requests >= 0).sum() == 1


def scoring(places: list[int], targets: list[int]) -> ExtendRow:
    """Two tokens of row 1."""
    return ExtendRow(1, 2, pack([7, 8]), False, pack(places), pack(targets))


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ({"closes": pack([2])}, "closes row 2, which is not open"),
        ({"closes": pack([-1])}, "closes row -1"),
        ({"closes": b"abc"}, "buffer size"),
        ({"copies": pack([1])}, "copies pages [1]: pairs below 50 are due"),
        ({"copies": pack([1, 50])}, "pairs below 50 are due"),
        ({"copies": pack([-1, 5])}, "pairs below 50 are due"),
        ({"copies": pack([1, 5, 2, 5])}, "copies twice to one of pages [5, 5]"),
        ({"opens": [opened(0, [1])]}, "opens row 0 for request 1: it is open for request 1"),
        ({"closes": pack([4])}, "closes row 4"),
        ({"opens": [opened(4, [1])]}, "there are 4 rows"),
        ({"opens": [opened(-1, [1])]}, "there are 4 rows"),
        ({"opens": [opened(2, [1], request=-1)]}, "must not be negative"),
        ({"opens": [opened(2, [1], cached=-1)]}, "must not be negative"),
        ({"opens": [opened(2, [50])]}, "the pool has 50"),
        ({"opens": [opened(2, [-1])]}, "the pool has 50"),
        ({"opens": [opened(2, [1], cached=5)]}, "5 cached tokens in 1 pages"),
        ({"opens": [opened(2, [1], sampled=-1)]}, "must not be negative"),
        ({"opens": [opened(2, list(range(7)))]}, "gets 7 pages of 4: more than the 21 tokens"),
        ({"grows": [GrowRow(0, pack(range(10, 15)))]}, "gets 7 pages of 4: more than the 21 tokens"),
        ({"grows": [GrowRow(2, pack([1]))]}, "grows row 2, which is not open"),
        ({"extends": [ExtendRow(2, 0, pack([1]), True)]}, "extends row 2, which is not open"),
        ({"extends": [ExtendRow(1, 1, pack([1]), True)]}, "at position 1: its length is 2"),
        ({"extends": [ExtendRow(1, 2, b"", True)]}, "by no token"),
        ({"extends": [ExtendRow(1, 2, pack([1000]), True)]}, "the vocabulary has 1000"),
        ({"extends": [ExtendRow(1, 2, pack([-1]), True)]}, "the vocabulary has 1000"),
        ({"extends": [ExtendRow(1, 2, pack([1, 2, 3]), True)]}, "too few"),
        ({"extends": [ExtendRow(1, 2, pack([1] * 33), True)]}, "at most 32 a step"),
        ({"extends": [ExtendRow(0, 4, pack([1]), True)], "decodes": pack([0])}, "stands twice"),
        ({"extends": [scoring([2], [3, 4])]}, "1 places for 2 targets"),
        ({"extends": [scoring([], [3])]}, "0 places for 1 targets"),
        ({"extends": [scoring([1], [3])]}, "behind positions 1 to 1, but runs 2 to 3"),
        ({"extends": [scoring([2, 4], [3, 3])]}, "behind positions 2 to 4, but runs 2 to 3"),
        ({"extends": [scoring([3, 2, 3], [1, 1, 1])]}, "do not ascend"),
        ({"extends": [scoring([2, 3], [1, 1000])]}, "the vocabulary has 1000"),
        ({"extends": [scoring([2], [-1])]}, "the vocabulary has 1000"),
        ({"decodes": pack([0, 0])}, "stands twice"),
        ({"decodes": pack([1])}, "decodes row 1, which has no sampled token"),
        ({"decodes": pack([3])}, "decodes row 3, which is not open"),
        ({"decodes": pack([4])}, "there are 4 rows"),
        (
            {
                "grows": [GrowRow(0, pack(range(10, 14)))],
                "extends": [ExtendRow(0, 4, pack([1] * 18), True)],
            },
            "longer than 21 tokens",
        ),
    ],
)
def test_a_wrong_plan_is_refused(executor: FakeExecutor, plan: dict[str, Any], words: str) -> None:
    chain = executor._chain.copy()
    with pytest.raises(PlanError, match="step 2: ") as caught:
        executor.launch(StepPlan(step=2, **plan))
    assert words in str(caught.value)
    assert (executor._chain == chain).all()  # nothing was written
    with pytest.raises(PlanError, match=r"an earlier plan failed: step 2"):
        executor.launch(StepPlan(step=3))


def test_what_is_just_allowed() -> None:
    """The last row, page, token and position there are."""
    made = FakeExecutor(page_size=4, pages=50, max_rows=4, context=20, step_tokens=16)
    plan = StepPlan(
        step=1,
        opens=[
            opened(3, [0, 49, 1, 2, 3], cached=0, request=0, sampled=0),
            opened(2, [5], cached=4, request=1),
        ],
        grows=[GrowRow(3, pack([6]))],
        extends=[ExtendRow(3, 0, pack([0, 999] * 8), True, pack([0, 15]), pack([0, 999]))],
    )
    made.launch(plan)
    assert fields(made.rows, 3)["length"] == 16
    made.launch(StepPlan(step=2, extends=[ExtendRow(3, 16, pack([7] * 5), True)]))
    assert fields(made.rows, 3) == {
        "request": 0,
        "length": 21,  # the context, and one token too many
        "pages": [0, 49, 1, 2, 3, 6],
        "drawn": 2,
    }
    assert (made.rows.requests >= 0).sum() == 2


@pytest.mark.parametrize(("page_size", "most"), [(1, 21), (3, 7), (4, 6), (21, 1), (22, 1)])
def test_a_row_may_have_the_pages_that_its_context_needs(page_size: int, most: int) -> None:
    """And room for one token too many."""
    made = FakeExecutor(page_size=page_size, pages=50, max_rows=4, context=20, step_tokens=16)
    made.launch(StepPlan(step=1, opens=[opened(0, list(range(most)))]))
    with pytest.raises(PlanError, match="more than the 21 tokens"):
        made.launch(StepPlan(step=2, grows=[GrowRow(0, pack([40]))]))


def test_slots_of_positions() -> None:
    for size in (1, 4):
        made = FakeExecutor(page_size=size, pages=50, max_rows=4, context=20, step_tokens=16)
        made.launch(StepPlan(step=1, opens=[opened(1, [7, 9, 8]), opened(2, [3, 2], request=2)]))
        rows, positions = np.array([1, 2, 1]), np.array([0, 1, 2])
        slots = made.rows.slots_at(rows, positions).tolist()
        assert slots == ([7, 2, 8] if size == 1 else [28, 13, 30])
        one_by_one = [
            made.rows.slots(int(r), int(p), int(p) + 1)[0] for r, p in zip(rows, positions, strict=True)
        ]
        assert slots == one_by_one


def test_a_row_that_is_opened_again_has_nothing_of_the_last_request(executor: FakeExecutor) -> None:
    executor.launch(StepPlan(step=2, closes=pack([0])))
    with_history = opened(0, [11], cached=2, request=9, sampled=5)
    executor.launch(StepPlan(step=3, opens=[with_history]))
    assert fields(executor.rows, 0) == {"request": 9, "length": 2, "pages": [11], "drawn": 5}
    assert executor.rows.openings[:2].tolist() == [2, 1]
    assert executor.rows.updates == [(0, 0, 1)]
    with pytest.raises(PlanError, match="no sampled token"):
        executor.launch(StepPlan(step=4, decodes=pack([0])))


def test_a_closed_row_is_not_decoded(executor: FakeExecutor) -> None:
    executor.launch(StepPlan(step=2, closes=pack([0])))
    with pytest.raises(PlanError, match="decodes row 0, which is not open"):
        executor.launch(StepPlan(step=3, decodes=pack([0])))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"closes": pack([0])}, "decodes row 0, which is not open"),
        ({"closes": pack([0]), "opens": [opened(0, [3])]}, "decodes row 0, which has no sampled token"),
        ({"extends": [ExtendRow(0, 6, pack([5]), False)]}, "a row stands twice"),
    ],
)
def test_decodes_that_were_planned_before_are_checked_again_after_a_change(
    executor: FakeExecutor, change: dict[str, Any], words: str
) -> None:
    for step in (2, 3):
        executor.launch(StepPlan(step=step, decodes=pack([0])))
    assert fields(executor.rows, 0)["length"] == 6
    with pytest.raises(PlanError, match=words):
        executor.launch(StepPlan(step=4, decodes=pack([0]), **change))


def test_updates_are_those_of_the_last_plan(executor: FakeExecutor) -> None:
    executor.launch(StepPlan(step=2, grows=[GrowRow(0, pack([20, 21])), GrowRow(1, pack([22]))]))
    assert executor.rows.updates == [(0, 2, 4), (1, 1, 2)]
    executor.launch(StepPlan(step=3, grows=[GrowRow(0, b"")], decodes=pack([0])))
    assert executor.rows.updates == []


def test_copies_are_those_of_the_last_plan(executor: FakeExecutor) -> None:
    executor.launch(StepPlan(step=2, copies=pack([3, 20, 3, 21])))
    assert executor.rows.copies is not None
    assert [pages.tolist() for pages in executor.rows.copies] == [[3, 3], [20, 21]]
    executor.launch(StepPlan(step=3, decodes=pack([0])))
    assert executor.rows.copies is None


def test_a_row_outgrows_its_pages(executor: FakeExecutor) -> None:
    for _ in range(4):
        executor.launch(StepPlan(step=2, decodes=pack([0])))
    with pytest.raises(PlanError, match="too few"):
        executor.launch(StepPlan(step=3, decodes=pack([0])))


def test_a_plan_may_only_close_rows(executor: FakeExecutor) -> None:
    result = executor.launch(StepPlan(step=2, closes=pack([0, 1]))).result()
    assert (result.rows, result.tokens, result.computed) == (b"", b"", 0)
    assert (executor.rows.requests >= 0).sum() == 0


def test_long_page_tables() -> None:
    executor = FakeExecutor(page_size=1, pages=5000, context=4000, step_tokens=4096)
    tokens = [1 + i % 900 for i in range(3000)]
    executor.launch(StepPlan(step=0, opens=[opened(0, list(range(3500)))]))
    executor.launch(StepPlan(step=1, grows=[GrowRow(0, pack(range(3500, 3600)))]))
    result = executor.launch(StepPlan(step=2, extends=[ExtendRow(0, 0, pack(tokens), True)])).result()
    assert result.tokens == pack(executor.model.expected(tokens, 1))


def test_short_extends_become_decodes() -> None:
    """Row 4 runs one token and does not sample, rows 1 and 3 do; the result's order stays."""
    step = StepRows(
        rows=np.array([3, 4, 2, 1, 0]),
        starts=np.array([7, 8, 9, 10, 11]),
        counts=np.array([1, 1, 3, 1, 1]),
        extends=4,
        tokens=np.array([30, 40, 20, 21, 22, 10], dtype=np.int32),
        sampling=np.array([0, 2, 3, 4]),
        draws=np.array([5, 0, 6, 7]),
    )
    other = step.with_short_extends_as_decodes()
    assert other.rows.tolist() == [4, 2, 3, 1, 0]
    assert other.starts.tolist() == [8, 9, 7, 10, 11]
    assert other.counts.tolist() == [1, 3, 1, 1, 1]
    assert (other.extends, other.computed) == (2, step.computed)
    assert other.tokens.tolist() == [40, 20, 21, 22]
    assert other.given.tolist() == [30, 10]
    assert other.rows[other.sampling].tolist() == step.rows[step.sampling].tolist() == [3, 2, 1, 0]
    assert other.draws is step.draws
    assert other.with_short_extends_as_decodes().given.tolist() == [30, 10]


def test_generations_of_computed_prompts_are_decodes_alone() -> None:
    index = np.arange(3)
    tokens = np.array([7, 8], dtype=np.int32)
    step = StepRows(index, index, np.ones_like(index), 2, tokens, index, index)
    other = step.with_short_extends_as_decodes()
    assert (other.extends, len(other.tokens), other.given.tolist()) == (0, 0, [7, 8])
    assert other.sampling.tolist() == other.rows.tolist() == [0, 1, 2]


def test_targets_name_the_lines_behind_which_they_stand() -> None:
    """Two extends; a line that has two targets is made once."""
    info = FakeExecutor(page_size=4, pages=50, max_rows=4, context=20, step_tokens=32).info
    table = RowTable(info)
    table.apply(StepPlan(step=1, opens=[opened(0, [1, 2]), opened(2, [3], cached=2, request=2)]))
    step = table.apply(
        StepPlan(
            step=2,
            extends=[
                ExtendRow(0, 0, pack([5, 6, 7]), False, pack([0, 2, 2]), pack([9, 8, 7])),
                ExtendRow(2, 2, pack([4, 3]), True, pack([3]), pack([6])),
            ],
        )
    )
    assert step.scored is not None
    assert step.scored.lines.tolist() == [0, 2, 4]
    assert step.scored.which.tolist() == [0, 1, 1, 2]
    assert step.scored.targets.tolist() == [9, 8, 7, 6]
    assert step.scored.rows.tolist() == [0, 0, 0, 2]
