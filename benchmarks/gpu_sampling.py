"""What sampling costs on one GPU: microseconds a step by what the rows ask for.

Times the device's sampler on random logits against the plain kernel (which is part of the CUDA
graph) and against the sampler on torch, which sorts and waits. Host time is until the call returns.

    python benchmarks/gpu_sampling.py --vocabulary 128256,151936 --batch 1,64,256
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ramify.gpu.sampling.cuda_sampler import CudaSampler
from ramify.gpu.sampling.torch_sampler import Sampler
from ramify.gpu.sampling.triton_sampling import sample_into
from ramify.protocol.plan import OpenRow, pack
from ramify.protocol.sampling import SamplingParams

CASES: dict[str, dict[str, Any]] = {
    "top-p 0.9": {"top_p": 0.9},
    "top-k 20, top-p 0.95": {"top_k": 20, "top_p": 0.95},
    "min-p 0.05": {"min_p": 0.05},
    "penalties": {"presence_penalty": 0.5, "repetition_penalty": 1.1},
    "logprobs 5": {"logprobs": 5},
}


def measure(run: Callable[[], Any], repeats: int = 30) -> tuple[float, float]:
    """Median microseconds (device, host) of a call."""
    for _ in range(3):
        run()
    device, host = [], []
    for _ in range(repeats):
        torch.cuda.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(4_000_000)  # so that the launches are queued before the first one runs
        begin.record()
        start = time.perf_counter()
        run()
        host.append(1e6 * (time.perf_counter() - start))
        end.record()
        torch.cuda.synchronize()
        device.append(1e3 * begin.elapsed_time(end))
    return statistics.median(device), statistics.median(host)


def bench(batch: int, vocabulary: int, spread: float) -> None:
    gpu = torch.device("cuda")
    rows, draws = np.arange(batch), np.zeros(batch, dtype=np.int64)
    logits = (torch.randn(batch, vocabulary, device=gpu) * spread).bfloat16()
    last = torch.zeros(batch, dtype=torch.int32, device=gpu)
    tokens = torch.zeros_like(last)
    index = torch.arange(batch, dtype=torch.int32, device=gpu)
    heat = torch.full((batch,), 0.7, device=gpu)
    points = torch.rand(batch, dtype=torch.float64, device=gpu)
    plain, host = measure(lambda: sample_into(logits, index, heat, points, last, tokens))
    head = f"batch {batch:3} vocabulary {vocabulary} spread {spread}"
    print(f"{head}: plain {plain:.0f} us (host {host:.0f})")
    for name, asked in CASES.items():
        settings = [SamplingParams(temperature=0.7, seed=row, **asked) for row in range(batch)]
        opens = [
            OpenRow(row, row, b"", 0, own, history=pack(range(100)) if own.penalized else b"")
            for row, own in enumerate(settings)
        ]
        cuda, by_sort = CudaSampler(batch, vocabulary, gpu), Sampler(batch, vocabulary, gpu)
        cuda.apply(0, [], opens)
        for opened in opens:
            by_sort.open(opened)
        ours = measure(lambda: cuda.resample(0, logits, rows, draws, last, tokens))  # noqa: B023
        theirs = measure(lambda: by_sort.sample(logits.float(), rows, draws), 5)  # noqa: B023
        print(f"  {name:22} +{ours[0]:.0f} us (host {ours[1]:.0f}); torch {theirs[0]:.0f} "
              f"(host {theirs[1]:.0f})", flush=True)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    integers = lambda text: [int(part) for part in text.split(",")]  # noqa: E731
    parser.add_argument("--vocabulary", type=integers, default=[128256, 151936])
    parser.add_argument("--batch", type=integers, default=[1, 64, 256])
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("it needs a CUDA device")
    print(torch.cuda.get_device_name(), torch.__version__)
    for vocabulary in args.vocabulary:
        for spread in (0.5, 3.0):  # nearly flat; peaked as a trained model's
            for batch in args.batch:
                bench(batch, vocabulary, spread)


if __name__ == "__main__":
    main()
