"""Workloads: their sizes, that runs differ, and the fewest prompt tokens by a model of a cache."""

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from ramify.clients.bench import workloads
from ramify.clients.bench.load_program import GenerateJob, Level, LoadProgram

TOP = 10_000


def test_throughput_is_row_a() -> None:
    case = workloads.throughput(256, 100, 1024, 100, 1024, 8)
    programs = case.build(Random("x"), TOP)
    jobs = [job for program in programs for job in program.levels[0].jobs]
    assert (len(programs), len(jobs)) == (32, 256)
    assert {len(program.levels[0].jobs) for program in programs} == {8}
    assert all(100 <= len(job.tokens) <= 1024 and 100 <= job.output <= 1024 for job in jobs)
    assert all(0 <= token < TOP for job in jobs for token in job.tokens)
    assert programs == case.build(Random("x"), TOP)
    assert programs != case.build(Random("y"), TOP)


def test_chat_and_tree_have_their_levels() -> None:
    (chat, *others) = workloads.chat(64, 8, 128, 64, 300).build(Random(0), TOP)
    assert len(others) == 63
    assert [(len(level.jobs[0].tokens), level.jobs[0].output) for level in chat.levels] == [
        (128, 64)
    ] * 8
    assert (chat.levels[0].ahead_s, chat.width, chat.output) == (0.3, 1, 512)
    (tree, *others) = workloads.tree(64, 512, 8, 128, 64).build(Random(0), TOP)
    assert len(others) == 63
    first, second = tree.levels
    assert (len(first.prefix), [job.output for job in first.jobs]) == (512, [128] * 8)
    assert [job.output for job in second.jobs] == [64] * 8
    assert first.parent == 0
    assert second.parent in range(8)
    assert tree.output == 8 * 128 + 8 * 64


def test_decode_waits_until_all_have_prefilled() -> None:
    programs = workloads.decode(20, 1024, 96, 8).build(Random(0), TOP)
    assert [len(program.levels[0].jobs) for program in programs] == [7, 7, 6]
    for program in programs:
        first, second = program.levels
        assert all((len(job.tokens), job.output) == (976, 1) for job in first.jobs)
        assert all((job.tokens, job.output) == ([], 96) for job in second.jobs)
        assert (second.together, second.parent) == (True, None)


def test_known_optima() -> None:
    tree = workloads.tree(2, 512, 8, 128, 64).build(Random(0), TOP)
    # prefix once, 7 more last tokens; then the last sampled token for each of the 8 children
    assert workloads.optimum(tree) == 2 * (512 + 7 + 8)
    chat = workloads.chat(3, 4, 128, 64, 0).build(Random(0), TOP)
    assert workloads.optimum(chat) == 3 * (128 + 3 * 129)
    shared = workloads.shared_prefix(4, 100, 10, 5).build(Random(0), TOP)
    assert workloads.optimum(shared) == 100 + 4 * 10


TOKENS = st.lists(st.integers(0, 2), max_size=4)
JOBS = st.lists(TOKENS, min_size=1, max_size=3)


@st.composite
def programs(draw: st.DrawFn) -> list[LoadProgram]:
    """Later levels get tokens that nothing else has, as random prompts do."""
    fresh = iter(range(100, 10_000))
    made = []
    for _ in range(draw(st.integers(1, 3))):
        root = draw(st.lists(st.integers(0, 2), min_size=1, max_size=4))
        jobs = [GenerateJob(tokens, 2) for tokens in draw(JOBS)]
        levels = [Level(jobs, parent=0, prefix=root)]
        for _ in range(draw(st.integers(0, 2))):
            fork = draw(st.booleans())
            count = draw(st.integers(1, 3)) if fork else len(levels[-1].jobs)
            sizes = [draw(st.integers(0, 2)) for _ in range(count)]
            later = [GenerateJob([next(fresh) for _ in range(size)], 2) for size in sizes]
            prefix = [next(fresh) for _ in range(draw(st.integers(0, 2)))] if fork else []
            levels.append(Level(later, parent=0 if fork else None, prefix=prefix))
        made.append(LoadProgram(levels))
    return made


@given(programs())
def test_the_optimum_is_what_a_perfect_cache_computes(load: list[LoadProgram]) -> None:
    known: set[tuple[int, ...]] = set()
    outputs = iter(range(20_000, 100_000))

    def run(prompt: list[int], count: int) -> tuple[int, list[int]]:
        cached = max(at for at in range(len(prompt)) if at == 0 or tuple(prompt[:at]) in known)
        line = prompt + [next(outputs) for _ in range(count)]
        known.update(tuple(line[:at]) for at in range(len(line)))  # the last one is not run
        return len(prompt) - cached, line

    computed = 0
    opening = [
        (program.levels[0].prefix + job.tokens, place, number, job.output)
        for place, program in enumerate(load)
        for number, job in enumerate(program.levels[0].jobs)
    ]
    lines: dict[tuple[int, int], list[int]] = {}
    for prompt, place, number, count in sorted(opening):  # the shorter one of two first
        new, lines[place, number] = run(prompt, count)
        computed += new
    for place, program in enumerate(load):
        heads = [lines[place, number] for number in range(len(program.levels[0].jobs))]
        for level in program.levels[1:]:
            ends = []
            for number, job in sorted(enumerate(level.jobs), key=lambda pair: len(pair[1].tokens)):
                parent = heads[number if level.parent is None else level.parent]
                new, line = run(parent + level.prefix + job.tokens, job.output)
                computed += new
                ends.append((number, line))
            heads = [line for _, line in sorted(ends)]
    assert workloads.optimum(load) == computed
