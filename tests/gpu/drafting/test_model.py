"""A draft model that is the model itself is always right; so its keys and values are, too."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ramify.gpu.drafting import model
from ramify.protocol.plan import ExtendRow, OpenRow, StepPlan, pack, unpack
from ramify.protocol.sampling import SamplingParams
from tests.gpu.drafting.conftest import write_folder

GREEDY = SamplingParams(temperature=0.0)
PROMPT = [5, 9, 2, 40, 7, 7, 7, 31, 100, 64, 3, 90, 17, 55, 21, 6, 8, 44, 13, 71, 3]
LENGTH = 24


class Row:
    """One request of the tests: what it holds, and where it has pages."""

    def __init__(self, row: int, prompt: list[int], pages: list[int], cached: int = 0) -> None:
        self.row, self.prompt, self.pages, self.cached = row, prompt, pages, cached
        self.output: list[int] = []

    def opened(self, sampling: SamplingParams = GREEDY) -> OpenRow:
        tokens = self.prompt + self.output
        return OpenRow(
            self.row, self.row, pack(self.pages), self.cached, sampling, len(self.output), pack(tokens)
        )

    def extend(self, first: int, last: int, sample: bool) -> ExtendRow:
        return ExtendRow(self.row, first, pack((self.prompt + self.output)[first:last]), sample)

    def start(self, driver: Any, sampling: SamplingParams = GREEDY) -> None:
        end = len(self.prompt + self.output)
        plan = StepPlan(1, opens=[self.opened(sampling)], extends=[self.extend(self.cached, end, True)])
        take(driver, plan, [self])


def take(driver: Any, plan: StepPlan, rows: list[Row]) -> Any:
    """Run a plan and give each row its tokens."""
    result = driver.executor.launch(plan).result()
    sampled = unpack(result.rows)
    counts = unpack(result.counts) if result.counts else [1] * len(sampled)
    tokens, begin = list(unpack(result.tokens)), 0
    for place, count in zip(sampled, counts, strict=True):
        owner = next(row for row in rows if row.row == place)
        owner.output += tokens[begin : begin + count]
        begin += count
    return result


def go_on(driver: Any, rows: list[Row], most: list[int]) -> Any:
    plan = StepPlan(1, decodes=pack(row.row for row in rows), drafts=pack(most))
    return take(driver, plan, rows)


def close(driver: Any, *rows: Row) -> None:
    driver.executor.launch(StepPlan(1, closes=pack(row.row for row in rows)))


def all_accepted(driver: Any) -> bool:
    drafts = driver.executor.drafts
    return bool(drafts.drafted) and drafts.drafted == drafts.accepted


@pytest.fixture
def twin(load: Any, folder: Path) -> Any:
    """A driver whose draft model is the model."""
    return load(draft=str(folder), draft_tokens=4)


@pytest.fixture
def plain(load: Any) -> list[int]:
    return list(load(draft="none").generate(0, PROMPT, LENGTH, range(20)))


def test_the_model_itself_is_always_right(twin: Any, plain: list[int]) -> None:
    info = twin.executor.info
    assert (info.drafter, info.max_drafts, info.drafts_from_history) == ("model", 4, True)
    one = Row(0, PROMPT, list(range(20)))
    one.start(twin)
    steps = 0
    while len(one.output) < LENGTH:
        result = go_on(twin, [one], [4])
        assert list(unpack(result.drafted)) == [4]
        steps += 1
    assert one.output[:LENGTH] == plain
    assert all_accepted(twin)
    assert steps == 5


def test_drafting_that_stops_and_goes_on(twin: Any, plain: list[int]) -> None:
    """Steps without drafts, and with fewer of them: what is missing is caught up with."""
    one = Row(0, PROMPT, list(range(20)))
    one.start(twin)
    for most in (2, 0, 0, 3, 1, 0, 4, 4, 1):
        go_on(twin, [one], [most])
    assert one.output[:LENGTH] == plain[: len(one.output)]
    assert all_accepted(twin)


def test_catching_up_in_parts(twin: Any, plain: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt of 21 tokens, 8 a step; what another row misses fits beside it but for one step."""
    monkeypatch.setattr(model, "CATCH_UP", 8)
    one, other = Row(0, PROMPT, list(range(20))), Row(1, PROMPT[:6], list(range(20, 40)))
    one.start(twin)
    other.start(twin)
    drafted = [list(unpack(go_on(twin, [one, other], [2, 2]).drafted)) for _ in range(6)]
    assert drafted == [[0, 2], [2, 0], [2, 2], [2, 2], [2, 2], [2, 2]]
    assert one.output[:LENGTH] == plain[: len(one.output)]
    assert all_accepted(twin)


