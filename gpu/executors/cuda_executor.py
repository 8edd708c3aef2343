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

from ramify.gpu.attention.groups import is_grouped
from ramify.gpu.attention.registry import KernelChoice
from ramify.gpu.drafting.device import DeviceDrafter
from ramify.gpu.drafting.device_drafts import DeviceDrafts
from ramify.gpu.executors.base import Counters
from ramify.gpu.executors.follower import ToldStep
from ramify.gpu.executors.launched_step import DraftedLines, LaunchedStep, Obeyed
from ramify.gpu.kv.cuda_blocks import Loaded, device_blocks
from ramify.gpu.kv.layout import KVPool, copy_pages
from ramify.gpu.models.decoder import Decoder
from ramify.gpu.ops.base import ShownPictures
from ramify.gpu.ops.fixed_states import state_room, state_tables
from ramify.gpu.ops.gluon_check import gluon_works
from ramify.gpu.ops.invariant_linear import InvariantProducts
from ramify.gpu.ops.tilings import LayerSizes
from ramify.gpu.ops.triton_conv import take_back
from ramify.gpu.ops.triton_linear import Products
from ramify.gpu.ops.triton_ops import LazyStream, TritonOps
from ramify.gpu.programmatic_launch import overlaps
from ramify.gpu.progress import Progress
from ramify.gpu.sampling.acceptance import draft_ends
from ramify.gpu.sampling.automata import Constrained
from ramify.gpu.sampling.cuda_sampler import CudaSampler, Drafts
from ramify.gpu.sampling.device_constraints import DeviceConstraints
from ramify.gpu.sampling.scoring import arrays, score, slice_lines
from ramify.gpu.sampling.triton_sampling import sample_into
from ramify.gpu.sampling.verifier import Verifier
from ramify.gpu.step.buckets import NOTHING, Bucket, decode_buckets, largest, tailored
from ramify.gpu.step.graphs import StepGraphs
from ramify.gpu.step.inputs import NO_DRAWS, Plan, StepFrame, StepInputs, lay, layout
from ramify.gpu.step.rows import PlanError, RowTable, Scored, StepRows
from ramify.gpu.step.staging import RING, Download, StepClock, Upload, frame_bytes
from ramify.gpu.step.step_rows import within
from ramify.gpu.vision.pictures import Pictures
from ramify.gpu.vision.placing import MOVED_TURNS, extending, lay_moved_turns, shows
from ramify.protocol.plan import ExecutorInfo, OpenRow, StepPlan
from ramify.protocol.sampling import SamplingParams


