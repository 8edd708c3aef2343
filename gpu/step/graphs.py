"""CUDA graphs of whole steps, sampler included, one for each bucket.

A replay costs the CPU some microseconds for any model; launching the kernels one by one costs
milliseconds. On a CPU nothing is captured: a replay runs the step, so that tests meet the same padding.
This file does not know what a step computes: it captures what `run` launches.

A capture fails if a graph is destroyed meanwhile, in any thread ("operation not permitted when stream is
capturing"). So graphs are destroyed by `close`, not with their last reference; and Python's collector,
which may find a graph that was never closed, rests during a capture (`torch.cuda.graph` lets it run).
"""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from ramify.gpu.progress import Progress
from ramify.gpu.step.buckets import Bucket, BucketTable
from ramify.gpu.step.rows import StepRows


class StepGraphs:
    """The CUDA graphs of an executor.

    `prepare(bucket)` uploads a step of padding and loads its kernels. `run(bucket)` launches the
    kernels for what was uploaded last, and must not wait.
    """

    def __init__(
        self,
        prepare: Callable[[Bucket], None],
        run: Callable[[Bucket], None],
        device: torch.device,
    ) -> None:
        self._prepare = prepare
        self._run = run
        self._cuda = device.type == "cuda"
        self._table = BucketTable([])
        self._graphs: dict[Bucket, torch.cuda.CUDAGraph | None] = {}  # None: on a CPU

    def capture(self, buckets: Sequence[Bucket], progress: Progress) -> None:
        """Capture a graph for each bucket. The largest comes first; the others reuse its memory."""
        pool = None
        for done, bucket in enumerate(sorted(buckets, key=lambda bucket: -bucket.lines)):
            if not self._cuda:
                self._graphs[bucket] = None
            else:
                progress(f"capturing CUDA graphs ({bucket.lines} lines)", done / len(buckets))
                self._prepare(bucket)
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with _no_collection(), torch.cuda.graph(graph, pool=pool):
                    self._run(bucket)
                pool = graph.pool()
                self._graphs[bucket] = graph
        self._table = BucketTable(buckets)

    def find(self, step: StepRows) -> Bucket | None:
        """Find the smallest captured bucket that holds the step; None: there is none."""
        return self._table.find(step)

    def replay(self, bucket: Bucket) -> None:
        """Run the step that was uploaded. Raises KeyError for a bucket that was not captured."""
        graph = self._graphs[bucket]
        if graph is None:
            self._run(bucket)
        else:
            graph.replay()

    def close(self) -> None:
        """Destroy the graphs, which must not run any more. Nothing may be called afterwards."""
        for graph in self._graphs.values():
            if graph is not None:
                graph.reset()
        self._graphs.clear()
        del self._prepare, self._run  # which hold the executor


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keep Python's collector of cycles from starting by itself."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
