"""The whole executor on a random model: seeds, retraction, bad logits, attention layouts."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ramify.gpu.executors.base import BadLogits
from ramify.protocol.plan import ExtendRow, StepPlan, pack, unpack
from ramify.protocol.sampling import SamplingParams

PROMPT = [5, 9, 2, 40, 7, 7, 7, 31, 100]


@pytest.fixture
def tiny(tmp_path: Path, tiny_config: dict[str, Any], drive: Any) -> Any:
    """A driver on a dummy model."""
    (tmp_path / "config.json").write_text(json.dumps(tiny_config))
    return drive(tmp_path, load_format="dummy")


def test_sampled_tokens_depend_neither_on_neighbours_nor_on_retraction(tiny: Any) -> None:
    sampling = SamplingParams(
        temperature=1.0, top_p=0.95, frequency_penalty=0.4, repetition_penalty=1.2, seed=99
    )
    pages = range(60)
    alone = tiny.step(
        opens=[tiny.open(0, pages, sampling=sampling, history=pack(PROMPT))],
        extends=[ExtendRow(0, 0, pack(PROMPT), True)],
    )
    whole = [alone[0], *tiny.decode([0], 19)[0]]
    tiny.step(closes=[0])
    # with neighbours, in chunks, retracted after 8 tokens and prefilled again
    crowd = [
        tiny.open(row, range(100 * row, 100 * row + 60), sampling=SamplingParams(seed=row))
        for row in (1, 2)
    ]
    tiny.step(
        opens=[*crowd, tiny.open(3, range(500, 560), sampling=sampling, history=pack(PROMPT))],
        extends=[ExtendRow(row, 0, pack([row] * 30), True) for row in (1, 2)]
        + [ExtendRow(3, 0, pack(PROMPT[:4]), False)],
    )
    first = tiny.step(extends=[ExtendRow(3, 4, pack(PROMPT[4:]), True)], decodes=[1, 2])[3]
    again = [first, *tiny.decode([1, 3, 2], 7)[3]]
    tiny.step(closes=[3])
    tokens = PROMPT + again
    resumed = tiny.step(
        opens=[tiny.open(0, range(700, 760), sampling=sampling, sampled=8, history=pack(tokens))],
        extends=[ExtendRow(0, 0, pack(tokens), True)],
        decodes=[1],
    )
    again += [resumed[0], *tiny.decode([0, 1], 11)[0]]
    assert again == whole


def test_counters_and_result(tiny: Any) -> None:
    opens = [
        tiny.open(4, range(20), sampling=SamplingParams(temperature=0.0, logprobs=2)),
        tiny.open(1, range(20, 40)),
    ]
    extends = [ExtendRow(4, 0, pack(PROMPT), True), ExtendRow(1, 0, pack(PROMPT), False)]
    pending = tiny.executor.launch(StepPlan(step=12, opens=opens, extends=extends))
    assert pending.ready()
    result = pending.result()
    assert (result.step, result.computed, list(unpack(result.rows))) == (12, 18, [4])
    assert result.logprobs[0].top_ids[0] == unpack(result.tokens)[0]
    assert result.elapsed_us > 0
    assert (tiny.executor.counters.steps, tiny.executor.counters.tokens) == (1, 18)
    empty = tiny.executor.launch(StepPlan(step=13, closes=pack([4, 1]))).result()
    assert (empty.rows, empty.tokens, empty.computed) == (b"", b"", 0)
    tiny.executor.close()


def test_bad_logits_name_the_request_and_spare_the_others(tiny: Any) -> None:
    wanted = tiny.generate(0, PROMPT, 6, range(30))
    poison = 77
    tiny.executor.model.embedding[poison] = torch.nan
    bad = tiny.open(7, range(100, 130))
    opens = [tiny.open(0, range(200, 230)), bad]
    extends = [ExtendRow(0, 0, pack(PROMPT), True), ExtendRow(7, 0, pack([3, poison]), True)]
    pending = tiny.executor.launch(StepPlan(step=0, opens=opens, extends=extends))
    with pytest.raises(BadLogits, match="request") as caught:
        pending.result()
    assert (caught.value.rows, caught.value.requests) == ([7], [107])
    tokens = list(unpack(caught.value.result.tokens))
    assert tokens == [wanted[0], -1]
    # its pages are freed and padded neighbours read other slots of the pool: nothing leaks over
    tiny.step(closes=[7])
    short = tiny.open(8, [100, 2, 101, 4, 102], sampling=SamplingParams(temperature=0.0))
    tiny.step(opens=[short], extends=[ExtendRow(8, 0, pack([1, 2]), True)], decodes=[0])
    rest = tiny.decode([8, 0], 2)[0]
    assert rest == wanted[2:4]