def test_a_prefix_that_another_row_left(twin: Any, plain: list[int]) -> None:
    """Pages of a closed row are a new row's prefix: its keys are found, and not computed again."""
    one = Row(0, PROMPT, list(range(20)))
    one.start(twin)
    go_on(twin, [one], [4])
    close(twin, one)
    fork = Row(3, PROMPT, [*range(5), *range(50, 65)], cached=20)
    fork.start(twin)
    drafter = twin.executor.drafts.drafter
    assert drafter._ready[3] == 20  # five pages of 4
    go_on(twin, [fork], [4])
    assert fork.output == plain[: len(fork.output)]
    assert all_accepted(twin)
    # pages that somebody else's prompt was written to, undrafted, are stale
    stranger = Row(1, PROMPT[::-1], list(range(20)))
    stranger.start(twin)
    close(twin, stranger)
    again = Row(1, PROMPT[::-1], [*range(5), *range(70, 85)], cached=20)
    again.start(twin)
    assert drafter._ready[1] == 0
    go_on(twin, [again], [4])
    assert all_accepted(twin)


def test_a_retracted_row_goes_on(twin: Any, plain: list[int]) -> None:
    one = Row(0, PROMPT, list(range(20)))
    one.start(twin)
    go_on(twin, [one], [3])
    close(twin, one)
    one.row, one.cached = 2, 20
    one.start(twin)
    go_on(twin, [one], [4])
    assert one.output == plain[: len(one.output)]
    assert all_accepted(twin)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_another_model_changes_nothing(
    load: Any, tmp_path: Path, page_size: int, temperature: float
) -> None:
    """Four rows, drafts of a model that is mostly wrong, in random numbers."""
    small = write_folder(tmp_path / "small", hidden_size=128, num_hidden_layers=1, vocab_size=192)
    sampling = SamplingParams(temperature=temperature, seed=5)
    pages = [list(range(row * 64 // page_size, (row + 1) * 64 // page_size)) for row in range(4)]
    outputs = []
    for draft in ("none", str(small)):
        driver = load(draft=draft, page_size=page_size)
        rows = [Row(row, PROMPT[row:], pages[row]) for row in range(4)]
        for row in rows:
            row.start(driver, sampling)
        draw = random.Random(1)
        while left := [row for row in rows if len(row.output) < LENGTH]:
            most = [draw.randint(0, 4) if draft != "none" else 0 for _ in left]
            go_on(driver, left, most)
        outputs.append([row.output[:LENGTH] for row in rows])
    assert outputs[0] == outputs[1]
    assert driver.executor.drafts.drafted > driver.executor.drafts.accepted
    assert driver.executor.drafts.drafted > 30


def test_a_shorter_context_ends_the_guesses(load: Any, tmp_path: Path) -> None:
    short = write_folder(tmp_path / "short", max_position_embeddings=24)
    driver = load(draft=str(short), draft_tokens=4)
    one = Row(0, PROMPT, list(range(20)))
    one.start(driver)
    drafted = []
    while len(one.output) < 12:
        length = len(one.prompt) + len(one.output)
        drafted.append((length, sum(unpack(go_on(driver, [one], [4]).drafted))))
    for length, count in drafted:
        assert count == max(0, min(4, 24 - length + 1))


def test_keys_of_the_draft_model_count_as_memory(load: Any, folder: Path) -> None:
    alone, both = load(draft="none"), load(draft=str(folder))
    assert both.executor.info.kv_bytes_per_token == 2 * alone.executor.info.kv_bytes_per_token
    assert alone.executor.info.drafter == ""


def test_forced_tokens_and_other_rows_that_run(twin: Any) -> None:
    """A row that is extended beyond its history is caught up with what was forced."""
    one, other = Row(0, PROMPT, list(range(20))), Row(1, PROMPT[:9], list(range(20, 40)))
    one.start(twin)
    other.start(twin)
    go_on(twin, [one, other], [2, 1])
    length = int(twin.executor.rows.lengths[0])
    forced = ExtendRow(0, length, pack([one.output[-1], 33, 34, 35]), True)
    take(twin, StepPlan(1, extends=[forced], decodes=pack([1]), drafts=pack([3])), [one, other])
    result = go_on(twin, [one, other], [4, 4])
    assert list(unpack(result.counts)) == [5, 5]
    assert all_accepted(twin)


def test_nothing_is_guessed_without_a_history(twin: Any) -> None:
    twin.step(opens=[twin.open(0, range(20))], extends=[ExtendRow(0, 0, pack(PROMPT), True)])
    drafter = twin.executor.drafts.drafter
    assert drafter._histories.lengths[0] == len(PROMPT) + 1  # an extend from the start says it as well
    twin.step(closes=[0], opens=[twin.open(1, range(20), cached=8)],
              extends=[ExtendRow(1, 8, pack(PROMPT[8:]), True)])  # fmt: skip
    guesses = drafter.propose(np.array([1]), np.array([3]))
    assert guesses.counts.tolist() == [0]
