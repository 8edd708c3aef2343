"""How fast one GPU runs the model, below the engine: ms per decode step, prefill tokens per second.

Drives an executor with the plans that a scheduler would send, two steps in flight, on random
weights of a real model's shape. Prints one JSON object; `--profile` adds a torch.profiler trace of
20 decode steps: the share of time in which the GPU ran no kernel, and the kernels that cost most.

    python benchmarks/gpu_decode.py --shape qwen3-0.6b --decode 1x128,64x128,256x1024 --prefill 8x2048
"""

import argparse
import json
import platform
import random
import statistics
import tempfile
import time
from collections import defaultdict, deque
from pathlib import Path
from typing import Any

import torch

from ramify.gpu.executor import Executor, PendingStep
from ramify.gpu.load import load_executor
from ramify.protocol.config import ModelConfig
from ramify.protocol.plan import ExtendRow, OpenRow, StepPlan, pack, unpack
from ramify.protocol.sampling import SamplingParams

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {
        "architectures": ["Qwen3ForCausalLM"], "vocab_size": 151936, "hidden_size": 1024,
        "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128, "rope_theta": 1000000,
        "tie_word_embeddings": True, "max_position_embeddings": 40960, "torch_dtype": "bfloat16",
    },
    "llama-3.1-8b": {
        "architectures": ["LlamaForCausalLM"], "vocab_size": 128256, "hidden_size": 4096,
        "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "rope_theta": 500000, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072, "torch_dtype": "bfloat16",
        "rope_scaling": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
    "tiny": {
        "architectures": ["Qwen3ForCausalLM"], "vocab_size": 512, "hidden_size": 64,
        "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 4096,
    },
}  # fmt: skip
IN_FLIGHT = 2


class Bench:
    """Rows on an executor: row r has its own `capacity` tokens of shuffled pages."""

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

    def launch(self, **plan: Any) -> None:
        """Launch a step, after taking the oldest result if two are in flight."""
        if len(self.pending) == IN_FLIGHT:
            self.take()
        begin = time.perf_counter()
        self.pending.append(self.executor.launch(StepPlan(step=self.steps, **plan)))
        self.launch_us.append((time.perf_counter() - begin) * 1e6)
        self.steps += 1

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
        count = -(-capacity // info.page_size)
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

    def close(self, rows: list[int]) -> None:
        self.launch(closes=pack(rows))
        self.drain()


def profile(bench: Bench, rows: list[int], trace: Path | None) -> dict[str, Any]:
    """Idle share and the costliest kernels of 20 decode steps."""
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
    spans = []
    kernels: dict[str, list[float]] = defaultdict(list)
    for event in run.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            begin, end = event.time_range.start, event.time_range.end
            spans.append((begin, end))
            kernels[event.name.split("<")[0][:60]].append(end - begin)
    spans.sort()
    total = spans[-1][1] - spans[0][0]
    busy, reach = 0.0, spans[0][0]
    for begin, end in spans:
        busy += max(0.0, end - max(begin, reach))
        reach = max(reach, end)
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


def sizes(text: str) -> list[tuple[int, int]]:
    """`8x2048,1x2048` as pairs."""
    return [(int(a), int(b)) for a, _, b in (part.partition("x") for part in text.split(",") if part)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=list(SHAPES), default="qwen3-0.6b")
    parser.add_argument("--decode", type=sizes, default=[], help="batch x context, comma-separated")
    parser.add_argument("--prefill", type=sizes, default=[], help="prompts x tokens, comma-separated")
    parser.add_argument("--profile", type=sizes, default=[], help="batch x context")
    parser.add_argument("--trace", type=Path, help="where to write the profile's Chrome trace")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--temperature", type=float, default=0.6)
    parser.add_argument("--sampling", type=json.loads, default={}, help="JSON: more SamplingParams")
    parser.add_argument("--page-size", type=int, default=1)
    parser.add_argument("--max-rows", type=int, default=256)
    parser.add_argument("--step-tokens", type=int, default=8192)
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps(SHAPES[args.shape]))
    begin = time.perf_counter()
    executor = load_executor(
        ModelConfig(
            path=folder, device=args.device, load_format="dummy", page_size=args.page_size,
            max_rows=args.max_rows, step_tokens=args.step_tokens, context=4096, attention=args.attention,
            deterministic=args.deterministic,
        ),
        lambda what, share: None,
    )  # fmt: skip
    report: dict[str, Any] = {
        "shape": args.shape, "dtype": executor.info.dtype, "attention": executor.info.attention,
        "page_size": args.page_size, "torch": torch.__version__,
        "sampling": {"temperature": args.temperature} | args.sampling,
        "deterministic": args.deterministic,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine(),
        "ready_s": round(time.perf_counter() - begin, 2),
        "kv_tokens": executor.info.pages * args.page_size,
        "decode": [], "prefill": [], "profile": [],
    }  # fmt: skip
    bench = Bench(executor, report["sampling"])
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
            })  # fmt: skip
            print(report["decode"][-1], flush=True)
        bench.close(rows)
    print(json.dumps({key: value for key, value in report.items() if key != "profile"}))
    if args.output is not None:
        args.output.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
