"""The executor for CUDA: rows live on the device, and steps are launched without waiting.

For each step the host uploads one small pinned buffer and replays a CUDA graph, or launches the kernels
one by one if no graph fits. Then it starts one copy of the sampled ids back, on a stream of its own.
The ids also stay on the device, where the next step reads them, so two steps can be in flight. Tests on
a CPU run it in Triton's interpreter. It does not know files (see `startup.load`); `startup.rehearsal`
finds out which steps gain from a graph.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from ramify.gpu.attention.registry import KernelChoice
from ramify.gpu.drafting.device import DeviceDrafter
from ramify.gpu.drafting.device_drafts import DeviceDrafts
from ramify.gpu.executors.base import Counters
from ramify.gpu.executors.device_pages import DevicePages
from ramify.gpu.executors.follower import ToldStep
from ramify.gpu.executors.launched_step import DraftedLines, LaunchedStep, Obeyed
from ramify.gpu.executors.step_frames import StepFrames
from ramify.gpu.executors.step_kernels import StepKernels, layer_sizes
from ramify.gpu.kv.cuda_blocks import Loaded
from ramify.gpu.kv.layout import KVPool
from ramify.gpu.models.decoder import Decoder
from ramify.gpu.ops.base import ShownPictures
from ramify.gpu.ops.invariant_linear import InvariantProducts
from ramify.gpu.ops.triton_conv import take_back
from ramify.gpu.ops.triton_linear import Products
from ramify.gpu.ops.triton_ops import LazyStream, TritonOps
from ramify.gpu.progress import Progress
from ramify.gpu.sampling.acceptance import draft_ends
from ramify.gpu.sampling.automata import Constrained
from ramify.gpu.sampling.cuda_sampler import CudaSampler, Drafts
from ramify.gpu.sampling.device_constraints import DeviceConstraints
from ramify.gpu.sampling.verifier import Verifier
from ramify.gpu.step.buckets import Bucket, decode_buckets, largest
from ramify.gpu.step.graphs import StepGraphs
from ramify.gpu.step.inputs import StepFrame, StepInputs
from ramify.gpu.step.rows import RowTable, StepRows
from ramify.gpu.step.staging import RING, Download, StepClock, Upload
from ramify.gpu.step.step_rows import within
from ramify.gpu.vision.pictures import Pictures
from ramify.gpu.vision.placing import extending, shows
from ramify.protocol.plan import ExecutorInfo, OpenRow, StepPlan
from ramify.protocol.sampling import SamplingParams


class CudaExecutor:
    """Executor of `model` over `pool` on a GPU. Call `capture` before the first plan.

    `drafter`: guesses up to `info.max_drafts` tokens ahead of a row.
    """

    def __init__(
        self,
        model: Decoder,
        pool: KVPool,
        table: RowTable,
        info: ExecutorInfo,
        attention: KernelChoice,
        drafter: DeviceDrafter | None = None,
        make_ops: Callable[..., TritonOps] = TritonOps,
        pictures: Pictures | None = None,
    ) -> None:
        self.info = info
        self.tower = pictures
        self.counters = Counters()
        self.rows = table
        self._device = model.device
        self._pool = pool
        self.pages = pages = DevicePages(pool, table, info, self._device)
        slots = pool.padding_slot + 1 if drafter is not None and drafter.reads_tokens else None
        self._verifier = Verifier(info.max_drafts, pages.full, info.page_size, slots, draft_ends(info))
        self._last = self._verifier.last
        # of each line that samples: its token, whether that is output (only of steps with drafts),
        # and whether its constraint allowed no other (only of lines that have one)
        self._results = torch.zeros(
            (3, -(-info.max_rows // 4) * 4), dtype=torch.int32, device=self._device
        )
        self._tokens, self._kept, self._forced = self._results
        self.constraints: DeviceConstraints | None = None
        if info.constrains:
            self.constraints = DeviceConstraints(info, table, self._device)
        self.drafts = DeviceDrafts(table, drafter, self.constraints, self._verifier)
        shapes = model.config.attention_shapes(
            model.dtype, info.window_pages > 0, info.kv_dtype == "fp8"
        )
        self._attention = attention.back_end(table, shapes, self._device, pages.full, pages.windows)
        products = (InvariantProducts if attention.deterministic else Products)(self._device)
        ops = make_ops(
            pool, pages.full, self._last, self._attention, products, layer_sizes(model, products),
            model.rotaries, windows=pages.windows,
        )  # fmt: skip
        if drafter is not None:
            drafter.join(self._attention, products)
        self._kernels = StepKernels(model, ops, drafter, self._verifier, self._tokens, info)
        self._sampler = CudaSampler(info.max_rows + 1, info.vocab_size, self._device)
        decodes = decode_buckets(info.max_rows)[-1]
        most = [largest(info.max_rows, info.step_tokens), *self.forms(decodes)]
        self._frames = StepFrames(
            info, table, self._attention, self._sampler, self.drafts, pictures,
            states=pool.states is not None, largest=most, device=self._device,
        )  # fmt: skip
        if pages.blocks is not None:
            self.info = pages.blocks.host.described(info)
        self._unsampled = Upload(self._device)
        self._download = Download(self._results.view(-1))
        self._clocks = [StepClock(self._device) for _ in range(RING)]
        self._ring: list[LaunchedStep | None] = [None] * RING
        self._launched = 0
        self._closed = False
        self._graphs = StepGraphs(self._warm, self._replayed, self._device)

    @torch.inference_mode()
    def capture(self, buckets: Sequence[Bucket], progress: Progress) -> int:
        """Capture CUDA graphs for all `forms` of `buckets`. Returns how many.

        The kernels of steps that fit none are launched one by one.
        """
        if not self.static_extends:
            buckets = [bucket for bucket in buckets if not bucket.extended]
        self.warm([])
        wanted = dict.fromkeys(form for bucket in buckets for form in self.forms(bucket))
        self._graphs.capture(list(wanted), progress)
        if self.drafts.drafter is not None:
            self.drafts.drafter.capture(progress)
        return len(wanted)

    def forms(self, bucket: Bucket) -> list[Bucket]:
        """List the buckets of a step of this size: plain, drafted, grouped if decodes can share keys."""
        plain = replace(bucket, grouped=False, drafted=False)
        if bucket.extended:
            return [plain]
        drafted = replace(plain, drafted=True)
        others = [drafted, replace(drafted, grouped=True)] if self.info.max_drafts else []
        others.append(replace(plain, grouped=True))
        return [plain, *(other for other in others if self._attention.room(other))]

    def unlike_decodes(self) -> list[Bucket]:
        """List steps of decodes that together launch every variant of every attention kernel.

        Steps without a graph may have other numbers of decodes than the captured ones.
        """
        counts = self._attention.unlike_decodes(self.info.max_rows)
        forms = [False, True] if self.info.max_drafts else [False]
        return [Bucket(0, 0, count, count, drafted=drafted) for count in counts for drafted in forms]

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Start the step. Raises PlanError if the plan contradicts the rows."""
        entry = self._take_entry()
        clock = self._clocks[entry]
        step = self._begin(entry, plan)
        rows = step.rows[step.sampling]
        scored = step.rows[:0] if step.scored is None else step.scored.owners
        more = obeyed = None
        clock.start()
        lost = self._move(entry, clock, plan)
        self.pages.upload(entry)
        if len(step.rows):
            late = self.drafts.late
            self._sampler.model_begins()
            frame, final = self._run(entry, step, late)
            constrained = None if self.constraints is None else self.constraints.lines(step)
            more = self._resample(entry, step, frame, late, constrained)
            if step.lines is not None:
                self._accept(step, frame)
            if self.constraints is not None and constrained is not None:
                kept = None if step.lines is None else self._kept
                self._sampler.follow(self.constraints.automata, self._tokens, kept, self._forced)
                obeyed = np.flatnonzero(constrained.kinds >= 0)
            if step.scored is not None and final is not None:
                scores = self._kernels.score(entry, step.scored, final)
                more = scores if more is None else torch.cat((more, scores))
        self.pages.hold_states(entry, step)
        arrives = len(rows) + len(scored) > 0
        clock.stop(fetched=arrives)
        results, fetched = np.empty(0, dtype=np.int32), None
        if arrives:
            results, fetched = self._download.fetch(entry, clock, more)
        asked = self._sampler.logprobs_asked(rows)
        requests = self.rows.requests.copy()
        launched = LaunchedStep(
            plan.step, step, requests, clock, asked, scored, results, fetched, lost=lost
        )
        if step.lines is not None:
            kept = results[len(self._tokens) :]
            launched.drafted = DraftedLines(step.lines, kept, self.drafts.watch(step))
        settled = None if self.constraints is None else self.constraints.watch(step)
        if self.constraints is not None and settled is not None and obeyed is not None:
            launched.constrained = Obeyed(
                obeyed, results[2 * len(self._tokens) :], settled, self.constraints.stuck
            )
        self._ring[entry] = launched
        return launched

    def forward(self, plan: StepPlan) -> tuple[StepRows, Tensor | None]:
        """Apply the plan and run the model without sampling: for tests.

        Returns what ran and float32 logits [S, vocabulary], None if no row samples.
        """
        entry = self._take_entry()
        self._ring[entry] = None
        step = self._begin(entry, plan)
        self._move(entry, self._clocks[entry], plan)
        self.pages.upload(entry)
        if len(step.rows):
            late = self.drafts.late
            frame = self._frames.tailored(entry, step, late)
            inputs = frame.device
            self._guess(entry, inputs, step, late)
            final = self._kernels.compute(inputs, shown=self._shown(frame, step))
            self._kernels.logits_of(final, inputs.sampled_lines, len(step.sampling))
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        sampling = len(step.sampling)
        return step, self._kernels.logits[:sampling].float() if sampling else None

    def run_padding(self, bucket: Bucket) -> None:
        """Launch a step of padding as large as `bucket` without a graph. Nothing reads its results."""
        self._kernels.issue(self._frames.padding(bucket).device)

    @torch.inference_mode()
    def warm(self, buckets: Sequence[Bucket]) -> None:
        """Load the kernels of the sampler and of steps as large as `buckets`, by launching each once.

        Nothing reads what that writes. On a CPU there is nothing to load.
        """
        if self._device.type == "cuda":
            self._warm_sampler()
            self._kernels.score_padding(1)
            torch.cuda.synchronize()  # the ring entry is used again
            for bucket in buckets:
                self._warm(bucket)

    @torch.inference_mode()
    def warm_drafter(self) -> None:
        """Load the drafter's kernels, of all its sizes."""
        if self.drafts.drafter is not None and self._device.type == "cuda":
            self.drafts.drafter.warm_sizes()

    @torch.inference_mode()
    def rehearse_drafter(self, progress: Progress) -> None:
        """Let the drafter take the memory that it needs, its CUDA graphs included."""
        if self.drafts.drafter is not None:
            self.drafts.drafter.capture(progress)

    def rehearse_pictures(self) -> None:
        """Let the tower of pictures take the memory that the largest one needs."""
        if self.tower is not None:
            self.tower.rehearse()

    @torch.inference_mode()
    def sample_the_slowest(self) -> None:
        """Sample and score with the most demanding settings. The executor cannot serve afterwards."""
        sampling = SamplingParams(top_p=0.5, presence_penalty=0.5, logprobs=1)
        rows = np.arange(self.info.max_rows)
        self._sampler.apply(0, [], [OpenRow(row, 0, b"", 0, sampling) for row in rows.tolist()])
        self._kernels.logits.zero_()  # the flattest distribution: half of the vocabulary stays
        self._sampler.resample(0, self._kernels.logits, rows, rows, self._last, self._tokens)
        self._kernels.score_padding(self._kernels.slice)

    @property
    def model(self) -> Decoder:
        return self._kernels.model

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def static_extends(self) -> bool:
        """Whether steps with extends can be captured."""
        return self._attention.static_extends

    def close(self) -> None:
        """Drop the weights, the pool and the graphs. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self.constraints is not None:
            self.constraints.close()
        if self.tower is not None:
            self.tower.close()
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        self.pages.close()
        self._graphs.close()
        if self.drafts.drafter is not None:
            self.drafts.drafter.close()
        self._ring.clear()  # its steps hold the executor
        del self._graphs, self._kernels, self._attention, self.pages, self._frames
        del self._pool, self.drafts, self.tower

    # --- the host's part of a step ---

    def _take_entry(self) -> int:
        """Take the next ring entry, once the step that used it last is over."""
        entry = self._launched % RING
        self._launched += 1
        before = self._ring[entry]
        if before is not None:
            before.settle()
        return entry

    def _begin(self, entry: int, plan: StepPlan) -> StepRows:
        """Apply the plan. Returns what it runs."""
        step = self.drafts.begin(plan)
        if self.tower is not None:
            self.tower.take(plan)
        if self.constraints is not None:
            self.constraints.automata.upload(entry)
            if step.asked is not None:
                self._remember(entry, step)
        if plan.closes or plan.opens:
            closes = np.frombuffer(plan.closes, dtype=np.int32).tolist()
            self._sampler.apply(entry, closes, plan.opens)
            self._frames.opened(plan.opens)
        self.counters.count(step.computed)
        return step.with_short_extends_as_decodes()

    def _remember(self, entry: int, step: StepRows) -> None:
        """Let rows whose extends were to sample, and did not, run their last token next."""
        rows, tokens = step.last_extended
        if len(rows):
            sent = self._unsampled.send(entry, rows=rows, tokens=tokens)
            self._last.index_copy_(0, sent["rows"], sent["tokens"])

    def _move(self, entry: int, clock: StepClock, plan: StepPlan | ToldStep) -> Loaded | None:
        """Move blocks and pages as the plan says: see `DevicePages.move`."""
        return self.pages.move(entry, clock, plan, self._verifier.tokens)

    def _run(self, entry: int, step: StepRows, late: bool) -> tuple[StepFrame, LazyStream | None]:
        """Upload the step and issue it, by a graph if one holds it.

        Returns also the model's output if targets are to be scored, which no graph keeps.
        """
        eager = step.scored is not None or shows(step, self.rows.pictures)
        bucket = None if eager else self._graphs.find(step)
        if bucket is None:
            frame = self._frames.tailored(entry, step, late)
        else:
            frame = self._frames.captured(entry, step, bucket, late)
        self._guess(entry, frame.device, step, late)
        self._download.settle()
        if bucket is None:
            return frame, self._kernels.issue(frame.device, shown=self._shown(frame, step))
        self._graphs.replay(frame.device.bucket)
        return frame, None

    def _guess(self, entry: int, inputs: StepInputs[Tensor], step: StepRows, late: bool) -> None:
        """Launch what precedes the model: corrections of a step that is `late`, then guesses."""
        self.drafts.launch(entry, inputs, step, late, self._clocks[entry])

    def _shown(self, frame: StepFrame, step: StepRows) -> ShownPictures | None:
        """Find the picture vectors that take the embedding's place; None: the step shows none."""
        pictures = extending(step, self.rows.pictures)
        if self.tower is None or not pictures:
            return None
        return self.tower.shown(frame.host.rows, frame.host.positions, pictures)

    def _accept(self, step: StepRows, frame: StepFrame) -> None:
        self._verifier.accept(frame.device, len(step.sampling), self._tokens, self._kept)
        self._sampler.record(self._verifier, self._tokens, self._kept)
        if self._pool.states is not None and step.lines is not None:
            self._take_back_states(drafts_of(step, frame))

    def _take_back_states(self, drafts: Tensor) -> None:
        """Give rows the states after their last accepted token. `drafts`: see `take_back`."""
        assert self._pool.states is not None
        for memory in self._pool.states.memory if len(drafts) else ():
            take_back(memory, self._kept, drafts)

    def _warm_sampler(self) -> None:
        """Launch the kernels that no bucket does: for rare sampling settings, and after drafts."""
        self._sampler.warm(
            self._kernels.logits.dtype, self.info.max_rows, self._last, self._tokens, self._kept,
            self._forced, self._verifier,
            None if self.constraints is None else self.constraints.automata,
        )  # fmt: skip
        for bucket in (Bucket(0, 0, 1, 1), Bucket(16, 1, 0, 1)):
            inputs = self._frames.padding(bucket).device
            self._verifier.correct(inputs)
            if self.drafts.drafter is not None:
                self.drafts.drafter.warm(inputs, self._verifier)
            self._verifier.accept(inputs, 1, self._tokens, self._kept)
            if self._pool.states is not None and self.info.max_drafts:
                self._take_back_states(inputs.plan["state_drafts"])

    # --- the device's part ---

    def _warm(self, bucket: Bucket) -> None:
        """Upload a step of padding and launch each of its kernels once, in place of each layer's."""
        self._kernels.issue(self._frames.padding(bucket).device, abridged=True)

    def _replayed(self, bucket: Bucket) -> None:
        """Issue what the graph of `bucket` holds."""
        self._kernels.issue(self._frames.graphs(0, bucket).device)

    def _resample(
        self,
        entry: int,
        step: StepRows,
        frame: StepFrame,
        late: bool,
        constrained: Constrained | None = None,
    ) -> Tensor | None:
        """Sample again lines that need more than a temperature. Returns their log-probabilities."""
        drafts = None
        if step.lines is not None:
            inputs, lines = frame.host.input_ids.astype(np.int32), frame.host.sampled_lines
            inputs = inputs if lines is None else inputs[lines.astype(np.int32, copy=False)]
            numbers = within(step.lines)
            drafts = Drafts(numbers, inputs[: len(step.sampling)], self._verifier.inputs)
        return self._sampler.resample(
            entry, self._kernels.logits, step.rows[step.sampling], step.draws, self._last, self._tokens,
            self._verifier if late else None, drafts, constrained,
            None if self.constraints is None else self.constraints.automata,
        )  # fmt: skip


def drafts_of(step: StepRows, frame: StepFrame) -> Tensor:
    """Return the states of each draft of the step: int32[n, 3], see `take_back`."""
    assert step.lines is not None
    return frame.device.plan["state_drafts"][: int((step.lines - 1).sum())]
