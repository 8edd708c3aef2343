"""Cost of radix-cache operations against the size of the tree.

    python benchmarks/radix.py [--json FILE] [--repeat 300] [--sizes 10000 100000] [--depths 100 1000]

Every tree is resident and holds SIZE tokens: half of them in one long branch ("long"), half in
branches of 1,000 tokens ("short") behind 64 namesakes of a system prompt. Each operation works on
100 tokens (`match` on 1,000) and is undone outside of the clock. Columns are the median and the
10th to 90th percentile in microseconds. "table" is the time of only copying the long branch's page
table, which every grant must contain: subtract it to see what the tree costs.

A row that is flat over the sizes costs what the delta costs; the tree's size does not matter.

A second table (`--depths`) has what could grow in other ways: forks on the path, siblings, small
leaves, turns of a session.
"""

import argparse
import gc
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from ramify.actors.cache.cache import RadixCache
from ramify.actors.cache.integrity import check
from ramify.actors.session.branches.branch import Branch, input_segment
from ramify.actors.session.branches.segments import Tail
from ramify.protocol import messages as m

DELTA = 100
SHORT = 1000
ROUND = 50  # operations on one tree; what they leave behind is at most 200 tokens each
WARM_UP = 5
LONG = 1  # the long branch; short ones count from 2
SCRATCH = 1 << 30  # ids of branches that an operation makes
REQUEST = 1 << 40


