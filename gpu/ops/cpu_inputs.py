"""Writes a step's inputs into the arrays that the CPU's kernels read.

Knows the page table and the kernels' tiles; it does not know what is computed, nor how lines sample.
"""

import numpy as np

from ramify.gpu.native.attention import COUNT, FIRST, MOST_ROWS, PAGES, POSITION, TILE_WORDS
from ramify.gpu.ops.cpu_ops import CpuStep
from ramify.gpu.step.rows import RowTable
from ramify.gpu.step.step_rows import Ints, StepRows, within


class CpuInputs:
    """Fills `own` for steps over the pages of `table`. `group`: query heads that share a KV head."""

    def __init__(self, own: CpuStep, table: RowTable, group: int) -> None:
        self.furthest = 0  # position of the last step
        self._own, self._table = own, table
        self._queries = max(1, MOST_ROWS // group)

    def lay(self, step: StepRows, last: Ints) -> None:
        """`last`: the token that each row of the table sampled last."""
        own, n, count = self._own, step.extends, step.computed
        rows, positions, lines = step.rows, step.starts, step.sampling
        if n:
            ends = np.cumsum(step.counts)
            firsts = ends - step.counts
            rows = np.repeat(step.rows, step.counts)
            positions = np.arange(count) + np.repeat(step.starts - firsts, step.counts)
            lines = ends[step.sampling] - 1
            self._lay_tiles(step)
        elif step.lines is not None:
            self._lay_drafted(step, step.lines)
        else:
            self._lay_table(rows, np.arange(count), 1, positions)
        given = len(step.tokens)
        own.tokens[0] = count
        own.ids[:given] = step.tokens
        own.ids[given:count] = last[step.rows[n:]]
        if len(step.given):
            ids = own.ids[given : given + len(step.given)]
            np.copyto(ids, step.given, where=step.given >= 0)
        own.positions[:count] = positions
        own.slots[:count] = self._table.slots_at(rows, positions)
        own.lines_count[0] = len(lines)
        own.lines[: len(lines)] = lines
        self.furthest = int(positions.max())

    def _lay_drafted(self, step: StepRows, lines: Ints) -> None:
        """Decodes alone: a tile for each row and its drafts, if it holds them."""
        if lines.max() > self._queries:
            self._lay_tiles(step)
            return
        firsts = np.cumsum(lines) - lines
        self._lay_table(step.rows[firsts], firsts, lines, step.starts[firsts])

    def _lay_tiles(self, step: StepRows) -> None:
        """Cut sequences into tiles. Those that follow each other in one row are one: a row's drafts."""
        rows, starts, counts = step.rows, step.starts, step.counts
        firsts = np.cumsum(counts) - counts
        if step.lines is not None:
            joined = (rows[1:] == rows[:-1]) & (starts[1:] == starts[:-1] + counts[:-1])
            begins = np.flatnonzero(np.concatenate([[True], ~joined]))
            rows, starts, firsts = rows[begins], starts[begins], firsts[begins]
            counts = np.add.reduceat(counts, begins)
        tiles = -(-counts // self._queries)
        which = np.repeat(np.arange(len(rows)), tiles)
        begun = within(tiles) * self._queries
        sizes = np.minimum(counts[which] - begun, self._queries)
        self._lay_table(rows[which], firsts[which] + begun, sizes, starts[which] + begun)

    def _lay_table(self, rows: Ints, firsts: Ints, counts: "Ints | int", positions: Ints) -> None:
        """Tiles of `counts` queries of `rows`, as `native.attention` reads them."""
        pages, count = self._table.pages, len(rows)
        table = self._own.tiles[: TILE_WORDS * count].reshape(count, TILE_WORDS)
        table[:, PAGES] = pages.ctypes.data + rows * pages.strides[0]
        table[:, FIRST], table[:, COUNT], table[:, POSITION] = firsts, counts, positions
        self._own.tiles_count[0] = count
