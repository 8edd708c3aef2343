"""The draft model on the CPU's kernels: all tokens of a guess in one run of one recording.

Its walk over the layers is recorded once for each token of a guess, with inputs of its own: a walk
writes its token where the next one reads its input. Positions, slots and tiles of all walks are known
before the first one runs, so Python is called once, not once a token.
"""

import numpy as np

from ramify.gpu.models.decoder import Decoder
from ramify.gpu.native.attention import COUNT, FIRST, PAGES, POSITION, TILE_WORDS
from ramify.gpu.native.kernels import DrawArrays
from ramify.gpu.native.threads import Crew, Instruction, Recording, aligned
from ramify.gpu.ops.cpu_inputs import CpuInputs
from ramify.gpu.ops.cpu_ops import CpuOps, CpuStep, no_step
from ramify.gpu.step.buckets import Bucket
from ramify.gpu.step.inputs import StepInputs
from ramify.gpu.step.rows import RowTable
from ramify.gpu.step.step_rows import Ints, StepRows


class _Chain:
    """The inputs of the walks after the first one, in which every row runs one token."""

    def __init__(self, walks: int, rows: int, table: RowTable) -> None:
        self._table = table
        self.counts = aligned(walks)
        # line j: the tokens that walk j samples; the last walk's are not read
        self.ids = aligned((walks + 1) * rows).reshape(walks + 1, rows)
        self._positions = aligned(walks * rows).reshape(walks, rows)
        self._slots = aligned(walks * rows).reshape(walks, rows)
        self._tiles = aligned(walks * rows * TILE_WORDS).reshape(walks, rows, TILE_WORDS)
        self._tiles[:, :, FIRST], self._tiles[:, :, COUNT] = np.arange(rows), 1
        self._lines = np.arange(rows)

    def step(self, walk: int) -> CpuStep:
        """Make the inputs that walk number `walk` + 1 reads."""
        count = self.counts[walk : walk + 1]
        tiles = self._tiles[walk].reshape(-1)
        rows = len(self._lines)
        parts = {
            "input_ids": self.ids[walk],
            "positions": self._positions[walk],
            "sampled_lines": self._lines,
        }
        inputs = StepInputs.from_parts(Bucket(0, 0, rows, rows), parts)
        return CpuStep(inputs, count, self._slots[walk], count, tiles, count)

    def lay(self, rows: Ints, ends: Ints, most: Ints) -> int:
        """Lay out rows at positions `ends`, to go on to `most` tokens. Returns the furthest position."""
        walks, count, pages = int(most[0]) - 1, len(rows), self._table.pages
        steps = np.arange(walks)[:, None]
        self.counts[:walks] = (most > steps + 1).sum(axis=1)
        positions = ends + np.minimum(steps, np.maximum(most - 2, 0))
        self._positions[:walks, :count] = positions
        # of rows that do not go on, the position is one that they have a slot for
        self._slots[:walks, :count] = self._table.slots_at(rows, np.where(most > 1, positions, ends - 1))
        self._tiles[:walks, :count, PAGES] = pages.ctypes.data + rows * pages.strides[0]
        self._tiles[:walks, :count, POSITION] = positions
        return int(positions.max())


class CpuRunner:
    """Draft model on the CPU's kernels: up to `most` tokens a guess; `max_rows`: of the table."""

    def __init__(
        self, model: Decoder, ops: CpuOps, crew: Crew, table: RowTable, most: int, max_rows: int
    ) -> None:
        self._ops, self._crew = ops, crew
        config = model.config
        self._first = CpuInputs(ops.step, table, ops.tile_rows // config.attention.group)
        self._chain = _Chain(most, max_rows, table)
        logits = ops.logits(max_rows, config.vocab_size)
        greedy, unused = np.zeros(max_rows, dtype=np.float32), np.zeros(max_rows)
        walks: list[Instruction] = []
        self._recordings: list[Recording] = []  # for guesses of 0, 1, .. tokens
        for walk in range(most):
            if walk:
                ops.step = self._chain.step(walk - 1)
            stream = model.forward(no_step(), ops)
            if not walk:
                self._recordings.append(Recording(ops.instructions))
            model.logits(stream, None, ops, logits)
            # garbage, not NO_TOKEN, where logits are not finite: the next walk looks it up
            choose = ops.choose(logits, DrawArrays(greedy, unused, self._chain.ids[walk]), bad=0)
            walks += [*ops.instructions, choose]
            self._recordings.append(Recording(walks))
        self._last: Ints = np.zeros(max_rows, dtype=np.int64)  # never read: all is given

    def run(self, step: StepRows, most: Ints) -> Ints:
        self._first.lay(step, self._last)
        longest, furthest = int(most[0]) if len(most) else 0, self._first.furthest
        if longest > 1:
            sampling = step.sampling
            ends = step.starts[sampling] + step.counts[sampling]
            furthest = max(furthest, self._chain.lay(step.rows[sampling], ends, most))
        self._ops.reach(furthest)
        self._crew.run(self._recordings[longest])
        return self._chain.ids[:longest, : len(most)].T
