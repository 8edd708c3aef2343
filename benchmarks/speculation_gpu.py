"""What drafts gain on one GPU: tokens a second with and without, for drafters that are right so often.

Random weights of a real model's shape, turned so that the likeliest token behind t is t + 1: the
embedding is made large and the head is the embedding, one row further. Nothing else changes, so steps
take as long as those of a real model; but the output is known, each token of it is checked, and a
drafter can be right with a chance that is set. Drives an executor as a scheduler would, two steps in
flight, and lets the scheduler's policy choose how many tokens are drafted. "Without" runs on the same
executor, in turns.

    python benchmarks/speculation_gpu.py --shape llama-3.1-8b --batches 1,8,32,128
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, import-untyped, import-not-found"

import argparse
import json
import platform
import statistics
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from ramify.actors.scheduler.speculation import DraftRecord, Speculation
from ramify.clients.bench.shapes import SHAPES
from ramify.gpu.drafting.device import DeviceDrafter
from ramify.gpu.executors.base import Executor
from ramify.gpu.sampling.triton_random import uniform
from ramify.gpu.sampling.verifier import Verifier
from ramify.gpu.startup import load
from ramify.gpu.step.inputs import StepInputs
from ramify.gpu.step.rows import RowTable
from ramify.gpu.step.step_rows import StepRows
from ramify.protocol.config import ModelConfig
from ramify.protocol.plan import ExtendRow, OpenRow, StepPlan, pack
from ramify.protocol.sampling import SamplingParams

IN_FLIGHT = 2
WARM = 4  # steps that are not counted
LOUD = 5000.0  # times the embedding: then it outweighs what the layers add


class Successor(DeviceDrafter):
    """A drafter that knows the next tokens, and is right with chance `acceptance` for each."""

    name, reads_tokens = "replay", False

    def __init__(self, vocabulary: int, file: Path | None = None, cycle: int = 0) -> None:
        """`file`: says the chance, if it is there; it may change. `cycle`: as of `turned`."""
        self._vocabulary, self._cycle, self._file = vocabulary, cycle, file
        self._chance = torch.zeros(1)
        self._read, self._steps = "", 0

    def serve(self, table: RowTable, verifier: Verifier) -> None:
        self._vocabulary = table.vocab_size

    def set(self, acceptance: float) -> None:
        with torch.inference_mode():
            self._chance.fill_(acceptance)

    def propose(
        self, entry: int, step: StepRows, inputs: StepInputs[Tensor], verifier: Verifier
    ) -> None:
        self.warm(inputs, verifier)

    def warm(self, inputs: StepInputs[Tensor], verifier: Verifier) -> None:
        first, lines = inputs.extended, inputs.bucket.decodes
        self._steps += 1
        if self._file is not None and self._steps % 16 == 0:
            text = self._file.read_text()
            if text and text != self._read:
                self._read = text
                self.set(float(text))
        self._chance = self._chance.to(inputs.rows.device)
        _propose[(lines,)](
            inputs.input_ids[first:], inputs.rows[first:], inputs.positions[first:], verifier.inputs,
            self._chance, lines, verifier.inputs.shape[1], self._cycle or self._vocabulary, MOST=8,
            num_warps=1,
        )  # fmt: skip


@triton.jit(do_not_specialize=["lines"], do_not_specialize_on_alignment=["ids", "rows", "positions"])
def _propose(ids, rows, positions, inputs, chance, lines, width, vocabulary, MOST: tl.constexpr):
    line = tl.program_id(0)
    row = tl.load(rows + line)
    number = 1 + tl.arange(0, MOST)
    place = line + number
    drafts = tl.load(ids + place, mask=place < lines, other=0) == -1 - row - number * width
    if tl.load(ids + line) != -1 - row:
        return
    position = (tl.load(positions + line) + number).to(tl.int64)
    right = uniform(row.to(tl.int64) + tl.zeros([MOST], tl.int64), position) < tl.load(chance)
    last = tl.load(inputs + row)
    begin = last // vocabulary * vocabulary
    token = begin + (last - begin + number + tl.where(right, 0, 1)) % vocabulary
    tl.store(inputs + number * width + row, token, mask=drafts)


class SpeculationBench:
    """Rows that continue prompts, from the start again in each measurement."""

    def __init__(self, executor: Executor, context: int, capacity: int, most: int) -> None:
        self.executor, self.context, self.most = executor, context, most
        self.info = executor.info
        self.per_row = -(-capacity // self.info.page_size)
        self.prompt: list[list[int]] = []
        self.step = 0
        self.faults = 0

    def fill(self, rows: int) -> None:
        """Compute the prompts of `rows` once; later they are found in their pages."""
        dice = np.random.default_rng(1)
        for row in range(rows):
            self.prompt.append(dice.integers(0, self.info.vocab_size, self.context).tolist())
            for start in range(0, self.context, self.info.step_tokens):
                run = self.prompt[row][start : start + self.info.step_tokens]
                opens = [self._open(row, 0)] if not start else []
                extends = [ExtendRow(row, start, pack(run), False)]
                plan = StepPlan(self.step, opens=opens, extends=extends)
                self.executor.launch(plan).result()
                self.step += 1
            self.executor.launch(StepPlan(self.step, closes=pack([row]))).result()

    def run(self, rows: int, seconds: float, policy: Speculation | int | None) -> dict[str, float]:
        """Tokens a second of `rows`, drafts chosen by `policy`: a number is fixed, None: no drafts."""
        ends = [pack(prompt[-1:]) for prompt in self.prompt[:rows]]
        extends = [ExtendRow(row, self.context - 1, end, True) for row, end in enumerate(ends)]
        opens = [self._open(row, self.context - 1) for row in range(rows)]
        first = self.executor.launch(StepPlan(self.step, opens=opens, extends=extends))
        last = np.array([prompt[-1] for prompt in self.prompt[:rows]])
        pending: deque[tuple[Any, list[int] | None]] = deque([(first, None)])
        decodes, records = pack(range(rows)), [DraftRecord() for _ in range(rows)]
        limit = self.per_row * self.info.page_size - 2 * (1 + self.most) - 1
        bound = np.full(rows, self.context)  # of each row's length, were all drafts accepted
        begin = time.perf_counter()
        tokens = steps = drafted = taken = 0
        launch_s = device_s = 0.0
        while time.perf_counter() - begin < seconds and bound.max() < limit:
            drafts = None
            if isinstance(policy, Speculation):
                drafts = policy.choose(records, self.info.max_rows - rows, changed=False)
            elif policy:
                drafts = [policy] * rows
            asked = b"" if drafts is None else pack(drafts)
            self.step += 1
            plan = StepPlan(self.step, decodes=decodes, drafts=asked)
            at = time.perf_counter()
            pending.append((self.executor.launch(plan), drafts))
            launch_s += time.perf_counter() - at
            bound += 1 + np.array(drafts if drafts else [0] * rows)
            if len(pending) > IN_FLIGHT:
                given, us, last = self._take(*pending.popleft(), last, bound, policy, records)
                tokens, steps, device_s = tokens + given, steps + 1, device_s + us
                drafted += 0 if drafts is None else sum(drafts)
                taken += 1
                if taken == WARM:  # the pipeline is full
                    begin, tokens, steps, drafted = time.perf_counter(), 0, 0, 0
                    launch_s = device_s = 0.0
        spent = time.perf_counter() - begin
        while pending:
            _, _, last = self._take(*pending.popleft(), last, bound, policy, records)
        self.step += 1
        self.executor.launch(StepPlan(self.step, closes=pack(range(rows)))).result()
        steps = max(1, steps)
        return {
            "tokens_s": tokens / spent, "ms": 1000 * spent / steps, "device_ms": device_s / steps / 1000,
            "launch_us": 1e6 * launch_s / steps, "drafts": drafted / steps / rows,
            "tokens_step": tokens / steps / rows,
        }  # fmt: skip

    def _take(
        self, step: Any, drafts: list[int] | None, last: Any, bound: Any, policy: Any,
        records: list[DraftRecord],
    ) -> tuple[int, int, Any]:  # fmt: skip
        """Tokens and microseconds of a step, and each row's last token; all tokens are checked."""
        result = step.result()
        tokens = np.frombuffer(result.tokens, dtype=np.int32)
        rows = len(records)
        counts = np.ones(rows, dtype=np.int64)
        if result.counts:
            counts = np.frombuffer(result.counts, dtype=np.int32).astype(np.int64)
        ends = np.cumsum(counts)
        number = np.arange(len(tokens)) - np.repeat(ends - counts, counts)
        wanted = (np.repeat(last, counts) + 1 + number) % self.info.vocab_size
        self.faults += int((wanted != tokens).sum())
        if drafts is not None:
            bound -= 1 + np.array(drafts) - counts
        if isinstance(policy, Speculation):
            if drafts is not None:
                for record, asked, count in zip(records, drafts, counts.tolist(), strict=True):
                    if asked:
                        policy.landed(record, asked, asked, count - 1)
            total = sum(drafts) if drafts is not None else 0
            depth = max(drafts) if drafts is not None else 0
            policy.took(rows, total, depth, len(tokens), result.elapsed_us * 1e-6)
        return len(tokens), result.elapsed_us, tokens[ends - 1].astype(np.int64)

    def _open(self, row: int, cached: int) -> OpenRow:
        pages = range(row * self.per_row, (row + 1) * self.per_row)
        return OpenRow(row, row, pack(pages), cached, SamplingParams(temperature=0.0))


