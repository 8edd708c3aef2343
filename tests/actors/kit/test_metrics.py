"""Metrics: what is counted, how it reads, what a step costs, and the lag monitor."""

import asyncio
import sys
from typing import Any, Literal

import pytest
from prometheus_client.parser import text_string_to_metric_families

from ramify.actors.kit.clock import watch_loop
from ramify.actors.kit.metric_families import Histogram
from ramify.actors.kit.metrics import Metrics
from ramify.actors.kit.report import CredentialUsage, RankState, Report
from ramify.protocol.messages import Finished
from ramify.protocol.plan import StepResult, pack
from tests.manual_clock import ManualClock


def samples(metrics: Metrics) -> dict[str, float]:
    """`name{label}` to value, as a scraper reads them."""
    found = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            labels = ",".join(sample.labels.values())
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


def end(
    reason: Literal["stop", "length", "cancelled", "deadline", "error"] = "stop", **changes: Any
) -> Finished:
    fields: dict[str, Any] = {
        "request": 1,
        "reason": reason,
        "output": 11,
        "prompt": 40,
        "cached": 30,
        "computed": 10,
        "arrived": 100.0,
        "started": 100.04,
        "first_token": 100.25,
        "ended": 100.75,
    }
    return Finished(**{**fields, **changes})


def test_fresh_metrics_show_every_series_at_zero() -> None:
    assert Metrics().kv_in_use == 0.0
    values = samples(Metrics())
    for name in (
        "ramify_requests_running",
        "ramify_requests_waiting",
        "ramify_kv_tokens{free}",
        "ramify_kv_tokens{evictable}",
        "ramify_kv_tokens{referenced}",
        "ramify_sockets",
        "ramify_sessions",
        "ramify_event_loop_lag_seconds",
        "ramify_cache_hit_rate",
        "ramify_steps_total",
        "ramify_executor_tokens_total",
        "ramify_output_tokens_total",
        "ramify_prompt_tokens_total{cached}",
        "ramify_prompt_tokens_total{computed}",
        "ramify_requests_total{deadline}",
        "ramify_ttft_seconds_count",
        "ramify_itl_seconds_sum",
        "ramify_queue_seconds_bucket{+Inf}",
        "ramify_step_seconds_count",
        "ramify_plan_seconds_count",
        "ramify_retractions_total{priority}",
        "ramify_retractions_total{memory}",
        "ramify_computed_twice_tokens_total",
        "ramify_mixed_tokens",
    ):
        assert values[name] == 0, name


def test_steps_and_gauges() -> None:
    metrics = Metrics()
    metrics.step(StepResult(1, pack([0, 1]), pack([5, 6]), 130, 2500), 0.00012)
    metrics.step(StepResult(2, pack([0]), pack([7]), 1, 900), 0.00002)
    metrics.turn(1, 8, {}, 0, 0)
    metrics.kv(10, 20, 30)
    for delta in (1, 1, -1):
        metrics.sockets(delta)
        metrics.sessions(2 * delta)
    metrics.loop_lag(0.2)
    metrics.loop_lag(0.01)
    values = samples(metrics)
    assert values["ramify_steps_total"] == 2
    assert values["ramify_executor_tokens_total"] == 131
    assert values["ramify_sampled_tokens_total"] == 3
    assert (values["ramify_requests_running"], values["ramify_requests_waiting"]) == (1, 8)
    assert [values[f"ramify_kv_tokens{{{s}}}"] for s in ("free", "evictable", "referenced")] == [
        10,
        20,
        30,
    ]
    assert (values["ramify_sockets"], values["ramify_sessions"]) == (1, 2)
    assert values["ramify_event_loop_lag_seconds"] == 0.01
    assert values["ramify_event_loop_lag_max_seconds"] == 0.2
    assert values["ramify_step_seconds_sum"] == pytest.approx(0.0034)
    assert values["ramify_plan_seconds_bucket{2e-05}"] == 1
    assert (metrics.running, metrics.waiting, metrics.kv_in_use) == (1, 8, 0.5)
    metrics.turn(0, 0, {}, 0, 0)
    assert samples(metrics)["ramify_requests_running"] == 0