class CudaExecutor:
    """Runs plans on `model` over `pool`. `capture` comes before the first plan.

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
        # one row more than there are: padding runs in it, at position 0 of the padding slot's page
        self._spare = info.max_rows
        self._shifts = np.zeros(info.max_rows + 1, dtype=np.int64)  # of `lay_moved_turns`
        windowed = info.window_pages > 0
        shape = 1 + windowed, info.max_rows + 1, -(-table.max_length // info.page_size)
        # one tensor, so that one launch writes what a plan adds to both
        self._tables = torch.full(shape, pool.pages, dtype=torch.int32, device=self._device)
        self._pages, windows = self._tables[0], self._tables[-1]
        if windowed:
            windows.fill_(info.window_pages)
        slots = pool.padding_slot + 1 if drafter is not None and drafter.reads_tokens else None
        self._verifier = Verifier(info.max_drafts, self._pages, info.page_size, slots, draft_ends(info))
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
        # of whatever step runs: were each graph to keep its own, they would fill a gigabyte
        self._logits = torch.empty(
            (info.max_rows, info.vocab_size), dtype=model.dtype, device=self._device
        )
        shapes = model.config.attention_shapes(model.dtype, windowed, info.kv_dtype == "fp8")
        self._attention = attention.back_end(table, shapes, self._device, self._pages, windows)
        self._model = model
        self._unlike_layers = model.unlike_layers()
        products = (InvariantProducts if attention.deterministic else Products)(self._device)
        self._ops = make_ops(
            pool, self._pages, self._last, self._attention, products, layer_sizes(model, products),
            model.rotaries, windows=windows,
        )  # fmt: skip
        if drafter is not None:
            drafter.join(self._attention, products)
        self._sampler = CudaSampler(info.max_rows + 1, info.vocab_size, self._device)
        decodes = decode_buckets(info.max_rows)[-1]
        most = [largest(info.max_rows, info.step_tokens), *self.forms(decodes)]
        sizes = [frame_bytes(layout(bucket, self._room(bucket))) for bucket in most]
        self._steps = Upload(self._device, fixed=max(sizes))
        self._frames: dict[tuple[int, Bucket], StepFrame] = {}  # by ring entry, into `_steps`
        self._extras = Upload(self._device)
        self._page_uploads = Upload(self._device)
        self._copies = Upload(self._device)
        self._blocks = device_blocks(pool, info.host_blocks) if info.host_blocks else None
        if self._blocks is not None:
            self.info = self._blocks.host.described(info)
        self._held = Upload(self._device)
        self._unsampled = Upload(self._device)
        self._targets = Upload(self._device)
        self._slice = min(info.max_rows, slice_lines(info.vocab_size))
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
        """The buckets for a step of this size: plain, with drafts, grouped if decodes can share keys."""
        plain = replace(bucket, grouped=False, drafted=False)
        if bucket.extended:
            return [plain]
        drafted = replace(plain, drafted=True)
        others = [drafted, replace(drafted, grouped=True)] if self.info.max_drafts else []
        others.append(replace(plain, grouped=True))
        return [plain, *(other for other in others if self._attention.room(other))]

    def unlike_decodes(self) -> list[Bucket]:
        """Steps of decodes that together launch every variant of every attention kernel.

        Steps without a graph may have any number of decodes, and not only the captured ones.
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
        self._upload_pages(entry)
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
                scores = self._score(entry, step.scored, final)
                more = scores if more is None else torch.cat((more, scores))
        self._hold_states(entry, step)
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
        self._upload_pages(entry)
        if len(step.rows):
            late = self.drafts.late
            frame = self._tailor(entry, step, late)
            inputs = frame.device
            self._guess(entry, inputs, step, late)
            final = self._compute(inputs, shown=self._shown(frame, step))
            self._logits_of(final, inputs.sampled_lines, len(step.sampling))
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        sampling = len(step.sampling)
        return step, self._logits[:sampling].float() if sampling else None

    def run_padding(self, bucket: Bucket) -> None:
        """Launch a step of padding as large as `bucket` without a graph. Nothing reads its results."""
        self._pad(bucket)
        self._replayed(bucket)

    @torch.inference_mode()
    def warm(self, buckets: Sequence[Bucket]) -> None:
        """Load the kernels of the sampler and of steps as large as `buckets`, by launching each once.

        Nothing reads what that writes. On a CPU there is nothing to load.
        """
        if self._device.type == "cuda":
            self._warm_sampler()
            self._score_padding(1)
            torch.cuda.synchronize()  # the ring entry is used again
            for bucket in buckets:
                self._warm(bucket)

    @torch.inference_mode()
    def warm_drafter(self) -> None:
        """Load the kernels of what guesses, of all its sizes."""
        if self.drafts.drafter is not None and self._device.type == "cuda":
            self.drafts.drafter.warm_sizes()

    @torch.inference_mode()
    def rehearse_drafter(self, progress: Progress) -> None:
        """Let what guesses take the memory that it needs, its CUDA graphs included."""
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
        self._logits.zero_()  # the flattest distribution: half of the vocabulary stays
        self._sampler.resample(0, self._logits, rows, rows, self._last, self._tokens)
        self._score_padding(self._slice)

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def static_extends(self) -> bool:
        """Whether steps with extends can be captured."""
        return self._attention.static_extends

    def close(self) -> None:
        """Drop the weights, the pool and the graphs. Again: no change."""
        if self._closed:
            return
        self._closed = True
        if self.constraints is not None:
            self.constraints.close()
        if self.tower is not None:
            self.tower.close()
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        if self._blocks is not None:
            self._blocks.close()
        self._graphs.close()
        if self.drafts.drafter is not None:
            self.drafts.drafter.close()
        self._ring.clear()  # its steps hold the executor
        del self._graphs, self._model, self._ops, self._attention, self._pages, self._tables
        del self._logits, self._pool, self.drafts, self.tower

    # --- the host's part of a step ---

    def _take_entry(self) -> int:
        """The next ring entry, once the step that used it last is over."""
        entry = self._launched % RING
        self._launched += 1
        before = self._ring[entry]
        if before is not None:
            before.settle()
        return entry

    def _begin(self, entry: int, plan: StepPlan) -> StepRows:
        """Apply the plan: what it runs."""
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
            for opened in plan.opens:
                self._shifts[opened.row] = sum(each.shift for each in opened.pictures)
        self.counters.count(step.computed)
        return step.with_short_extends_as_decodes()

    def _remember(self, entry: int, step: StepRows) -> None:
        """Let rows whose extends were to sample, and do not, run their last token next."""
        rows, tokens = step.last_extended
        if len(rows):
            sent = self._unsampled.send(entry, rows=rows, tokens=tokens)
            self._last.index_copy_(0, sent["rows"], sent["tokens"])

    def _move(self, entry: int, clock: StepClock, plan: StepPlan | ToldStep) -> Loaded | None:
        """Save blocks, copy pages and load blocks, ahead of all that writes a page. Returns what tells,
        once the step is over, the slots of blocks that could not be loaded.
        """
        lost = None
        if self._blocks is not None:
            self._blocks.begin()
            if plan.saves:
                self._blocks.save(plan.saves)
        self._copy_pages(entry)
        if self._blocks is not None and plan.loads:
            lost = self._blocks.load(plan.loads)
        if plan.saves or plan.loads:
            clock.moved()
        return lost

    def _copy_pages(self, entry: int) -> None:
        """Copy the pages that the plan says, ahead of all that writes any."""
        if self.rows.copies is None:
            return
        sources, targets = self.rows.copies
        sent = self._copies.send(entry, sources=sources, targets=targets)
        pages = sent["sources"], sent["targets"]
        self._pool.copy(*pages)
        if self._verifier.tokens is not None:
            copy_pages(self._verifier.tokens, self._pool.page_size, *pages)

    def _upload_pages(self, entry: int) -> None:
        """Write what the plan added to the page tables into the one on the device."""
        if not self.rows.updates:
            return
        rows, first, last = np.array(self.rows.updates).T
        counts = last - first
        total = int(counts.sum())
        column = np.arange(total) + np.repeat(first - (np.cumsum(counts) - counts), counts)
        row = np.repeat(rows, counts)
        places, pages = row * self._pages.shape[1] + column, self.rows.pages[row, column]
        if len(self._tables) > 1:
            places = np.concatenate([places, places + self._pages.numel()])
            pages = np.concatenate([pages, self.rows.windows[row, column]])
        sent = self._page_uploads.send(entry, places=places, pages=pages)
        self._tables.view(-1).index_copy_(0, sent["places"], sent["pages"])

    def _hold_states(self, entry: int, step: StepRows) -> None:
        """Give rows that sat the step out the state that they had, in the slot that they were to write.

        Raises PlanError if one of them ran several tokens: the state before its last one is lost.
        """
        if step.states is None or self._pool.states is None or step.asked is None:
            return
        n = step.extends
        ran = np.isin(step.rows[:n], step.asked) & ~np.isin(np.arange(n), step.sampling)
        if (step.counts[:n][ran] > 1).any():
            raise PlanError(f"rows {step.rows[:n][ran].tolist()} sit out behind several tokens")
        held = step.states[:0] if step.held is None else step.held
        sources, targets = np.unique(np.concatenate([held, step.states[:n][ran]]), axis=0).T
        sent = self._held.send(entry, sources=sources, targets=targets)
        self._pool.states.copy(sent["sources"], sent["targets"])

    def _run(self, entry: int, step: StepRows, late: bool) -> tuple[StepFrame, LazyStream | None]:
        """Upload the step and issue it, by a graph if one holds it.

        Returns also the model's output if targets are to be scored, which no graph keeps.
        """
        eager = step.scored is not None or shows(step, self.rows.pictures)
        bucket = None if eager else self._graphs.find(step)
        if bucket is not None:
            bucket, plan = self._plan(step, bucket, captured=True)
            frame = self._frame(entry, bucket)
            self._fill(entry, frame, step, plan, late)
            self._guess(entry, frame.device, step, late)
            self._download.settle()
            self._graphs.replay(bucket)
            return frame, None
        frame = self._tailor(entry, step, late)
        self._guess(entry, frame.device, step, late)
        self._download.settle()
        return frame, self._issue(frame.device, shown=self._shown(frame, step))

    def _guess(self, entry: int, inputs: StepInputs[Tensor], step: StepRows, late: bool) -> None:
        """Launch what goes ahead of the model: corrections of a step that is `late`, then guesses."""
        self.drafts.launch(entry, inputs, step, late, self._clocks[entry])

    def _shown(self, frame: StepFrame, step: StepRows) -> ShownPictures | None:
        """What takes the embedding's place."""
        pictures = extending(step, self.rows.pictures)
        if self.tower is None or not pictures:
            return None
        return self.tower.shown(frame.host.rows, frame.host.positions, pictures)

    def _tailor(self, entry: int, step: StepRows, late: bool) -> StepFrame:
        """Upload the step as large as it is."""
        bucket = tailored(step, self.static_extends and self._device.type == "cuda")
        bucket, plan = self._plan(step, bucket, captured=False)
        room = plan | self._turns_room(bucket)
        frame = StepFrame(bucket, self._extras.frame(entry, layout(bucket, room)))
        self._fill(entry, frame, step, plan, late)
        return frame

    def _frame(self, entry: int, bucket: Bucket) -> StepFrame:
        """Where the graph of `bucket` reads its step, through ring entry `entry`."""
        frame = self._frames.get((entry, bucket))
        if frame is None:
            fields = layout(bucket, self._room(bucket))
            frame = StepFrame(bucket, self._steps.frame(entry, fields))
            self._frames[entry, bucket] = frame
        return frame

    def _fill(self, entry: int, frame: StepFrame, step: StepRows, plan: Plan, late: bool) -> None:
        draws = self._sampler.draws_for(step.rows[step.sampling], step.draws)
        lay(frame.host, step, draws, plan, self._spare)
        if self.rows.pictures and self.tower is not None and self.tower.turned:
            host, extended = frame.host, extending(step, self.rows.pictures)
            moved = host.plan[MOVED_TURNS]
            lay_moved_turns(moved, host.rows, host.positions, self._shifts, extended)
        self.drafts.lay(entry, frame.host, step, late, self._sampler.seeds)
        self._send(frame)

    def _send(self, frame: StepFrame) -> None:
        frame.send()
        if not frame.host.extended:
            self._attention.plan_decodes(frame.host.rows, frame.host.positions)

    def _plan(self, step: StepRows, bucket: Bucket, captured: bool) -> tuple[Bucket, Plan]:
        """The attention's and the states' part of a step, and the bucket: grouped if decodes share keys,
        drafted."""
        plan = self._attention.plan(step, bucket, captured)
        if plan and not step.extends:
            drafted = step.lines is not None
            bucket = replace(bucket, grouped=is_grouped(plan), drafted=drafted)
        return bucket, plan | state_tables(step, bucket, self.info.state_slots + 1)

    def _room(self, bucket: Bucket) -> Plan:
        """Zeros, as large as such a part can be."""
        room = self._attention.room(bucket)
        room = room if self._pool.states is None else room | state_room(bucket)
        return room | self._turns_room(bucket)

    def _turns_room(self, bucket: Bucket) -> Plan:
        """Where it is said how tokens of a model that sees pictures turn."""
        if self.tower is None or not self.tower.turned:
            return {}
        return {MOVED_TURNS: np.zeros((3, bucket.lines), dtype=np.int32)}

    def _accept(self, step: StepRows, frame: StepFrame) -> None:
        self._verifier.accept(frame.device, len(step.sampling), self._tokens, self._kept)
        self._sampler.record(self._verifier, self._tokens, self._kept)
        if self._pool.states is not None and step.lines is not None:
            self._take_back_states(drafts_of(step, frame))

    def _take_back_states(self, drafts: Tensor) -> None:
        """Give rows the states behind what was kept. `drafts`: see `take_back`."""
        assert self._pool.states is not None
        for memory in self._pool.states.memory if len(drafts) else ():
            take_back(memory, self._kept, drafts)

    def _warm_sampler(self) -> None:
        """Launch what no bucket does: what some rows ask for, and what steps with drafts need."""
        self._sampler.warm(
            self._logits.dtype, self._spare, self._last, self._tokens, self._kept, self._forced,
            self._verifier, None if self.constraints is None else self.constraints.automata,
        )  # fmt: skip
        for bucket in (Bucket(0, 0, 1, 1), Bucket(16, 1, 0, 1)):
            self._pad(bucket)
            inputs = self._frame(0, bucket).device
            self._verifier.correct(inputs)
            if self.drafts.drafter is not None:
                self.drafts.drafter.warm(inputs, self._verifier)
            self._verifier.accept(inputs, 1, self._tokens, self._kept)
            if self._pool.states is not None and self.info.max_drafts:
                self._take_back_states(inputs.plan["state_drafts"])

    # --- the device's part ---

    def _pad(self, bucket: Bucket) -> None:
        """Upload a step of padding to where the graph of `bucket` reads."""
        if self._device.type == "cuda":
            torch.cuda.synchronize()  # the ring entry may be in use
        frame = self._frame(0, bucket)
        lay(frame.host, NOTHING, NO_DRAWS, {}, self._spare)
        self._send(frame)

    def _warm(self, bucket: Bucket) -> None:
        """Upload a step of padding and launch each of its kernels once, in place of each layer's."""
        self._pad(bucket)
        self._issue(self._frame(0, bucket).device, abridged=True)

    def _replayed(self, bucket: Bucket) -> None:
        """What the graph of `bucket` holds."""
        self._issue(self._frame(0, bucket).device)

    def _issue(
        self, inputs: StepInputs[Tensor], abridged: bool = False, shown: ShownPictures | None = None
    ) -> LazyStream:
        """Issue a step's kernels, its sampler included."""
        final = self._compute(inputs, abridged, shown)
        if inputs.bucket.sampling:
            logits = self._logits_of(final, inputs.sampled_lines, inputs.bucket.sampling)
            sample_into(
                logits, inputs.rows_that_sample, inputs.temperatures, inputs.uniforms, self._last,
                self._tokens,
            )  # fmt: skip
        return final

    def _compute(
        self, inputs: StepInputs[Tensor], abridged: bool = False, shown: ShownPictures | None = None
    ) -> LazyStream:
        """Run the model. `abridged`: only layers that together launch all of its kernels."""
        self._verifier.remember(inputs)
        layers = self._unlike_layers if abridged else None
        final = self._model.forward(inputs, self._ops, layers, shown=shown)
        if self.drafts.drafter is not None and self.drafts.drafter.follows:
            self.drafts.drafter.ran(self._ops.whole(final), inputs)
        return final

    def _logits_of(self, final: LazyStream, lines: Tensor | None, count: int) -> Tensor:
        """[count, vocabulary] of `lines` of the model's output (None: of all), where all logits go."""
        if not count:
            return self._logits[:0]
        return self._model.logits(final, lines, self._ops, self._logits[:count])

    def _resample(
        self,
        entry: int,
        step: StepRows,
        frame: StepFrame,
        late: bool,
        constrained: Constrained | None = None,
    ) -> Tensor | None:
        """Sample again the lines that ask for more than a temperature; their log-probabilities."""
        drafts = None
        if step.lines is not None:
            inputs, lines = frame.host.input_ids.astype(np.int32), frame.host.sampled_lines
            inputs = inputs if lines is None else inputs[lines.astype(np.int32, copy=False)]
            numbers = within(step.lines)
            drafts = Drafts(numbers, inputs[: len(step.sampling)], self._verifier.inputs)
        return self._sampler.resample(
            entry, self._logits, step.rows[step.sampling], step.draws, self._last, self._tokens,
            self._verifier if late else None, drafts, constrained,
            None if self.constraints is None else self.constraints.automata,
        )  # fmt: skip

    def _score(self, entry: int, scored: Scored, final: LazyStream) -> Tensor:
        """int32, the bits of `score`. What was sampled from is overwritten."""

        def logits_of(lines: Tensor) -> Tensor:
            return self._logits_of(final, lines, len(lines))

        views = self._targets.send(entry, **arrays(scored))
        return score(scored, views, logits_of, self._slice).view(torch.int32)

    def _score_padding(self, lines: int) -> None:
        """Score as a step would that has targets at so many positions."""
        places = np.arange(lines)
        scored = Scored(places, places, np.zeros(lines, dtype=np.int32), places, 0 * places)
        self._score(0, scored, self._ops.blank(lines))


def drafts_of(step: StepRows, frame: StepFrame) -> Tensor:
    """int32[n, 3] of a step with drafts: the states behind each draft, see `take_back`."""
    assert step.lines is not None
    return frame.device.plan["state_drafts"][: int((step.lines - 1).sum())]


def layer_sizes(model: Decoder, products: Products) -> LayerSizes:
    """The sizes and abilities by which `tilings` chooses kernels for the model's products."""
    config, attention = model.config, model.config.attention
    tried = products.follows_tilings and model.dtype == torch.bfloat16  # else Gluon is never chosen
    return LayerSizes(
        hidden=config.hidden_size,
        attention=attention.width,
        qkv=attention.rows,
        intermediate=config.intermediate_size,
        dtype=model.dtype,
        overlaps=overlaps(model.device),
        gluon=tried and gluon_works(model.device),
    )
