"""Repeats a case and collects what came out. Knows no flags and draws nothing."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

from ramify.clients.bench.crowd import Crowd
from ramify.clients.bench.figures import figures, itl_quantiles
from ramify.clients.bench.load_program import Outcome, Target
from ramify.clients.bench.server import device_time, served
from ramify.clients.bench.stats import spread
from ramify.clients.bench.workloads import Case
from ramify.protocol.errors import BadRequest

BUSY = 0.85  # of a core: from here on the load may be the bottleneck

Say = Callable[[str], None]


def check(case: Case, target: Target, processes: int) -> None:
    """Check a case. Raises BadRequest for what cannot be measured so."""
    if case.together and processes > 1:
        raise BadRequest(f"{case.name}: its lines start together, so it needs --processes 1")
    if case.device_time and target.kind != "ramify":
        raise BadRequest("overhead needs the step times that only a Ramify server tells: use --url")


def measure(
    case: Case,
    target: Target,
    crowd: Crowd,
    *,
    top: int,
    seed: int,
    repeats: int,
    warmup: int,
    say: Say,
) -> dict[str, Any]:
    """Make `warmup` runs that do not count, then `repeats` runs. `top`: prompt ids are below it.

    Returns the case's part of the report. Raises BenchFailed, OSError.
    """
    runs: list[dict[str, Any]] = []
    for number in range(-warmup, repeats):
        # Other prompts in each run of each case, so that nothing is cached across.
        dice = Random(f"{case.name}, seed {seed}, run {number}")
        programs = case.build(dice, top)
        before = device_time(target) if target.kind == "ramify" else None
        outcome = crowd.run(target, programs)
        if before is not None:
            seconds, steps = device_time(target)
            outcome.device_s, outcome.steps = seconds - before[0], steps - before[1]
        found = figures(case, programs, outcome)
        key = case.figures[0]
        what = f"run {number + 1} of {repeats}" if number >= 0 else "warm-up"
        say(f"{case.name}: {what}: {key} {found.get(key, float('nan')):.4g}")
        if outcome.cpu > BUSY:
            say(f"the load took {outcome.cpu:.0%} of a core: give more --processes")
        if number >= 0:
            runs.append({"figures": found, **records(outcome)})
    return {"name": case.name, "shown": list(case.figures), **summary(runs), "runs": runs}


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Median, minimum and maximum of every figure that all runs have."""
    keys = [key for key in runs[0]["figures"] if all(key in run["figures"] for run in runs)]
    return {"figures": {key: spread([run["figures"][key] for run in runs]) for key in keys}}


def records(outcome: Outcome) -> dict[str, Any]:
    """Make columns of every request of a run; times in ms from the start."""
    columns: dict[str, list[Any]] = {
        name: []
        for name in ("program", "level", "sent_ms", "ttft_ms", "ended_ms", "prompt", "cached",
                     "computed", "output", "server_ttft_ms", "extra")
    }  # fmt: skip
    for trace in outcome.traces:
        row = (
            trace.program,
            trace.level,
            round(1e3 * (trace.sent - outcome.begin), 3),
            round(1e3 * trace.ttft, 3),
            round(1e3 * (trace.ended - outcome.begin), 3),
            trace.prompt,
            trace.cached,
            trace.computed,
            trace.output,
            trace.server_ttft_ms,
            trace.extra,
        )
        for column, value in zip(columns.values(), row, strict=True):
            column.append(value)
    return {"requests": columns, "itl_ms_quantiles": itl_quantiles(outcome)}


def measure_start(
    flags: list[str], shape: str | None, *, cold: bool, repeats: int, warmup: int, say: Say
) -> dict[str, Any]:
    """Measure row h: the time from the start of the process to ready. Returns the case's report.

    `cold`: Triton finds no kernel that an earlier start compiled, and leaves none.
    """
    runs: list[dict[str, Any]] = []
    for number in range(-warmup, repeats):
        with _kernel_cache(cold) as environment, served(flags, shape, environment) as server:
            what = f"run {number + 1} of {repeats}" if number >= 0 else "warm-up"
            say(f"start: {what}: ready_s {server.ready_s:.2f}")
            if number >= 0:
                runs.append({"figures": {"ready_s": server.ready_s}})
    name = f"process start to ready, {'cold' if cold else 'warm'}"
    return {"name": name, "shown": ["ready_s"], **summary(runs), "runs": runs}


@contextmanager
def _kernel_cache(cold: bool) -> Iterator[dict[str, str]]:
    """Give the environment variables that say where Triton keeps compiled kernels."""
    if not cold:
        yield {}
        return
    with TemporaryDirectory() as folder:
        yield {"TRITON_CACHE_DIR": folder}
