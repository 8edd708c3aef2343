"""Decoding on a CPU by the executor alone: no scheduler, no socket.

    python benchmarks/cpu_decode.py [--model DIR] [--quantization none int8] [--batches 1 8 16]
        [--context 128] [--steps 100] [--prompt 512] [--threads N] [--repeat 3] [--crowd N]
        [--json FILE]

Every sequence is prefilled with --context random tokens; then --steps decode steps are timed, one
token a sequence, greedy. A prompt of --prompt tokens is timed, too. All variants are loaded at once and
take turns in each repetition: each --quantization; `none` with the executor's own choice of threads
(`gpu/executors/threads.py`), and with all of --threads always. --crowd starts so many processes that
only count, as other programs on the machine would.
"""

import argparse
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
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


Clock = Callable[[], float]


def decode(
    executor: Any, batch: int, context: int, steps: int, clock: Clock = time.perf_counter
) -> list[float]:
    """Seconds of each step by `clock`. Opens and closes its rows."""
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
        begin = clock()
        _run(executor, plan)
        times.append(clock() - begin)
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


def prefill(executor: Any, length: int, clock: Clock = time.perf_counter) -> float:
    """Seconds of one prompt in one step by `clock`."""
    draw = random.Random(length)
    prompt = pack(draw.randrange(executor.info.vocab_size) for _ in range(length))
    _run(executor, StepPlan(0, opens=[OpenRow(0, 0, pack(range(length)), 0, GREEDY)]))
    begin = clock()
    _run(executor, StepPlan(0, extends=[ExtendRow(0, 0, prompt, True)]))
    seconds = clock() - begin
    _run(executor, StepPlan(0, closes=pack([0])))
    return seconds


@dataclass(slots=True)
class Variant:
    """An executor, and how it is run."""

    executor: Any
    choice: ThreadChoice | None = None

    def prepare(self) -> None:
        """Executors of one process share torch's number of threads."""
        if self.choice is not None:
            self.executor._threads = self.choice
            torch.set_num_threads(self.choice._most)
        else:
            torch.set_num_threads(1)


def variants(options: argparse.Namespace, model: Path) -> dict[str, Variant]:
    found: dict[str, Variant] = {}
    tokens = max(max(options.batches) * (options.context + options.steps + 1), options.prompt)
    for quantization in options.quantization:
        config = ModelConfig(
            path=model,
            device="cpu",
            threads=options.threads,
            kv_tokens=tokens,
            quantization=quantization,
        )
        executor = load_executor(config, lambda what, done: None)
        if executor.info.quantization == "int8":
            found["int8"] = Variant(executor)
        else:
            found["none"] = Variant(executor, ThreadChoice(options.threads))
            found["none, all threads"] = Variant(executor, AllThreads(options.threads))
    return found


Rates = dict[str, dict[str, list[float]]]


def measure(found: dict[str, Variant], options: argparse.Namespace) -> Rates:
    """Tokens a second of each repetition, by variant and row. A median step's time counts."""
    names = [*(str(batch) for batch in options.batches), f"prompt of {options.prompt}"]
    rates: Rates = {name: {row: [] for row in names} for name in found}
    for _ in range(options.repeat):
        for name, variant in found.items():
            variant.prepare()
            for batch in options.batches:
                times = decode(variant.executor, batch, options.context, options.steps)
                rates[name][str(batch)].append(batch / percentile(times, 50))
            seconds = prefill(variant.executor, options.prompt)
            rates[name][names[-1]].append(options.prompt / seconds)
    return rates


def _row(batch: str, name: str, found: Sequence[float], peer: float) -> list[str]:
    rate = spread(found)
    cell = f"{rate['median']:.0f} ({rate['min']:.0f}-{rate['max']:.0f})"
    return [f"{batch}, {name}", cell, f"{rate['median'] / peer:.2f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, help="default: the bundled one")
    parser.add_argument("--quantization", nargs="+", default=["none", "int8"])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 16])
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--crowd", type=int, default=0, help="busy processes beside")
    parser.add_argument("--json", help="write the rates to this file")
    options = parser.parse_args()
    about = machine(["ramify", "torch", "llvmlite"])
    print(headline(about), flush=True)
    model = options.model or Path(str(files("ramify.gpu") / "default_model"))
    found = variants(options, model)
    with crowd(options.crowd):
        rates = measure(found, options)
    peers = next(iter(rates.values()))
    rows = [
        _row(batch, name, rates[name][batch], percentile(peers[batch], 50))
        for batch in peers
        for name in found
    ]
    print(table(["batch, variant", "tokens/s", "times the first variant"], rows))
    print(f"load average at the end: {os.getloadavg()[0]:.2f}")
    write_json(options.json, about, rates)
    for variant in found.values():
        if variant.choice is None:
            variant.executor.close()


if __name__ == "__main__":
    main()
