"""The executor that runs a decoder on torch: on CPUs, and as the reference for CUDA.

rows -> inputs -> decoder -> sampler, one step at a time. Sampled tokens stay in a tensor on the
device, where the next step reads its inputs. This file does not know checkpoints; see `load`.
"""

import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ramify.gpu.attention.base import AttentionBackend
from ramify.gpu.constraints.rows import Masks
from ramify.gpu.drafting.base import Drafter
from ramify.gpu.drafting.mtp import MtpDrafter
from ramify.gpu.executors.follower import RankTold
from ramify.gpu.executors.host_executor import DoneStep, HostExecutor, Logprobs
from ramify.gpu.executors.threads import ThreadChoice
from ramify.gpu.kv.layout import KVPool
from ramify.gpu.models.decoder import Decoder
from ramify.gpu.ops.base import Ops, ResidualStream
from ramify.gpu.ops.ranked_ops import RankedTorchOps
from ramify.gpu.ops.torch_ops import TorchOps, torch_inputs
from ramify.gpu.step.rows import Ints, RowTable, StepRows
from ramify.gpu.vision.pictures import Pictures
from ramify.protocol.plan import NO_TOKEN, ExecutorInfo, StepPlan

MakeOps = Callable[[KVPool, Tensor, AttentionBackend], Ops[ResidualStream]]
_Output = tuple[ResidualStream, Tensor | None]  # and the lines of it that sample; None: all


class TorchExecutor(HostExecutor[_Output]):
    """Executor of `model` on torch over `pool`. `table`: that from which `attention` reads page tables.

    `make_ops`: makes the model's operations.
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
        pictures: Pictures | None = None,
        others: RankTold | None = None,
    ) -> None:
        """`others`: the other ranks, if this is rank 0 of several."""
        if others is not None:
            make_ops = partial(RankedTorchOps, others.ranks, info.vocab_size)
        super().__init__(table, info, drafter, pool, model.device, others, pictures)
        self.model = model
        self._attention = attention
        self._last = torch.zeros(info.max_rows, dtype=torch.int64, device=model.device)
        self._ops = make_ops(pool, self._last, attention)
        # the most threads of torch: set by the thread that loads the model and runs it
        self._threads = ThreadChoice(torch.get_num_threads()) if model.device.type == "cpu" else None

    def launch(self, plan: StepPlan) -> DoneStep:
        if self._threads is None:
            return super().launch(plan)
        tokens = plan_tokens(plan)
        threads = self._threads.take(tokens)
        if threads != torch.get_num_threads():
            torch.set_num_threads(threads)
        begin = time.perf_counter()
        done = super().launch(plan)
        self._threads.note(tokens, threads, time.perf_counter() - begin)
        return done

    def _release(self) -> None:
        del self.model, self._attention, self._ops

    def _compute(self, step: StepRows) -> _Output:
        if not len(step.rows):
            nothing = self.model.embedding[:0]
            return ResidualStream(nothing, nothing), None
        pictures, shown = self.rows.pictures, None
        turned = pictures if self.tower is not None and self.tower.turned else {}
        inputs = torch_inputs(step, self._attention, self._device, self._spare_states, turned)
        if pictures and self.tower is not None:
            rows, positions = (part.cpu().numpy() for part in (inputs.rows, inputs.positions))
            shown = self.tower.shown(rows, positions, pictures)
        stream = self.model.forward(inputs, self._ops, shown=shown)
        if isinstance(self.drafts.drafter, MtpDrafter):
            self.drafts.drafter.saw(stream.normed)
        return stream, inputs.sampled_lines

    def _end(self) -> None:
        if isinstance(self.drafts.drafter, MtpDrafter):
            self.drafts.drafter.end()

    def _sample(
        self, step: StepRows, output: _Output, drafts: Ints | None, masks: Masks | None
    ) -> tuple[Ints, Logprobs]:
        logits = self._logits(step, output)
        sampled = self._sampler.sample(logits, step.rows[step.sampling], step.draws, drafts, masks)
        tokens: Ints = torch.where(sampled.finite, sampled.tokens, NO_TOKEN).cpu().numpy()
        return tokens, sampled.logprobs

    def _logits(self, step: StepRows, output: _Output) -> Tensor:
        return self.model.logits(*output, self._ops).float()

    def _logits_at(self, lines: Tensor, output: _Output) -> Tensor:
        return self.model.logits(output[0], lines, self._ops).float()

    def _set_last(self, rows: Ints, tokens: Ints) -> None:
        self._last[torch.from_numpy(rows).to(self._device)] = torch.from_numpy(tokens).to(self._device)


def plan_tokens(plan: StepPlan) -> int:
    """Count the tokens that the plan runs, without the decodes' drafts."""
    return (len(plan.decodes) + sum(len(extend.tokens) for extend in plan.extends)) // 4
