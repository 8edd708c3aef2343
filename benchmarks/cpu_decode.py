"""Decoding on a CPU by the executor alone: no scheduler, no socket.

    python benchmarks/cpu_decode.py [--model DIR] [--batches 1 8 16] [--context 128] [--steps 100]
        [--threads N] [--repeat 3] [--crowd N] [--json FILE]

Every sequence is prefilled with --context random tokens; then --steps decode steps are timed, one
token a sequence, greedy. Each repetition runs twice: with the executor's own choice of threads
(`gpu/executors/threads.py`) and with all of --threads always. --crowd starts so many processes that only
count, as other programs on the machine would.
"""

import argparse
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any

from report import headline, machine, percentile, spread, table, write_json

from ramify.gpu.executors.base import Executor
from ramify.gpu.executors.threads import ThreadChoice
from ramify.gpu.startup.load import load_executor
from ramify.protocol.config import ModelConfig
from ramify.protocol.plan import ExtendRow, OpenRow, StepPlan, pack
from ramify.protocol.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0.0)


class AllThreads(ThreadChoice):
    """No choice: what a plain torch program does."""

    def take(self, tokens: int) -> int:
        return self._most

    def note(self, tokens: int, threads: int, seconds: float) -> None:
        pass


def decode(executor: Any, batch: int, context: int, steps: int) -> list[float]:
    """Seconds of each step. Opens and closes its rows."""
    draw = random.Random(batch)
    length = context + steps + 1
    rows = range(batch)
    opens = [OpenRow(row, row, pack(range(row * length, (row + 1) * length)), 0, GREEDY) for row in rows]
    _run(executor, StepPlan(0, opens=opens))
    for row in rows:
        prompt = pack(draw.randrange(executor.info.vocab_size) for _ in range(context))
        _run(executor, StepPlan(0, extends=[ExtendRow(row, 0, prompt, True)]))
    plan = StepPlan(0, decodes=pack(rows))
    times = []
    for _ in range(steps):
        begin = time.perf_counter()
        _run(executor, plan)
        times.append(time.perf_counter() - begin)
    _run(executor, StepPlan(0, closes=pack(rows)))
    return times


def _run(executor: Executor, plan: StepPlan) -> None:
    executor.launch(plan).result()


@contextmanager
def crowd(count: int) -> Iterator[None]:
    """`count` busy processes."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def measure(executor: Any, options: argparse.Namespace) -> dict[str, dict[int, list[float]]]:
    """Tokens per second of each repetition, by choice and batch. A median step's time counts."""
    choices = {"chosen": ThreadChoice(options.threads), "all": AllThreads(options.threads)}
    found: dict[str, dict[int, list[float]]] = {
        name: {batch: [] for batch in options.batches} for name in choices
    }
    for _ in range(options.repeat):
        for batch in options.batches:
            for name, choice in choices.items():
                executor._threads = choice
                times = decode(executor, batch, options.context, options.steps)
                found[name][batch].append(batch / percentile(times, 50))
    return found


def _row(name: str, batch: int, found: Sequence[float], one: float) -> list[str]:
    rate = spread(found)
    cell = f"{rate['median']:.0f} ({rate['min']:.0f}-{rate['max']:.0f})"
    return [
        f"{batch}, {name}",
        cell,
        f"{1e3 * batch / rate['median']:.2f}",
        f"{rate['median'] / one:.2f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, help="default: the bundled one")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 16])
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--crowd", type=int, default=0, help="busy processes beside")
    parser.add_argument("--json", help="write the rates to this file")
    options = parser.parse_args()
    about = machine(["ramify", "torch"])
    print(headline(about), flush=True)
    model = options.model or Path(str(files("ramify.gpu") / "default_model"))
    tokens = max(options.batches) * (options.context + options.steps + 1)
    config = ModelConfig(path=model, device="cpu", threads=options.threads, kv_tokens=tokens)
    executor = load_executor(config, lambda what, done: None)
    with crowd(options.crowd):
        found = measure(executor, options)
    first = {name: percentile(rates[options.batches[0]], 50) for name, rates in found.items()}
    rows = [
        _row(name, batch, rates[batch], first[name])
        for batch in options.batches
        for name, rates in found.items()
    ]
    print(table(["batch, threads", "tokens/s", "ms/step", "times the first batch"], rows))
    print(f"load average at the end: {os.getloadavg()[0]:.2f}")
    write_json(options.json, about, found)


if __name__ == "__main__":
    main()
