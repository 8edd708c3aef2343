"""The executor for CUDA: rows live on the device, and steps are launched without waiting.

Per step the host uploads one small pinned buffer, replays a CUDA graph (decodes) or launches
kernels (steps with extends), and starts one copy of the sampled ids back, on a stream of its own.
Sampled ids also stay on the device, where the next step reads its inputs, so two steps can be in
flight. It runs on a CPU too, in Triton's interpreter, which is how it is tested there.
It does not know files; see `load`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ramify.gpu.attention.paged import Inputs
from ramify.gpu.attention.triton_paged import TritonPaged
from ramify.gpu.attention.triton_shared import grouper_for
from ramify.gpu.executor import BadLogits, Counters, Progress
from ramify.gpu.fused_sampling import sample_into
from ramify.gpu.graphs import DecodeGraphs, batch_sizes
from ramify.gpu.kv_pool import KVPool
from ramify.gpu.models.decoder import Decoder
from ramify.gpu.models.fused import FusedDecoder
from ramify.gpu.rows import Ints, RowTable, StepRows
from ramify.gpu.sampler import Sampler
from ramify.gpu.staging import RING, Array, Download, Fetched, Stopwatch, Upload
from ramify.protocol.plan import ExecutorInfo, StepPlan, StepResult
from ramify.protocol.sampling import TokenLogprobs


@dataclass(slots=True)
class LaunchedStep:
    """A step on the device."""

    number: int
    computed: int
    rows: Ints  # [S] that sample
    requests: Ints  # [S]
    fetched: Fetched | None  # None: nothing is sampled
    watch: Stopwatch
    logprobs: "list[TokenLogprobs | None]"

    def ready(self) -> bool:
        return self.fetched is None or self.fetched.ready()

    def result(self) -> StepResult:
        tokens = self.fetched.wait() if self.fetched is not None else np.empty(0, dtype=np.int32)
        result = StepResult(
            step=self.number,
            rows=self.rows.astype(np.int32).tobytes(),
            tokens=tokens.tobytes(),
            computed=self.computed,
            elapsed_us=self.watch.elapsed_us(),
            logprobs=self.logprobs,
        )
        bad = np.flatnonzero(tokens < 0)
        if len(bad):
            raise BadLogits(self.rows[bad].tolist(), self.requests[bad].tolist(), result)
        return result


class FusedExecutor:
    """Runs plans on `model` over `pool`. CUDA graphs are captured here, before anything is served."""

    def __init__(
        self, model: Decoder, pool: KVPool, table: RowTable, info: ExecutorInfo, progress: Progress
    ) -> None:
        self.info = info
        self.counters = Counters()
        self.rows = table
        self._device = model.device
        # one row more than there are: padding decodes in it, at position 0 of the padding slot's page
        self._spare = info.max_rows
        columns = -(-table.max_length // info.page_size)
        shape = (info.max_rows + 1, columns)
        self._pages = torch.full(shape, pool.pages, dtype=torch.int32, device=self._device)
        self._last = torch.zeros(info.max_rows + 1, dtype=torch.int32, device=self._device)
        self._tokens = torch.zeros(info.max_rows, dtype=torch.int32, device=self._device)
        config = model.config
        grouper = grouper_for(table, config.heads, config.kv_heads, config.head_dim, pool.k.itemsize)
        self._attention = TritonPaged(
            self._pages, info.page_size, config.heads, config.kv_heads, grouper
        )
        self._decoder = FusedDecoder(model, pool, self._pages, self._last, self._attention)
        self._sampler = Sampler(info.max_rows, info.vocab_size, self._device)
        grouped = sum(array.nbytes for array in self._attention.no_groups(info.max_rows))
        self._lines = Upload(self._device, fixed=info.max_rows * 24 + grouped + 256)
        self._extras = Upload(self._device)
        self._page_uploads = Upload(self._device)
        self._padding: tuple[np.generic, ...] = (
            np.int32(-1 - self._spare), np.int32(self._spare), np.int32(0), np.float32(0), np.float64(0)
        )  # fmt: skip
        self._download = Download(self._device, info.max_rows)
        self._ring: list[LaunchedStep | None] = [None] * RING
        self._launched = 0
        self._graphs: DecodeGraphs | None = None
        self._grouped_graphs: DecodeGraphs | None = None
        if self._device.type == "cuda":
            self._warm(progress)

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Start the step. Raises PlanError if the plan contradicts the rows."""
        slot = self._take_slot()
        step = self._apply(plan)
        rows = step.rows[step.sampling]
        watch = Stopwatch(self._device)
        fetched, logprobs = None, list[TokenLogprobs | None]()
        with torch.inference_mode():
            watch.start()
            self._upload_pages(slot)
            if step.extends:
                logprobs = self._run_mixed(slot, step, rows)
            elif len(step.rows):
                logprobs = self._run_decodes(slot, step)
            watch.stop()
            if len(rows):
                fetched = self._download.fetch(slot, self._tokens[: len(rows)])
        launched = LaunchedStep(
            plan.step, step.computed, rows, self.rows.requests[rows], fetched, watch, logprobs
        )
        self._ring[slot] = launched
        return launched

    def forward(self, plan: StepPlan) -> tuple[StepRows, Tensor | None]:
        """Apply the plan and run the model without sampling: for tests and for scoring.

        Returns what ran and float32 logits [S, vocabulary], None if no row samples.
        """
        slot = self._take_slot()
        self._ring[slot] = None
        step = self._apply(plan)
        with torch.inference_mode():
            self._upload_pages(slot)
            if not len(step.rows):
                return step, None
            logits = self._decoder.forward(self._inputs(slot, step)[0])
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        return step, logits.float() if len(step.sampling) else None

    def close(self) -> None:
        """Drop the weights, the pool and the graphs."""
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        self._graphs = self._grouped_graphs = None
        del self._decoder, self._pages

    # --- the host's part of a step ---

    def _take_slot(self) -> int:
        """The next ring slot, once the step that used it last is over."""
        slot = self._launched % RING
        self._launched += 1
        before = self._ring[slot]
        if before is not None:
            before.watch.wait()
            if before.fetched is not None:
                before.fetched.wait()
        return slot

    def _apply(self, plan: StepPlan) -> StepRows:
        step = self.rows.apply(plan)
        for row in np.frombuffer(plan.closes, dtype=np.int32).tolist():
            self._sampler.close(row)
        for opened in plan.opens:
            self._sampler.open(opened)
        self.counters.count(step.computed)
        return step

    def _upload_pages(self, slot: int) -> None:
        """Write what the plan added to the page tables into the one on the device."""
        updates = self.rows.updates
        if not updates:
            return
        columns = self._pages.shape[1]
        places = np.concatenate(
            [np.arange(row * columns + first, row * columns + last) for row, first, last in updates]
        )
        pages = np.concatenate([self.rows.pages[row, first:last] for row, first, last in updates])
        where, what = self._page_uploads.send(slot, [places, pages])
        self._pages.view(-1).index_copy_(0, where, what)

    # --- the device's part ---

    def _run_decodes(self, slot: int, step: StepRows) -> "list[TokenLogprobs | None]":
        lines = len(step.rows)
        size = self._graphs.size_for(lines) if self._graphs is not None else None
        arrays = _decode_lines(step, *self._sampler.draws_for(step.rows, step.draws))
        if size is not None:
            arrays = [_pad(array, size, fill) for array, fill in zip(arrays, self._padding, strict=True)]
        groups = self._attention.groups(step.rows, step.starts, size or lines)
        views = self._lines.send(slot, arrays + groups)
        self._download.settle()
        graphs = self._grouped_graphs if groups else self._graphs
        if graphs is not None and size is not None:
            logits = graphs.replay(size)
        else:
            logits = self._decode(views)
        return self._sample_by_sort(logits[:lines], step.rows, step.draws)

    def _decode(self, views: list[Tensor]) -> Tensor:
        """Issue a decode step, its sampler included; `views`: of `_decode_lines`, then groups."""
        codes, rows, positions, temperatures, uniforms, *groups = views
        inputs = Inputs(codes, rows, positions, extended=0, plan=[], groups=groups)
        logits = self._decoder.forward(inputs)
        sample_into(logits, rows, temperatures, uniforms, self._last, self._tokens)
        return logits

    def _run_mixed(self, slot: int, step: StepRows, rows: Ints) -> "list[TokenLogprobs | None]":
        inputs, (sampled, temperatures, uniforms) = self._inputs(slot, step)
        self._download.settle()
        logits = self._decoder.forward(inputs)
        if not len(rows):
            return []
        sample_into(logits, sampled, temperatures, uniforms, self._last, self._tokens)
        return self._sample_by_sort(logits, rows, step.draws)

    def _inputs(self, slot: int, step: StepRows) -> tuple[Inputs, list[Tensor]]:
        """Upload a step of any kind. Also the sampling rows, their temperatures and uniforms."""
        ends = np.cumsum(step.counts)
        sampling = (ends - 1)[step.sampling]
        rows = np.repeat(step.rows, step.counts)
        positions = np.arange(len(rows)) - np.repeat(ends - step.counts - step.starts, step.counts)
        codes = np.concatenate([step.tokens, -1 - step.rows[step.extends :]])
        settings = self._sampler.draws_for(step.rows[step.sampling], step.draws)
        integers = (codes, rows, positions, sampling, step.rows[step.sampling])
        arrays: list[Array] = [*(array.astype(np.int32) for array in integers), *settings]
        plan = self._attention.plan(step) if step.extends else []
        decodes = step.rows[step.extends :]
        groups = self._attention.groups(decodes, step.starts[step.extends :], len(decodes))
        views = self._extras.send(slot, arrays + plan + groups)
        inputs = Inputs(
            codes=views[0],
            rows=views[1],
            positions=views[2],
            extended=len(step.tokens),
            plan=views[7 : 7 + len(plan)],
            sampling=views[3],
            groups=views[7 + len(plan) :],
        )
        return inputs, views[4:7]

    def _sample_by_sort(self, logits: Tensor, rows: Ints, draws: Ints) -> "list[TokenLogprobs | None]":
        """Sample again, on torch, the lines that ask for more than the kernel does. This waits."""
        lines = np.flatnonzero(~self._sampler.plain(rows))
        if not len(lines):
            return []
        index = torch.from_numpy(lines).to(self._device)
        sampled = self._sampler.sample(logits[index].float(), rows[lines], draws[lines])
        tokens = sampled.tokens.int()
        self._tokens[index] = torch.where(sampled.finite, tokens, -1)
        self._last[torch.from_numpy(rows[lines]).to(self._device)] = tokens
        if not sampled.logprobs:
            return []
        logprobs: list[TokenLogprobs | None] = [None] * len(rows)
        for line, own in zip(lines.tolist(), sampled.logprobs, strict=True):
            logprobs[line] = own
        return logprobs

    # --- before anything is served ---

    @torch.inference_mode()
    def _warm(self, progress: Progress) -> None:
        """Compile every kernel and capture the graphs, on the spare row."""
        sizes = batch_sizes(self.info.max_rows)
        if self.info.max_rows > 1:  # an extend and a decode in one step
            row, one = np.full(1, self._spare), np.ones(1, dtype=np.int64)
            step = StepRows(row, one - 1, one, 1, np.zeros(1, dtype=np.int32), one - 1, one - 1)
            plan = [torch.from_numpy(array).to(self._device) for array in self._attention.plan(step)]
            codes, rows, positions, temperatures, uniforms = self._padded_lines(2)
            sampling = torch.arange(2, device=self._device)
            inputs = Inputs(codes, rows, positions, extended=1, plan=plan, sampling=sampling)
            logits = self._decoder.forward(inputs)
            sample_into(logits, rows, temperatures, uniforms, self._last, self._tokens)
        self._graphs = DecodeGraphs(self._padded_lines, self._decode, sizes, progress)
        sizes = [size for size in sizes if self._attention.no_groups(size)]
        self._grouped_graphs = DecodeGraphs(self._padded_groups, self._decode, sizes, progress)

    def _padded_lines(self, size: int, groups: Sequence[Array] = ()) -> list[Tensor]:
        """A decode step of `size` lines that are all padding."""
        torch.cuda.synchronize()  # the ring slot may be in use
        arrays = [np.full(size, fill, dtype=fill.dtype) for fill in self._padding]
        return self._lines.send(0, [*arrays, *groups])

    def _padded_groups(self, size: int) -> list[Tensor]:
        return self._padded_lines(size, self._attention.no_groups(size))


def _decode_lines(
    step: StepRows, temperatures: npt.NDArray[np.float32], uniforms: npt.NDArray[np.float64]
) -> list[Array]:
    """What a decode step is: codes, rows, positions, temperatures, uniforms, a line for each row."""
    rows = step.rows.astype(np.int32)
    return [-1 - rows, rows, step.starts.astype(np.int32), temperatures, uniforms]


def _pad(array: Array, size: int, fill: np.generic) -> Array:
    padded = np.full(size, fill, dtype=array.dtype)
    padded[: len(array)] = array
    return padded
