"""The executor that runs a decoder on the CPU's kernels: see `ops.cpu_ops` and `native`.

A step is one call that does not hold the interpreter's lock: inputs are written into arrays at fixed
addresses, the recording runs, and the tokens that rows sampled are in an array, where the next
step reads its inputs. Rows with penalties or log-probabilities are sampled again by torch. It does not
know files; see `load`.
"""

import numpy as np
import torch
from torch import Tensor

from ramify.gpu.constraints.rows import Masks
from ramify.gpu.drafting.base import Drafter
from ramify.gpu.executors.host_executor import DoneStep, HostExecutor, Logprobs
from ramify.gpu.models.decoder import Decoder
from ramify.gpu.native.kernels import DrawArrays
from ramify.gpu.native.threads import Crew, Recording
from ramify.gpu.ops.cpu_inputs import CpuInputs
from ramify.gpu.ops.cpu_ops import CpuOps, no_step
from ramify.gpu.step.inputs import NO_DRAWS, Draws
from ramify.gpu.step.rows import Ints, RowTable, StepRows
from ramify.protocol.plan import NO_TOKEN, ExecutorInfo, StepPlan


class CpuExecutor(HostExecutor[None]):
    """Executor of `model` on the CPU's kernels, recorded by `ops`, over the pages of `table`."""

    def __init__(
        self,
        model: Decoder,
        ops: CpuOps,
        crew: Crew,
        table: RowTable,
        info: ExecutorInfo,
        drafter: Drafter | None = None,
    ) -> None:
        super().__init__(table, info, drafter, ops.pool, model.device)
        self._slice = min(self._slice, info.max_rows)
        self._ops, self._step, self._crew = ops, ops.step, crew
        self._last = np.zeros(info.max_rows, dtype=np.int64)
        self._inputs = CpuInputs(ops.step, table, ops.tile_rows // model.config.attention.group)
        inputs, tokens = ops.step.inputs, np.zeros(info.max_rows, dtype=np.int64)
        self._draws = DrawArrays(inputs.temperatures, inputs.uniforms, tokens)
        self._record(model)
        self._threads = torch.get_num_threads()
        torch.set_num_threads(1)  # the crew has the cores now; torch's threads would spin beside it

    def _record(self, model: Decoder) -> None:
        """Walk the layers once, and record the layers alone, the head alone, and all with sampling."""
        ops = self._ops
        stream = model.forward(no_step(), ops)
        layers = list(ops.instructions)
        ops.instructions = []
        self._all_logits = ops.logits(self.info.max_rows, self.info.vocab_size)
        model.logits(stream, None, ops, self._all_logits)
        head = list(ops.instructions)
        choose = ops.choose(self._all_logits, self._draws)
        self._layers, self._head, self._choose = Recording(layers), Recording(head), Recording([choose])
        self._whole = Recording([*layers, *head, choose])

    def launch(self, plan: StepPlan) -> DoneStep:
        self._spent = self._crew.spent()
        return super().launch(plan)

    def _release(self) -> None:
        self._crew.close()
        torch.set_num_threads(self._threads)
        del self._ops, self._layers, self._head, self._choose, self._whole

    def _busy_us(self) -> int:
        return int(self._crew.busy(self._spent) * 1e6)

    def _set_last(self, rows: Ints, tokens: Ints) -> None:
        self._last[rows] = tokens

    def _compute(self, step: StepRows) -> None:
        if len(step.rows):
            self._lay(step)
            self._crew.run(self._whole if len(step.sampling) else self._layers)

    def _lay(self, step: StepRows) -> None:
        """Write the step's inputs where the kernels read them."""
        self._inputs.lay(step, self._last, self._draws_of(step))
        self._ops.reach(self._inputs.furthest)

    def _draws_of(self, step: StepRows) -> Draws:
        """Draw random numbers for the lines that sample, if one of them has a temperature."""
        rows, settings, draws = step.rows[step.sampling], self._sampler.settings, self._draws
        if not settings.temperatures[rows].any():
            return NO_DRAWS
        for own, setting in (
            (draws.top_k, settings.top_k), (draws.top_p, settings.top_p), (draws.floors, settings.floors)
        ):  # fmt: skip
            own[: len(rows)] = setting[rows]
        return settings.draws(rows, step.draws)

    def _sample(
        self, step: StepRows, output: None, drafts: Ints | None, masks: Masks | None
    ) -> tuple[Ints, Logprobs]:
        rows = step.rows[step.sampling]
        special = np.flatnonzero(self._sampler.settings.special[rows])
        if masks is not None:
            self._mask(masks, special, len(rows))
        tokens = self._draws.tokens[: len(rows)].copy()
        if masks is not None and len(masks.forced):  # there is nothing to choose, but logits may be bad
            tokens[masks.forced] = np.where(tokens[masks.forced] < 0, NO_TOKEN, masks.tokens)
        logprobs: Logprobs = []
        if len(special):  # torch counts for penalties, and knows log-probabilities
            own = None if drafts is None else drafts[special]
            logits = self._logits_of(len(rows))[torch.from_numpy(special)]
            bound = None if masks is None else masks.of(special)
            sampled = self._sampler.sample(logits, rows[special], step.draws[special], own, bound)
            tokens[special] = torch.where(sampled.finite, sampled.tokens, NO_TOKEN).numpy()
            if sampled.logprobs:
                logprobs = [None] * len(rows)
                for line, found in zip(special.tolist(), sampled.logprobs, strict=True):
                    logprobs[line] = found
        return tokens, logprobs

    def _mask(self, masks: Masks, special: Ints, count: int) -> None:
        """Choose again among the legal tokens. Lines that torch samples keep their logits."""
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
        return self._all_logits[:count, : self.info.vocab_size]

    def _logits(self, step: StepRows, output: None) -> Tensor:
        return self._logits_of(len(step.sampling)).clone()

    def _logits_at(self, lines: Tensor, output: None) -> Tensor:
        own = self._step
        own.lines_count[0] = len(lines)
        own.lines[: len(lines)] = lines.numpy()
        self._crew.run(self._head)
        return self._logits_of(len(lines))
