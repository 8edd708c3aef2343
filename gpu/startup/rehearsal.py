"""What serving will take, found out before it begins: memory of steps and graphs, which graphs pay.

The KV pool gets what everything else leaves, so everything else is run once on a pool too small to
serve: the largest steps, the slowest sampling, the largest graphs. What the device has lost
afterwards is what it must keep free. It does not know how the pool is sized; see `memory`.
"""

import time
from dataclasses import dataclass

import torch

from ramify.gpu.executors.base import Progress
from ramify.gpu.executors.cuda_executor import CudaExecutor
from ramify.gpu.step.buckets import Bucket, decode_buckets, largest, mixed_buckets

HOST_BOUND = 1.2  # a step that is over by this times its launch waits for the host: it gets a graph
_SAMPLED = 8  # graphs whose size stands for that of all


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """`buckets` to capture, and the `bytes` that steps and graphs take beside weights and pool."""

    buckets: list[Bucket]
    bytes: int


def rehearse(executor: CudaExecutor, free: int, progress: Progress) -> Rehearsal:
    """Run `executor`, which cannot serve afterwards, and before which `free` bytes were free.

    On a CPU nothing is measured, and no step is padded.
    """
    rows, tokens = executor.info.max_rows, executor.info.step_tokens
    if executor.device.type != "cuda":
        return Rehearsal([], 0)
    decodes, mixed = decode_buckets(rows), mixed_buckets(rows, tokens)
    progress("measuring steps", 0.0)
    lines = _lines_worth_a_graph(executor, mixed)
    executor.run_padding(largest(rows, tokens))
    executor.run_padding(executor.forms(decodes[-1])[-1])
    executor.sample_the_slowest()
    steps = free - _free(executor)
    buckets = decodes + [bucket for bucket in mixed if bucket.lines <= lines]
    return Rehearsal(buckets, steps + _graph_bytes(executor, buckets, progress))


def warm_all(executor: CudaExecutor) -> None:
    """Launch every kernel there is: of the sampler, and of steps of all sizes.

    Not of all buckets: every number of extended tokens and of decodes is met once, and those between
    whose decodes launch other kernels, which only steps without a graph do.
    """
    rows, tokens = executor.info.max_rows, executor.info.step_tokens
    mixed = mixed_buckets(rows, tokens)
    least = min((bucket.extended for bucket in mixed), default=0)
    sizes = [bucket for bucket in mixed if not bucket.decodes or bucket.extended == least]
    decodes = [form for bucket in decode_buckets(rows) for form in executor.forms(bucket)]
    executor.warm([*decodes, *executor.unlike_decodes(), *sizes, largest(rows, tokens)])


def _lines_worth_a_graph(executor: CudaExecutor, mixed: list[Bucket]) -> int:
    """Up to how many lines of a mixed step the device would wait for the host to launch kernels.

    Beyond, a graph would only cost: its padding takes time, and the launch takes none. Measured
    beside a few decodes, because attention for them is launched as well.
    """
    rows, tokens = executor.info.max_rows, executor.info.step_tokens
    executor.warm([bucket for bucket in mixed if not bucket.decodes])  # loads what such steps launch
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
    """Seconds until a step was launched, and until it was over."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    executor.run_padding(bucket)
    launched = time.perf_counter() - begin
    torch.cuda.synchronize()
    return launched, time.perf_counter() - begin


def _graph_bytes(executor: CudaExecutor, buckets: list[Bucket], progress: Progress) -> int:
    """Memory of all graphs: the largest one's tensors, whose place all share, and each one's nodes."""
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
