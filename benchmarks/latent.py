"""Latent attention on one GPU: right, how far from what the memory allows, and what a fork saves.

First a small random DeepSeek V3 against `transformers`. Then V2-Lite's shape on random weights: tokens a
second of prompts, ms a decode step beside the time of its bytes (weights of experts hit, latents; at the
rate of a copy on the same GPU), and 32 branches over 32k tokens that they share or each have alone, read
together or by each.
Part "forms": one layer's prompts, absorbed and expanded.

    python benchmarks/latent.py --output latent.json
    TRITON_INTERPRET=1 python benchmarks/latent.py --tiny    # no GPU: the same at sizes without meaning
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
from gpu_decode import DecodeBench, profile
from hybrids import CUDA, SMALL, copy_rate, loaded, median_s

from ramify.gpu.executors.base import Executor
from ramify.gpu.models.config import read_config
from ramify.gpu.models.definition import Definition, ExpertSettings
from ramify.protocol.plan import ExtendRow, OpenRow, StepPlan, pack
from ramify.protocol.sampling import SamplingParams

LITE = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "dtype": "bfloat16",
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "q_lora_rank": None,
    "moe_intermediate_size": 1408,
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 163840,
    "eos_token_id": 2,
}
FEW_EXPERTS = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 128,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
}
TINY = FEW_EXPERTS | {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}


@torch.inference_mode()
def right(tiny: bool, dtype: torch.dtype) -> dict[str, Any]:
    """The largest difference of a log-probability to `transformers` in float32, on the same weights.

    In 16 bits some tokens go to other experts than in float32.
    """
    import transformers

    torch.manual_seed(1)
    fields = SMALL | FEW_EXPERTS | (TINY | {"q_lora_rank": 24} if tiny else {"kv_lora_rank": 512})
    model = transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**fields)).eval()
    for name, weight in model.named_parameters():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj", "gate.weight")):
            torch.nn.init.normal_(weight, 0.0, 0.1)
    model = model.to(dtype)
    prompt, decodes, cut = (300, 24, 130) if not tiny else (40, 2, 23)
    text = torch.randint(3, fields["vocab_size"], (prompt + decodes,)).tolist()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        executor = loaded(Path(folder), max_rows=4, step_tokens=512, kv_tokens=2048, context=1024)
    where = torch.device("cuda" if CUDA else "cpu")
    likely = model.float().to(where)(torch.tensor([text], device=where)).logits[0].log_softmax(-1)
    opens = [OpenRow(0, 0, pack(range(len(text) + 2)), 0, SamplingParams(temperature=0.0))]
    worst = {"prompt": 0.0, "decodes": 0.0}
    for first, last in [(0, cut), (cut, prompt), *((at, at + 1) for at in range(prompt, len(text)))]:
        extends = [ExtendRow(0, first, pack(text[first:last]), True)]
        _, logits = executor.forward(StepPlan(0, opens=opens, extends=extends))
        assert logits is not None
        opens = []
        off = (logits[0].log_softmax(-1) - likely[last - 1]).abs().max().item()
        kind = "prompt" if last - first > 1 else "decodes"
        worst[kind] = max(worst[kind], float(f"{off:.2g}"))
    served = executor.info.dtype
    executor.close()
    return {"dtype": served, **worst}


def weights_read(shape: Definition, parameters: int, tokens: int) -> float:
    """Weights that a step of so many tokens reads, where each chooses its experts at random."""
    left_out = 0.0
    for layer in shape.layers:
        one = layer.feed_forward
        if isinstance(one, ExpertSettings):
            idle = one.experts * (1 - one.router.top / one.experts) ** tokens
            left_out += idle * (3 - (one.activation == "relu2")) * one.size * shape.hidden_size
    return parameters - shape.vocab_size * shape.hidden_size - left_out  # the embedding is looked up


def speed(executor: Executor, shape: Definition, args: argparse.Namespace, rate: float) -> list[Any]:
    """Prompts and decodes."""
    info, bench = executor.info, DecodeBench(executor, {"temperature": 0.6})
    batches, context = ([1, 8, 32, 64, 128], 1024) if not args.tiny else ([1, 2], 6)
    prompts = [(1, 2048), (1, 8192), (8, 1024), (1, 32768)] if not args.tiny else [(1, 40)]
    width, found = 2 if info.dtype != "float32" else 4, []
    for count, tokens in prompts:
        times = []
        for _ in range(args.repeats + 1):
            times.append(bench.prefill(list(range(count)), tokens, tokens + 1))
            bench.close(list(range(count)))
        seconds = statistics.median(times[1:])
        found.append({"prompts": count, "tokens": tokens, "tokens_a_s": round(count * tokens / seconds)})
    bench.prefill(list(range(max(batches))), context, context + 64 + 2 * args.steps * args.repeats)
    for batch in batches:
        rows = list(range(batch))
        seconds = statistics.median([bench.decode(rows, args.steps) for _ in range(args.repeats)])
        moved = weights_read(shape, info.parameters, batch) * width
        floor = (moved + batch * info.kv_bytes_per_token * context) / rate
        found.append({"batch": batch, "ms": round(1e3 * seconds, 3), "floor_ms": round(1e3 * floor, 3),
                      "ratio": round(seconds / floor, 2)})  # fmt: skip
        bench.close(rows)
        bench.prefill(rows, context, context + 64 + 2 * args.steps * args.repeats)
    if CUDA and args.profile:
        found += [{"profile": profile(bench, list(range(batch)), None)} for batch in (1, 8)]
    bench.close(list(range(max(batches))))
    return found


def branches(executor: Any, args: argparse.Namespace) -> list[dict[str, Any]]:
    """A tree of thought: ms a step of its branches, over each one's copy of a prefix or over one, which
    each reads, or all together; and the latents that a layer reads, as the step was planned.
    """
    count, prefix = (32, 32768) if not args.tiny else (3, 24)
    room, rows, found = 16 + 2 * args.steps * args.repeats, list(range(count)), []
    bench = DecodeBench(executor, {"temperature": 0.6})
    bench.prefill([0], prefix, prefix)
    bench.close([0])
    whole, left = bench.pages[:prefix], bench.pages[prefix:]  # a page is a token
    attention, grouper = executor._attention, executor._attention._grouper
    if args.tiny:
        grouper.limits = replace(grouper.limits, least_depth=16, least_saved=1)
    for shares, together in ((False, False), (True, False), (True, True)):
        attention._grouper = grouper if together else None
        opens, taken = [], 0
        for row in rows:
            settings = SamplingParams(temperature=0.6, seed=row)
            pages = whole
            if not shares:
                pages, taken = left[taken : taken + prefix], taken + prefix
                pairs = (page for pair in zip(whole, pages, strict=True) for page in pair)
                bench.launch(copies=pack(pairs))
            own, taken = left[taken : taken + room], taken + room
            opens.append(OpenRow(row, row, pack([*pages, *own]), prefix, settings))
        extends = [ExtendRow(row, prefix, pack([5, 6]), True) for row in rows]
        bench.launch(opens=opens, extends=extends)
        bench.drain()
        seconds = statistics.median([bench.decode(rows, args.steps) for _ in range(args.repeats)])
        bench.close(rows)
        read = count * (prefix + 2)
        if together:
            planned = grouper._arrays
            read += int((planned.items[:, 2] - planned.items[:, 1]).sum() - planned.own[:, 0].sum())
        found.append({"branches": count, "tokens": prefix, "one_prefix": shares, "together": together,
                      "latents_read": read, "ms": round(1e3 * seconds, 3)})  # fmt: skip
    return found


@torch.inference_mode()
def forms(tiny: bool) -> list[dict[str, Any]]:
    """Microseconds of a layer's attention to prompts in both forms, and how far they are apart."""
    from types import SimpleNamespace

    import numpy as np

    from ramify.gpu.attention.latent import LatentHeads
    from ramify.gpu.attention.spec import AttentionShape, AttentionSpec, LatentSizes
    from ramify.gpu.attention.triton_expanded import TritonLatent
    from ramify.gpu.kv.layout import LatentLayout
    from ramify.gpu.ops.triton_latent import absorb, open_latents

    device, dtype = (
        (torch.device("cuda"), torch.bfloat16) if CUDA else (torch.device("cpu"), torch.float32)
    )
    shapes = {"V2-Lite": (16, 128, 128, 512, 64), "GLM-4.7-Flash": (20, 192, 256, 512, 64),
              "Mistral Small 4": (32, 64, 128, 256, 64)}  # fmt: skip
    asked = [(512, 512), (2048, 2048), (8192, 8192), (512, 32768), (2048, 32768), (8192, 32768)]
    if tiny:
        shapes, asked = {"tiny": (4, 16, 24, 32, 16)}, [(20, 20), (20, 60)]
    found = []
    for name, (heads, nope, value, rank, turned) in shapes.items():
        longest = asked[-1][1]
        pages = torch.randperm(longest, device=device).int()[None]
        kv = LatentLayout(1, rank, turned, dtype).allocate(longest, 1, device).layers[0]
        kv.k.normal_()
        up = torch.randn((heads, nope + value, rank), device=device).mul_(rank**-0.5).to(dtype)
        own = LatentHeads(up, nope, AttentionSpec((nope + turned) ** -0.5))
        sizes = LatentSizes(rank, nope, turned, value)
        shape = AttentionShape(heads, 1, rank + turned, dtype, (own.spec,), rank, False, sizes)
        table: Any = SimpleNamespace(max_guessed=0, max_length=longest, step_tokens=8192, page_size=1)
        back = TritonLatent(pages, table, shape, shares_keys=False)
        for count, keys in asked:
            step: Any = SimpleNamespace(extends=1, rows=np.array([0]), starts=np.array([keys - count]),
                                        counts=np.array([count]), tokens=np.zeros(count))  # fmt: skip
            bucket: Any = SimpleNamespace(decodes=0)
            queries = torch.randn((count, heads * (nope + turned)), device=device).to(dtype)
            q = torch.empty((count, heads, rank + turned), dtype=dtype, device=device)
            q[..., rank:] = queries.view(count, heads, -1)[..., nope:]
            outputs = {way: q.new_empty((count, heads * value)) for way in ("absorbed", "expanded")}
            row: dict[str, Any] = {"shape": name, "queries": count, "keys": keys}
            for way, output in outputs.items():
                plan = back.plan(step, bucket, captured=way == "absorbed")
                parts = {key: torch.from_numpy(part).to(device) for key, part in plan.items()}
                ready: Any = SimpleNamespace(plan=parts, extended=count)

                def run(way: str = way, output: torch.Tensor = output, ready: Any = ready) -> None:
                    if way == "expanded":
                        back.attend_expanded(queries, q, kv, own, None, ready, output)  # noqa: B023
                        return
                    absorb(queries, own, q, None, False)  # noqa: B023
                    open_latents(back.attend(q, kv, ready, own.spec), own, False, output)  # noqa: B023

                if way == "absorbed" or back.runs(ready):
                    row[f"{way}_us"] = round(1e6 * median_s(run, 9 if CUDA else 1), 1)
            if "expanded_us" in row:
                one, other = (output.float() for output in outputs.values())
                row["apart"] = float(f"{((one - other).norm() / one.norm()).item():.2g}")
                flops = 2 * heads * count * (keys - (count - 1) / 2) * (nope + turned + value)
                row["tflop_s"] = round(flops / row["expanded_us"] / 1e6, 1)
            found.append(row)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", default="right,forms,speed,branches")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--profile", action="store_true", help="the kernels of decodes, by their time")
    parser.add_argument("--tiny", action="store_true", help="sizes for Triton's interpreter")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    if args.tiny:
        args.steps, args.repeats = 2, 1
    begin, report = time.perf_counter(), {}

    def keep(name: str, value: Any) -> None:
        """Write what there is, should the next part not end."""
        report[name] = value
        if args.output is not None:
            args.output.write_text(json.dumps(report, indent=1))
        for row in value if isinstance(value, list) else [value]:
            print(
                name, *(f"{key}={one}" for key, one in row.items() if not isinstance(one, (list, dict)))
            )
        print(f"  ({time.perf_counter() - begin:.0f} s)", flush=True)

    device = torch.cuda.get_device_name() if CUDA else "a CPU"
    keep("machine", {"device": device, "torch": torch.__version__})
    if "right" in args.parts:
        kinds = (torch.float32, torch.bfloat16) if CUDA else (torch.float32,)
        keep("right", [right(args.tiny, kind) for kind in kinds])
    if "forms" in args.parts:
        keep("forms", forms(args.tiny))
    if not {"speed", "branches"} & set(args.parts.split(",")):
        return
    sizes = {"max_rows": 128, "step_tokens": 8192, "context": 40960, "kv_tokens": 33 * 34000}
    if args.tiny:
        sizes = {"max_rows": 4, "step_tokens": 64, "context": 256, "kv_tokens": 512}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(LITE | (TINY if args.tiny else {})))
        shape = read_config(Path(folder))
        executor = loaded(Path(folder), load_format="dummy", **sizes)
    info = executor.info
    keep("shape", {
        "parameters": info.parameters, "attention": info.attention, "kv_bytes": info.kv_bytes_per_token,
        "tokens_in_20_gib": (20 << 30) // info.kv_bytes_per_token, "ready_s": info.load_seconds,
    })  # fmt: skip
    if "speed" in args.parts:
        keep("speed", speed(executor, shape, args, copy_rate()))
    if "branches" in args.parts:
        keep("branches", branches(executor, args))
    executor.close()


if __name__ == "__main__":
    main()
