"""Models with recurrent layers or windows on one GPU: right, and how far from what the memory allows.

First Qwen3.5, LFM2 and Granite 4 of small random shapes against `transformers`: a prompt in two
chunks, then decodes of given tokens. Then Qwen3.5-9B's shape on random weights: ms a decode step beside
the time that its bytes take (weights, keys and values, states read and written; at the rate of a copy on
the same GPU), and the FLOP rate of prompts, of products with weights alone. `windows` and `whole`: six
layers of Gemma-4-31B, whose layers with a window keep the last tokens alone, or all; and how many tokens
fit. Prints a table, writes JSON.

    python benchmarks/hybrids.py --output hybrids.json
    python benchmarks/hybrids.py --parts kernels    # the kernels by themselves, in other cuts
    TRITON_INTERPRET=1 python benchmarks/hybrids.py --tiny    # no GPU: the same at sizes without meaning
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from gpu_decode import DecodeBench, profile

from ramify.gpu.executors.base import Executor
from ramify.gpu.models.config import read_config
from ramify.gpu.startup.load import load_executor
from ramify.protocol.config import ModelConfig
from ramify.protocol.plan import ExtendRow, OpenRow, StepPlan, pack, unpack
from ramify.protocol.sampling import SamplingParams

CUDA = torch.cuda.is_available()
NINE = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "dtype": "bfloat16",
    "eos_token_id": 2,
}
LLAMA = "llama-3.1-8b"
GEMMA = {
    "architectures": ["Gemma4ForCausalLM"],
    "model_type": "gemma4_text",
    "dtype": "bfloat16",
    "vocab_size": 32768,
    "hidden_size": 5376,
    "intermediate_size": 21504,
    "num_hidden_layers": 6,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "num_global_key_value_heads": 4,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "sliding_window": 1024,
}
TINY_GEMMA = {"head_dim": 32, "global_head_dim": 64, "sliding_window": 9, "num_hidden_layers": 6}
SMALL = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.1,
    "pad_token_id": 0,
    "eos_token_id": 2,
}
DELTA = {
    "head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
MAMBA = {
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "num_local_experts": 0,
    "shared_intermediate_size": 512,
    "mamba_n_heads": 8,
    "mamba_d_state": 128,
    "attention_multiplier": 0.1,
}
CONV = {"full_attn_idxs": [1, 3], "block_multiple_of": 256}
TINY_DELTA = {"head_dim": 32, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
TINY_MAMBA = {"shared_intermediate_size": 96, "mamba_d_state": 16}
TINY = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 160}


class HybridBench(DecodeBench):
    """Each row writes its states in turn to three slots of its own. Window pages of a prompt's last
    tokens, and of what follows, are its own, too; those before them are of all rows."""

    def __init__(self, executor: Executor, sampling: dict[str, Any]) -> None:
        super().__init__(executor, sampling)
        self.newest: dict[int, int] = {}
        self.tokens = 0  # sampled so far

    def take(self) -> None:
        self.tokens += len(self.pending[0].result().tokens) // 4
        super().take()
        self.prompt = 0

    def prefill(self, rows: list[int], prompt: int, capacity: int) -> float:
        self.prompt = prompt
        return super().prefill(rows, prompt, capacity)

    def windows(self, row: int, count: int) -> bytes:
        before = self.executor.info.window - 1
        common, own = before + self.executor.info.step_tokens, before + 32
        position = np.arange(count)
        kept = common + row * own + position % own
        return np.where(position < self.prompt - before, position % common, kept).astype("<i4").tobytes()

    def launch(self, **plan: Any) -> None:
        for opened in plan.get("opens", ()):
            self.newest[opened.row] = 0
        if self.executor.info.window_pages:
            plan["opens"] = [
                msgspec.structs.replace(one, windows=self.windows(one.row, len(one.pages) // 4))
                for one in plan.get("opens", ())
            ]
        rows = [extend.row for extend in plan.get("extends", ())] + list(
            unpack(plan.get("decodes", b""))
        )
        pairs: list[int] = []
        for row in rows if self.executor.info.state_slots else ():
            first, newest = 1 + 3 * row, self.newest[row]
            self.newest[row] = first + (newest - first + 1) % 3 if newest >= first else first
            pairs += newest, self.newest[row]
        super().launch(**plan, states=pack(pairs))


def loaded(folder: Path, **settings: Any) -> Executor:
    where = {"device": "cuda"} if CUDA else {"device": "cpu", "attention": "triton"}
    return load_executor(ModelConfig(path=folder, **(where | settings)), lambda what, share: None)


# --- right ---


@torch.inference_mode()
def compared(family: str, tiny: bool) -> dict[str, Any]:
    """The largest difference of a log-probability to `transformers` in float32, on the same weights."""
    import transformers

    fields = SMALL | {"Qwen3_5": DELTA, "Lfm2": CONV, "GraniteMoeHybrid": MAMBA}[family]
    if tiny:
        tiny_ones: dict[str, dict[str, Any]] = {"Qwen3_5": TINY_DELTA, "GraniteMoeHybrid": TINY_MAMBA}
        fields |= TINY | tiny_ones.get(family, {})
    torch.manual_seed(1)
    name = "Qwen3_5TextConfig" if family == "Qwen3_5" else f"{family}Config"
    model = getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, name)(**fields))
    model = model.eval().to(torch.bfloat16 if CUDA else torch.float32)
    prompt, decodes, cut = (300, 24, 130) if not tiny else (70, 2, 40)
    text = torch.randint(3, fields["vocab_size"], (prompt + decodes,)).tolist()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        executor = loaded(
            Path(folder), max_rows=4, step_tokens=512, kv_tokens=2048, state_slots=12, context=1024
        )
    where = torch.device("cuda" if CUDA else "cpu")
    likely = model.float().to(where)(torch.tensor([text], device=where)).logits[0].log_softmax(-1)
    settings = SamplingParams(temperature=0.0)
    opens = [OpenRow(0, 0, pack(range(len(text) + 2)), 0, settings)]
    worst, slot = {"prompt": 0.0, "decodes": 0.0}, 0
    for first, last in [(0, cut), (cut, prompt), *((at, at + 1) for at in range(prompt, len(text)))]:
        extends = [ExtendRow(0, first, pack(text[first:last]), True)]
        states = pack([slot, slot % 3 + 1])
        _, logits = executor.forward(StepPlan(0, opens=opens, extends=extends, states=states))
        assert logits is not None
        slot, opens = slot % 3 + 1, []
        off = (logits[0].log_softmax(-1) - likely[last - 1]).abs().max().item()
        kind = "prompt" if last - first > 1 else "decodes"
        worst[kind] = max(worst[kind], off)
    dtype = executor.info.dtype
    executor.close()
    rounded = {kind: float(f"{off:.2g}") for kind, off in worst.items()}
    return {"family": family, "dtype": dtype, **rounded}


# --- fast ---


def copy_rate() -> float:
    """Bytes a second of a device copy, read and written."""
    size = 1 << 30 if CUDA else 1 << 22
    source = torch.empty(size, dtype=torch.uint8, device="cuda" if CUDA else "cpu")
    target = torch.empty_like(source)
    return 2 * size / median_s(lambda: target.copy_(source))


def median_s(run: Callable[[], object], times: int = 9) -> float:
    """Seconds of a launch on the device, after a first one."""
    run()
    found = []
    for _ in range(times):
        if CUDA:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            run()
            end.record()
            torch.cuda.synchronize()
            found.append(begin.elapsed_time(end) / 1e3)
        else:
            start = time.perf_counter()
            run()
            found.append(time.perf_counter() - start)
    return statistics.median(found)


def speed(
    fields: dict[str, Any], args: argparse.Namespace, windows: int | None = None
) -> dict[str, Any]:
    """Of a shape on random weights. `windows`: as of `--window-tokens`."""
    batches, context = ([1, 8, 32, 128], 1024) if not args.tiny else ([1, 2], 6)
    prompts = [(1, 2048), (1, 8192), (8, 1024)] if not args.tiny else [(1, 70)]
    rows, begin = max(batches), time.perf_counter()
    around = (args.steps + 8) * args.repeats
    capacity = context + (around + 48) * (len(batches) + 1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(fields))
        shape = read_config(folder)
        more: dict[str, Any] = {"state_slots": 3 * rows + 1} if shape.keeps_states else {}
        if shape.window is None:
            more["kv_tokens"] = rows * capacity + 16384
        else:  # as many as fit
            more["window_tokens"], context = windows, 3 * context
            capacity += context
        executor = loaded(
            folder, load_format="dummy", max_rows=rows, step_tokens=8192 if not args.tiny else 128,
            context=10240 if not args.tiny else 256, **more,
        )  # fmt: skip
    info, rate = executor.info, copy_rate()
    table = shape.vocab_size * shape.hidden_size
    layers = info.parameters - (table if shape.tied else 2 * table)
    width = 2 if info.dtype != "float32" else 4
    kept = shape.kv_layout(getattr(torch, info.dtype), shape.window is not None)
    read = kept.bytes_per_token * context + kept.bytes_per_window_page * min(shape.window or 0, context)
    report: dict[str, Any] = {
        "architecture": shape.architecture, "parameters": info.parameters, "dtype": info.dtype,
        "attention": info.attention, "state_mb": round(info.state_bytes / 1e6, 2),
        "kv_bytes_a_token": info.kv_bytes_per_token, "kv_tokens": info.pages, "window": info.window,
        "window_pages": info.window_pages, "window_bytes": info.window_bytes,
        "copy_gb_s": round(rate / 1e9), "ready_s": round(time.perf_counter() - begin, 1),
        "prefill": [], "decode": [],
    }  # fmt: skip
    bench = HybridBench(executor, {"temperature": 0.6})
    for count, tokens in prompts:
        times = []
        for _ in range(args.repeats + 1):
            times.append(bench.prefill(list(range(count)), tokens, tokens + 1))
            bench.close(list(range(count)))
        seconds = statistics.median(times[1:])
        report["prefill"].append({
            "prompts": count, "tokens": tokens, "tokens_a_s": round(count * tokens / seconds),
            "tflop_s": round(2 * layers * count * tokens / seconds / 1e12, 1),
        })  # fmt: skip
    bench.prefill(list(range(rows)), context, capacity)
    for batch in batches:
        chosen = list(range(batch))
        times = [bench.decode(chosen, args.steps) for _ in range(args.repeats)]
        states = 2 * info.state_bytes
        moved = (layers + table) * width + batch * (states + read)
        floor, seconds = moved / rate, statistics.median(times)
        report["decode"].append({
            "batch": batch, "ms": round(1e3 * seconds, 3), "floor_ms": round(1e3 * floor, 3),
            "ratio": round(seconds / floor, 3), "launch_us": round(statistics.median(bench.launch_us)),
        })  # fmt: skip
    if CUDA and args.profile:
        report["profile"] = [profile(bench, list(range(batch)), None) for batch in (1, 32)]
    bench.close(list(range(rows)))
    executor.close()
    del bench, executor
    if CUDA:
        torch.cuda.empty_cache()
    return report


def drafted(fields: dict[str, Any], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Milliseconds of a step of decodes in which each row runs n-gram drafts, and what it samples."""
    rows, most = (32, 3) if not args.tiny else (2, 3)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(fields))
        executor = loaded(
            folder, load_format="dummy", max_rows=(1 + most) * rows, step_tokens=2048, context=4096,
            kv_tokens=rows * 3072, draft="ngram", state_slots=3 * (1 + most) * rows,
        )  # fmt: skip
    bench, found = HybridBench(executor, {"temperature": 0.0}), []
    bench.prefill(list(range(rows)), 64, 3072)
    for batch in (1, 8, rows) if not args.tiny else (rows,):
        for drafts in (0, 1, most):
            asked = pack([drafts] * batch) if drafts else b""
            for steps in (3, args.steps):  # the first ones fill the pipeline
                bench.drain()
                begin, tokens = time.perf_counter(), bench.tokens
                for _ in range(steps):
                    bench.launch(decodes=pack(range(batch)), drafts=asked)
                bench.drain()
                seconds = time.perf_counter() - begin
            found.append({
                "batch": batch, "drafts": drafts, "ms": round(1e3 * seconds / steps, 3),
                "tokens_a_row": round((bench.tokens - tokens) / steps / batch, 2),
            })  # fmt: skip
    executor.close()
    return found


