"""The CUDA executor as one of several ranks: rank 0 tells what it launches, the others launch the same.

Rank 0 alone guesses drafts and verifies them; where the checkpoint's own layer guesses, each rank has a
part of that layer. With two steps in flight, how many drafts were accepted is known on rank 0's device
first. So its device sends the others the positions of a step that follows drafts, and, for a model with
fixed states, which lines were kept. Each rank keeps its own part of a block of KV in its host memory.
"""

from collections.abc import Callable
from functools import partial

import msgspec
import torch
from torch import Tensor

from ramify.gpu.attention.registry import KernelChoice
from ramify.gpu.drafting.device import DeviceDrafter
from ramify.gpu.executors.base import Follower
from ramify.gpu.executors.cuda_executor import CudaExecutor, drafts_of
from ramify.gpu.executors.follower import IDLE_SECONDS, MirroredRows, RankTold, ToldStep, lost_slots
from ramify.gpu.kv.cuda_blocks import Loaded
from ramify.gpu.kv.layout import KVPool
from ramify.gpu.models.decoder import Decoder
from ramify.gpu.ops.triton_ranked import RankedTritonOps
from ramify.gpu.ranks.group import Ranks, RankSums
from ramify.gpu.step.inputs import StepInputs
from ramify.gpu.step.rows import RowTable, StepRows
from ramify.gpu.step.staging import RING, StepClock
from ramify.gpu.vision.pictures import Pictures
from ramify.protocol.plan import ExecutorInfo, MovedBlock, StepPlan


def ranked(ranks: RankSums, info: ExecutorInfo) -> "partial[RankedTritonOps]":
    """Make the constructor of an executor's operations, for one of several ranks."""
    return partial(RankedTritonOps, ranks, info.vocab_size)


def cuda_executor(
    model: Decoder, pool: KVPool, info: ExecutorInfo, attention: KernelChoice,
    drafter: DeviceDrafter | None, ranks: Ranks | None, pictures: Pictures | None = None,
) -> CudaExecutor:  # fmt: skip
    """Make the executor of this process: of the whole model, or of its rank's part."""
    if ranks is None:
        return CudaExecutor(model, pool, RowTable(info), info, attention, drafter, pictures=pictures)
    if ranks.rank:
        return CudaFollower(ranks, model, pool, MirroredRows(info), info, attention, drafter)
    return CudaLeader(ranks, model, pool, RowTable(info), info, attention, drafter)


class CudaLeader(CudaExecutor):
    """The CUDA executor of rank 0, which tells the other ranks what it launches."""

    def __init__(
        self, ranks: Ranks, model: Decoder, pool: KVPool, table: RowTable, info: ExecutorInfo,
        attention: KernelChoice, drafter: DeviceDrafter | None,
    ) -> None:  # fmt: skip
        super().__init__(model, pool, table, info, attention, drafter, make_ops=ranked(ranks, info))
        self._ranks, self._others = ranks, RankTold(ranks, table)
        if self.pages.blocks is not None:
            self.info = self.pages.blocks.host.described(info, whole=False)

    def close(self) -> None:
        was = self._closed
        super().close()  # graphs that hold sums go before the ranks that make these
        if not was:
            self._others.close()

    def _begin(self, entry: int, plan: StepPlan) -> StepRows:
        step = super()._begin(entry, plan)
        self._others.tell(plan, step, self.drafts.late)
        return step

    def _guess(self, entry: int, inputs: StepInputs[Tensor], step: StepRows, late: bool) -> None:
        super()._guess(entry, inputs, step, late)
        if late:
            self._ranks.from_first(inputs.positions)

    def _take_back_states(self, drafts: Tensor) -> None:
        self._ranks.from_first(self._kept)
        super()._take_back_states(drafts)

    def _move(self, entry: int, clock: StepClock, plan: StepPlan | ToldStep) -> Loaded | None:
        loaded = super()._move(entry, clock, plan)
        return None if loaded is None else partial(self._lost, loaded, plan.loads)

    def _lost(self, loaded: Loaded, asked: list[MovedBlock]) -> tuple[list[int], int]:
        found, took = loaded()
        return self._others.lost(found, asked), took


class CudaFollower(CudaExecutor, Follower):
    """The CUDA executor of another rank: launches rank 0's steps; what it samples is not read."""

    def __init__(
        self, ranks: Ranks, model: Decoder, pool: KVPool, table: MirroredRows, info: ExecutorInfo,
        attention: KernelChoice, drafter: DeviceDrafter | None,
    ) -> None:  # fmt: skip
        """`drafter`: runs this rank's part of rank 0's drafter."""
        alone = msgspec.structs.replace(info, constrains=False)
        super().__init__(model, pool, table, alone, attention, drafter, make_ops=ranked(ranks, info))
        if self.pages.blocks is not None:
            self.info = self.pages.blocks.host.described(alone, whole=False)
        self._mirror = table
        self._ranks = ranks
        self._decoder, self._late = msgspec.msgpack.Decoder(ToldStep), False

    def follow(self, idle: Callable[[], None]) -> None:
        while (message := self._ranks.ring.take(IDLE_SECONDS)) != b"":
            if message is None:
                idle()
            else:
                self._follow(self._decoder.decode(message))

    def close(self) -> None:
        was = self._closed
        super().close()
        if not was:
            self._ranks.close()

    @torch.inference_mode()
    def _follow(self, told: ToldStep) -> None:
        entry = self._launched % RING
        self._launched += 1
        clock = self._clocks[entry]
        clock.wait()  # for the step that used the entry last
        clock.start()
        self._mirror.put(told)
        loaded = self._move(entry, clock, told)
        self.pages.upload(entry)
        step = told.rows()
        self.counters.count(step.computed)
        if len(step.rows):
            self._late = told.late
            frame, final = self._run(entry, step, late=False)
            if step.lines is not None and self._pool.states is not None:
                self._take_back_states(drafts_of(step, frame))
            if step.scored is not None and final is not None:
                self._kernels.score(entry, step.scored, final)
        self.pages.hold_states(entry, step)
        clock.stop(fetched=False)
        if loaded is not None:  # rank 0 asks with the step's result
            lost_slots(self._ranks, loaded()[0], told.loads)

    def _guess(self, entry: int, inputs: StepInputs[Tensor], step: StepRows, late: bool) -> None:
        if self.drafts.drafter is not None:
            self.drafts.drafter.propose(entry, step, inputs, self._verifier)
        if self._late:
            self._ranks.from_first(inputs.positions)

    def _take_back_states(self, drafts: Tensor) -> None:
        self._ranks.from_first(self._kept)
        super()._take_back_states(drafts)
