"""The workloads of the benchmarks: programs of random token ids. Pure.

A `Case` is one row of a table: `build(dice, top)` makes its programs with ids below `top`. Each `dice`
makes other ids, so that nothing of one run is cached for the next. `figures` names the figures that are
shown. Sizes are the defaults of the flags in `commands/bench.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from ramify.clients.bench.load_program import GenerateJob, Level, LoadProgram

Build = Callable[[Random, int], list[LoadProgram]]
LATENCY = ("ttft_mean_ms", "ttft_p50_ms", "ttft_p99_ms", "itl_mean_ms", "itl_p50_ms", "itl_p99_ms")


@dataclass(frozen=True)
class Case:
    """A row of a table. `name`: of the row.

    `figures`: keys of `figures.figures`, the first one is the headline.
    """

    name: str
    build: Build
    figures: tuple[str, ...]
    device_time: bool = False  # means nothing without the server's account of its device
    together: bool = False  # its programs wait for each other, so they need one process


def throughput(
    requests: int, shortest: int, longest: int, out_shortest: int, out_longest: int, branches: int
) -> Case:
    """`requests` requests at once, lengths uniform in [shortest, longest]; `branches` to a session."""

    def build(dice: Random, top: int) -> list[LoadProgram]:
        sizes = [
            (dice.randint(shortest, longest), dice.randint(out_shortest, out_longest))
            for _ in range(requests)
        ]
        jobs = [GenerateJob(_ids(dice, top, i), o, place) for place, (i, o) in enumerate(sizes)]
        return _dealt(jobs, branches)

    name = f"{requests} x ({shortest}-{longest} in, {out_shortest}-{out_longest} out)"
    return Case(name, build, ("output_tok_s", "seconds", *LATENCY))


def decode(batch: int, context: int, steps: int, branches: int) -> Case:
    """`batch` generations at a context of `context` on average, none of which prefills meanwhile.

    First each line computes its prompt (one token out); when all have, they go on together.
    """
    start = max(1, context - steps // 2)

    def build(dice: Random, top: int) -> list[LoadProgram]:
        firsts = _dealt([GenerateJob(_ids(dice, top, start), 1, i) for i in range(batch)], branches)
        programs = []
        for program in firsts:
            again = [GenerateJob([], steps, job.seed) for job in program.levels[0].jobs]
            programs.append(LoadProgram([*program.levels, Level(again, together=True)]))
        return programs

    return Case(
        f"decode {batch} x {context}", build, ("step_ms", "steady_share", "itl_p99_ms"), together=True
    )


def prefill(prompts: int, length: int) -> Case:
    """`prompts` prompts at once, one token of output each."""

    def build(dice: Random, top: int) -> list[LoadProgram]:
        jobs = [GenerateJob(_ids(dice, top, length), 1, i) for i in range(prompts)]
        return _dealt(jobs, prompts)

    return Case(f"prefill {prompts} x {length}", build, ("prefill_tok_s", "ttft_mean_ms"))


def chat(sessions: int, turns: int, given: int, answered: int, ahead_ms: float) -> Case:
    """`sessions` conversations at once, each turn as soon as the one before has ended."""

    def build(dice: Random, top: int) -> list[LoadProgram]:
        return [
            LoadProgram(
                [
                    Level([GenerateJob(_ids(dice, top, given), answered, turn)], ahead_s=ahead_ms / 1e3)
                    for turn in range(turns)
                ]
            )
            for _ in range(sessions)
        ]

    name = f"{sessions} sessions x {turns} turns, +{given} in, {answered} out"
    if ahead_ms:
        name += f", appended {ahead_ms:g} ms ahead"
    return Case(name, build, ("output_tok_s", *LATENCY, "seconds"))


def tree(questions: int, prefix: int, branches: int, first: int, then: int) -> Case:
    """Each question: a prefix, `branches` thoughts of `first` tokens, one of them gone on with.

    The second level starts when all thoughts of that question have ended, as where they are judged.
    """

    def build(dice: Random, top: int) -> list[LoadProgram]:
        programs = []
        for _ in range(questions):
            thoughts = [GenerateJob([], first, i) for i in range(branches)]
            more = [GenerateJob([], then, branches + i) for i in range(branches)]
            levels = [
                Level(thoughts, parent=0, prefix=_ids(dice, top, prefix)),
                Level(more, parent=dice.randrange(branches)),
            ]
            programs.append(LoadProgram(levels))
        return programs

    name = f"{questions} trees, prefix {prefix}, {branches} x {first}, {branches} x {then}"
    shown = ("seconds", "level_1_s", "level_2_s", "output_tok_s", "ttft_mean_ms", "computed_ratio")
    return Case(name, build, shown)


def shared_prefix(sessions: int, prefix: int, own: int, output: int) -> Case:
    """`sessions` at once whose prompts begin with the same `prefix` tokens."""

    def build(dice: Random, top: int) -> list[LoadProgram]:
        common = _ids(dice, top, prefix)
        return [
            LoadProgram([Level([GenerateJob(common + _ids(dice, top, own), output, i)])])
            for i in range(sessions)
        ]

    return Case(f"{sessions} prompts, shared {prefix}, own {own}", build, PREFIX)


PREFIX = ("computed_ratio", "hit_rate", "prompt_computed", "prompt_optimum", "seconds")


def overhead(batch: int, given: int, output: int, branches: int) -> Case:
    """One large batch from prefill to its end, against the device's own time."""

    def build(dice: Random, top: int) -> list[LoadProgram]:
        return _dealt([GenerateJob(_ids(dice, top, given), output, i) for i in range(batch)], branches)

    name = f"{batch} x ({given} in, {output} out)"
    return Case(name, build, ("wall_over_device", "seconds", "device_s", "steps"), device_time=True)


def optimum(programs: list[LoadProgram]) -> int:
    """Count the fewest prompt tokens that can be computed: each shared prefix once.

    A request must run at least its last token, whose logits nobody has kept; going on after an
    answer, the answer's last token has been sampled but not run.
    """
    opening = sorted(
        level.prefix + job.tokens
        for level in (program.levels[0] for program in programs)
        for job in level.jobs
    )
    total = 0
    before: list[int] = []
    for prompt in opening:
        total += max(1, len(prompt) - _common(before, prompt))
        before = prompt
    for program in programs:
        for level in program.levels[1:]:
            if level.parent is None:
                total += sum(1 + len(job.tokens) for job in level.jobs)
            else:  # the first one runs the shared part, every other one at least its last token
                fresh = [len(job.tokens) for job in level.jobs]
                total += 1 + len(level.prefix) + sum(max(1, size) for size in fresh)
                total -= 1 if 0 in fresh else 0
    return total


def _common(one: list[int], other: list[int]) -> int:
    """The length of the common prefix."""
    for place, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return place
    return min(len(one), len(other))


def _dealt(jobs: list[GenerateJob], branches: int) -> list[LoadProgram]:
    """Sessions of at most `branches` lines, jobs dealt out in turn."""
    count = -(-len(jobs) // branches)
    return [LoadProgram([Level(jobs[place::count], parent=0)]) for place in range(count)]


def _ids(dice: Random, top: int, count: int) -> list[int]:
    return dice.choices(range(top), k=count)
