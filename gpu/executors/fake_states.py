"""State slots, window pages and blocks in host memory of the fake executor.

A state slot holds the hash of all tokens that its state stands for, a window page that of the tokens up
to its position.

A row that reads a state of other tokens than its own raises PlanError, so a slot that was given away,
overwritten or taken at a wrong position is named. A state that was computed from KV that is not finite
is not finite either, and spoils what is computed after it.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ramify.gpu.kv.host_memory import HostMemory
from ramify.gpu.step.rows import PlanError, RowTable
from ramify.gpu.step.step_rows import Ints, StepRows
from ramify.protocol.cluster import BLOCK
from ramify.protocol.plan import FULL, STATE, WINDOW, MovedBlock, StepPlan

Hashes = npt.NDArray[np.uint64]


class FakeStates:
    """The state slots: `slots` of them, and slot 0, which stands for no token."""

    def __init__(self, slots: int, max_rows: int) -> None:
        self._hashes: Hashes = np.zeros(slots + 1, dtype=np.uint64)
        self._spoiled = np.zeros(slots + 1, dtype=np.bool_)
        self._spoils = np.zeros(max_rows, dtype=np.bool_)  # rows of the step that read a spoiled state
        self._rows: Ints = np.zeros(0, dtype=np.int64)
        self._sources: Ints = self._rows
        self._targets: Ints = self._rows

    def begin(self, plan: StepPlan) -> None:
        """Take the plan's pairs of slots, which `RowTable` has checked: one a row, none overwritten."""
        pairs = np.frombuffer(plan.states, dtype=np.int32).astype(np.int64).reshape(-1, 2)
        decodes = np.frombuffer(plan.decodes, dtype=np.int32).astype(np.int64)
        extends = np.array([extend.row for extend in plan.extends], dtype=np.int64)
        self._rows = np.concatenate([extends, decodes])
        self._sources, self._targets = pairs[:, 0], pairs[:, 1]
        self._spoils[:] = False
        self._spoils[self._rows] = self._spoiled[self._sources]

    def spoils(self, rows: Ints) -> npt.NDArray[np.bool_]:
        """Tell which of `rows` begin this step from a state that is not finite: bool[len(rows)]."""
        return self._spoils[rows]

    def starts(self, step: StepRows, lengths: Ints) -> Ints:
        """Find where each of the plan's rows begins; `lengths`: where those do that sit it out."""
        starts = lengths[self._rows]
        lines = zip(step.rows.tolist(), step.starts.tolist(), strict=True)
        found = dict(reversed(list(lines)))  # a row's drafts stand behind it
        for i, row in enumerate(self._rows.tolist()):
            starts[i] = found.get(row, starts[i])
        return starts

    @property
    def arrays(self) -> list[npt.NDArray[Any]]:
        """The arrays of the slots: hash, and whether it is spoiled."""
        return [self._hashes, self._spoiled]

    @property
    def rows(self) -> Ints:
        """The rows of the step, in plan order."""
        return self._rows

    def end(self, number: int, before: Hashes, after: Hashes, spoiled: npt.NDArray[np.bool_]) -> None:
        """Check what the rows read and store what they write.

        `before`, `after`: hashes of each row's tokens before and after the step. Raises PlanError.
        """
        wrong = self._hashes[self._sources] != before
        if wrong.any():
            row, slot = self._rows[wrong][0], self._sources[wrong][0]
            raise PlanError(f"step {number}: slot {slot} has another state than that of row {row}")
        self._hashes[self._targets] = after
        self._spoiled[self._targets] = spoiled


class FakeWindows:
    """The `pages` window pages. A row that reads other KV than its own raises PlanError: a page was
    freed, given away, or overwritten while the window still reached it.
    """

    def __init__(self, window: int, pages: int) -> None:
        self._before = window - 1
        self._hashes: Hashes = np.zeros(pages, dtype=np.uint64)

    @property
    def arrays(self) -> list[npt.NDArray[Any]]:
        """The array of the pages: a hash each."""
        return [self._hashes]

    def run(self, number: int, step: StepRows, rows: RowTable, chain: Hashes) -> None:
        """Write all pages of the step, then check those that it reads. Raises PlanError.

        `chain`: the hashes of the full layers' slots.
        """
        spans = list(zip(step.rows.tolist(), step.starts.tolist(), step.counts.tolist(), strict=True))
        for row, start, count in spans:
            pages = rows.windows[row, start : start + count]
            self._hashes[pages] = chain[rows.slots(row, start, start + count)]
        for row, start, count in spans:
            first = max(0, start - self._before)
            pages = rows.windows[row, first : start + count]
            wrong = (pages < 0) | (self._hashes[pages] != chain[rows.slots(row, first, start + count)])
            if wrong.any():
                at = first + int(np.argmax(wrong))
                raise PlanError(f"step {number}: row {row} reads other KV than its own at {at}")


class FakeBlocks:
    """`count` slots in host memory, each for `BLOCK` tokens of `arrays`, whose first axis is KV slots.

    Each part of a state holds the whole state. `flipped`: slots whose bytes count as damaged, for tests.
    """

    def __init__(
        self,
        count: int,
        page_size: int,
        arrays: Sequence[npt.NDArray[Any]],
        states: FakeStates | None = None,
        windows: FakeWindows | None = None,
    ) -> None:
        self._arrays = {FULL: [array.reshape(-1, page_size) for array in arrays]}
        for form, each in (STATE, states), (WINDOW, windows):
            self._arrays[form] = [] if each is None else [array.reshape(-1, 1) for array in each.arrays]
        size = BLOCK * sum(array.itemsize for array in arrays)
        self.host = HostMemory(count, size)
        self.flipped: set[int] = set()

    def save(self, blocks: Sequence[MovedBlock]) -> None:
        host = self.host
        for block in blocks:
            pages = np.frombuffer(block.pages, dtype=np.int32)
            parts = [array[pages].view(np.uint8).ravel() for array in self._arrays[block.form]]
            whole = np.concatenate(parts)
            host.blocks[block.slot, : len(whole)] = whole
            host.seals[block.slot] = host.seal(block.key, host.blocks[block.slot])
            self.flipped.discard(block.slot)

    def load(self, blocks: Sequence[MovedBlock]) -> list[int]:
        """Load blocks. Returns the slots of those that are not what was saved."""
        lost: list[int] = []
        for block in blocks:
            own, at = self.host.blocks[block.slot], 0
            right = self.host.seals[block.slot] == self.host.seal(block.key, own)
            if block.slot in self.flipped or not right:
                lost.append(block.slot)
                continue
            pages = np.frombuffer(block.pages, dtype=np.int32)
            for array in self._arrays[block.form]:
                size = array[0].nbytes * len(pages)
                part = own[at : at + size].view(array.dtype).reshape(len(pages), -1)
                array[pages[pages >= 0]] = part[pages >= 0]
                at += size
        return lost
