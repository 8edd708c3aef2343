"""The executor that runs a decoder on the CPU's kernels: see `ops.cpu_ops` and `native`.

A step is one call that does not hold the interpreter's lock: inputs are written into arrays at fixed
addresses, the recording runs, and the tokens that rows sampled are in an array, where the next
step reads its inputs. Rows that need more than a temperature are sampled again by torch. It does not
know files; see `load`.
"""

import time

import numpy as np
import torch
from torch import Tensor

from ramify.gpu.constraints.rows import ConstrainedRows, Masks
from ramify.gpu.drafting.base import Drafter
from ramify.gpu.drafting.host import HostDrafts
from ramify.gpu.executors.base import Counters, bad_logits
from ramify.gpu.executors.torch_executor import DoneStep
from ramify.gpu.models.decoder import Decoder
from ramify.gpu.native.threads import Crew, Recording
from ramify.gpu.ops.cpu_inputs import CpuInputs
from ramify.gpu.ops.cpu_ops import CpuOps, empty_draws, no_step
from ramify.gpu.sampling.acceptance import Accepted, inputs_of, packed_rows
from ramify.gpu.sampling.randomness import uniforms
from ramify.gpu.sampling.scoring import arrays, score, slice_lines
from ramify.gpu.sampling.torch_sampler import Sampler
from ramify.gpu.step.rows import Ints, RowTable, Scored, StepRows
from ramify.protocol.plan import NO_TOKEN, ExecutorInfo, StepPlan, StepResult
from ramify.protocol.sampling import SamplingParams, TokenLogprobs


