"""Sums over ranks, how long it takes to tell them a step, and whether they equal `transformers`.

    python benchmarks/rank_sums.py --ranks 2 [--equal]

On GPUs: NCCL and our kernel (`ops.triton_sums`) in one shot and in two, with residual and norm too, each
50 times in a CUDA graph. On CPUs: gloo. A message is told as rank 0 tells a step; both ends read the
same clock.

`--equal`: a random Llama of 4 layers, hidden size 1,024, in float32. Prompts of 7, 300 and 1,900 tokens
are scored, alone and together, which takes sums of all sizes; then all rows decode. The exit code is 1
if a log-probability is further than 2e-4 from that of `transformers`.
"""

import argparse
import dataclasses
import os
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch

from ramify.gpu.executors.base import Executor, Follower
from ramify.gpu.executors.follower import ToldStep
from ramify.gpu.ranks.group import Ranks
from ramify.gpu.ranks.ring import GroupMemory, RankPlace
from ramify.gpu.startup.load import load_executor, load_rank
from ramify.gpu.step.rows import RowTable
from ramify.protocol.config import ModelConfig
from ramify.protocol.plan import ExecutorInfo, ExtendRow, OpenRow, StepPlan, pack, unpack
from ramify.protocol.sampling import SamplingParams

HIDDEN, REPEATS, MESSAGES = 4096, 50, 300
SIZES = [1 << power for power in range(14, 29)]  # bytes of a rank's part: 16 KiB to 256 MiB
TOLD = 2048  # bytes, about a step of 32 decodes

