"""The fake executor refuses a step that reads a window page that is not its row's any more."""

import pytest

from ramify.gpu.executors.fake import FakeExecutor
from ramify.gpu.step.rows import PlanError
from ramify.protocol.plan import ExtendRow, GrowRow, OpenRow, StepPlan, pack
from ramify.protocol.sampling import SamplingParams


def opened(row: int, windows: list[int], cached: int = 0) -> OpenRow:
    pages = pack(range(32 * row, 32 * row + 8))
    return OpenRow(row, row, pages, cached, SamplingParams(temperature=0.0), windows=pack(windows))


def executor(windows: list[int]) -> FakeExecutor:
    """Row 0 has run five tokens, of which a token sees three."""
    executor = FakeExecutor(pages=128, context=300, window=3, window_pages=12)
    extend = ExtendRow(0, 0, pack([5, 6, 7, 8, 9]), True)
    executor.launch(StepPlan(1, opens=[opened(0, windows)], extends=[extend])).result()
    return executor


def test_pages_recur_behind_the_window() -> None:
    runs = executor([0, 1, 2, 3, 4, 0, 1, 2])
    assert (runs.info.window, runs.info.window_pages) == (3, 12)
    for step in range(2, 5):
        runs.launch(StepPlan(step, decodes=pack([0]))).result()
    grow = GrowRow(0, pack(range(8, 16)), pack([3, 4, 0, 1, 2, 3, 4, 0]))
    runs.launch(StepPlan(5, grows=[grow], decodes=pack([0]))).result()
    # another row begins behind the same tokens, with the last two of them
    pages = pack([*range(5), 40, 41])
    fork = OpenRow(1, 1, pages, 7, SamplingParams(), windows=pack([1, 2]))
    with pytest.raises(PlanError, match="too few"):
        runs.launch(StepPlan(6, opens=[fork], extends=[ExtendRow(1, 7, pack([3]), True)]))


@pytest.mark.parametrize(
    "windows",
    [
        [0, 1, 2, 3, 0, 5, 6, 7],  # within one step: the second token sees the first
        [0, 1, 2, 3, 4, 3, 6, 7],  # the sixth sees the fourth
        [0, 1, 2, 3, 4, 4, 6, 7],
    ],
)
def test_a_page_that_is_overwritten_too_early(windows: list[int]) -> None:
    with pytest.raises(PlanError, match="reads other KV than its own"):
        executor(windows).launch(StepPlan(2, decodes=pack([0]))).result()


def test_a_page_that_another_row_has() -> None:
    runs = executor(list(range(8)))
    extend = ExtendRow(1, 0, pack([5, 6]), True)
    begin = opened(1, [8, 3, 9, 10, 11, 0, 1, 2])
    with pytest.raises(PlanError, match="row 0 reads other KV than its own at 3"):
        runs.launch(StepPlan(2, opens=[begin], extends=[extend], decodes=pack([0])))


def test_a_row_that_begins_behind_a_window() -> None:
    runs = executor(list(range(8)))
    pages = pack([*range(4), 40, 41])
    right = OpenRow(1, 1, pages, 4, SamplingParams(), windows=pack([2, 3, 8, 9]))
    extend = ExtendRow(1, 4, pack([9]), True)
    runs.launch(StepPlan(2, opens=[right], extends=[extend])).result()
    short = OpenRow(2, 2, pages, 4, SamplingParams(), windows=pack([3, 10, 11]))
    with pytest.raises(PlanError, match="row 2 reads other KV than its own at 2"):
        runs.launch(StepPlan(3, opens=[short], extends=[ExtendRow(2, 4, pack([9]), True)]))


@pytest.mark.parametrize("windows", [[], list(range(9)), [12, 0, 1], [-1, 0, 1]])
def test_a_table_that_does_not_fit(windows: list[int]) -> None:
    with pytest.raises(PlanError, match="row 0 gets window pages"):
        executor(windows)


def test_a_page_too_few_when_it_grows() -> None:
    runs = executor(list(range(8)))
    with pytest.raises(PlanError, match="beside 2 pages"):
        runs.launch(StepPlan(2, grows=[GrowRow(0, pack([8, 9]), pack([8]))]))


def test_only_a_model_with_windows_has_such_pages() -> None:
    runs = FakeExecutor(pages=128, context=32)
    with pytest.raises(PlanError, match="row 0 gets window pages"):
        runs.launch(StepPlan(1, opens=[opened(0, [0])]))