class CpuExecutor:
    """Runs plans on `model`, whose operations `ops` records, over the pages of `table`."""

    def __init__(
        self,
        model: Decoder,
        ops: CpuOps,
        crew: Crew,
        table: RowTable,
        info: ExecutorInfo,
        drafter: Drafter | None = None,
    ) -> None:
        self.info = info
        self.counters = Counters()
        self.rows = table
        self.constraints = ConstrainedRows(info.max_rows, info.vocab_size)
        self.drafts = HostDrafts(table, drafter, self.constraints)
        self._ops, self._step, self._crew = ops, ops.step, crew
        self._sampler = Sampler(info.max_rows, info.vocab_size, model.device)
        self._asks = _Asks(info.max_rows)
        self._last = np.zeros(info.max_rows, dtype=np.int64)
        self._inputs = CpuInputs(ops.step, table, model.config.heads // model.config.kv_heads)
        self._draws = empty_draws(info.max_rows)
        self._record(model)
        self._threads = torch.get_num_threads()
        torch.set_num_threads(1)  # the crew has the cores now; torch's threads would spin beside it

    def _record(self, model: Decoder) -> None:
        """Walk the layers once. The recordings: layers alone, the head alone, all with sampling."""
        ops = self._ops
        stream = model.forward(no_step(), ops)
        layers = list(ops.instructions)
        ops.instructions = []
        self._logits = ops.logits(self.info.max_rows, self.info.vocab_size)
        model.logits(stream, None, ops, self._logits)
        head = list(ops.instructions)
        choose = ops.choose(self._logits, self._draws)
        self._layers, self._head, self._choose = Recording(layers), Recording(head), Recording([choose])
        self._whole = Recording([*layers, *head, choose])

    def launch(self, plan: StepPlan) -> DoneStep:
        """Compute the step. Raises PlanError if the plan contradicts the rows."""
        begin, spent = time.perf_counter(), self._crew.spent()
        step = self._run(plan)
        accepted, tokens, logprobs, forced = self._sampled(step)
        scores = b"" if step.scored is None else self._score(step.scored)
        result = StepResult(
            step=plan.step,
            tokens=tokens.astype(np.int32).tobytes(),
            computed=step.computed,
            elapsed_us=int((time.perf_counter() - begin) * 1e6),
            logprobs=logprobs,
            scores=scores,
            busy_us=int(self._crew.busy(spent) * 1e6),
            late_us=self.drafts.late_us,
            **packed_rows(step, accepted),
            forced=forced,
            reasons=accepted.reasons,
        )
        return DoneStep(result, bad_logits(step, self.rows.requests, result))

    def forward(self, plan: StepPlan) -> tuple[StepRows, Tensor | None]:
        """Apply the plan and run the model, without taking over what was sampled.

        Returns what ran and float32 logits [S, vocabulary], None if no row samples. Meant for tests.
        """
        step = self._run(plan)
        return step, self._logits_of(len(step.sampling)).clone() if len(step.sampling) else None

    def close(self) -> None:
        """End the threads; drop the weights and the pool."""
        self.constraints.close()
        self._crew.close()
        torch.set_num_threads(self._threads)
        del self._ops, self._layers, self._head, self._choose, self._whole

    def _run(self, plan: StepPlan) -> StepRows:
        step = self.drafts.begin(plan)
        for row in np.frombuffer(plan.closes, dtype=np.int32).tolist():
            self._sampler.close(row)
        for opened in plan.opens:
            self._sampler.open(opened)
            self._asks.open(opened.row, opened.sampling)
        self.counters.count(step.computed)
        if step.extends:  # for those that sit the step out
            extended, last = step.last_extended
            self._last[extended] = last
        if len(step.rows):
            self._lay(step)
            self._crew.run(self._whole if len(step.sampling) else self._layers)
        return step

    def _lay(self, step: StepRows) -> None:
        """Write the step's inputs where the kernels read them."""
        self._inputs.lay(step, self._last)
        self._lay_draws(step)
        self._ops.reach(self._inputs.furthest)

    def _lay_draws(self, step: StepRows) -> None:
        rows = step.rows[step.sampling]
        temperatures = self._asks.temperatures[rows]
        draws = self._draws
        draws.temperatures[: len(rows)] = temperatures
        if temperatures.any():
            draws.uniforms[: len(rows)] = uniforms(self._asks.seeds[rows], step.draws)

    def _sampled(self, step: StepRows) -> "tuple[Accepted, Ints, list[TokenLogprobs | None], bytes]":
        """What the rows get, the tokens, what was asked about them, and which were forced."""
        rows = step.rows[step.sampling]
        special = np.flatnonzero(self._asks.special[rows])
        drafts = inputs_of(step) if step.lines is not None and self.constraints.any else None
        masks = self.constraints.masks(rows, drafts)
        if masks is not None:
            self._mask(masks, special, len(rows))
        tokens = self._draws.tokens[: len(rows)].copy()
        if masks is not None and len(masks.forced):  # there is nothing to choose, but logits may be bad
            tokens[masks.forced] = np.where(tokens[masks.forced] < 0, NO_TOKEN, masks.tokens)
        logprobs: list[TokenLogprobs | None] = []
        if len(special):  # torch sorts for top-k and top-p, and counts for penalties
            own = None if step.lines is None else inputs_of(step)[special]
            logits = self._logits_of(len(rows))[torch.from_numpy(special)]
            bound = None if masks is None else masks.of(special)
            sampled = self._sampler.sample(logits, rows[special], step.draws[special], own, bound)
            tokens[special] = torch.where(sampled.finite, sampled.tokens, NO_TOKEN).numpy()
            if sampled.logprobs:
                logprobs = [None] * len(rows)
                for line, found in zip(special.tolist(), sampled.logprobs, strict=True):
                    logprobs[line] = found
        accepted = self.drafts.end(step, tokens)
        if step.lines is None and masks is None:
            self._last[rows] = np.maximum(tokens, 0)
            return accepted, tokens, logprobs, b""
        if len(special):
            counted = special[accepted.kept[special]]
            self._sampler.record(rows[counted], torch.from_numpy(np.maximum(tokens[counted], 0)))
            logprobs = [found for found, kept in zip(logprobs, accepted.kept, strict=False) if kept]
        forced = b"" if masks is None else self.constraints.forced(accepted.kept)
        tokens, some = tokens[accepted.kept], accepted.counts > 0
        last = np.maximum(tokens[np.cumsum(accepted.counts)[some] - 1], 0)
        self._last[step.sampled_rows[some]] = last
        return accepted, tokens, logprobs, forced

    def _mask(self, masks: Masks, special: Ints, count: int) -> None:
        """Choose again, of what is legal. Lines that torch samples keep their logits."""
        lines = np.flatnonzero(~np.isin(masks.lines, special)) if len(special) else slice(None)
        native = masks.lines[lines]
        if not len(native):
            return
        legal = masks.flags(self.info.vocab_size)[lines]
        logits = self._logits_of(count).numpy()
        for line, own in zip(native.tolist(), legal, strict=True):
            np.copyto(logits[line], -np.inf, where=~own)
        self._crew.run(self._choose)

    def _logits_of(self, count: int) -> Tensor:
        return self._logits[:count, : self.info.vocab_size]

    def _score(self, scored: Scored) -> bytes:
        views = {name: torch.from_numpy(array) for name, array in arrays(scored).items()}
        slice_size = min(slice_lines(self.info.vocab_size), self.info.max_rows)
        return score(scored, views, self._head_of, slice_size).numpy().tobytes()

    def _head_of(self, lines: Tensor) -> Tensor:
        own = self._step
        own.lines_count[0] = len(lines)
        own.lines[: len(lines)] = lines.numpy()
        self._crew.run(self._head)
        return self._logits_of(len(lines))


class _Asks:
    """What the open rows ask of sampling, as arrays."""

    def __init__(self, max_rows: int) -> None:
        self.temperatures = np.zeros(max_rows, dtype=np.float32)
        self.seeds: Ints = np.zeros(max_rows, dtype=np.int64)
        self.special = np.zeros(max_rows, dtype=np.bool_)  # more than a temperature

    def open(self, row: int, sampling: SamplingParams) -> None:
        self.temperatures[row] = sampling.temperature
        self.seeds[row] = sampling.seed
        truncated = sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0
        self.special[row] = (
            sampling.penalized or sampling.logprobs > 0 or (sampling.temperature > 0 and truncated)
        )
