"""Measurements before serving: the memory of steps and graphs, and which steps gain from a graph.

The KV pool gets the memory that everything else leaves. So everything else runs once, on a pool of one
page: the largest steps, the most demanding sampling, the largest graphs. The memory that is gone
afterwards is what serving needs beside the pool. `memory` sizes the pool.
"""

import time
from dataclasses import dataclass

import torch

from ramify.gpu.executors.cuda_executor import CudaExecutor
from ramify.gpu.models.decoder import Decoder
from ramify.gpu.progress import Progress
from ramify.gpu.startup.expert_tiles import tune_experts
from ramify.gpu.step.buckets import Bucket, decode_buckets, largest, mixed_buckets

# If the GPU finishes a step within 1.2x of its launch time, it was waiting for the CPU: capture a graph.
HOST_BOUND = 1.2
_SAMPLED = 8  # graphs whose size stands for that of all


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """The `buckets` to capture, and the `bytes` that steps and graphs take beside weights and pool."""

    buckets: list[Bucket]
    bytes: int


def rehearse(
    executor: CudaExecutor, free: int, progress: Progress, tuned: Decoder | None = None
) -> Rehearsal:
    """Run everything once on `executor`, which cannot serve afterwards.

    `free`: bytes that were free before the executor was made. `tuned`: a model whose experts' tiles are
    measured. On a CPU nothing is measured, and no step is padded.
    """
    rows, tokens = executor.info.max_rows, executor.info.step_tokens
    if executor.device.type != "cuda":
        return Rehearsal([], 0)
    if tuned is not None:
        tune_experts(tuned, tokens, progress)
    decodes, mixed = decode_buckets(rows), mixed_buckets(rows, tokens)
    progress("measuring steps", 0.0)
    lines = _lines_worth_a_graph(executor, mixed)
    executor.run_padding(largest(rows, tokens))
    executor.run_padding(executor.forms(decodes[-1])[-1])
    executor.sample_the_slowest()
    executor.rehearse_drafter(progress)
    executor.rehearse_pictures()
    steps = free - _free(executor)
    buckets = decodes + [bucket for bucket in mixed if bucket.lines <= lines]
    return Rehearsal(buckets, steps + _graph_bytes(executor, buckets, progress))


def warm_all(executor: CudaExecutor) -> None:
    """Launch every kernel once: those of the sampler, and those of steps of all sizes.

    Not every bucket is run. Each number of extended tokens and each number of decodes occurs once, and
    so do numbers of decodes between them that launch other variants, as steps without a graph may.
    """
    rows, tokens = executor.info.max_rows, executor.info.step_tokens
    mixed = mixed_buckets(rows, tokens)
    least = min((bucket.extended for bucket in mixed), default=0)
    sizes = [bucket for bucket in mixed if not bucket.decodes or bucket.extended == least]
    decodes = [form for bucket in decode_buckets(rows) for form in executor.forms(bucket)]
    executor.warm([*decodes, *executor.unlike_decodes(), *sizes, largest(rows, tokens)])
    executor.warm_drafter()


def _lines_worth_a_graph(executor: CudaExecutor, mixed: list[Bucket]) -> int:
    """Measure up to how many lines of a mixed step the GPU waits for the CPU's launches.

    A larger step loses time with a graph: padding costs, and launches are hidden anyway. Measured with
    a few decodes in the step, because their attention is launched as well.
    """
    rows, tokens = executor.info.max_rows, executor.info.step_tokens
    executor.warm([bucket for bucket in mixed if not bucket.decodes])  # loads their kernels
    if not executor.static_extends or not mixed:
        return 0
    few = min(bucket.decodes for bucket in mixed if bucket.decodes)
    lines = 0
    for bucket in mixed:
        if bucket.decodes != few:
            continue
        launched, finished = min(_timed(executor, bucket) for _ in range(3))
        if finished > HOST_BOUND * launched:
            return lines
        lines = bucket.lines
    return tokens + rows


def _timed(executor: CudaExecutor, bucket: Bucket) -> tuple[float, float]:
    """Measure the seconds until a step was launched, and until it was over."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    executor.run_padding(bucket)
    launched = time.perf_counter() - begin
    torch.cuda.synchronize()
    return launched, time.perf_counter() - begin


def _graph_bytes(executor: CudaExecutor, buckets: list[Bucket], progress: Progress) -> int:
    """Estimate the bytes of all graphs: tensors, which all share, and the nodes of each graph."""
    order = sorted(buckets, key=lambda bucket: -bucket.lines)
    torch.cuda.empty_cache()
    begin = _free(executor)
    executor.capture(order[:1], progress)
    first = _free(executor)
    small = order[-_SAMPLED:]
    sampled = executor.capture(small, progress)
    count = sum(len(executor.forms(bucket)) for bucket in buckets)
    return begin - first + (first - _free(executor)) * count // sampled


def _free(executor: CudaExecutor) -> int:
    torch.cuda.synchronize()
    return int(torch.cuda.mem_get_info(executor.device)[0])