def test_drafts_by_drafter() -> None:
    metrics = Metrics()
    assert "ramify_draft_tokens_total" not in metrics.render().decode()
    metrics.drafter = "ngram"
    metrics.step(StepResult(1, pack([0, 1]), pack([5, 6, 7]), 4, 900, counts=pack([2, 1]),
                            drafted=pack([3, 0])), 0.0)  # fmt: skip
    metrics.step(StepResult(2, pack([0, 1]), pack([8, 9]), 2, 900), 0.0)
    metrics.step(StepResult(3, pack([0, 1]), pack([8, 9, 9]), 3, 900, counts=pack([0, 3]),
                            drafted=pack([0, 2])), 0.0)  # the first row waited for its mask  # fmt: skip
    metrics.step(StepResult(4, pack([0, 1]), pack([7, 8, 9, 9]), 6, 900, counts=pack([1, 3]),
                            drafted=pack([1, 3]), forced=bytes([1, 1, 1, 0])), 0.0)  # fmt: skip
    values = samples(metrics)
    assert values["ramify_draft_tokens_total{ngram}"] == 7  # what is forced is no guess
    assert values["ramify_accepted_draft_tokens_total{ngram}"] == 3


def test_how_requests_gave_way() -> None:
    metrics = Metrics()
    metrics.turn(0, 0, {"fairness": 3, "ahead": 1}, 17, 512)
    values = samples(metrics)
    causes = ("priority", "fairness", "memory", "ahead")
    assert [values[f"ramify_retractions_total{{{cause}}}"] for cause in causes] == [0, 3, 0, 1]
    assert values["ramify_computed_twice_tokens_total"] == 17
    assert values["ramify_mixed_tokens"] == 512


def test_finished_requests() -> None:
    metrics = Metrics()
    metrics.finished(end())
    metrics.finished(end("length", output=1))
    metrics.finished(end("cancelled", output=0, started=0.0, first_token=0.0, cached=0, computed=0))
    values = samples(metrics)
    assert values["ramify_requests_total{stop}"] == 1
    assert values["ramify_requests_total{length}"] == 1
    assert values["ramify_requests_total{cancelled}"] == 1
    assert values["ramify_output_tokens_total"] == 12
    assert values["ramify_prompt_tokens_total{cached}"] == 60
    assert values["ramify_prompt_tokens_total{computed}"] == 20
    assert values["ramify_cache_hit_rate"] == pytest.approx(0.75)
    assert values["ramify_ttft_seconds_count"] == 2
    assert values["ramify_ttft_seconds_sum"] == pytest.approx(0.5)
    assert values["ramify_itl_seconds_count"] == 1  # one token has no time between tokens
    assert values["ramify_itl_seconds_sum"] == pytest.approx(0.05)
    assert values["ramify_queue_seconds_count"] == 2


