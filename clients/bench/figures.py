"""Numbers from traces. Pure: times in, milliseconds and rates out.

output_tok_s     output tokens over `seconds`, from the word to go to the last end
ttft_*_ms        from sending a request to its first token at the client
itl_mean_ms      mean over requests of (last - first token) / (tokens after the first arrival)
itl_p*_ms        over tokens: what a token waited for; a delta of k tokens counts k times its k-th
step_ms          of the lines of a `together` level: time per token while all of them decode
steady_share     which part of their tokens fell into that time
prefill_tok_s    where each request has one token of output: all prompts over the time until the last
level_N_s        mean over programs of the time from a level's start, which warms its prefix if that
                 was asked for, to its end
computed_ratio   prompt tokens computed, over the optimum (`workloads.optimum`); not where input was
                 appended ahead, for then its computation is in no request's account; far below 1 the
                 prompts were cached before the run, which then counts for nothing
hit_rate         cached share of the prompt tokens
wall_over_device `seconds` over the time that the device spent in steps (of every Ramify server's run)
"""

from collections import defaultdict
from collections.abc import Sequence

from ramify.clients.bench.load_program import LoadProgram, Outcome, Trace
from ramify.clients.bench.session import BenchFailed
from ramify.clients.bench.stats import mean, percentile, quantiles
from ramify.clients.bench.workloads import Case, optimum

STEADY_SHARE = 0.5  # of a decode batch's tokens at least
LEAST_RATIO = 0.8  # below 1 by chance only: random prompts may begin with the same few tokens


def figures(case: Case, programs: list[LoadProgram], outcome: Outcome) -> dict[str, float]:
    """Work out all figures of one run. Raises BenchFailed where counts do not add up."""
    load = outcome.load
    wanted = sum(program.output for program in programs)
    output = sum(trace.output for trace in load)
    if output != wanted:
        raise BenchFailed(f"{output} tokens came of {wanted} that were asked for")
    found = {
        "seconds": outcome.seconds,
        "output_tokens": output,
        "output_tok_s": output / outcome.seconds,
        "client_cpu": outcome.cpu,
        **_latencies(load),
        **_prompts(programs, outcome),
        **_levels(outcome.traces),
    }
    if case.together:
        found |= _steady([trace for trace in load if trace.level == 1])
    if all(trace.output == 1 for trace in load):
        last = max(trace.arrivals[0] for trace in load)
        found["prefill_tok_s"] = sum(trace.prompt for trace in load) / (last - outcome.begin)
    if outcome.device_s is not None:
        found["device_s"] = outcome.device_s
        if outcome.device_s:  # an executor without a clock says 0
            found["wall_over_device"] = outcome.seconds / outcome.device_s
        found["steps"] = outcome.steps or 0
    return found


def itl_quantiles(outcome: Outcome) -> list[float]:
    """0%, 1%, ..., 100% of the times between tokens, in ms; empty if no line had two arrivals."""
    return [round(value, 4) for value in quantiles(*_gaps(outcome.load))]


def _latencies(load: Sequence[Trace]) -> dict[str, float]:
    firsts = [1e3 * trace.ttft for trace in load]
    found = {"ttft_mean_ms": mean(firsts)}
    for percent in (50, 90, 99):
        found[f"ttft_p{percent}_ms"] = percentile(firsts, percent)
    means = [1e3 * _mean_gap(trace) for trace in load if len(trace.arrivals) > 1]
    if means:
        found["itl_mean_ms"] = mean(means)
        marks = quantiles(*_gaps(load))
        for percent in (50, 90, 99):
            found[f"itl_p{percent}_ms"] = marks[percent]
    return found


def _mean_gap(trace: Trace) -> float:
    """Mean seconds for each token after the first arrival's, from that arrival to the last."""
    return (trace.arrivals[-1] - trace.arrivals[0]) / (trace.output - trace.counts[0])


def _gaps(load: Sequence[Trace]) -> tuple[list[float], list[int]]:
    """Milliseconds between arrivals, and how many tokens came with the later one of each pair."""
    gaps: list[float] = []
    weights: list[int] = []
    for trace in load:
        before = trace.arrivals[0]
        for now, count in zip(trace.arrivals[1:], trace.counts[1:], strict=True):
            gaps.append(1e3 * (now - before) / count)
            weights.append(count)
            before = now
    return gaps, weights


def _prompts(programs: list[LoadProgram], outcome: Outcome) -> dict[str, float]:
    """Count prompt tokens by the server's account; no figures where it gives none.

    Raises BenchFailed if the prompts were in the server's cache before this run.
    """
    counted = [(t.cached, t.computed) for t in outcome.traces if t.computed is not None]
    ahead = any(level.ahead_s for program in programs for level in program.levels)
    if ahead or len(counted) != len(outcome.traces):
        return {}
    cached = sum(have or 0 for have, _ in counted)
    computed = sum(new or 0 for _, new in counted)
    best = optimum(programs)
    if computed < LEAST_RATIO * best:
        raise BenchFailed(
            f"only {computed} of at least {best} prompt tokens were computed: the server has the others "
            "cached from an earlier load. Give another --seed, or start the server anew"
        )
    return {
        "prompt_cached": cached,
        "prompt_computed": computed,
        "prompt_optimum": best,
        "computed_ratio": computed / best,
        "hit_rate": cached / (cached + computed),
    }


def _levels(every: Sequence[Trace]) -> dict[str, float]:
    spans: dict[tuple[int, int], list[Trace]] = defaultdict(list)
    for trace in every:
        spans[trace.level, trace.program].append(trace)
    times: dict[int, list[float]] = defaultdict(list)
    for (level, _), traces in spans.items():
        times[level].append(max(t.ended for t in traces) - min(t.sent for t in traces))
    return {f"level_{level + 1}_s": mean(spent) for level, spent in sorted(times.items())}


def _steady(load: Sequence[Trace]) -> dict[str, float]:
    """Measure the time in which all lines decode. Raises BenchFailed if it holds too few tokens."""
    begin = max(trace.arrivals[0] for trace in load)
    end = min(trace.arrivals[-1] for trace in load)
    steps: list[float] = []
    inside = 0
    for trace in load:
        marks = [(t, c) for t, c in zip(trace.arrivals, trace.counts, strict=True) if begin <= t <= end]
        tokens = sum(count for _, count in marks[1:])
        inside += tokens
        if tokens:
            steps.append((marks[-1][0] - marks[0][0]) / tokens)
    share = inside / sum(trace.output for trace in load)
    if share < STEADY_SHARE:
        raise BenchFailed(
            f"the batch decoded together for {share:.0%} of its tokens only: give more --steps, "
            "or a server with room for the whole batch (--max-rows)"
        )
    return {"step_ms": 1e3 * percentile(steps, 50), "steady_share": share}