def turned(fill: Any, cycle: int = 0) -> Any:
    """`fill_random` for a model whose likeliest token behind t is t + 1.

    `cycle`: so many tokens go round, if it is not 0.
    """

    def filled(views: dict[str, Tensor], seed: int = 0) -> None:
        fill(views, seed)
        embedding = views["model.embed_tokens.weight"]
        each = embedding.view(-1, cycle or len(embedding), embedding.shape[1])
        views["lm_head.weight"].copy_(each.roll(1, 1).view_as(embedding))
        embedding.mul_(LOUD)

    return filled


def numbers(kind: Any) -> Any:
    return lambda text: [kind(part) for part in text.split(",") if part]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=list(SHAPES), default="llama-3.1-8b")
    parser.add_argument("--batches", type=numbers(int), default=[1, 8, 32, 128])
    parser.add_argument("--acceptance", type=numbers(float), default=[0.0, 0.6, 0.8, 0.9])
    parser.add_argument("--fixed", type=numbers(int), default=[1, 2, 3, 5, 7],
                        help="numbers of drafts whose steps are timed without the policy")  # fmt: skip
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--output", type=int, default=1536, help="most tokens of a measurement")
    parser.add_argument("--seconds", type=float, default=1.5, help="of a measurement")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--max-rows", type=int, default=256)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--json", type=Path, help="where to write the report")
    args = parser.parse_args()
    shape = SHAPES[args.shape] | {"tie_word_embeddings": False}
    most = max(args.fixed, default=7)
    drafter = Successor(shape["vocab_size"])
    load.fill_random, load.device_drafter = turned(load.fill_random), lambda *about: drafter
    capacity = args.context + args.output + 2 * (1 + most) + 1
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(shape))
        config = ModelConfig(
            path=Path(folder), device=args.device, load_format="dummy", page_size=args.page_size,
            kv_tokens=max(args.batches) * -(-capacity // args.page_size) * args.page_size,
            max_rows=args.max_rows, step_tokens=min(8192, args.context), context=capacity + 64,
            attention=args.attention, deterministic=args.deterministic, draft="ngram", dtype=args.dtype,
            draft_tokens=most,
        )  # fmt: skip
        executor = load.load_executor(config, lambda what, share: None)
    report: dict[str, Any] = {
        "shape": args.shape, "attention": executor.info.attention, "context": args.context,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine(),
        "ready_s": round(time.perf_counter() - begin, 1), "deterministic": args.deterministic,
        "fixed": [], "policy": [],
    }  # fmt: skip
    about = {key: value for key, value in report.items() if not isinstance(value, list)}
    print(json.dumps(about), flush=True)
    bench = SpeculationBench(executor, args.context, capacity, most)
    bench.fill(max(args.batches))

    def rounded(measured: dict[str, float]) -> dict[str, float]:
        return {key: round(value, 3) for key, value in measured.items()}

    for batch in args.batches:
        drafter.set(0.8)
        for count in [0, *args.fixed]:
            if batch * (1 + count) > args.max_rows:
                continue
            bench.run(batch, args.seconds / 6, count or None)
            report["fixed"].append({"batch": batch, "k": count} | rounded(
                bench.run(batch, args.seconds / 3, count or None)))  # fmt: skip
            print(json.dumps(report["fixed"][-1]), flush=True)
    for batch in args.batches:
        for acceptance in args.acceptance:
            drafter.set(acceptance)
            policy = Speculation(most)
            bench.run(batch, args.seconds, policy)  # it has to learn what steps cost
            pairs = []
            for _ in range(args.repeats):
                without = bench.run(batch, args.seconds, None)
                pairs.append((without, bench.run(batch, args.seconds, policy)))
            ratios = [drafted["tokens_s"] / plain["tokens_s"] for plain, drafted in pairs]
            plain, drafted = pairs[-1]
            report["policy"].append({
                "batch": batch, "acceptance": acceptance, "ratio": round(statistics.median(ratios), 3),
                "ratios": [round(ratio, 3) for ratio in ratios], "without": rounded(plain),
                "with": rounded(drafted), "faults": bench.faults,
            })  # fmt: skip
            print(json.dumps(report["policy"][-1]), flush=True)
    print(f"tokens that are not what they must be: {bench.faults}")
    if args.json is not None:
        args.json.write_text(json.dumps(report, indent=1))
    if bench.faults:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
