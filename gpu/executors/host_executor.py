"""The step loop of executors that compute a step before `launch` returns: the CPU's, and torch's.

plan -> rows with drafts -> model -> sampler -> accepted drafts -> result. An executor runs the model and
samples; what a plan does to rows, constraints and drafts, and what a result says, is done here.
"""

import time
from abc import ABC, abstractmethod
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from ramify.gpu.constraints.rows import ConstrainedRows, Masks
from ramify.gpu.drafting.base import Drafter
from ramify.gpu.drafting.host import HostDrafts
from ramify.gpu.executors.base import BadLogits, Counters, bad_logits
from ramify.gpu.executors.follower import RankTold
from ramify.gpu.kv.blocks import HostBlocks
from ramify.gpu.kv.layout import KVPool
from ramify.gpu.ops.fixed_states import accepted_states
from ramify.gpu.sampling.acceptance import AcceptedTokens, draft_ends, inputs_of, packed_rows
from ramify.gpu.sampling.scoring import arrays, score, slice_lines
from ramify.gpu.sampling.torch_sampler import Sampler
from ramify.gpu.step.rows import Ints, PlanError, RowTable, Scored, StepRows
from ramify.gpu.vision.pictures import Pictures
from ramify.protocol.plan import ExecutorInfo, StepPlan, StepResult, pack
from ramify.protocol.sampling import TokenLogprobs

Output = TypeVar("Output")  # of the model, from which its head computes logits
Logprobs = list[TokenLogprobs | None]


class DoneStep:
    """A step that was computed before `launch` returned."""

    def __init__(self, result: StepResult, bad: BadLogits | None) -> None:
        self._result = result
        self._bad = bad

    def ready(self) -> bool:
        return True

    def result(self) -> StepResult:
        if self._bad is not None:
            raise self._bad
        return self._result