class Bench:
    """One tree of `size` resident tokens, room for a round of operations, and a stopwatch."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.random = np.random.default_rng(size)
        self.cache = RadixCache(size + (WARM_UP + ROUND) * 2 * DELTA)
        self.results: dict[str, list[float]] = {}
        system = [self.tokens(64) for _ in range(64)]
        self.shorts: list[bytes] = []
        self.prefill(LONG, self.tokens(size // 2))
        for i in range(size // 2 // SHORT):
            prompt = system[i % 64] + self.tokens(SHORT - 64)
            self.shorts.append(prompt)
            self.prefill(2 + i, prompt)

    def tokens(self, count: int) -> bytes:
        return self.random.integers(0, 150_000, count, dtype=np.int32).tobytes()

    def any_short(self) -> int:
        return int(self.random.integers(len(self.shorts)))

    def prefill(self, branch: int, tokens: bytes) -> None:
        self.cache.open_branch(m.OpenBranch(branch))
        self.cache.extend_branch(m.ExtendBranch(branch, tokens))
        self.cache.acquire(m.Acquire(REQUEST, branch, 0))
        self.cache.commit(m.Commit(REQUEST, len(tokens) // 4, final=True))

    @contextmanager
    def clock(self, name: str) -> Iterator[None]:
        start = time.perf_counter_ns()
        yield
        self.results.setdefault(name, []).append((time.perf_counter_ns() - start) / 1000)

    def granted(self, branch: int, extra: int) -> m.Granted:
        verdict = self.cache.acquire(m.Acquire(REQUEST, branch, extra))
        assert isinstance(verdict, m.Granted), verdict
        return verdict


def match(bench: Bench) -> None:
    """A stranger sends a prompt of 1,000 tokens that the tree has."""
    prompt = bench.shorts[bench.any_short()]
    bench.cache.open_branch(m.OpenBranch(SCRATCH))
    message = m.ExtendBranch(SCRATCH, prompt)
    with bench.clock("match 1000 tokens from the root"):
        bench.cache.extend_branch(message)
    bench.cache.drop_branches(m.DropBranches([SCRATCH]))


def insert(bench: Bench) -> None:
    """A stranger sends a system prompt that the tree has, and something new."""
    message = m.ExtendBranch(
        SCRATCH, bench.shorts[bench.any_short()][: 64 * 4] + bench.tokens(DELTA - 64)
    )
    bench.cache.open_branch(m.OpenBranch(SCRATCH))
    with bench.clock("insert 100 tokens from the root"):
        bench.cache.extend_branch(message)
    bench.cache.drop_branches(m.DropBranches([SCRATCH]))


def turn(name: str, pick: Callable[[Bench], tuple[int, int]]) -> Callable[[Bench], None]:
    """One turn of a chat: 100 tokens in, 16 out. The branch is then rolled back."""

    def run(bench: Bench) -> None:
        branch, length = pick(bench)
        extend = m.ExtendBranch(branch, bench.tokens(DELTA))
        acquire = m.Acquire(REQUEST, branch, 16)
        commit = m.Commit(REQUEST, length + DELTA + 15, bench.tokens(16), final=True)
        with bench.clock(f"continue + acquire 100, {name}"):
            bench.cache.extend_branch(extend)
            verdict = bench.cache.acquire(acquire)
        assert isinstance(verdict, m.Granted), verdict
        assert verdict.cached == length
        with bench.clock(f"table: copy the page table, {name}"):
            bytearray(verdict.pages)
        with bench.clock(f"commit the prompt, {name}"):
            bench.cache.commit(m.Commit(REQUEST, length + DELTA))
        with bench.clock(f"final commit, {name}"):
            bench.cache.commit(commit)
        bench.cache.move_branch(m.MoveBranch(branch, length))

    return run


def fork(bench: Bench) -> None:
    """Eight children in the middle of the long branch, each given 100 tokens of its own."""
    children = list(range(SCRATCH, SCRATCH + 8))
    at = int(bench.random.integers(bench.size // 4, bench.size // 2))
    message = m.ForkBranch(LONG, children, bench.size // 2)
    with bench.clock("fork 8 at the head"):
        bench.cache.fork_branch(message)
    bench.cache.drop_branches(m.DropBranches(children))
    with bench.clock("fork 8 inside the long branch"):
        bench.cache.fork_branch(m.ForkBranch(LONG, children, at))
    bench.cache.drop_branches(m.DropBranches(children))


def siblings(bench: Bench) -> None:
    """Eight forks of a short branch are acquired in one step."""
    i = bench.any_short()
    children = list(range(SCRATCH, SCRATCH + 8))
    bench.cache.fork_branch(m.ForkBranch(2 + i, children, SHORT))
    settle = m.Settle([], [], [m.Acquire(REQUEST + child, child, 16) for child in children])
    with bench.clock("acquire 8 siblings, short"):
        settled = bench.cache.settle(settle)
    assert all(isinstance(verdict, m.Granted) for verdict in settled.verdicts)
    ends = [m.Commit(REQUEST + child, SHORT, final=True) for child in children]
    bench.cache.settle(m.Settle(ends, [], []))
    bench.cache.drop_branches(m.DropBranches(children))


def grow(bench: Bench) -> None:
    i = bench.any_short()
    bench.granted(2 + i, 1)
    with bench.clock("grow 16 slots"):
        bench.cache.grow(m.Grow(REQUEST, 16))
    bench.cache.commit(m.Commit(REQUEST, SHORT, final=True))


def evict(bench: Bench) -> None:
    """A full pool: 100 new tokens push out the end of the least recently used branch."""
    cache = bench.cache
    if cache.free:
        bench.prefill(SCRATCH, bench.tokens(cache.free))
        cache.drop_branches(m.DropBranches([SCRATCH]))
    cache.open_branch(m.OpenBranch(SCRATCH))
    cache.extend_branch(m.ExtendBranch(SCRATCH, bench.tokens(DELTA)))
    acquire = m.Acquire(REQUEST, SCRATCH, 0)
    with bench.clock("acquire that evicts 100 pages"):
        verdict = cache.acquire(acquire)
    assert isinstance(verdict, m.Granted), verdict
    cache.commit(m.Commit(REQUEST, DELTA, final=True))
    cache.drop_branches(m.DropBranches([SCRATCH]))


class Deep:
    """A path of `depth` nodes: a fork at each token keeps them apart. One more node with each turn."""

    def __init__(self, depth: int) -> None:
        self.cache = cache = RadixCache(4 * depth + 4096)
        self.depth = depth
        cache.open_branch(m.OpenBranch(LONG))
        for i in range(depth):
            cache.extend_branch(m.ExtendBranch(LONG, np.int32(i % 1000).tobytes()))
            cache.fork_branch(m.ForkBranch(LONG, [SCRATCH + i], i + 1))
        cache.acquire(m.Acquire(REQUEST, LONG, 0))
        cache.commit(m.Commit(REQUEST, depth, final=True))


def deep_turns(depth: int, repeat: int) -> dict[str, list[float]]:
    """Turns on the deep branch: one token in, 16 out, and a fork of it."""
    deep, times = Deep(depth), dict[str, list[float]]()
    cache, end = deep.cache, depth
    for i in range(WARM_UP + repeat):
        cache.extend_branch(m.ExtendBranch(LONG, np.int32(7000 + i).tobytes()))
        begin = time.perf_counter_ns()
        verdict = cache.acquire(m.Acquire(REQUEST, LONG, 16))
        granted = time.perf_counter_ns()
        assert isinstance(verdict, m.Granted), verdict
        cache.commit(m.Commit(REQUEST, end + 1))
        output = (np.arange(16, dtype=np.int32) + 9000).tobytes()
        final = time.perf_counter_ns()
        cache.commit(m.Commit(REQUEST, end + 16, output, final=True))
        done = time.perf_counter_ns()
        end += 17
        cache.fork_branch(m.ForkBranch(LONG, [SCRATCH + depth + i], end))
        times.setdefault("acquire", []).append((granted - begin) / 1000)
        times.setdefault("final commit", []).append((done - final) / 1000)
    check(cache)
    return {name: values[WARM_UP:] for name, values in times.items()}


def deep_inspect(depth: int, repeat: int) -> dict[str, list[float]]:
    """1,024 forks of one cold path of `depth` nodes."""
    cache = RadixCache(64)
    cache.open_branch(m.OpenBranch(LONG))
    for i in range(depth):
        cache.extend_branch(m.ExtendBranch(LONG, np.int32(i % 1000).tobytes()))
        cache.fork_branch(m.ForkBranch(LONG, [SCRATCH + i], i + 1))
    children = list(range(2, 1026))
    cache.fork_branch(m.ForkBranch(LONG, children, depth))
    message = m.Inspect(1, 1, children)
    return {"inspect 1,024 branches": timed(lambda: cache.inspect(message), min(repeat, 3))}


def retained_siblings(count: int, repeat: int) -> dict[str, list[float]]:
    """The one of `count` retained siblings that is retained longest lets go, and comes back."""
    cache = RadixCache(2 * count + 64)
    cache.open_branch(m.OpenBranch(LONG))
    cache.extend_branch(m.ExtendBranch(LONG, np.int32(5).tobytes()))
    children = list(range(2, 2 + count))
    cache.fork_branch(m.ForkBranch(LONG, children, 1))
    for child in children:
        cache.extend_branch(m.ExtendBranch(child, np.int32(child).tobytes()))
        cache.retain_branches(m.RetainBranches({child: float(child)}))
    last, times = children[-1], list[float]()
    for _ in range(repeat):
        times += timed(lambda: cache.retain_branches(m.RetainBranches({last: 0.0})), 1)
        cache.retain_branches(m.RetainBranches({last: float(last)}))
    check(cache)
    return {"retain_s back to 0": times}


def small_leaves(count: int, repeat: int) -> dict[str, list[float]]:
    """A prompt that pushes out `count` leaves of one token each."""
    times = []
    for _ in range(min(repeat, 5)):
        cache = RadixCache(count)
        for i in range(count):
            cache.open_branch(m.OpenBranch(LONG))
            cache.extend_branch(m.ExtendBranch(LONG, np.int32(i).tobytes()))
            cache.acquire(m.Acquire(REQUEST, LONG, 0))
            cache.commit(m.Commit(REQUEST, 1, final=True))
            cache.drop_branches(m.DropBranches([LONG]))
        cache.open_branch(m.OpenBranch(LONG))
        cache.extend_branch(m.ExtendBranch(LONG, np.arange(count, 2 * count, dtype=np.int32).tobytes()))
        acquire = m.Acquire(REQUEST, LONG, 0)
        times += timed(lambda cache=cache, acquire=acquire: cache.acquire(acquire), 1)  # type: ignore[misc]
        check(cache)
    return {"acquire that evicts all": times}


def session_forks(turns: int, repeat: int) -> dict[str, list[float]]:
    """900 forks of a session's branch of `turns` turns: what the session keeps, beside the cache."""
    branch = Branch("main", 1)
    for i in range(turns):
        input_segment(branch, [i, i + 1], "ab", tail=Tail.CLOSED, turn=True)

    def fork_all() -> None:
        for i in range(900):
            branch.fork(str(i), i, 2 * turns - 2 * (i % 2), decode=str)

    return {"900 forks": timed(fork_all, min(repeat, 5))}


