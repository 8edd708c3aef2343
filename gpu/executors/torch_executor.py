"""The executor that runs a decoder on torch: the CPU's, and the reference for CUDA.

rows -> inputs -> decoder -> sampler, one step at a time. Sampled tokens stay in a tensor on the
device, where the next step reads its inputs. It does not know files; see `load`.
"""

import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from ramify.gpu.attention.base import AttentionBackend
from ramify.gpu.constraints.rows import ConstrainedRows
from ramify.gpu.drafting.base import Drafter
from ramify.gpu.drafting.host import HostDrafts
from ramify.gpu.executors.base import BadLogits, Counters, bad_logits
from ramify.gpu.executors.threads import ThreadChoice
from ramify.gpu.kv.layout import KVPool
from ramify.gpu.models.decoder import Decoder
from ramify.gpu.ops.base import Ops, Stream
from ramify.gpu.ops.torch_ops import TorchOps
from ramify.gpu.sampling.acceptance import Accepted, inputs_of, packed_rows
from ramify.gpu.sampling.scoring import arrays, score, slice_lines
from ramify.gpu.sampling.torch_sampler import Sampler
from ramify.gpu.step.buckets import tailored
from ramify.gpu.step.inputs import NO_DRAWS, StepInputs, host_inputs, lay
from ramify.gpu.step.rows import Ints, RowTable, Scored, StepRows
from ramify.protocol.plan import NO_TOKEN, ExecutorInfo, StepPlan, StepResult
from ramify.protocol.sampling import TokenLogprobs

MakeOps = Callable[[KVPool, Tensor, AttentionBackend], Ops[Stream]]


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


