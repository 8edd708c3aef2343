"""The fake's outputs are a pure function of the tokens, and any damage to its KV changes them."""

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ramify.gpu.executors.base import BadLogits, Executor
from ramify.gpu.executors.fake import FakeExecutor, FakeModel
from ramify.protocol.plan import ExtendRow, OpenRow, StepPlan, StepResult, pack, unpack
from ramify.protocol.sampling import SamplingParams

PROMPT = [5, 9, 2, 400, 7, 7, 7, 31]


def test_a_fault_spoils_what_is_computed_after_it() -> None:
    executor = FakeExecutor(pages=64, context=32)
    executor.faults = {400: 1}
    for row in (0, 1):  # the fault happens once
        opened = OpenRow(
            row, row, pack(range(32 * row, 32 * row + 32)), 0, SamplingParams(temperature=0.0)
        )
        executor.launch(
            StepPlan(row, opens=[opened], extends=[ExtendRow(row, 0, pack(PROMPT[:6]), False)])
        )
    rest = [ExtendRow(row, 6, pack(PROMPT[6:]), True) for row in (0, 1)]
    with pytest.raises(BadLogits) as caught:
        executor.launch(StepPlan(2, extends=rest)).result()
    assert list(unpack(caught.value.result.tokens)) == [-1, *executor.model.expected(PROMPT, 1)]
    assert (caught.value.rows, caught.value.requests) == ([0], [0])


@settings(max_examples=150, deadline=None, derandomize=True)
@given(data=st.data())
def test_requests_in_any_chunks_and_any_company(data: st.DataObject) -> None:
    page_size = data.draw(st.sampled_from([1, 4]))
    verify = data.draw(st.booleans())
    executor = FakeExecutor(page_size=page_size, pages=200, context=64, verify=verify)
    free = list(range(200))
    random.Random(data.draw(st.integers(0, 99))).shuffle(free)

    def plan_step(**plan: Any) -> StepResult:
        return executor.launch(StepPlan(step=0, **plan)).result()

    prompts = data.draw(st.lists(st.lists(st.integers(0, 999), min_size=1, max_size=20), max_size=5))
    params = [
        SamplingParams(temperature=data.draw(st.sampled_from([0.0, 1.0])), seed=row)
        for row in range(len(prompts))
    ]
    opens = []
    for row, sampling in enumerate(params):
        pages = [free.pop() for _ in range(-(-40 // page_size))] if page_size > 1 else free[:40]
        del free[: 40 if page_size == 1 else 0]
        opens.append(OpenRow(row, row, pack(pages), 0, sampling))
    plan_step(opens=opens)
    done = [0] * len(prompts)
    outputs: list[list[int]] = [[] for _ in prompts]
    while any(len(output) < 10 for output in outputs):
        extends, decodes = [], []
        for row, prompt in enumerate(prompts):
            if done[row] < len(prompt):
                n = data.draw(st.integers(1, len(prompt) - done[row]))
                chunk = prompt[done[row] : done[row] + n]
                extends.append(ExtendRow(row, done[row], pack(chunk), done[row] + n == len(prompt)))
                done[row] += n
            elif len(outputs[row]) < 10:
                decodes.append(row)
        result = plan_step(extends=extends, decodes=pack(decodes))
        for row, token in zip(unpack(result.rows), unpack(result.tokens), strict=True):
            outputs[row].append(token)
    for row, prompt in enumerate(prompts):
        assert outputs[row] == executor.model.expected(prompt, 10, sampling=params[row])
    assert executor.corruptions == 0


def test_damage_anywhere_changes_the_output(drive: Any) -> None:
    for victim in range(len(PROMPT)):
        d = drive(FakeExecutor())
        d.step(opens=[d.open(0, range(100, 150))])
        first = d.prefill(0, 0, PROMPT)[0]
        assert first == d.executor.model.expected(PROMPT, 1)[0]
        d.executor._chain[100 + victim] ^= d.executor._chain.dtype.type(1 << 17)
        assert d.decode([0], 1)[0] != d.executor.model.expected([*PROMPT, first], 1)
        assert d.executor.corruptions == 1


def test_another_requests_page_in_the_cached_prefix(drive: Any) -> None:
    d = drive(FakeExecutor(page_size=4))
    d.generate(0, PROMPT, 5, range(5))
    d.generate(1, PROMPT[::-1], 5, range(5, 10))
    tail = [3, 4]
    right = d.step(opens=[d.open(2, [0, 1, 20], cached=8)], extends=[ExtendRow(2, 8, pack(tail), True)])
    wrong = d.step(opens=[d.open(3, [5, 1, 21], cached=8)], extends=[ExtendRow(3, 8, pack(tail), True)])
    stale = d.step(opens=[d.open(4, [0, 30, 22], cached=8)], extends=[ExtendRow(4, 8, pack(tail), True)])
    wanted = d.executor.model.expected(PROMPT + tail, 1)[0]
    assert right[2] == wanted
    assert wrong[3] != wanted
    assert stale[4] != wanted


def test_sampling_depends_on_the_seed_and_the_output_index_alone(drive: Any) -> None:
    d = drive(FakeExecutor())
    sampling = SamplingParams(temperature=0.7, seed=11)
    whole = d.generate(0, PROMPT, 8, range(40), sampling=sampling)
    assert whole == d.executor.model.expected(PROMPT, 8, sampling=sampling)
    assert whole != d.executor.model.expected(
        PROMPT, 8, sampling=SamplingParams(temperature=0.7, seed=12)
    )
    assert whole != d.executor.model.expected(PROMPT, 8)
    # retracted after three tokens, prefilled again elsewhere
    again = d.step(
        opens=[d.open(1, range(50, 90), sampling=sampling, sampled=3)],
        extends=[ExtendRow(1, 0, pack(PROMPT + whole[:3]), True)],
    )
    assert [again[1], *d.decode([1], 4)[1]] == whole[3:]


def test_some_generations_end_by_themselves() -> None:
    model = FakeModel(eos=2, eos_every=8)
    lengths = [len(model.expected([i], 200, eos=[2])) for i in range(1, 200)]
    assert 5 < sum(lengths) / len(lengths) < 12
    assert 2 not in FakeModel(eos=2).expected([1], 500)
    assert min(FakeModel(first=10, eos=2).expected([1], 500)) >= 10


def test_logprobs(drive: Any) -> None:
    d = drive(FakeExecutor())
    opens = [d.open(0, range(20)), d.open(1, range(20, 40), sampling=SamplingParams(logprobs=3))]
    extends = [ExtendRow(row, 0, pack(PROMPT), True) for row in range(2)]
    result = d.executor.launch(StepPlan(step=0, opens=opens, extends=extends)).result()
    assert result.logprobs[0] is None
    assert len(result.logprobs[1].top_ids) == 3


def test_a_step_takes_its_time_after_the_one_before() -> None:
    executor = FakeExecutor(step_seconds=0.01)
    steps = [executor.launch(StepPlan(step=i)) for i in range(2)]
    assert not steps[1].ready()
    assert steps[1].result().step == 1
    assert steps[1].ready()
    assert steps[0].ready()
    assert executor.counters.steps == 2


@pytest.mark.parametrize("verify", [False, True])
def test_the_interface_is_the_executors(verify: bool) -> None:
    executor: Executor = FakeExecutor(verify=verify)
    executor.close()