def timed(action: Callable[[], object], repeat: int) -> list[float]:
    times = []
    for _ in range(repeat):
        begin = time.perf_counter_ns()
        action()
        times.append((time.perf_counter_ns() - begin) / 1000)
    return times


GROWTH: list[tuple[str, Callable[[int, int], dict[str, list[float]]]]] = [
    ("fork depth", deep_turns),
    ("cold fork depth", deep_inspect),
    ("siblings", retained_siblings),
    ("leaves of one token", small_leaves),
    ("turns of a session's branch", session_forks),
]


def growth(sizes: list[int], repeat: int) -> dict[str, dict[str, float]]:
    """Medians in microseconds of what must not grow with the tree, by size."""
    report: dict[str, dict[str, float]] = {}
    for what, measure_at in GROWTH:
        for size in sizes:
            gc.collect()
            gc.disable()
            for name, values in measure_at(size, repeat).items():
                row = report.setdefault(f"{name}, by {what}", {})
                row[str(size)] = statistics.median(values)
            gc.enable()
    return report


OPERATIONS: list[Callable[[Bench], None]] = [
    match,
    insert,
    turn("short", lambda bench: (2 + bench.any_short(), SHORT)),
    turn("long", lambda bench: (LONG, bench.size // 2)),
    fork,
    siblings,
    grow,
    evict,
]


def measure(size: int, repeat: int) -> dict[str, list[float]]:
    """Microseconds by operation, in rounds of `ROUND` on a fresh tree each."""
    every: dict[str, list[float]] = {}
    for operation in OPERATIONS:
        for _ in range(-(-repeat // ROUND)):
            bench = Bench(size)
            gc.collect()
            gc.disable()
            for _ in range(WARM_UP + ROUND):
                operation(bench)
            gc.enable()
            for name, values in bench.results.items():
                every.setdefault(name, []).extend(values[WARM_UP:])
        check(bench.cache)
    return every


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", help="write all results to this file")
    parser.add_argument("--repeat", type=int, default=300)
    parser.add_argument("--sizes", type=int, nargs="*", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--depths", type=int, nargs="*", default=[100, 1000, 10_000])
    options = parser.parse_args()
    machine = f"{platform.machine()}, {os.cpu_count()} CPUs, Python {platform.python_version()}"
    print(f"radix cache, us: median (p10-p90) of {options.repeat}; {machine}, numpy {np.__version__}")
    grown = growth(options.depths, min(options.repeat, 50))
    if grown:
        print(f"{'median':<54}" + "".join(f"{depth:>14,}" for depth in options.depths))
    for name, medians in grown.items():
        print(f"{name:<54}" + "".join(f"{value:>14.1f}" for value in medians.values()))
    tables = {size: measure(size, options.repeat) for size in options.sizes}
    if not tables:
        return
    print(f"{'operation':<42}" + "".join(f"{size:>24,}" for size in tables))
    report: dict[str, dict[str, dict[str, float]]] = {}
    for name in tables[options.sizes[0]]:
        row = report.setdefault(name, {})
        for size, results in tables.items():
            deciles = statistics.quantiles(results[name], n=10)
            row[str(size)] = {
                "median": statistics.median(results[name]),
                "p10": deciles[0],
                "p90": deciles[-1],
            }
        cells = [f"{c['median']:.1f} ({c['p10']:.1f}-{c['p90']:.1f})" for c in row.values()]
        print(f"{name:<42}" + "".join(f"{cell:>24}" for cell in cells))
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(
                {"machine": machine, "unit": "us", "operations": report, "growth": grown}, file, indent=1
            )
        print(f"written to {options.json}", file=sys.stderr)


if __name__ == "__main__":
    main()
