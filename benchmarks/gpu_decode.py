"""How fast one GPU runs the model, below the engine: ms per decode step, prefill tokens per second.

Drives an executor with the plans that a scheduler would send, two steps in flight, on random
weights of a real model's shape: of `--shape`, or of any config.json that is served (`--config`), states
and windows included. Prints one JSON object. `floor_ms` of a decode is the time of its bytes (weights
that it reads, experts by chance; keys and values; states) at the rate of a copy on this device; it is
left out where weights or keys are of fewer bits. `--profile` adds a torch.profiler trace of 24 decode
steps: the share of time in which the GPU ran no kernel, and the kernels that cost most.

    python benchmarks/gpu_decode.py --shape qwen3-0.6b --decode 1x128,64x128,256x1024 --prefill 8x2048
"""

import argparse
import json
import os
import platform
import random
import statistics
import tempfile
import time
from collections import defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from ramify.clients.bench.shapes import SHAPES
from ramify.gpu.executors.base import Executor, PendingStep
from ramify.gpu.models.config import read_config
from ramify.gpu.models.definition import Definition, ExpertSettings
from ramify.gpu.startup.load import load_executor
from ramify.protocol.config import ModelConfig
from ramify.protocol.plan import ExtendRow, OpenRow, StepPlan, pack, unpack
from ramify.protocol.sampling import SamplingParams

IN_FLIGHT = 2


