"""Output is the same with and without drafts, right and wrong ones, however rows sample."""

import random
from typing import Any

import numpy as np
import pytest
import torch

from ramify.gpu.drafting.base import Guesses
from ramify.gpu.drafting.host import HostDrafts
from ramify.gpu.executors.base import BadLogits
from ramify.protocol.plan import NO_TOKEN, ExtendRow, OpenRow, StepPlan, pack, unpack
from ramify.protocol.sampling import SamplingParams

PROMPT = [5, 9, 2, 40, 7, 7, 7, 31, 100, 64, 3, 90, 17]
LENGTH = 24
SAMPLINGS = {
    "greedy": SamplingParams(temperature=0.0),
    "seeded": SamplingParams(temperature=1.0, seed=7),
    "truncated": SamplingParams(temperature=1.3, top_k=20, top_p=0.9, min_p=0.01, seed=8),
    "penalised": SamplingParams(
        temperature=0.0, frequency_penalty=0.3, presence_penalty=0.2, repetition_penalty=1.3
    ),
    "both": SamplingParams(temperature=0.8, frequency_penalty=1.0, seed=9, logprobs=3),
}


class Oracle:
    """Guesses what rows will sample, wrong with a probability, and sometimes less than was asked."""

    def __init__(self, outputs: dict[int, list[int]], wrong: float) -> None:
        self.outputs, self.wrong = outputs, wrong
        self.places: dict[int, int] = {}
        self.draw = random.Random(3)

    def open(self, opened: OpenRow) -> None:
        self.places[opened.row] = opened.sampled

    def close(self, row: int) -> None:
        del self.places[row]

    def propose(self, rows: Any, most: Any) -> Guesses:
        found: list[list[int]] = []
        for row, limit in zip(rows.tolist(), most.tolist(), strict=True):
            count = self.draw.randint(limit // 2, limit)
            next_ones = self.outputs[row][self.places[row] :][:count]
            found.append([token if self.draw.random() >= self.wrong else 1 for token in next_ones])
        tokens = np.array([token for guess in found for token in guess], dtype=np.int32)
        return Guesses(np.array([len(guess) for guess in found]), tokens)

    def continued(self, row: int, behind: Any, most: int) -> list[int]:
        return []

    def runs(self, step: Any) -> None:
        pass

    def observe(self, rows: Any, counts: Any, tokens: Any) -> None:
        for row, count in zip(rows.tolist(), counts.tolist(), strict=True):
            self.places[row] += count


@pytest.fixture
def driver(load: Any) -> Any:
    return load()


def with_drafts(driver: Any, drafter: Any) -> None:
    """Let the executor run drafts of `drafter`, up to 4 a row."""
    executor = driver.executor
    executor.rows.max_drafts = 4
    executor.drafts = HostDrafts(executor.rows, drafter)


def prompt_of(row: int) -> list[int]:
    return [(token + row) % 150 for token in PROMPT[row:]]


def opened(row: int, sampling: SamplingParams, before: list[int] | None = None) -> OpenRow:
    """Row with room for its prompt, output and drafts, on pages of its own."""
    output = before or []
    history = pack(prompt_of(row) + output)
    pages = pack(range(20 * row, 20 * row + 20))
    return OpenRow(row, row, pages, 0, sampling, len(output), history)


def generate(driver: Any, drafts: int) -> tuple[dict[int, list[int]], dict[int, list[Any]], int]:
    """Each way of sampling in a row of its own: outputs, log-probabilities, steps."""
    rows = dict(enumerate(SAMPLINGS.values()))
    outputs: dict[int, list[int]] = {row: [] for row in rows}
    logprobs: dict[int, list[Any]] = {row: [] for row in rows}
    steps = 0
    plan = StepPlan(
        1,
        opens=[opened(row, sampling) for row, sampling in rows.items()],
        extends=[ExtendRow(row, 0, pack(prompt_of(row)), True) for row in rows],
    )
    while True:
        result = driver.executor.launch(plan).result()
        steps += 1
        places = list(unpack(result.rows))
        counts = unpack(result.counts) if result.counts else [1] * len(places)
        owners = [row for row, count in zip(places, counts, strict=True) for _ in range(count)]
        entries = result.logprobs or [None] * len(owners)
        for row, token, entry in zip(owners, unpack(result.tokens), entries, strict=True):
            outputs[row].append(token)
            logprobs[row].append(entry)
        left = [row for row in rows if len(outputs[row]) < LENGTH]
        if not left:
            break
        # the second row never runs drafts
        planned = pack(min(drafts, 4 if row != 1 else 0) for row in left) if drafts else b""
        plan = StepPlan(1, decodes=pack(left), drafts=planned)
    driver.executor.launch(StepPlan(2, closes=pack(rows))).result()
    return (
        {row: output[:LENGTH] for row, output in outputs.items()},
        {row: found[:LENGTH] for row, found in logprobs.items()},
        steps,
    )


@pytest.mark.parametrize("wrong", [0.0, 0.3, 1.0])
def test_the_same_output_with_and_without(driver: Any, wrong: float) -> None:
    plain, logprobs, steps = generate(driver, 0)
    assert steps == LENGTH
    with_drafts(driver, Oracle({row: output + [2] * 9 for row, output in plain.items()}, wrong))
    drafted, others, fewer = generate(driver, 4)
    assert drafted == plain
    for row, found in logprobs.items():
        for one, other in zip(found, others[row], strict=True):
            assert (one is None) == (other is None)
            if one is not None:
                assert one.top_ids == other.top_ids
                assert other.top_logprobs == pytest.approx(one.top_logprobs, abs=1e-4)
    drafts = driver.executor.drafts
    assert drafts.accepted <= drafts.drafted
    if wrong == 0.0:
        assert drafts.accepted > 0
        assert fewer == LENGTH  # for the row without drafts
    if wrong == 1.0:
        assert drafts.accepted < drafts.drafted / 4


def test_drafts_save_steps(driver: Any) -> None:
    plain = driver.generate(0, PROMPT, LENGTH, range(20))
    oracle = Oracle({0: plain + [2] * 9}, 0.0)
    with_drafts(driver, oracle)
    executor = driver.executor
    result = executor.launch(
        StepPlan(1, opens=[driver.open(0, range(20))], extends=[ExtendRow(0, 0, pack(PROMPT), True)])
    ).result()
    output, steps = list(unpack(result.tokens)), 0
    while len(output) < LENGTH:
        result = executor.launch(StepPlan(1, decodes=pack([0]), drafts=pack([4]))).result()
        assert unpack(result.counts)[0] == unpack(result.drafted)[0] + 1 == len(unpack(result.tokens))
        assert result.computed == unpack(result.counts)[0]
        output += unpack(result.tokens)
        steps += 1
    assert output[:LENGTH] == plain
    assert steps < LENGTH / 2
    assert executor.rows.lengths[0] == len(PROMPT) + len(output) - 1
    assert executor.rows.drawn[0] == len(output)


def test_an_extend_that_ends_in_drafts(driver: Any) -> None:
    """Of a row without a drafter: right ones, one wrong, and beside a prompt in chunks."""
    plain = driver.generate(0, PROMPT, 8, range(20))
    for wrong, expected in ((9, 4), (1, 2), (0, 1)):
        guess = plain[:3]
        if wrong < 3:
            guess[wrong] = (guess[wrong] + 1) % 150
        result = driver.executor.launch(
            StepPlan(
                1,
                opens=[driver.open(0, range(20)), driver.open(1, range(40, 60))],
                extends=[
                    ExtendRow(0, 0, pack(PROMPT + guess), True, drafts=3),
                    ExtendRow(1, 0, pack(PROMPT[:5]), False),
                ],
            )
        ).result()
        assert list(unpack(result.tokens)) == plain[:expected]
        assert list(unpack(result.counts)) == [expected]
        assert list(unpack(result.drafted)) == [3]
        output = list(unpack(result.tokens)) + driver.decode([0], 8 - expected)[0]
        assert output == plain
        assert driver.prefill(1, 5, PROMPT[5:])[1] == plain[0]
        driver.step(closes=[0, 1])


def test_bad_logits_name_the_row_of_several_tokens(driver: Any) -> None:
    """NaN in the pool behind the first line: two tokens came, the last one is none."""
    executor = driver.executor
    plain = driver.generate(0, PROMPT, 8, range(20))
    with_drafts(driver, Oracle({0: plain, 1: plain}, 0.0))
    executor.launch(
        StepPlan(
            1,
            opens=[opened(0, SAMPLINGS["greedy"]), opened(1, SAMPLINGS["greedy"])],
            extends=[ExtendRow(row, 0, pack(PROMPT), True) for row in (0, 1)],
        )
    )
    executor._pool.layers[1].v[executor.rows.slots(1, 3, 4)] = torch.nan
    with pytest.raises(BadLogits) as caught:
        executor.launch(StepPlan(2, decodes=pack([0, 1]), drafts=pack([2, 2]))).result()
    assert caught.value.rows == [1]
    result = caught.value.result
    counts = list(unpack(result.counts))
    assert counts[1] == 1
    assert list(unpack(result.tokens))[-1] == NO_TOKEN
    assert len(unpack(result.tokens)) == sum(counts)