class HostExecutor(ABC, Generic[Output]):
    """Base of executors that compute a step within `launch`, over the pages of `pool` in `table`."""

    def __init__(
        self,
        table: RowTable,
        info: ExecutorInfo,
        drafter: Drafter | None,
        pool: KVPool,
        device: torch.device,
        others: RankTold | None = None,
        pictures: Pictures | None = None,
    ) -> None:
        """`device`: the model's. `others`: the other ranks, which hold parts of model and pool."""
        self.info = info
        self._others = others
        self.tower = pictures
        self.counters = Counters()
        self.rows = table
        self.constraints = ConstrainedRows(info.max_rows, info.vocab_size)
        self._spare_states = info.state_slots + 1  # the first one
        self.drafts = HostDrafts(table, drafter, self.constraints, draft_ends(info))
        self._device = device
        self._pool = pool
        self._blocks = HostBlocks(pool, info.host_blocks) if info.host_blocks else None
        if self._blocks is not None:
            self.info = self._blocks.host.described(info, whole=others is None)
        self._closed = False
        self._sampler = Sampler(info.max_rows, info.vocab_size, device)
        self._slice = slice_lines(info.vocab_size)  # lines that are scored at a time

    def launch(self, plan: StepPlan) -> DoneStep:
        """Compute the step. Raises PlanError if the plan contradicts the rows."""
        begin = time.perf_counter()
        step = self._begin(plan)
        lost, moved = self._lost, time.perf_counter() - begin if plan.saves or plan.loads else 0.0
        output = self._compute(step)
        accepted, tokens, logprobs, forced = self._sampled(step, output)
        self._keep_states(step, accepted)
        scores = b"" if step.scored is None else self._score(step.scored, output)
        self._end()
        result = StepResult(
            step=plan.step,
            tokens=tokens.astype(np.int32).tobytes(),
            computed=step.computed,
            elapsed_us=int((time.perf_counter() - begin) * 1e6),
            logprobs=logprobs,
            scores=scores,
            busy_us=self._busy_us(),
            late_us=self.drafts.late_us,
            **packed_rows(step, accepted),
            forced=forced,
            reasons=accepted.reasons,
            lost=lost,
            load_us=int(moved * 1e6),
        )
        return DoneStep(result, bad_logits(step, self.rows.requests, result))

    def forward(self, plan: StepPlan) -> tuple[StepRows, Tensor | None]:
        """Apply the plan and run the model, without taking over what was sampled.

        Returns what ran and float32 logits [S, vocabulary], None if no row samples. Meant for tests.
        """
        step = self._begin(plan)
        output = self._compute(step)
        logits = self._logits(step, output) if len(step.sampling) else None
        self._end()
        return step, logits

    def close(self) -> None:
        """Release what the executor holds. Idempotent. No other call may follow."""
        if not self._closed:
            self._closed = True
            if self._others is not None:
                self._others.close()
            self.constraints.close()
            if self.tower is not None:
                self.tower.close()
            self._release()
            if self._blocks is not None:
                self._blocks.close()
            del self._pool, self._blocks, self.tower

    # --- what each executor implements ---

    @abstractmethod
    def _release(self) -> None:
        """Release the model and its operations."""

    @abstractmethod
    def _compute(self, step: StepRows) -> Output:
        """Run the model. The step may be empty."""

    @abstractmethod
    def _sample(
        self, step: StepRows, output: Output, drafts: Ints | None, masks: Masks | None
    ) -> tuple[Ints, Logprobs]:
        """Sample int64[S], NO_TOKEN where logits are not finite. Returns also the log-probabilities.

        `drafts`, `masks`: see `Sampler.sample`.
        """

    @abstractmethod
    def _logits(self, step: StepRows, output: Output) -> Tensor:
        """Compute float32[S, vocabulary], which the next step does not overwrite."""

    @abstractmethod
    def _logits_at(self, lines: Tensor, output: Output) -> Tensor:
        """Compute float32[L, vocabulary] of `lines` [L] of the step's tokens, after all is sampled."""

    @abstractmethod
    def _set_last(self, rows: Ints, tokens: Ints) -> None:
        """Let `rows` [R] run `tokens` [R] next."""

    def _end(self) -> None:
        """Clean up when all of a step is computed."""
        return

    def _busy_us(self) -> int:
        """Measure `StepResult.busy_us` of the step under way."""
        return 0

    # --- what all share ---

    def _begin(self, plan: StepPlan) -> StepRows:
        """Apply the plan. Returns what it runs."""
        step = self.drafts.begin(plan)
        if self._others is not None:
            self._others.tell(plan, step)
        if self.tower is not None:
            self.tower.take(plan)
        self._lost = b""
        if self._blocks is not None and plan.saves:
            self._blocks.save(plan.saves)
        if self.rows.copies is not None:
            self._pool.copy(*(torch.from_numpy(pages).to(self._device) for pages in self.rows.copies))
        if self._blocks is not None and plan.loads:
            lost = self._blocks.load(plan.loads)
            if self._others is not None:
                lost = self._others.lost(lost, plan.loads)
            self._lost = pack(lost)
        for row in np.frombuffer(plan.closes, dtype=np.int32).tolist():
            self._sampler.close(row)
        for opened in plan.opens:
            self._sampler.open(opened)
        self.counters.count(step.computed)
        if step.extends and self.constraints.any:  # for rows that sit the step out
            extended, tokens = step.last_extended
            self._set_last(extended, tokens.astype(np.int64))
        return step

    def _sampled(self, step: StepRows, output: Output) -> tuple[AcceptedTokens, Ints, Logprobs, bytes]:
        """Sample. Returns what was accepted, the tokens, their log-probabilities, which were forced."""
        if not len(step.sampling):
            return AcceptedTokens(step.sampling > 0, step.sampling), step.sampling, [], b""
        rows = step.rows[step.sampling]
        drafts = None if step.lines is None else inputs_of(step)
        masks = self.constraints.masks(rows, drafts)
        tokens, logprobs = self._sample(step, output, drafts, masks)
        accepted = self.drafts.end(step, tokens, drafts)
        if drafts is None and masks is None:
            self._set_last(rows, np.maximum(tokens, 0))
            return accepted, tokens, logprobs, b""
        tokens, some = tokens[accepted.kept], accepted.counts > 0
        known = np.maximum(tokens, 0)
        self._sampler.record(rows[accepted.kept], torch.from_numpy(known).to(self._device))
        self._set_last(step.sampled_rows[some], known[np.cumsum(accepted.counts)[some] - 1])
        logprobs = [found for found, kept in zip(logprobs, accepted.kept, strict=False) if kept]
        forced = b"" if masks is None else self.constraints.forced(accepted.kept)
        return accepted, tokens, logprobs, forced

    def _keep_states(self, step: StepRows, accepted: AcceptedTokens) -> None:
        """Copy to the slot that each row was to write the state after its last accepted token, or, of a
        row that sat the step out, the state that it had.

        Raises PlanError if one of the latter ran several tokens: the state before its last one is lost.
        """
        if step.states is None or self._pool.states is None:
            return
        pairs = [] if step.held is None else [step.held]
        if step.lines is not None:
            places, *slots = accepted_states(step, self._spare_states).T
            ends = accepted.kept[places] & ~accepted.kept[places + 1]
            pairs.append(np.column_stack(slots)[ends])
        if self.constraints.late:
            late = np.isin(step.rows, list(self.constraints.late))
            late &= np.isin(np.arange(len(step.rows)), step.sampling)
            if (step.counts[late] > 1).any():
                raise PlanError(f"rows {step.rows[late].tolist()} sit out behind several tokens")
            pairs.append(np.unique(step.states[late], axis=0))
        if sum(map(len, pairs)):
            copied = torch.from_numpy(np.concatenate(pairs))
            if self._others is not None:
                self._others.states = [*copied.t()]
            sources, targets = copied.to(self._device).t()
            self._pool.states.copy(sources, targets)

    def _score(self, scored: Scored, output: Output) -> bytes:
        views = {
            name: torch.from_numpy(array).to(self._device) for name, array in arrays(scored).items()
        }
        found = score(scored, views, lambda lines: self._logits_at(lines, output), self._slice)
        return found.cpu().numpy().tobytes()
