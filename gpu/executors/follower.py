"""The ranks beside rank 0: each runs its part of the model, and decides nothing.

Rank 0 alone knows plans, constraints, drafts and samplers. Once a step it sends the others what runs:
the rows, the changes of their page tables, the copies. So all ranks do the same by construction.
"""

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from ramify.gpu.attention.base import AttentionBackend
from ramify.gpu.drafting.mtp import MtpPasses
from ramify.gpu.executors.base import Counters, Follower
from ramify.gpu.kv.blocks import HostBlocks
from ramify.gpu.kv.layout import KVPool
from ramify.gpu.models.decoder import Decoder
from ramify.gpu.ops.ranked_ops import RankedTorchOps
from ramify.gpu.ops.torch_ops import torch_inputs
from ramify.gpu.ranks.group import Ranks
from ramify.gpu.sampling.scoring import arrays, score, slice_lines
from ramify.gpu.step.rows import RowTable, Scored, StepRows
from ramify.protocol.plan import ExecutorInfo, MovedBlock, StepPlan

IDLE_SECONDS = 1.0  # between signs of life

# Numbers of each array, -1: there is none; those of int64, one behind the other, and of int32
_Arrays = tuple[list[int], bytearray, bytearray]
_SHORT, _PAIRS = ("tokens", "given", "targets"), ("states", "held")  # int32; [n, 2]; others: int64[n]
_SKIPPED = ("extends", "scored")


def _names(of: type[StepRows] | type[Scored]) -> list[tuple["np.dtype[Any]", list[str]]]:
    found = [each.name for each in fields(of) if each.name not in _SKIPPED]
    return [
        (np.dtype(kind), [name for name in found if (name in _SHORT) == short])
        for kind, short in ((np.int64, False), (np.int32, True))
    ]


_NAMES = {kind: _names(kind) for kind in (StepRows, Scored)}


_Pages = list[tuple[int, int, bytes, bytes]]  # of page tables: row, first column, new pages, new windows


class ToldPass(msgspec.Struct, array_like=True, frozen=True, tag=1):
    """A pass of the checkpoint's own draft layer: it runs `step`, of whose rows `extends` are extends;
    without a step the head runs on `lines` lines.
    """

    step: _Arrays | None
    extends: int
    lines: int
    pages: _Pages


class ToldStep(msgspec.Struct, array_like=True, frozen=True, tag=0):
    """A step as rank 0 sends it. `copies`: pages, and where they are copied to.

    `states`: slots, and where they are copied to before the step: left over from the step before.
    `late`: positions are right on rank 0's device alone.
    """

    step: _Arrays
    extends: int
    scored: _Arrays | None
    pages: _Pages
    copies: list[bytes]
    saves: list[MovedBlock]
    loads: list[MovedBlock]
    states: list[bytes]
    late: bool = False

    @classmethod
    def of(
        cls, plan: StepPlan, step: StepRows, table: RowTable, states: list[Tensor], late: bool = False
    ) -> "ToldStep":
        """Pack a step. `table`: as the plan left it."""
        return cls(
            _packed(step),
            step.extends,
            None if step.scored is None else _packed(step.scored),
            _pages(table),
            [] if table.copies is None else [pages.tobytes() for pages in table.copies],
            plan.saves,
            plan.loads,
            [slots.numpy().tobytes() for slots in states],
            late,
        )

    def rows(self) -> StepRows:
        scored = None if self.scored is None else Scored(**_unpacked(Scored, self.scored))
        return StepRows(extends=self.extends, scored=scored, **_unpacked(StepRows, self.step))


def _pages(table: RowTable) -> _Pages:
    windows = table.windows if table.window_pages else table.pages[:, :0]
    return [
        (row, first, table.pages[row, first:last].tobytes(), windows[row, first:last].tobytes())
        for row, first, last in table.updates
    ]


def _packed(of: StepRows | Scored) -> _Arrays:
    counts: list[int] = []
    packed: list[bytearray] = []
    for kind, names in _NAMES[type(of)]:
        found: list[Any] = []
        for name in names:
            value = getattr(of, name)
            counts.append(-1 if value is None else value.size)
            if value is not None:
                found.append(np.ascontiguousarray(value, kind))
        packed.append(bytearray().join(found))
    return counts, packed[0], packed[1]


def _unpacked(of: type[StepRows] | type[Scored], arrays: _Arrays) -> dict[str, Any]:
    """Unpack the fields of `of` by name, as views of the memory of `arrays`, which is writable."""
    found, counts = {}, iter(arrays[0])
    for (kind, names), data in zip(_NAMES[of], arrays[1:], strict=True):
        numbers, at = np.frombuffer(data, kind), 0
        for name, count in zip(names, counts):  # noqa: B905 - more of them follow
            if count >= 0:
                array = numbers[at : at + count]
                found[name] = array.reshape(-1, 2) if name in _PAIRS else array
                at += count
    return found