def test_histogram_bounds_are_inclusive_and_cumulative() -> None:
    histogram = Histogram("x", "help", (1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 99.0):
        histogram.observe(value)
    buckets = {s.labels["le"]: s.value for s in histogram.family().samples if s.name == "x_bucket"}
    assert buckets == {"1.0": 2, "2.0": 4, "+Inf": 5}


def test_engines_do_not_share_a_registry() -> None:
    one, other = Metrics(), Metrics()
    one.sockets(1)
    assert samples(other)["ramify_sockets"] == 0


def test_a_step_costs_few_calls_however_many_rows_it_has() -> None:
    def calls(rows: int) -> int:
        result = StepResult(1, pack(range(rows)), pack(range(rows)), rows, 2500)
        found: list[str] = []
        sys.setprofile(lambda frame, event, arg: found.append(event) if "call" in event else None)
        try:
            metrics.step(result, 0.0001)
            metrics.turn(rows, 3, {}, 0, 0)
        finally:
            sys.setprofile(None)
        return len(found)

    metrics = Metrics()
    assert calls(1) == calls(256) < 40


async def test_lag_is_how_late_a_timer_is() -> None:
    clock, metrics = ManualClock(), Metrics()
    task = asyncio.create_task(watch_loop(clock, metrics.loop_lag, interval=1.0))
    await asyncio.sleep(0)
    clock.advance(1.25)
    for _ in range(3):
        await asyncio.sleep(0)
    assert samples(metrics)["ramify_event_loop_lag_seconds"] == pytest.approx(0.25)
    clock.advance(1.0)
    for _ in range(3):
        await asyncio.sleep(0)
    values = samples(metrics)
    assert values["ramify_event_loop_lag_seconds"] == pytest.approx(0.0)
    assert values["ramify_event_loop_lag_max_seconds"] == pytest.approx(0.25)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_gateway_processes_add_up_and_show_alone() -> None:
    metrics = Metrics()
    assert "ramify_gateway_sockets{0}" not in samples(metrics)
    metrics.sockets(1)
    metrics.gateway(0, Report(sockets=3, sessions=2, lag=0.5))
    metrics.gateway(1, Report(sockets=5, sessions=4, lag=0.25))
    metrics.gateway(0, Report(sockets=1, sessions=2, lag=0.5))
    values = samples(metrics)
    assert values["ramify_sockets"] == metrics.open_sockets == 7
    assert values["ramify_sessions"] == metrics.live_sessions == 6
    assert values["ramify_gateway_sockets{0}"] == 1
    assert values["ramify_gateway_sessions{1}"] == 4
    assert values["ramify_gateway_event_loop_lag_seconds{1}"] == 0.25


def test_a_scrape_is_answered_at_once() -> None:
    texts: list[bytes] = []
    Metrics().scrape(texts.append)
    assert b"ramify_sockets 0.0" in texts[0]


def test_what_credentials_have_adds_up_over_processes() -> None:
    """Counters outlive the process that counted; sockets do not."""
    metrics = Metrics()
    metrics.usage = lambda: {"alice": CredentialUsage(1, 10, 2)}
    zero = {"alice": CredentialUsage(2, 100, 20, 3), "bob": CredentialUsage(1)}
    metrics.gateway(0, Report(usage=zero))
    metrics.gateway(1, Report(usage={"alice": CredentialUsage(4, 1000, 200, 0, 1)}))
    metrics.gateway(1, Report(usage={"alice": CredentialUsage(5, 2000, 200, 0, 1)}))
    assert metrics.sockets_elsewhere(1) == {"alice": 2, "bob": 1}
    assert metrics.sockets_elsewhere(0) == {"alice": 5}
    values = samples(metrics)
    assert values["ramify_owner_sockets{alice}"] == 8
    assert values["ramify_owner_received_bytes_total{alice}"] == 2110
    metrics.gateway_ended(1)
    metrics.gateway_ended(1)
    assert metrics.sockets_elsewhere(0) == {}
    metrics.gateway(1, Report(usage={"alice": CredentialUsage(1, 5)}))  # the process that took its place
    values = samples(metrics)
    assert values["ramify_owner_sockets{alice}"] == 4
    assert values["ramify_owner_received_bytes_total{alice}"] == 2115
    assert values["ramify_owner_frames_total{alice}"] == 222
    assert values["ramify_owner_refused_ops_total{alice}"] == 3
    assert values["ramify_owner_abuses_total{alice}"] == 1
    assert values["ramify_owner_sockets{bob}"] == 1


def test_ranks_are_labelled_and_one_process_has_none() -> None:
    metrics = Metrics()
    behind = RankState(1, 8, 28, 2)
    assert "ramify_rank" not in metrics.render().decode()
    metrics.ranks = lambda: [RankState(0, 7, 30, 0, "running", 1 << 20, 2.5), behind]
    lines = metrics.render().decode().splitlines()
    for line in (
        'ramify_rank_steps_total{rank="1"} 28.0',
        'ramify_rank_behind{rank="1"} 2.0',
        'ramify_rank_resident_bytes{rank="0"} 1.048576e+06',
        'ramify_rank_cpu_seconds_total{rank="0"} 2.5',
    ):
        assert line in lines