class TorchExecutor:
    """Runs plans on `model` over `pool`. `table` is the one that `attention` reads page tables from.

    `make_ops`: what the model's operations run on.
    """

    def __init__(
        self,
        model: Decoder,
        pool: KVPool,
        attention: AttentionBackend,
        table: RowTable,
        info: ExecutorInfo,
        make_ops: MakeOps = TorchOps,
        drafter: Drafter | None = None,
    ) -> None:
        self.info = info
        self.counters = Counters()
        self.rows = table
        self._model = model
        self._attention = attention
        self.constraints = ConstrainedRows(info.max_rows, info.vocab_size)
        self.drafts = HostDrafts(table, drafter, self.constraints)
        self._sampler = Sampler(info.max_rows, info.vocab_size, model.device)
        self._last = torch.zeros(info.max_rows, dtype=torch.int64, device=model.device)
        self._ops = make_ops(pool, self._last, attention)
        # what torch may use at most: set by the thread that loads the model and runs it
        self._threads = ThreadChoice(torch.get_num_threads()) if model.device.type == "cpu" else None

    def launch(self, plan: StepPlan) -> DoneStep:
        """Compute the step. Raises PlanError if the plan contradicts the rows."""
        if self._threads is None:
            return self._launch(plan)
        tokens = plan_tokens(plan)
        threads = self._threads.take(tokens)
        if threads != torch.get_num_threads():
            torch.set_num_threads(threads)
        begin = time.perf_counter()
        done = self._launch(plan)
        self._threads.note(tokens, threads, time.perf_counter() - begin)
        return done

    def _launch(self, plan: StepPlan) -> DoneStep:
        begin = time.perf_counter()
        step, hidden, lines = self._run(plan)
        scores = b""
        accepted, tokens, logprobs, forced = self._sampled(step, hidden, lines)
        if step.scored is not None:
            scores = self._score(step.scored, hidden).cpu().numpy().tobytes()
        result = StepResult(
            step=plan.step,
            tokens=tokens.astype(np.int32).tobytes(),
            computed=step.computed,
            elapsed_us=int((time.perf_counter() - begin) * 1e6),
            logprobs=logprobs,
            scores=scores,
            late_us=self.drafts.late_us,
            **packed_rows(step, accepted),
            forced=forced,
            reasons=accepted.reasons,
        )
        return DoneStep(result, bad_logits(step, self.rows.requests, result))

    def _sampled(
        self, step: StepRows, hidden: Stream, lines: Tensor | None
    ) -> "tuple[Accepted, Ints, list[TokenLogprobs | None], bytes]":
        """What the rows get, the tokens, what was asked about them, and which were forced."""
        if not len(step.sampling):
            return Accepted(step.sampling > 0, step.sampling), step.sampling, [], b""
        rows = step.rows[step.sampling]
        drafts = None if step.lines is None else inputs_of(step)
        masks = self.constraints.masks(rows, drafts)
        sampled = self._sampler.sample(self._logits(hidden, lines), rows, step.draws, drafts, masks)
        tokens: Ints = torch.where(sampled.finite, sampled.tokens, NO_TOKEN).cpu().numpy()
        accepted = self.drafts.end(step, tokens)
        kept = torch.from_numpy(np.flatnonzero(accepted.kept)).to(self._last.device)
        output = sampled.tokens[kept]
        if drafts is not None or masks is not None:
            self._sampler.record(rows[accepted.kept], output)
        # of each row the last one
        some = accepted.counts > 0
        last = np.cumsum(accepted.counts)[some] - 1
        self._set_last(step.sampled_rows[some], output[torch.from_numpy(last).to(self._last.device)])
        logprobs = sampled.logprobs
        if logprobs:
            logprobs = [logprobs[line] for line in kept.tolist()]
        forced = self.constraints.forced(accepted.kept)
        return accepted, tokens[accepted.kept], logprobs, forced

    def forward(self, plan: StepPlan) -> tuple[StepRows, Tensor | None]:
        """Apply the plan and run the model, without sampling.

        Returns what ran and float32 logits [S, vocabulary], None if no row samples. Meant for tests.
        """
        step, hidden, lines = self._run(plan)
        return step, self._logits(hidden, lines) if len(step.sampling) else None

    def _run(self, plan: StepPlan) -> tuple[StepRows, Stream, Tensor | None]:
        """What ran, the model's output, the lines of it that sample (None: all)."""
        step = self.drafts.begin(plan)
        for row in np.frombuffer(plan.closes, dtype=np.int32).tolist():
            self._sampler.close(row)
        for opened in plan.opens:
            self._sampler.open(opened)
        self.counters.count(step.computed)
        if step.extends and self.constraints.active.any():  # for those that sit the step out
            extended, tokens = step.last_extended
            self._set_last(extended, torch.from_numpy(tokens.astype(np.int64)).to(self._last.device))
        if not len(step.rows):
            nothing = self._model.embedding[:0]
            return step, Stream(nothing, nothing), None
        inputs = self._inputs(step)
        return step, self._model.forward(inputs, self._ops), inputs.sampled_lines

    def _set_last(self, rows: Ints, tokens: Tensor) -> None:
        """What `rows` [R] run next: `tokens` [R]."""
        self._last[torch.from_numpy(rows).to(self._last.device)] = tokens

    def _inputs(self, step: StepRows) -> StepInputs[Tensor]:
        """The step as large as it is, on the device."""
        bucket = tailored(step, padded=False)
        plan = self._attention.plan(step, bucket, captured=False)
        host = host_inputs(bucket, plan)
        lay(host, step, NO_DRAWS, plan, spare=0)
        return host.on(self._model.device)

    def _logits(self, hidden: Stream, lines: Tensor | None) -> Tensor:
        """float32[S, vocabulary]."""
        return self._model.logits(hidden, lines, self._ops).float()

    def _score(self, scored: Scored, hidden: Stream) -> Tensor:
        device = self._model.device
        views = {name: torch.from_numpy(array).to(device) for name, array in arrays(scored).items()}
        return score(
            scored,
            views,
            lambda lines: self._logits(hidden, lines),
            slice_lines(self.info.vocab_size),
        )

    def close(self) -> None:
        """Drop the weights and the pool."""
        self.constraints.close()
        del self._model, self._attention, self._ops


def plan_tokens(plan: StepPlan) -> int:
    """Tokens that the plan runs, drafts left out."""
    return (len(plan.decodes) + sum(len(extend.tokens) for extend in plan.extends)) // 4
