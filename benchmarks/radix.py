"""Cost of radix-cache operations against the size of the tree.

    python benchmarks/radix.py [--json FILE] [--repeat 300] [--sizes 10000 100000 1000000]

Every tree is resident and holds SIZE tokens: half of them in one long branch ("long"), half in
branches of 1,000 tokens ("short") behind 64 namesakes of a system prompt. Each operation works on
100 tokens (`match` on 1,000) and is undone outside of the clock. Columns are the median and the
10th to 90th percentile in microseconds. "table" is the time of only copying the long branch's page
table, which every grant must contain: subtract it to see what the tree costs.

A row that is flat over the sizes costs what the delta costs; the tree's size does not matter.
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
    parser.add_argument("--sizes", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    options = parser.parse_args()
    machine = f"{platform.machine()}, {os.cpu_count()} CPUs, Python {platform.python_version()}"
    print(f"radix cache, us: median (p10-p90) of {options.repeat}; {machine}, numpy {np.__version__}")
    tables = {size: measure(size, options.repeat) for size in options.sizes}
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
            json.dump({"machine": machine, "unit": "us", "operations": report}, file, indent=1)
        print(f"written to {options.json}", file=sys.stderr)


if __name__ == "__main__":
    main()
