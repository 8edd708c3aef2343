"""The fake's outputs are a pure function of the tokens, and any damage to its KV changes them."""

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ramify.gpu.executors.base import BadLogits, Executor
from ramify.gpu.executors.fake import FakeExecutor
from ramify.gpu.executors.fake_model import FakeModel
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


def test_a_copied_page_continues_a_prompt(drive: Any) -> None:
    model = FakeModel()
    d = drive(FakeExecutor(model, page_size=4, pages=64))
    prompt = list(range(10, 17))
    d.step(opens=[d.open(0, [1, 2])], extends=[ExtendRow(0, 0, pack(prompt), True)])
    plan = {"copies": pack([2, 5]), "opens": [d.open(1, [1, 5, 6], cached=6)]}
    found = d.step(**plan, extends=[ExtendRow(1, 6, pack(prompt[6:]), True)])[1]
    assert [found, *d.decode([1], 4)[1]] == model.expected(prompt, 5)
    assert d.executor.corruptions == 0


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


class Drafted:
    """Some rows that decode with drafts, as a scheduler would plan them."""

    def __init__(self, rows: int, **settings: Any) -> None:
        self.executor = FakeExecutor(pages=64 * rows, context=64, max_rows=64, **settings)
        self.prompts = [[5 + row, 9, 2, 400] for row in range(rows)]
        self.sampling = [
            SamplingParams(temperature=row % 2, seed=row, logprobs=2) for row in range(rows)
        ]
        self.outputs: list[list[int]] = [[] for _ in range(rows)]
        self.drafted = self.accepted = self.asked = 0
        each = 64 // self.executor.info.page_size
        opens = [
            OpenRow(row, row, pack(range(each * row, each * row + each)), 0, self.sampling[row])
            for row in range(rows)
        ]
        extends = [ExtendRow(row, 0, pack(prompt), True) for row, prompt in enumerate(self.prompts)]
        self.take(StepPlan(0, opens=opens, extends=extends))

    def take(self, plan: StepPlan) -> StepResult:
        result = self.executor.launch(plan).result()
        tokens = list(unpack(result.tokens))
        counts = list(unpack(result.counts)) or [1] * len(tokens)
        assert len(result.logprobs) == len(tokens)
        for row, count in zip(unpack(result.rows), counts, strict=True):
            self.outputs[row] += tokens[:count]
            del tokens[:count]
        self.drafted += sum(unpack(result.drafted))
        self.accepted += sum(counts) - len(counts)
        self.asked += sum(unpack(plan.drafts))
        return result

    def right(self) -> bool:
        """Whether all outputs are those without drafts."""
        model = self.executor.model
        return all(
            output == model.expected(prompt, len(output), sampling=sampling)
            for output, prompt, sampling in zip(self.outputs, self.prompts, self.sampling, strict=True)
        )


@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.8, 1.0])
@pytest.mark.parametrize("generous", [1.0, 0.5])
@pytest.mark.parametrize("page_size", [1, 4])
def test_drafts_change_nothing_but_the_speed(acceptance: float, generous: float, page_size: int) -> None:
    drafted = Drafted(4, page_size=page_size, drafts=4, acceptance=acceptance, generous=generous)
    dice = random.Random(3)
    for _ in range(8):
        rows = dice.sample(range(4), 3)
        asked = [dice.randint(0, 4) for _ in rows]
        drafted.take(StepPlan(0, decodes=pack(rows), drafts=pack(asked)))
    assert drafted.right()
    assert drafted.executor.corruptions == 0
    assert (drafted.drafted, drafted.accepted) == (
        drafted.executor.drafts.drafted,
        drafted.executor.drafts.accepted,
    )
    assert (drafted.drafted == drafted.asked) == (generous == 1.0)
    if acceptance in (0.0, 1.0):
        assert drafted.accepted == acceptance * drafted.drafted
    else:
        assert 0 < drafted.accepted < drafted.drafted


def test_the_slot_of_a_refused_draft_is_no_good() -> None:
    drafted = Drafted(1, drafts=3, acceptance=0.0)
    drafted.take(StepPlan(0, decodes=pack([0]), drafts=pack([3])))
    executor = drafted.executor
    length = int(executor.rows.lengths[0])
    assert length == len(drafted.prompts[0]) + 1
    assert executor._intact(0, length)
    assert not executor._intact(0, length + 1)  # as if one had been accepted


def test_drafts_that_an_extend_brings() -> None:
    """The last tokens of a prompt as drafts of what is sampled behind the ones before them."""
    model = FakeModel()
    first = model.expected(PROMPT, 3)
    wrong = [first[0], first[1] + 1]
    for drafts, expected in ((first, 4), (wrong, 2)):
        executor = FakeExecutor(pages=64, context=32)
        opened = OpenRow(0, 0, pack(range(32)), 0, SamplingParams(temperature=0.0))
        extend = ExtendRow(0, 0, pack(PROMPT + drafts), True, drafts=len(drafts))
        result = executor.launch(StepPlan(0, opens=[opened], extends=[extend])).result()
        assert list(unpack(result.tokens)) == model.expected(PROMPT, expected)
        more = executor.launch(StepPlan(1, decodes=pack([0]))).result()
        assert list(unpack(more.tokens)) == model.expected(PROMPT, expected + 1)[-1:]


def test_a_fault_within_an_accepted_run_is_its_last_token() -> None:
    drafted = Drafted(2, drafts=3, acceptance=1.0)
    third = drafted.executor.model.expected(drafted.prompts[0], 3)[2]
    drafted.executor.faults = {third: 1}  # the KV behind it: nothing is sampled there
    with pytest.raises(BadLogits) as caught:
        drafted.take(StepPlan(0, decodes=pack([0, 1]), drafts=pack([3, 3])))
    result = caught.value.result
    assert list(unpack(result.counts)) == [3, 4]
    assert list(unpack(result.tokens))[2] == -1
    assert caught.value.rows == [0]
