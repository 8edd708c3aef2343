"""Models with experts: right on this device, and how far from what the memory allows.

On a GPU: one layer of Qwen3-30B-A3B's size against torch in float32, both paths; microseconds of that
layer in other tiles than are served; then the whole model on random weights, ms a decode step beside the
time that its bytes take (weights that every token reads, experts hit by a uniform routing, keys and
values; at the rate of a copy on the same GPU), and the FLOP rate of prompts. On a CPU in 8 bits: Granite
3.1-1B-A400M's shape beside a dense model of its total size. Prints, writes JSON.

    python benchmarks/experts.py --output experts.json    # on a GPU: right, tiles, speed
    python benchmarks/experts.py --parts cpu
    TRITON_INTERPRET=1 python benchmarks/experts.py --tiny    # no GPU: the same at sizes without meaning
"""

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from gpu_decode import profile
from hybrids import CUDA, HybridBench, copy_rate, loaded, median_s
from latent import weights_read

from ramify.gpu.models.config import read_config
from ramify.gpu.ops.experts import LayerExperts, RouterSettings, run
from ramify.gpu.ops.linear.base import Linear, plain

THIRTY = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "dtype": "bfloat16",
    "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128,
    "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True,
    "max_position_embeddings": 40960, "rope_theta": 1000000.0, "eos_token_id": 2,
}  # fmt: skip
THIRTY_FIVE = {
    "architectures": ["Qwen3_5MoeForCausalLM"], "model_type": "qwen3_5_moe_text", "dtype": "bfloat16",
    "vocab_size": 248320, "hidden_size": 2048, "num_hidden_layers": 40, "num_attention_heads": 16,
    "num_key_value_heads": 2, "head_dim": 256, "num_experts": 256, "num_experts_per_tok": 8,
    "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "eos_token_id": 2,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "full_attention_interval": 4,
    "max_position_embeddings": 262144,
    "rope_parameters": {"rope_theta": 10000000.0, "partial_rotary_factor": 0.25},
}  # fmt: skip
GPT_OSS = {
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "dtype": "bfloat16",
    "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24,
    "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 32,
    "num_experts_per_tok": 4, "sliding_window": 128, "max_position_embeddings": 131072,
    "eos_token_id": 2,
}  # fmt: skip
NEMOTRON = {
    "architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h", "dtype": "bfloat16",
    "vocab_size": 131072, "hidden_size": 2688, "num_attention_heads": 32, "num_key_value_heads": 2,
    "head_dim": 128, "mamba_num_heads": 64, "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128,
    "n_routed_experts": 128, "num_experts_per_tok": 6, "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712, "routed_scaling_factor": 2.5, "eos_token_id": 2,
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    "max_position_embeddings": 262144,
}  # fmt: skip
SHAPES = {  # Qwen3's and Qwen3.6's; the last two for speed alone
    "30b-a3b": THIRTY, "35b-a3b": THIRTY_FIVE, "gpt-oss-20b": GPT_OSS, "nemotron-3-nano": NEMOTRON,
}  # fmt: skip
TINY = {
    "vocab_size": 160, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "num_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "intermediate_size": 96, "dtype": "float32",
    "shared_expert_intermediate_size": 32, "full_attention_interval": 2, "linear_num_key_heads": 1,
    "linear_num_value_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip
GRANITE = {
    "architectures": ["GraniteMoeForCausalLM"], "model_type": "granitemoe", "vocab_size": 49155,
    "hidden_size": 1024, "intermediate_size": 512, "num_hidden_layers": 24, "num_attention_heads": 16,
    "num_key_value_heads": 8, "num_local_experts": 32, "num_experts_per_tok": 8,
    "tie_word_embeddings": True, "max_position_embeddings": 4096, "eos_token_id": 2,
}  # fmt: skip


def drawn_layer(fields: dict[str, Any], scale: float = 0.02) -> LayerExperts:
    """One layer of that size with random weights."""
    kind = getattr(torch, fields["dtype"])
    experts, hidden, size = (
        fields[name] for name in ("num_experts", "hidden_size", "moe_intermediate_size")
    )

    def made(rows: int, inputs: int, stacked: int = 0) -> Linear:
        weight = torch.randn((rows, inputs), device="cuda" if CUDA else "cpu") * scale
        return replace(plain(weight.to(kind)), stacked=stacked)

    return LayerExperts(
        made(experts, hidden), None, made(experts * 2 * size, hidden, experts),
        made(experts * hidden, size, experts), None,
        RouterSettings(top=fields["num_experts_per_tok"]), "silu",
    )  # fmt: skip


def widened(linear: Linear) -> Linear:
    return replace(linear, weight=plain(linear.tensor.float()).weight)


def layer_parts(fields: dict[str, Any], tiny: bool, tune: bool) -> list[dict[str, Any]]:
    """Errors and microseconds of both paths, by tokens. `tune`: in other tiles than are served, too."""
    from ramify.gpu.ops import triton_experts_many as kernels
    from ramify.gpu.ops.triton_experts import MOST_FEW, route_tokens
    from ramify.gpu.ops.triton_experts_few import run_few
    from ramify.gpu.ops.triton_linear import UnscaledRows

    one, found = drawn_layer(fields), []
    wide = replace(one, gate_up=widened(one.gate_up), down=widened(one.down))
    counts = (1, 4, 8, 16, 32, 64, 128, 256, 1024, 4096, 8192) if not tiny else (1, 20)
    for tokens in counts:
        x = torch.randn((tokens, fields["hidden_size"]), device=one.down.tensor.device)
        x = x.to(one.down.tensor.dtype)
        routes = route_tokens(one.router(x), one)
        pairs, experts = routes.chosen.numel(), one.experts
        hit = len(routes.chosen.unique())
        moved = hit * (one.gate_up.tensor.nbytes + one.down.tensor.nbytes) / experts
        flops = 6 * pairs * one.size * fields["hidden_size"]
        ways: dict[str, Any] = {}
        if tokens <= (4 * MOST_FEW if tune else MOST_FEW):
            ways["few"] = lambda x=x, r=routes: run_few(UnscaledRows(x), 0.0, one, r)
        served = kernels.tile_for(pairs, experts, x.dtype, False)
        tiles = (
            {tile for _, tile in kernels._TILES} | {kernels._LARGEST, served}
            if tune and not tiny
            else {served}
        )
        for tile in sorted(tiles, key=str):
            ways[f"many {tile}"] = lambda x=x, r=routes: kernels.run_many(x, one, r, None, False)
        for name, way in ways.items():
            tile = next((each for each in tiles if name == f"many {each}"), served)
            choice, kernels.tile_for = kernels.tile_for, lambda *_, tile=tile: tile
            try:
                seconds = median_s(way, 9 if CUDA else 1)
                row = {"tokens": tokens, "path": name, "us": round(1e6 * seconds, 1),
                       "gb_s": round(moved / seconds / 1e9),
                       "tflop_s": round(flops / seconds / 1e12, 1)}  # fmt: skip
                if not tune and tokens <= 1024:
                    wanted = run(x.float(), wide, x)  # the same routes
                    row["error"] = float(
                        f"{((way().float() - wanted).norm() / wanted.norm()).item():.2g}"
                    )
            finally:
                kernels.tile_for = choice
            found.append(row)
    return found


def speed(fields: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    batches, context = ([1, 8, 32, 128], 1024) if not args.tiny else ([1, 2], 6)
    prompts = [(1, 2048), (1, 8192), (8, 1024)] if not args.tiny else [(1, 40)]
    rows, begin = max(batches), time.perf_counter()
    capacity = context + ((args.steps + 8) * args.repeats + 48) * (len(batches) + 1)
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "config.json").write_text(json.dumps(fields))
        shape = read_config(Path(name))
        executor = loaded(
            Path(name), load_format="dummy", max_rows=rows, kv_tokens=rows * capacity + 16384,
            step_tokens=8192 if not args.tiny else 128, context=10240 if not args.tiny else 256,
            quantization=args.quantization,
            **({"state_slots": 3 * rows + 1} if shape.keeps_states else {}),
        )  # fmt: skip
    info, rate = executor.info, copy_rate()
    width = 2 if info.dtype != "float32" else 4
    report: dict[str, Any] = {
        "parameters": info.parameters, "attention": info.attention, "copy_gb_s": round(rate / 1e9),
        "ready_s": round(time.perf_counter() - begin, 1), "prefill": [], "decode": [],
    }  # fmt: skip
    bench = HybridBench(executor, {"temperature": 0.6})
    for count, tokens in prompts:
        times = []
        for _ in range(args.repeats + 1):
            times.append(bench.prefill(list(range(count)), tokens, tokens + 1))
            bench.close(list(range(count)))
        seconds = statistics.median(times[1:])
        # the last product runs for one token of a prompt
        active = weights_read(shape, info.parameters, 1) - shape.vocab_size * shape.hidden_size
        flops = 2 * active * count * tokens
        report["prefill"].append({"prompts": count, "tokens": tokens,
                                  "tokens_a_s": round(count * tokens / seconds),
                                  "tflop_s": round(flops / seconds / 1e12, 1)})  # fmt: skip
    bench.prefill(list(range(rows)), context, capacity)
    for batch in batches:
        times = [bench.decode(list(range(batch)), args.steps) for _ in range(args.repeats)]
        moved = weights_read(shape, info.parameters, batch) * width
        moved += batch * (info.kv_bytes_per_token * context + 2 * info.state_bytes)
        floor, seconds = moved / rate, statistics.median(times)
        report["decode"].append({"batch": batch, "ms": round(1e3 * seconds, 3),
                                 "floor_ms": round(1e3 * floor, 3),
                                 "ratio": round(seconds / floor, 3)})  # fmt: skip
    if CUDA:
        report["profile"] = [profile(bench, list(range(batch)), None) for batch in (1, 32)]
    bench.close(list(range(rows)))
    executor.close()
    return report


def on_cpu(args: argparse.Namespace) -> list[dict[str, Any]]:
    """CPU time of a decode of one row in 8 bits: the mixture, and a dense model of its total size."""
    fields = GRANITE | ({"num_hidden_layers": args.layers} if args.layers else {})
    dense = {"architectures": ["GraniteForCausalLM"], "model_type": "granite",
             "intermediate_size": fields["intermediate_size"] * fields["num_local_experts"]}  # fmt: skip
    found = []
    plain_fields = {name: value for name, value in fields.items() if "experts" not in name}
    for name, shape in (("mixture", fields), ("dense", plain_fields | dense)):
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(shape))
            executor = loaded(Path(folder), load_format="dummy", quantization="int8", attention="auto",
                              kv_tokens=2048, max_rows=4, step_tokens=64, context=1024)  # fmt: skip
        bench = HybridBench(executor, {"temperature": 0.0})
        bench.prefill([0], 32, 512)
        times, cpu = [], []
        for _ in range(args.repeats):
            begin = time.process_time()
            times.append(bench.decode([0], args.steps))
            cpu.append((time.process_time() - begin) / args.steps)
        found.append({"model": name, "parameters": executor.info.parameters,
                      "quantization": executor.info.quantization,
                      "cpu_ms": round(1e3 * statistics.median(cpu), 2),
                      "ms": round(1e3 * statistics.median(times), 2)})  # fmt: skip
        executor.close()
        del bench, executor
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", default="right,tiles,speed", help="of right, tiles, speed, cpu")
    parser.add_argument("--shape", choices=SHAPES, default="30b-a3b", help="of right, tiles and speed")
    parser.add_argument("--quantization", default="auto", help="of speed; its floor is that of floats")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--layers", type=int, help="of the shape on a CPU, instead of all of them")
    parser.add_argument("--tiny", action="store_true", help="sizes for Triton's interpreter")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    if args.tiny:
        args.steps, args.repeats = 2, 1
    shape = SHAPES[args.shape]
    fields = shape | {name: TINY[name] for name in shape if args.tiny and name in TINY}
    parts = {
        "right": lambda: layer_parts(fields, args.tiny, False),
        "tiles": lambda: layer_parts(fields, args.tiny, True),
        "speed": lambda: speed(fields, args),
        "cpu": lambda: on_cpu(args),
    }
    report: dict[str, Any] = {"device": torch.cuda.get_device_name() if CUDA else "a CPU"}
    for name in args.parts.split(","):
        report[name] = parts[name]()
        if args.output is not None:  # what there is, should the next part not end
            args.output.write_text(json.dumps(report, indent=1))
        for row in report[name] if isinstance(report[name], list) else [report[name]]:
            print(name, json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
