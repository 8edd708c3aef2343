"""The executor for CUDA: rows live on the device, and steps are launched without waiting.

Per step the host uploads one small pinned buffer, replays a CUDA graph (decodes) or launches
kernels (steps with extends), and starts one copy of the sampled ids back, on a stream of its own.
Sampled ids also stay on the device, where the next step reads its inputs, so two steps can be in
flight. It runs on a CPU too, in Triton's interpreter, which is how it is tested there.
It does not know files; see `load`.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ramify.gpu.attention.paged import Inputs, PagedAttention
from ramify.gpu.attention.triton_invariant import InvariantPaged
from ramify.gpu.attention.triton_paged import TritonPaged
from ramify.gpu.executor import BadLogits, Counters, Progress
from ramify.gpu.fused_sampling import sample_into
from ramify.gpu.graphs import DecodeGraphs, batch_sizes
from ramify.gpu.kv_pool import KVPool
from ramify.gpu.layers.invariant import invariant_product
from ramify.gpu.layers.linear import Linear
from ramify.gpu.models.decoder import Decoder
from ramify.gpu.models.fused import FusedDecoder
from ramify.gpu.row_sampler import RowSampler, token_logprobs
from ramify.gpu.rows import Ints, RowTable, StepRows
from ramify.gpu.staging import RING, Array, Download, Fetched, Stopwatch, Upload
from ramify.protocol.plan import ExecutorInfo, StepPlan, StepResult


@dataclass(slots=True)
class LaunchedStep:
    """A step on the device."""

    number: int
    computed: int
    rows: Ints  # [S] that sample
    requests: Ints  # [S]
    asked: Ints  # [S] how many log-probabilities, 0: none
    fetched: Fetched | None  # None: nothing is sampled
    watch: Stopwatch

    def ready(self) -> bool:
        return self.fetched is None or self.fetched.ready()

    def result(self) -> StepResult:
        tokens, words = np.empty(0, dtype=np.int32), None
        if self.fetched is not None:
            tokens, words = self.fetched.wait()
        result = StepResult(
            step=self.number,
            rows=self.rows.astype(np.int32).tobytes(),
            tokens=tokens.tobytes(),
            computed=self.computed,
            elapsed_us=self.watch.elapsed_us(),
            logprobs=token_logprobs(words, self.asked) if words is not None else [],
        )
        bad = np.flatnonzero(tokens < 0)
        if len(bad):
            raise BadLogits(self.rows[bad].tolist(), self.requests[bad].tolist(), result)
        return result


class FusedExecutor:
    """Runs plans on `model` over `pool`. CUDA graphs are captured here, before anything is served.

    `deterministic`: a row's logits are the same, bit for bit, whatever else is in the batch, however
    its prompt was cut and whatever part of it was cached.
    """

    def __init__(
        self,
        model: Decoder,
        pool: KVPool,
        table: RowTable,
        info: ExecutorInfo,
        progress: Progress,
        deterministic: bool = False,
    ) -> None:
        self.info = info
        self.counters = Counters()
        self.rows = table
        self._device = model.device
        self._dtype = model.dtype
        # one row more than there are: padding decodes in it, at position 0 of the padding slot's page
        self._spare = info.max_rows
        columns = -(-table.max_length // info.page_size)
        shape = (info.max_rows + 1, columns)
        self._pages = torch.full(shape, pool.pages, dtype=torch.int32, device=self._device)
        self._last = torch.zeros(info.max_rows + 1, dtype=torch.int32, device=self._device)
        self._tokens = torch.zeros(info.max_rows, dtype=torch.int32, device=self._device)
        product = invariant_product if deterministic else Linear.__call__
        self._attention: PagedAttention = TritonPaged(self._pages, info.page_size)
        if deterministic:
            group = model.config.heads // model.config.kv_heads
            self._attention = InvariantPaged(self._pages, info.page_size, group)
        self._decoder = FusedDecoder(model, pool, self._pages, self._last, self._attention, product)
        self._sampler = RowSampler(info.max_rows + 1, info.vocab_size, self._device)
        self._lines = Upload(self._device, fixed=info.max_rows * 24 + 128)
        self._extras = Upload(self._device)
        self._page_uploads = Upload(self._device)
        self._padding: tuple[np.generic, ...] = (
            np.int32(-1 - self._spare), np.int32(self._spare), np.int32(0), np.float32(0), np.float64(0)
        )  # fmt: skip
        self._download = Download(self._device, info.max_rows)
        self._ring: list[LaunchedStep | None] = [None] * RING
        self._launched = 0
        self._graphs: DecodeGraphs | None = None
        if self._device.type == "cuda":
            self._warm(progress)

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Start the step. Raises PlanError if the plan contradicts the rows."""
        slot = self._take_slot()
        step = self._apply(slot, plan)
        rows = step.rows[step.sampling]
        watch = Stopwatch(self._device)
        fetched, logprobs = None, None
        with torch.inference_mode():
            watch.start()
            self._upload_pages(slot)
            if step.extends:
                logprobs = self._run_mixed(slot, step, rows)
            elif len(step.rows):
                logprobs = self._run_decodes(slot, step)
            watch.stop()
            if len(rows):
                fetched = self._download.fetch(slot, self._tokens[: len(rows)], logprobs)
        asked = self._sampler.logprobs_asked(rows)
        launched = LaunchedStep(
            plan.step, step.computed, rows, self.rows.requests[rows], asked, fetched, watch
        )
        self._ring[slot] = launched
        return launched

    def forward(self, plan: StepPlan) -> tuple[StepRows, Tensor | None]:
        """Apply the plan and run the model without sampling: for tests and for scoring.

        Returns what ran and float32 logits [S, vocabulary], None if no row samples.
        """
        slot = self._take_slot()
        self._ring[slot] = None
        step = self._apply(slot, plan)
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
        self._graphs = None
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

    def _apply(self, slot: int, plan: StepPlan) -> StepRows:
        step = self.rows.apply(plan)
        if plan.closes or plan.opens:
            closes = np.frombuffer(plan.closes, dtype=np.int32).tolist()
            with torch.inference_mode():
                self._sampler.apply(slot, closes, plan.opens)
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

    def _run_decodes(self, slot: int, step: StepRows) -> Tensor | None:
        lines = len(step.rows)
        size = self._graphs.size_for(lines) if self._graphs is not None else None
        arrays = _decode_lines(step, *self._sampler.draws_for(step.rows, step.draws))
        if size is not None:
            arrays = [_pad(array, size, fill) for array, fill in zip(arrays, self._padding, strict=True)]
        views = self._lines.send(slot, arrays)
        self._download.settle()
        if self._graphs is not None and size is not None:
            logits = self._graphs.replay(size)
        else:
            logits = self._decode(views)
        return self._resample(slot, logits, step.rows, step.draws)

    def _decode(self, views: list[Tensor]) -> Tensor:
        """Issue a decode step, its sampler included; `views` as of `_decode_lines`."""
        codes, rows, positions, temperatures, uniforms = views
        logits = self._decoder.forward(Inputs(codes, rows, positions, extended=0, plan=[]))
        sample_into(logits, rows, temperatures, uniforms, self._last, self._tokens)
        return logits

    def _run_mixed(self, slot: int, step: StepRows, rows: Ints) -> Tensor | None:
        inputs, (sampled, temperatures, uniforms) = self._inputs(slot, step)
        self._download.settle()
        logits = self._decoder.forward(inputs)
        if not len(rows):
            return None
        sample_into(logits, sampled, temperatures, uniforms, self._last, self._tokens)
        return self._resample(slot, logits, rows, step.draws)

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
        if step.extends:
            arrays += self._attention.plan(step)
        views = self._extras.send(slot, arrays)
        inputs = Inputs(
            codes=views[0],
            rows=views[1],
            positions=views[2],
            extended=len(step.tokens),
            plan=views[7:],
            sampling=views[3],
        )
        return inputs, views[4:7]

    def _resample(self, slot: int, logits: Tensor, rows: Ints, draws: Ints) -> Tensor | None:
        """Sample again the lines that ask for more than a temperature; log-probabilities."""
        return self._sampler.resample(slot, logits, rows, draws, self._last, self._tokens)

    # --- before anything is served ---

    @torch.inference_mode()
    def _warm(self, progress: Progress) -> None:
        """Compile every kernel and capture the graphs, on the spare row."""
        sizes = batch_sizes(self.info.max_rows)
        if self.info.max_rows > 1:  # an extend and a decode in one step
            spare = torch.tensor([[self._spare, 0, 1, 0]], dtype=torch.int32, device=self._device)
            codes, rows, positions, temperatures, uniforms = self._padded_lines(2)
            sampling = torch.arange(2, device=self._device)
            inputs = Inputs(codes, rows, positions, extended=1, plan=[spare], sampling=sampling)
            logits = self._decoder.forward(inputs)
            sample_into(logits, rows, temperatures, uniforms, self._last, self._tokens)
        self._sampler.warm(self._dtype, self._spare, self._last, self._tokens)
        self._graphs = DecodeGraphs(self._padded_lines, self._decode, sizes, progress)

    def _padded_lines(self, size: int) -> list[Tensor]:
        """A decode step of `size` lines that are all padding."""
        torch.cuda.synchronize()  # the ring slot may be in use
        arrays = [np.full(size, fill, dtype=fill.dtype) for fill in self._padding]
        return self._lines.send(0, arrays)


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