class RankTold:
    """Rank 0's side: sends steps to the other ranks, and gathers what they could not load."""

    def __init__(self, ranks: Ranks, table: RowTable) -> None:
        self.ranks, self._table = ranks, table
        self._encoder = msgspec.msgpack.Encoder()
        self.states: list[Tensor] = []  # slots that the step under way copies, and where to

    def tell(self, plan: StepPlan, step: StepRows, late: bool = False) -> None:
        """Send a step, before rank 0 runs it."""
        told = ToldStep.of(plan, step, self._table, self.states, late)
        self.states = []
        self.ranks.ring.put(self._encoder.encode(told))

    def tell_pass(self, step: StepRows | None, lines: int) -> None:
        """Send a pass, before rank 0 runs it: see `ToldPass`."""
        packed, extends = (None, 0) if step is None else (_packed(step), step.extends)
        told = ToldPass(packed, extends, lines, _pages(self._table))
        self.ranks.ring.put(self._encoder.encode(told))

    def lost(self, found: list[int], asked: list[MovedBlock]) -> list[int]:
        """Gather the slots of blocks that some rank could not load. `found`: those of this rank."""
        return lost_slots(self.ranks, found, asked)

    def close(self) -> None:
        self.ranks.close()


def lost_slots(ranks: Ranks, found: list[int], asked: list[MovedBlock]) -> list[int]:
    """Gather the slots of `asked` that some rank could not load. All ranks call this."""
    slots = [block.slot for block in asked]
    whole = ranks.least([slot not in found for slot in slots])
    return [slot for slot, kept in zip(slots, whole, strict=True) if not kept]


class MirroredRows(RowTable):
    """A copy of rank 0's page tables."""

    def put(self, told: ToldStep | ToldPass) -> None:
        """Take over the changes that rank 0 sent, `updates` and `copies` too."""
        self.updates, self.copies = [], None
        if isinstance(told, ToldStep) and told.copies:
            sources, targets = (np.frombuffer(pages, dtype=np.int64) for pages in told.copies)
            self.copies = sources, targets
        for row, first, pages, windows in told.pages:
            added = np.frombuffer(pages, dtype=np.int32)
            last, columns = first + len(added), self.pages.shape[1]
            if last > columns:
                more = ((0, 0), (0, max(last - columns, columns)))
                self.pages, self.windows = np.pad(self.pages, more), np.pad(self.windows, more)
            self.pages[row, first:last] = added
            if windows:
                self.windows[row, first:last] = np.frombuffer(windows, dtype=np.int32)
            self.updates.append((row, first, last))


class TorchFollower(Follower):
    """Follower on torch: runs rank 0's steps on this rank's part of `model`, without results."""

    def __init__(
        self,
        model: Decoder,
        pool: KVPool,
        attention: AttentionBackend,
        table: MirroredRows,
        info: ExecutorInfo,
        ranks: Ranks,
        passes: MtpPasses | None = None,
    ) -> None:
        """`table`: the one that `attention` reads. `passes`: this rank's part of rank 0's drafter."""
        self.info, self.counters = info, Counters()
        self._model, self._pool, self._ranks = model, pool, ranks
        self._table, self._attention = table, attention
        last = torch.zeros(info.max_rows, dtype=torch.int64, device=model.device)
        self._ops = RankedTorchOps(ranks, info.vocab_size, pool, last, attention)
        self._blocks = HostBlocks(pool, info.host_blocks) if info.host_blocks else None
        if self._blocks is not None:
            self.info = self._blocks.host.described(info, whole=False)
        self._spare = info.state_slots + 1
        self._decoder = msgspec.msgpack.Decoder(ToldStep | ToldPass)
        self._passes = passes

    def follow(self, idle: Callable[[], None]) -> None:
        """Run steps until rank 0 ends. `idle` is called once a second while there is nothing to do."""
        while (message := self._ranks.ring.take(IDLE_SECONDS)) != b"":
            if message is None:
                idle()
            else:
                self._run(self._decoder.decode(message))

    def close(self) -> None:
        """Leave the group of ranks. Idempotent."""
        self._ranks.close()

    def _run(self, told: ToldStep | ToldPass) -> None:
        device = self._model.device
        self._table.put(told)
        if isinstance(told, ToldPass):
            assert self._passes is not None
            step = (
                None
                if told.step is None
                else StepRows(extends=told.extends, **_unpacked(StepRows, told.step))
            )
            self._passes.follow(step, told.lines)
            return
        if told.states and self._pool.states is not None:
            slots = (np.frombuffer(packed, dtype=np.int64) for packed in told.states)
            self._pool.states.copy(*(torch.tensor(each, device=device) for each in slots))
        if self._blocks is not None and told.saves:
            self._blocks.save(told.saves)
        if self._table.copies is not None:
            self._pool.copy(*(torch.tensor(pages, device=device) for pages in self._table.copies))
        if self._blocks is not None and told.loads:
            lost_slots(self._ranks, self._blocks.load(told.loads), told.loads)
        step = told.rows()
        self.counters.count(step.computed)
        if not len(step.rows):
            return
        inputs = torch_inputs(step, self._attention, device, self._spare)
        stream = self._model.forward(inputs, self._ops)
        if len(step.sampling):
            self._model.logits(stream, inputs.sampled_lines, self._ops)
        if step.scored is not None:
            views = {
                name: torch.from_numpy(array).to(device) for name, array in arrays(step.scored).items()
            }
            lines = slice_lines(self.info.vocab_size)
            score(step.scored, views, lambda of: self._model.logits(stream, of, self._ops), lines)
