"""CUDA graphs of whole decode steps, sampler included, at padded batch sizes.

A replay costs the host some microseconds whatever the model, where launching its kernels one by
one costs milliseconds. It does not know what a step computes: `run` is captured as it is.
"""

from bisect import bisect_left
from collections.abc import Callable

import torch
from torch import Tensor

from ramify.gpu.executor import Progress


def batch_sizes(most: int) -> list[int]:
    """The sizes to capture: dense where padding would cost most, ending with `most`."""
    sizes = [1, 2, 4, *range(8, 33, 8), *range(48, 257, 16), *range(320, most, 64)]
    return [size for size in sizes if size < most] + [most]


class DecodeGraphs:
    """`prepare(size)` uploads a step of `size` lines; `run` issues what it returned.

    `run` must not wait. It returns the logits.
    """

    def __init__(
        self,
        prepare: Callable[[int], list[Tensor]],
        run: Callable[[list[Tensor]], Tensor],
        sizes: list[int],
        progress: Progress,
    ) -> None:
        self._sizes = sizes
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        pool = None
        for done, size in enumerate(sorted(sizes, reverse=True)):  # the largest fixes the memory
            progress(f"capturing CUDA graphs (batch {size})", done / len(sizes))
            inputs = prepare(size)
            run(inputs)  # compiles kernels, lets cuBLAS choose
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                logits = run(inputs)
            pool = graph.pool()
            self._graphs[size] = graph, logits

    def size_for(self, lines: int) -> int | None:
        """The captured size that holds `lines`, None if none does."""
        at = bisect_left(self._sizes, lines)
        return self._sizes[at] if at < len(self._sizes) else None

    def replay(self, size: int) -> Tensor:
        """Run the step. Its logits [size, V] are good until the next replay."""
        graph, logits = self._graphs[size]
        graph.replay()
        return logits