def kernels(tiny: bool) -> list[dict[str, Any]]:
    """Microseconds of one delta net of Qwen3.5-9B, and of its parts, in other cuts than are served."""
    from ramify.gpu.ops import triton_delta
    from ramify.gpu.ops.fixed_states import CHUNK, LayerDelta
    from ramify.gpu.ops.rmsnorm import RMSNorm

    device, dtype = ("cuda", torch.bfloat16) if CUDA else ("cpu", torch.float32)
    keys, values, dim = (16, 32, 128) if not tiny else (1, 2, 16)

    def made(*shape: int, kind: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(shape, device=device).to(kind)

    wide = torch.float32
    layer = LayerDelta(
        0, keys, values, dim, dim, made(2 * keys * dim + values * dim, 1, 4), made(values, kind=wide),
        made(values, kind=wide), RMSNorm(made(dim), 1e-6),
    )  # fmt: skip
    found = []
    served = triton_delta._VALUES
    try:
        for cut in (16, 32, 64) if not tiny else (16,):
            triton_delta._VALUES = cut
            for batch in (1, 8, 32, 128) if not tiny else (1,):
                states = [made(2 * batch + 1, 3, len(layer.conv), kind=wide),
                          made(2 * batch + 1, values, dim, dim, kind=wide)]  # fmt: skip
                table = [[1 + at, 1 + batch + at, at, 0, 1] for at in range(batch)]
                items = torch.tensor(table, dtype=torch.int32, device=device)
                rows = made(batch, sum(layer.parts))
                output = rows.new_empty((batch, layer.width))
                seconds = median_s(
                    lambda r=rows, s=states, i=items, o=output: triton_delta.recurrent(r, layer, s, i, o)
                )
                rate = 2 * states[1][:batch].nbytes / seconds
                found.append({"kernel": "recur", "values": cut, "batch": batch,
                              "us": round(1e6 * seconds, 1), "gb_s": round(rate / 1e9)})  # fmt: skip
            for count, tokens in ((1, 8192), (8, 1024)) if not tiny else ((1, 70),):
                table = [[0, 1 + at, at * tokens, 0, tokens] for at in range(count)]
                pieces = [[*item[:3], offset, tokens] for item in table
                          for offset in range(0, tokens, CHUNK)]  # fmt: skip
                items, chunks = (torch.tensor(each, dtype=torch.int32, device=device)
                                 for each in (table, pieces))  # fmt: skip
                rows = made(count * tokens, sum(layer.parts))
                output = rows.new_empty((len(rows), layer.width))
                states = [made(count + 1, 3, len(layer.conv), kind=wide),
                          made(count + 1, values, dim, dim, kind=wide)]  # fmt: skip
                seconds = median_s(
                    lambda r=rows, s=states, i=items, c=chunks, o=output: triton_delta.chunked(
                        r, layer, s, i, c, len(r), o
                    )
                )
                found.append({"kernel": "chunked", "values": cut, "prompts": count, "tokens": tokens,
                              "us": round(1e6 * seconds, 1)})  # fmt: skip
    finally:
        triton_delta._VALUES = served
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--parts",
        default="right,speed",
        help="of right, speed, llama, windows, whole, kernels, drafts",
    )
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--profile", action="store_true", help="the kernels of decodes, by their time")
    parser.add_argument("--tiny", action="store_true", help="sizes for Triton's interpreter")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    if args.tiny:
        args.steps, args.repeats = 2, 1
    begin, parts = time.perf_counter(), args.parts.split(",")
    device = torch.cuda.get_device_name() if CUDA else "a CPU"
    report: dict[str, Any] = {"device": device, "torch": torch.__version__}

    def keep(name: str, value: Any) -> None:
        """Write what there is, should the next part not end."""
        report[name] = value
        if args.output is not None:
            args.output.write_text(json.dumps(report, indent=1))
        for row in value if isinstance(value, list) else [value]:
            print(name, *(f"{key}={one}" for key, one in row.items() if not isinstance(one, list)))
            for kind in ("prefill", "decode"):
                for one in row.get(kind, ()):
                    print(" ", kind, *(f"{key}={each}" for key, each in one.items()))
        print(f"  ({time.perf_counter() - begin:.0f} s)", flush=True)

    if "right" in parts:
        families = ("Qwen3_5", "Lfm2", "GraniteMoeHybrid")
        keep("right", [compared(family, args.tiny) for family in families])
    if "kernels" in parts:
        keep("kernels", kernels(args.tiny))
    if "speed" in parts:
        small = SMALL | DELTA | TINY | TINY_DELTA
        keep("speed", speed(NINE | (small if args.tiny else {}), args))
    if "drafts" in parts:
        small = SMALL | DELTA | TINY | TINY_DELTA
        keep("drafts", drafted(NINE | (small if args.tiny else {}), args))
    for name, tokens in (("windows", None), ("whole", 0)):
        if name in parts:
            keep(name, speed(GEMMA | (SMALL | TINY | TINY_GEMMA if args.tiny else {}), args, tokens))
    if "llama" in parts:
        from ramify.clients.bench.shapes import SHAPES

        keep("llama", speed(SHAPES[LLAMA], args))


if __name__ == "__main__":
    main()