class DecodeBench:
    """Rows on an executor: row r has its own `capacity` tokens of shuffled pages.

    It writes its states in turn to three slots of its own. Window pages of a prompt's last tokens, and
    of what follows, are its own; those before them are of all rows.
    """

    def __init__(self, executor: Executor, sampling: dict[str, Any]) -> None:
        self.executor = executor
        self.vocabulary = executor.info.vocab_size
        self.random = random.Random(0)
        self.sampling = sampling
        self.pages = list(range(executor.info.pages))
        self.random.shuffle(self.pages)
        self.steps = 0
        self.pending: deque[PendingStep] = deque()
        self.launch_us: list[float] = []
        self.prompt = 0  # of the rows that open
        self.newest: dict[int, int] = {}  # row -> the slot of its newest state

    def launch(self, **plan: Any) -> None:
        """Launch a step, after taking the oldest result if two are in flight."""
        if len(self.pending) == IN_FLIGHT:
            self.take()
        if self.executor.info.state_slots:
            plan["states"] = self.states(plan)
        if self.executor.info.window_pages:
            plan["opens"] = [
                msgspec.structs.replace(one, windows=self.windows(one.row, len(one.pages) // 4))
                for one in plan.get("opens", ())
            ]
        begin = time.perf_counter()
        self.pending.append(self.executor.launch(StepPlan(step=self.steps, **plan)))
        self.launch_us.append((time.perf_counter() - begin) * 1e6)
        self.steps += 1

    def states(self, plan: dict[str, Any]) -> bytes:
        """For each row of a step: the slot that it reads (0: none yet), and the one that it writes."""
        self.newest |= {opened.row: 0 for opened in plan.get("opens", ())}
        rows = [extend.row for extend in plan.get("extends", ())]
        pairs: list[int] = []
        for row in [*rows, *unpack(plan.get("decodes", b""))]:
            first, newest = 1 + 3 * row, self.newest[row]
            self.newest[row] = first + (newest - first + 1) % 3 if newest else first
            pairs += newest, self.newest[row]
        return pack(pairs)

    def windows(self, row: int, count: int) -> bytes:
        """The window page of each of a row's tokens."""
        before = self.executor.info.window - 1
        common, own = before + self.executor.info.step_tokens, before + 32
        position = np.arange(count)
        kept = common + row * own + position % own
        return np.where(position < self.prompt - before, position % common, kept).astype("<i4").tobytes()

    def take(self) -> None:
        tokens = unpack(self.pending.popleft().result().tokens)
        if any(not 0 <= token < self.vocabulary for token in tokens):
            raise SystemExit(f"sampled tokens out of range: {list(tokens)[:8]}")

    def drain(self) -> None:
        while self.pending:
            self.take()

    def prefill(self, rows: list[int], prompt: int, capacity: int) -> float:
        """Open `rows` and prefill `prompt` random tokens of each; seconds."""
        info = self.executor.info
        self.prompt = prompt
        count = -(-capacity // info.page_size)
        if count * len(rows) > len(self.pages):
            raise SystemExit(
                f"{len(rows)} rows of {capacity} tokens do not fit into a pool of "
                f"{info.pages * info.page_size} tokens: give a larger --kv-tokens"
            )
        opens = []
        for place, row in enumerate(rows):
            own = self.pages[place * count : (place + 1) * count]
            settings = SamplingParams(**self.sampling, seed=row)
            opens.append(OpenRow(row, row, pack(own), 0, settings))
        ranges, left = [[]], info.step_tokens  # chunks of each step
        for row in rows:
            start = 0
            while start < prompt:
                size = min(left, prompt - start)
                ranges[-1].append((row, start, size))
                start, left = start + size, left - size
                if left == 0:
                    ranges.append([])
                    left = info.step_tokens
        self.drain()
        begin = time.perf_counter()
        for chunks in filter(None, ranges):
            extends = [
                ExtendRow(
                    row,
                    start,
                    pack(self.random.choices(range(min(10000, self.vocabulary)), k=size)),
                    start + size == prompt,
                )
                for row, start, size in chunks
            ]
            self.launch(opens=opens, extends=extends)
            opens = []
        self.drain()
        return time.perf_counter() - begin

    def decode(self, rows: list[int], steps: int) -> float:
        """Seconds a step, after the pipeline is full."""
        packed = pack(rows)
        for _ in range(5):
            self.launch(decodes=packed)
        self.launch_us.clear()
        begin = time.perf_counter()
        for _ in range(steps):
            self.launch(decodes=packed)
        self.drain()
        return (time.perf_counter() - begin) / (steps + IN_FLIGHT)

    def mixed(self, rows: list[int], fresh: list[int], tokens: int, steps: int) -> float:
        """Seconds a step in which `rows` decode and `fresh` rows get a prompt of `tokens` together."""
        info = self.executor.info
        self.prompt = share = tokens // len(fresh)
        count = -(-(share + 1) // info.page_size)
        settings = SamplingParams(**self.sampling)
        opens, extends = [], []
        for place, row in enumerate(fresh):
            own = self.pages[len(self.pages) - (place + 1) * count :][:count]
            opens.append(OpenRow(row, row, pack(own), 0, settings))
            prompt = self.random.choices(range(min(10000, self.vocabulary)), k=share)
            extends.append(ExtendRow(row, 0, pack(prompt), True))
        plan = {"opens": opens, "extends": extends, "decodes": pack(rows)}
        self.launch(**plan)
        for _ in range(4):
            self.launch(closes=pack(fresh), **plan)
        self.launch_us.clear()
        begin = time.perf_counter()
        for _ in range(steps):
            self.launch(closes=pack(fresh), **plan)
        self.drain()
        seconds = (time.perf_counter() - begin) / (steps + IN_FLIGHT)
        self.close(fresh)
        return seconds

    def close(self, rows: list[int]) -> None:
        self.launch(closes=pack(rows))
        self.drain()


def profile(bench: DecodeBench, rows: list[int], trace: Path | None) -> dict[str, Any]:
    """Idle share and the costliest kernels of 24 decode steps; each from the end of the one before."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    packed = pack(rows)
    for _ in range(10):
        bench.launch(decodes=packed)
    with profiler(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as run:
        for _ in range(24):
            bench.launch(decodes=packed)
        bench.drain()
        torch.cuda.synchronize()
    if trace is not None:
        run.export_chrome_trace(str(trace))
    spans = sorted(
        (event.time_range.end, event.time_range.start, event.name.split("<")[0][:60])
        for event in run.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    )
    kernels: dict[str, list[float]] = defaultdict(list)
    reach = first = min(begin for _, begin, _ in spans)
    for end, begin, name in spans:
        kernels[name].append(end - max(begin, reach))  # one may begin before the last one's end
        reach = end
    total, busy = reach - first, sum(map(sum, kernels.values()))
    ranked = sorted(kernels.items(), key=lambda item: -sum(item[1]))[:14]
    return {
        "batch": len(rows),
        "idle_share": round(1 - busy / total, 4),
        "us_a_step": round(total / 24, 1),
        "kernels_a_step": round(sum(map(len, kernels.values())) / 24, 1),
        "kernels": [
            {"name": name, "us_a_step": round(sum(t) / 24, 1), "calls_a_step": round(len(t) / 24, 1)}
            for name, t in ranked
        ],
    }


def weights_read(shape: Definition, parameters: int, tokens: int) -> float:
    """Weights that a step of so many tokens reads, where each chooses its experts at random."""
    left_out = 0.0
    for layer in shape.layers:
        one = layer.feed_forward
        if isinstance(one, ExpertSettings):
            idle = one.experts * (1 - one.router.top / one.experts) ** tokens
            left_out += idle * (3 - (one.activation == "relu2")) * one.size * shape.hidden_size
    table = 0 if shape.tied else shape.vocab_size * shape.hidden_size  # the embedding is looked up
    return parameters - table - left_out


def copy_rate(device: torch.device) -> float:
    """Bytes a second of a copy on the device, read and written."""
    source = torch.empty(1 << (30 if device.type == "cuda" else 24), dtype=torch.uint8, device=device)
    target, times = torch.empty_like(source), []
    for _ in range(6):
        begin = time.perf_counter()
        target.copy_(source)
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return 2 * len(source) / statistics.median(times[1:])


def floor_of(executor: Executor, shape: Definition, rate: float) -> Callable[[int, int], float] | None:
    """Milliseconds that the bytes of a decode of so many rows at that context take."""
    info = executor.info
    if info.quantization != "none" or info.kv_dtype == "fp8":
        return None
    width = getattr(torch, info.dtype).itemsize

    def floor(batch: int, context: int) -> float:
        kept = info.kv_bytes_per_token * context + info.window_bytes * min(info.window, context)
        moved = weights_read(shape, info.parameters, batch) * width
        return 1e3 * (moved + batch * (kept + 2 * info.state_bytes)) / rate

    return floor


def sizes(text: str) -> list[tuple[int, int]]:
    """`8x2048,1x2048` as pairs."""
    return [(int(a), int(b)) for a, _, b in (part.partition("x") for part in text.split(",") if part)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=list(SHAPES), default="qwen3-0.6b")
    parser.add_argument("--config", type=Path, help="the config.json of another model")
    parser.add_argument("--decode", type=sizes, default=[], help="batch x context, comma-separated")
    parser.add_argument("--prefill", type=sizes, default=[], help="prompts x tokens, comma-separated")
    parser.add_argument("--mixed", type=sizes, default=[],
                        help="decodes at context 128 x new tokens, of one step")  # fmt: skip
    parser.add_argument("--profile", type=sizes, default=[], help="batch x context")
    parser.add_argument("--trace", type=Path, help="where to write the profile's Chrome trace")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--temperature", type=float, default=0.6)
    parser.add_argument("--sampling", type=json.loads, default={}, help="JSON: more SamplingParams")
    parser.add_argument("--page-size", type=int, default=1)
    parser.add_argument("--kv-tokens", type=int, help="size of the pool (default: most of the memory)")
    parser.add_argument("--max-rows", type=int, default=256)
    parser.add_argument("--step-tokens", type=int, default=8192)
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--quantization", default="auto")
    parser.add_argument("--kv-dtype", default="auto")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--library-sums", action="store_true", help="of ranks: NCCL makes all")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        text = args.config.read_text() if args.config is not None else json.dumps(SHAPES[args.shape])
        (Path(folder) / "config.json").write_text(text)
        shape = read_config(Path(folder))
        states = {"state_slots": 3 * args.max_rows + 1} if shape.keeps_states else {}
        config = ModelConfig(
            path=Path(folder), device=args.device, load_format="dummy", kv_tokens=args.kv_tokens,
            page_size=args.page_size, max_rows=args.max_rows, step_tokens=args.step_tokens,
            context=4096, attention=args.attention, deterministic=args.deterministic,
            quantization=args.quantization, kv_dtype=args.kv_dtype, tensor_parallel=args.tensor_parallel,
            **states,
        )  # fmt: skip
        if args.tensor_parallel == 1:
            measure(args, load_executor(config, lambda what, share: None), begin, shape)
            return
        from rank_sums import ranked_executor

        with ranked_executor(config, args.library_sums) as executor:
            measure(args, executor, begin, None)
    os._exit(0)  # see `executor_program`


def measure(
    args: argparse.Namespace, executor: Executor, begin: float, shape: Definition | None
) -> None:
    """`shape`: of a model on one device, for the floor."""
    where = torch.device("cuda" if executor.info.device.startswith("cuda") else "cpu")
    floor = floor_of(executor, shape, copy_rate(where)) if shape is not None and args.decode else None
    report: dict[str, Any] = {
        "shape": args.shape if args.config is None else str(args.config),
        "dtype": executor.info.dtype, "attention": executor.info.attention,
        "page_size": args.page_size, "torch": torch.__version__,
        "sampling": {"temperature": args.temperature} | args.sampling,
        "deterministic": args.deterministic, "quantization": executor.info.quantization,
        "kv_dtype": executor.info.kv_dtype, "ranks": args.tensor_parallel,
        "sums": "library" if args.library_sums else "auto",
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine(),
        "ready_s": round(time.perf_counter() - begin, 2),
        "kv_tokens": executor.info.pages * args.page_size,
        "decode": [], "prefill": [], "mixed": [], "profile": [],
    }  # fmt: skip
    bench = DecodeBench(executor, report["sampling"])
    for prompts, tokens in args.prefill:
        rows = list(range(prompts))
        times = []
        for _ in range(args.repeats + 1):
            times.append(bench.prefill(rows, tokens, tokens + 1))
            bench.close(rows)
        seconds = statistics.median(times[1:])
        report["prefill"].append({
            "prompts": prompts, "tokens": tokens, "tokens_a_s": round(prompts * tokens / seconds),
            "all_ms": [round(1000 * t, 1) for t in times],
        })  # fmt: skip
        print(report["prefill"][-1], flush=True)
    for decodes, tokens in args.mixed:
        rows = list(range(decodes))
        fresh = list(range(decodes, decodes + max(1, tokens // 128)))
        if rows:
            bench.prefill(rows, 128, 128 + (args.steps + 9) * args.repeats)
        times = [bench.mixed(rows, fresh, tokens, args.steps) for _ in range(args.repeats)]
        report["mixed"].append({
            "decodes": decodes, "tokens": tokens, "ms": round(1000 * statistics.median(times), 3),
            "all_ms": [round(1000 * t, 3) for t in times],
            "launch_us": round(statistics.median(bench.launch_us), 1),
        })  # fmt: skip
        print(report["mixed"][-1], flush=True)
        if rows:
            bench.close(rows)
    cases = [(*case, False) for case in args.decode] + [(*case, True) for case in args.profile]
    for context in sorted({context for _, context, _ in cases}):
        group = [(batch, traced) for batch, length, traced in cases if length == context]
        rows = list(range(max(batch for batch, _ in group)))
        around = (args.steps + 8) * args.repeats
        start = max(1, context - around // 2)
        bench.prefill(rows, start, start + (around + 40) * len(group) + 8)
        for batch, traced in sorted(group, reverse=True):
            chosen = rows[len(rows) - batch :] if len(rows) == batch else rows[:batch]
            if traced:
                report["profile"].append(profile(bench, chosen, args.trace))
                print(json.dumps(report["profile"][-1], indent=0), flush=True)
                continue
            times = [bench.decode(chosen, args.steps) for _ in range(args.repeats)]
            report["decode"].append({
                "batch": batch, "context": context, "ms": round(1000 * statistics.median(times), 3),
                "all_ms": [round(1000 * t, 3) for t in times],
                "launch_us": round(statistics.median(bench.launch_us), 1),
                **({} if floor is None else {"floor_ms": round(floor(batch, context), 3)}),
            })  # fmt: skip
            print(report["decode"][-1], flush=True)
        bench.close(rows)
    print(json.dumps({key: value for key, value in report.items() if key != "profile"}))
    if args.output is not None:
        args.output.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
