"""The inputs of a step on a CPU, written into the arrays that the kernels read.

This file knows the page table and the kernels' tiles, not what is computed, nor how lines sample.
"""

from typing import cast

import numpy as np

from ramify.gpu.native.attention import COUNT, FIRST, PAGES, POSITION, TILE_WORDS
from ramify.gpu.ops.cpu_ops import CpuStep
from ramify.gpu.step.buckets import Bucket, tailored
from ramify.gpu.step.inputs import NO_DRAWS, Draws, StepInputs, lay
from ramify.gpu.step.rows import RowTable
from ramify.gpu.step.staging import Array
from ramify.gpu.step.step_rows import Ints, StepRows, within

_MOST_CUTS = 64


class CpuInputs:
    """Writer of `own`, over the pages of `table`. `queries`: the most of a tile of attention."""

    def __init__(self, own: CpuStep, table: RowTable, queries: int) -> None:
        self.furthest = 0  # position of the last step
        self._own, self._table = own, table
        self._cuts: dict[Bucket, StepInputs[Array]] = {}  # making views costs more than filling them
        self._queries = queries

    def lay(self, step: StepRows, last: Ints, draws: Draws = NO_DRAWS) -> None:
        """Write the inputs of a step. `last`: the token that each row of the table sampled last."""
        own, bucket = self._own, tailored(step, padded=False)
        inputs = self._cut(bucket)
        lay(inputs, step, draws, {}, spare=0)
        count, rows, positions = bucket.lines, cast(Ints, inputs.rows), cast(Ints, inputs.positions)
        if step.extends:
            self._lay_tiles(step)
        elif step.lines is not None:
            self._lay_drafted(step, step.lines)
        else:
            self._lay_table(rows, np.arange(count), 1, positions)
        ids = cast(Ints, inputs.input_ids)[bucket.extended :]
        np.copyto(ids, last[rows[bucket.extended :]], where=ids < 0)
        if inputs.sampled_lines is None:  # all of them
            own.lines[:count] = step.sampling
        own.tokens[0], own.lines_count[0] = count, bucket.sampling
        for routed in own.routed.values():
            routed.of_tokens(count)
        own.slots[:count] = self._table.slots_at(rows, positions)
        if own.window_slots is not None and self._table.window_pages:
            own.window_slots[:count] = self._table.windows[rows, positions]
        self.furthest = int(positions.max())

    def _cut(self, bucket: Bucket) -> StepInputs[Array]:
        """Find or make the views of a step of this size."""
        found = self._cuts.get(bucket)
        if found is None:
            if len(self._cuts) >= _MOST_CUTS:
                self._cuts.clear()
            found = self._cuts[bucket] = self._own.inputs.cut(bucket)
        return found

    def _lay_drafted(self, step: StepRows, lines: Ints) -> None:
        """Lay out decodes alone: a tile for each row and its drafts, if it holds them."""
        if lines.max() > self._queries:
            self._lay_tiles(step)
            return
        firsts = np.cumsum(lines) - lines
        self._lay_table(step.rows[firsts], firsts, lines, step.starts[firsts])

    def _lay_tiles(self, step: StepRows) -> None:
        """Cut sequences into tiles. Those that follow each other in one row, its drafts, are one.

        A prompt's last tiles, which have the most keys, come first: so threads end at about the same
        time.
        """
        rows, starts, counts = step.rows, step.starts, step.counts
        firsts = np.cumsum(counts) - counts
        if step.lines is not None:
            joined = (rows[1:] == rows[:-1]) & (starts[1:] == starts[:-1] + counts[:-1])
            begins = np.flatnonzero(np.concatenate([[True], ~joined]))
            rows, starts, firsts = rows[begins], starts[begins], firsts[begins]
            counts = np.add.reduceat(counts, begins)
        tiles = -(-counts // self._queries)
        which = np.repeat(np.arange(len(rows)), tiles)[::-1]
        begun = within(tiles)[::-1] * self._queries
        sizes = np.minimum(counts[which] - begun, self._queries)
        self._lay_table(rows[which], firsts[which] + begun, sizes, starts[which] + begun)

    def _lay_table(self, rows: Ints, firsts: Ints, counts: "Ints | int", positions: Ints) -> None:
        """Write tiles of `counts` queries of `rows`, as `native.attention` reads them."""
        pages, count = self._table.pages, len(rows)
        table = self._own.tiles[: TILE_WORDS * count].reshape(count, TILE_WORDS)
        table[:, PAGES] = pages.ctypes.data + rows * pages.strides[0]
        table[:, FIRST], table[:, COUNT], table[:, POSITION] = firsts, counts, positions
        self._own.tiles_count[0] = count
        if self._own.window_tiles is not None and self._table.window_pages:
            windows = self._table.windows
            within_windows = self._own.window_tiles[: TILE_WORDS * count].reshape(count, TILE_WORDS)
            within_windows[:] = table
            within_windows[:, PAGES] = windows.ctypes.data + rows * windows.strides[0]