PROMPTS, DECODES, BOUND, ROOM = (7, 300, 1900), 40, 2e-4, 2048
SHAPE = {
    "vocab_size": 4096, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 4,
    "num_attention_heads": 16, "num_key_value_heads": 4, "max_position_embeddings": 4096,
    "initializer_range": 0.05,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--equal", action="store_true")
    parser.add_argument("--place", type=int, nargs="*")
    parser.add_argument("--follow", nargs=2)
    parser.add_argument("--library", action="store_true")
    asked = parser.parse_args()
    if asked.follow:
        follow(*asked.follow, asked.library)
    if asked.equal:
        sys.exit(equal(asked.ranks))
    if asked.place:
        rank, ranks, store, ring, *bells = asked.place
        be(RankPlace(rank, ranks, store, ring, bells))
        return
    with GroupMemory(asked.ranks) as memory:
        processes = [
            subprocess.Popen(
                [
                    sys.executable,
                    __file__,
                    "--place",
                    *map(str, (place.rank, place.ranks, *place.descriptors)),
                ],
                pass_fds=place.descriptors,
            )
            for place in memory.places
        ]
    sys.exit(max(process.wait() for process in processes))


def be(place: RankPlace) -> None:
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", place.rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    ranks = Ranks(place, device, spins=True)
    if place.rank == 0:
        print(f"{place.ranks} ranks, {torch.cuda.get_device_name() if on_gpu else 'CPU'}", flush=True)
    told(ranks)
    ranks.meet(HIDDEN, torch.bfloat16, SIZES[-1] // HIDDEN // 2)
    for size in SIZES:
        x = torch.ones(size // HIDDEN // 2, HIDDEN, dtype=torch.bfloat16, device=device)
        found = f"{size >> 10:6} KiB: library {timed(partial(ranks.sum, x), device):8.1f} us"
        if on_gpu:
            found += ours(ranks, x)
        if place.rank == 0:
            print(found, flush=True)
    ranks.close()
    os._exit(0)


def ours(ranks: Ranks, x: torch.Tensor) -> str:
    from ramify.gpu.ops.rmsnorm import RMSNorm
    from ramify.gpu.ops.triton_sums import sum_add_norm, sum_rows

    peers, found = ranks.peers, ""
    if peers is None or len(x) > peers.most:
        return found
    norm, residual = RMSNorm(torch.ones_like(x[0]), 1e-5), torch.zeros_like(x)
    for name, one_shot in (("one shot", len(x)), ("two", 0)):
        peers = dataclasses.replace(peers, one_shot=one_shot)
        x.fill_(1)
        took = timed(partial(sum_rows, x, peers), x.device)
        fused = timed(partial(sum_add_norm, x, peers, residual, norm), x.device)
        numbers = torch.arange(x.numel(), device=x.device).view_as(x) % 61
        x.copy_(numbers * (1 + ranks.rank))
        wanted = (numbers * sum(range(1, ranks.count + 1))).to(x.dtype)
        right = all(bool((sum_rows(x, peers) == wanted).all()) for _ in range(4))
        found += f", {name} {took:8.1f}, with norm {fused:8.1f}, {'right' if right else 'WRONG'}"
    return found


def told(ranks: Ranks) -> None:
    """Microseconds from the writer's call to the reader's hands, of bytes and of a step of decodes."""
    info = ExecutorInfo(
        model="", architecture="", parameters=0, vocab_size=9, context=64, page_size=16, pages=128,
        max_rows=32, step_tokens=64, device="", dtype="", attention="", eos_token_ids=[],
        kv_bytes_per_token=0, load_seconds=0,
    )  # fmt: skip
    table, decoder = RowTable(info), msgspec.msgpack.Decoder(ToldStep)
    encoder = msgspec.msgpack.Encoder()
    pages = [pack(range(4 * row, 4 * row + 4)) for row in range(32)]
    opens = [OpenRow(row, row, pages[row], 0, SamplingParams()) for row in range(32)]
    extends = [ExtendRow(row, 0, pack([1]), True) for row in range(32)]
    table.apply(StepPlan(0, opens=opens, extends=extends))
    step = table.apply(StepPlan(0, decodes=pack(range(32))))
    took: dict[str, list[float]] = {}
    for number in range(2 * MESSAGES):
        name = "a step of 32 decodes" if number % 2 else f"{TOLD} bytes"
        if ranks.rank == 0:
            ready = time.perf_counter() + 0.002
            while time.perf_counter() < ready:  # as busy as one that launches steps
                pass
            now = struct.pack("=q", time.perf_counter_ns())
            if number % 2:
                ranks.ring.put(now + encoder.encode(ToldStep.of(StepPlan(0), step, table, [])))
            else:
                ranks.ring.put(now + bytes(TOLD))
        else:
            message = ranks.ring.take(10)
            assert message is not None
            if number % 2:
                decoder.decode(memoryview(message)[8:]).rows()
            now_ns = time.perf_counter_ns()
            took.setdefault(name, []).append((now_ns - struct.unpack_from("=q", message)[0]) / 1e3)
    if ranks.rank == 1:
        for name, times in took.items():
            times.sort()
            print(
                f"told {name}: median {statistics.median(times):.1f} us, p99 {times[-4]:.1f}", flush=True
            )


def timed(run: object, device: torch.device) -> float:
    """Microseconds of a call."""
    assert callable(run)
    if device.type == "cpu":
        times = []
        for _ in range(REPEATS):
            begin = time.perf_counter()
            run()
            times.append(time.perf_counter() - begin)
        return statistics.median(times) * 1e6
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(REPEATS):
            run()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    found = []
    for _ in range(5):
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end) * 1e3 / REPEATS)
    return statistics.median(found)


@contextmanager
def ranked_executor(config: ModelConfig, library: bool = False) -> Iterator[Executor]:
    """`library`: NCCL makes all sums."""
    with GroupMemory(config.tensor_parallel) as shared:
        told = msgspec.json.encode(config, enc_hook=str).decode()
        first, *others = shared.places
        followers = [
            subprocess.Popen(
                [sys.executable, __file__, "--follow", msgspec.json.encode(place).decode(), told]
                + ["--library"] * library,
                pass_fds=place.descriptors,
            )
            for place in others
        ]
        descriptors = [os.dup(each) for each in first.descriptors]
    store, ring, *bells = descriptors
    executor = load(config, RankPlace(first.rank, first.ranks, store, ring, bells), library)
    assert not isinstance(executor, Follower)
    yield executor
    executor.close()
    for follower in followers:
        follower.wait(30)


def load(config: ModelConfig, place: RankPlace, library: bool) -> Executor | Follower:
    if library:
        Ranks.meet = lambda *_: None  # type: ignore[method-assign]
    return load_rank(config, lambda what, share: None, place)


def follow(place: str, told: str, library: bool) -> None:
    config = msgspec.json.decode(
        told, type=ModelConfig, dec_hook=lambda wanted, of: Path(of) if wanted is Path else of
    )
    follower = load(config, msgspec.json.decode(place, type=RankPlace), library)
    assert isinstance(follower, Follower)
    follower.follow(lambda: None)
    os._exit(0)


def outputs(executor: Executor, prompts: list[list[int]]) -> tuple[torch.Tensor, list[list[int]]]:
    """The scores of all prompts behind their first token, and what rows go on with."""
    rows, scores = range(len(prompts)), []
    for plan in [[row] for row in rows], [list(rows)]:
        for chosen in plan:
            opens, extends = [], []
            for row in chosen:
                pages = pack(list(range(ROOM * row, ROOM * (row + 1))))
                opens.append(OpenRow(row, row, pages, 0, SamplingParams(temperature=0.0)))
                prompt, places = prompts[row], list(range(len(prompts[row]) - 1))
                extends.append(
                    ExtendRow(row, 0, pack(prompt), True, places=pack(places), targets=pack(prompt[1:]))
                )
            result = executor.launch(StepPlan(0, opens=opens, extends=extends)).result()
            scores.append(torch.frombuffer(bytearray(result.scores), dtype=torch.float32))
            tokens = [[token] for token in unpack(result.tokens)]
            if len(chosen) < len(prompts):
                executor.launch(StepPlan(0, closes=pack(chosen))).result()
    for _ in range(DECODES):
        result = executor.launch(StepPlan(0, decodes=pack(list(rows)))).result()
        for row, token in zip(unpack(result.rows), unpack(result.tokens), strict=True):
            tokens[row].append(token)
    executor.launch(StepPlan(0, closes=pack(list(rows)))).result()
    return torch.cat(scores), tokens


def equal(count: int) -> int:
    """Whether they are not."""
    import transformers

    torch.manual_seed(0)
    on = "cuda" if torch.cuda.is_available() else "cpu"
    model: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE)).to(on).eval()
    prompts = [torch.randint(0, 4096, (size,)).tolist() for size in PROMPTS]
    wanted = []
    with torch.inference_mode(), tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        for prompt in prompts:
            ids = torch.tensor([prompt], device=on)
            of = model(ids).logits[0, :-1].log_softmax(-1)
            wanted.append(of.gather(1, ids[0, 1:, None])[:, 0].cpu())
        reference = torch.cat(wanted + wanted)
        del model
        config: dict[str, Any] = {
            "path": Path(folder), "dtype": "float32", "page_size": 1,
            "kv_tokens": ROOM * len(PROMPTS), "max_rows": 8, "step_tokens": 2304, "context": ROOM,
            "quantization": "none",
        }  # fmt: skip
        one = load_executor(ModelConfig(**config), lambda what, share: None)
        alone, tokens = outputs(one, prompts)
        one.close()
        worst = [("one rank", alone, tokens)]
        for library in (False, True):
            with ranked_executor(ModelConfig(**config, tensor_parallel=count), library) as executor:
                name = f"{count} ranks, {'library' if library else 'our sums'}"
                worst.append((name, *outputs(executor, prompts)))
    far = 0.0
    for name, found, continued in worst:
        distance = float((found - reference).abs().max())
        same = sum(
            a == b for x, y in zip(continued, tokens, strict=True) for a, b in zip(x, y, strict=True)
        )
        print(f"{name}: log-probabilities within {distance:.1e} of transformers, "
              f"{same} of {sum(map(len, tokens))} tokens as one rank's", flush=True)  # fmt: skip
        far = max(far, distance)
    return int(far > BOUND)


if __name__ == "__main__":
    main()
