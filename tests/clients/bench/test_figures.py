"""Numbers from traces made by hand."""

import pytest

from ramify.clients.bench.figures import figures, itl_quantiles
from ramify.clients.bench.load_program import GenerateJob, Level, LoadProgram, Outcome, Trace
from ramify.clients.bench.session import BenchFailed
from ramify.clients.bench.workloads import Case


def trace(
    sent: float, *arrivals: tuple[float, int], prompt: int = 10, cached: int | None = 4, level: int = 0
) -> Trace:
    made = Trace(sent=sent, prompt=prompt, cached=cached, level=level)
    made.computed = None if cached is None else prompt - cached
    for when, count in arrivals:
        made.arrived(when, count)
    made.ended = arrivals[-1][0]
    return made


def program(*outputs: int) -> LoadProgram:
    return LoadProgram([Level([GenerateJob(list(range(10)), count) for count in outputs], parent=0)])


def case(together: bool = False) -> Case:
    return Case("x", lambda dice, top: [], ("seconds",), together=together)


def test_rates_and_latencies() -> None:
    one = trace(1.0, (1.5, 1), (1.6, 1), (1.9, 2))
    two = trace(1.0, (2.0, 1), (3.0, 1))
    outcome = Outcome(1.0, [one, two])
    found = figures(case(), [program(4, 2)], outcome)
    assert found["seconds"] == pytest.approx(2.0)
    assert found["output_tok_s"] == pytest.approx(3.0)
    assert found["ttft_mean_ms"] == pytest.approx(750)
    assert found["itl_mean_ms"] == pytest.approx((400 / 3 + 1000) / 2)
    assert "prefill_tok_s" not in found
    marks = itl_quantiles(outcome)  # 100 once, 150 twice (one delta of two tokens), 1000 once
    assert (marks[0], marks[50], marks[100]) == pytest.approx((100, 150, 1000))


def test_prompts_against_the_optimum() -> None:
    outcome = Outcome(0.0, [trace(0.0, (1.0, 1), cached=0), trace(0.0, (1.0, 1), cached=9)])
    found = figures(case(), [program(1, 1)], outcome)
    assert (found["prompt_computed"], found["prompt_optimum"]) == (11, 11)
    assert found["computed_ratio"] == 1
    assert found["hit_rate"] == pytest.approx(9 / 20)
    warm = trace(0.0, (0.5, 1), cached=0)
    warm.extra = True
    more = figures(case(), [program(1, 1)], Outcome(0.0, [warm, *outcome.traces]))
    assert more["prompt_computed"] == 21  # what the client adds is computed all the same
    assert more["output_tokens"] == 2
    outcome.traces[0].computed = None
    assert "computed_ratio" not in figures(case(), [program(1, 1)], outcome)


def test_missing_tokens_are_a_fault() -> None:
    with pytest.raises(BenchFailed, match="3 tokens came of 4"):
        figures(case(), [program(4)], Outcome(0.0, [trace(0.0, (1.0, 3))]))


def test_levels() -> None:
    first = [trace(0.0, (1.0, 1)), trace(0.5, (2.0, 1))]
    second = [trace(2.5, (3.0, 1), level=1)]
    load = LoadProgram([*program(1, 1).levels, Level([GenerateJob([], 1)], parent=0)])
    found = figures(case(), [load], Outcome(0.0, [*first, *second]))
    assert (found["level_1_s"], found["level_2_s"]) == (2.0, 0.5)


def test_a_step_is_timed_while_all_decode() -> None:
    first = [trace(0.0, (0.1, 1)), trace(0.0, (0.2, 1))]
    early = trace(0.2, *[(1 + i / 100, 1) for i in range(50)], level=1)
    late = trace(0.2, *[(1.1 + i / 100, 1) for i in range(50)], level=1)
    load = LoadProgram(
        [*program(1, 1).levels, Level([GenerateJob([], 50), GenerateJob([], 50)], together=True)]
    )
    found = figures(case(together=True), [load], Outcome(0.0, [*first, early, late]))
    assert found["step_ms"] == pytest.approx(10)
    assert found["steady_share"] == pytest.approx(0.78, abs=0.02)
    apart = trace(0.2, *[(2 + i / 100, 1) for i in range(50)], level=1)
    with pytest.raises(BenchFailed, match="--max-rows"):
        figures(case(together=True), [load], Outcome(0.0, [*first, early, apart]))


def test_prompts_that_were_cached_before_the_run() -> None:
    with pytest.raises(BenchFailed, match=r"6 of at least 10 prompt tokens.*another --seed"):
        figures(case(), [program(1)], Outcome(0.0, [trace(0.0, (1.0, 1), cached=4)]))
    found = figures(case(), [program(1)], Outcome(0.0, [trace(0.0, (1.0, 1), cached=1)]))
    assert found["computed_ratio"] == pytest.approx(0.9)  # which may be chance


def test_warming_a_prefix_is_part_of_its_level() -> None:
    warm, load = trace(1.0, (2.0, 1), cached=None), trace(2.0, (4.0, 1), cached=None)
    warm.extra = True
    found = figures(case(), [program(1)], Outcome(1.0, [warm, load]))
    assert found["level_1_s"] == pytest.approx(3.0)
    assert found["ttft_mean_ms"] == pytest.approx(2000)  # of the load alone


def test_device_time() -> None:
    outcome = Outcome(0.0, [trace(0.0, (3.0, 1), cached=0)], device_s=2.0, steps=7)
    found = figures(case(), [program(1)], outcome)
    assert (found["wall_over_device"], found["steps"]) == (1.5, 7)
    outcome.device_s = 0.0
    assert "wall_over_device" not in figures(case(), [program(1)], outcome)


def test_prefill_is_measured_without_decoding() -> None:
    outcome = Outcome(1.0, [trace(1.0, (1.5, 1)), trace(1.0, (3.0, 1))])
    assert figures(case(), [program(1, 1)], outcome)["prefill_tok_s"] == pytest.approx(10)


def test_input_ahead_is_in_no_account() -> None:
    ahead = LoadProgram([Level([GenerateJob([1, 2], 1)], ahead_s=0.3)])
    assert "computed_ratio" not in figures(case(), [ahead], Outcome(0.0, [trace(0.0, (1.0, 1))]))
