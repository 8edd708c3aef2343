"""The page tables on the device, and the moves of pages, blocks and states around a step.

Before a step runs, blocks are saved to host memory, pages copied, blocks loaded, and new entries of the
page tables written. After it, rows that sat it out get back the states that they had. This file does not
know the model, nor what a step computes.
"""

import numpy as np
import torch
from torch import Tensor

from ramify.gpu.executors.follower import ToldStep
from ramify.gpu.kv.cuda_blocks import Loaded, device_blocks
from ramify.gpu.kv.layout import KVPool, copy_pages
from ramify.gpu.step.rows import PlanError, RowTable, StepRows
from ramify.gpu.step.staging import StepClock, Upload
from ramify.protocol.plan import ExecutorInfo, StepPlan


class DevicePages:
    """The page tables of `table` on the device, over `pool`. Nothing here waits for the device.

    `full`, `windows`: int32[rows + 1, columns], the page tables of full layers and of those with a
    window; the same tensor where no layer has a window. The last row is for padding.
    """

    def __init__(self, pool: KVPool, table: RowTable, info: ExecutorInfo, device: torch.device) -> None:
        windowed = info.window_pages > 0
        shape = 1 + windowed, info.max_rows + 1, -(-table.max_length // info.page_size)
        # one tensor, so that one launch writes a plan's additions to both
        self._tables = torch.full(shape, pool.pages, dtype=torch.int32, device=device)
        self.full, self.windows = self._tables[0], self._tables[-1]
        if windowed:
            self.windows.fill_(info.window_pages)
        self.blocks = device_blocks(pool, info.host_blocks) if info.host_blocks else None
        self._pool, self._table = pool, table
        self._entries, self._copies, self._held = Upload(device), Upload(device), Upload(device)

    def move(
        self, entry: int, clock: StepClock, plan: StepPlan | ToldStep, tokens: Tensor | None
    ) -> Loaded | None:
        """Save blocks, copy pages and load blocks, before any kernel writes a page.

        Returns a function that tells, once the step is over, which blocks could not be loaded: see
        `Loaded`. `tokens`: int32[slots], copied with the pages.
        """
        lost = None
        if self.blocks is not None:
            self.blocks.begin()
            if plan.saves:
                self.blocks.save(plan.saves)
        if self._table.copies is not None:
            sources, targets = self._table.copies
            sent = self._copies.send(entry, sources=sources, targets=targets)
            pages = sent["sources"], sent["targets"]
            self._pool.copy(*pages)
            if tokens is not None:
                copy_pages(tokens, self._pool.page_size, *pages)
        if self.blocks is not None and plan.loads:
            lost = self.blocks.load(plan.loads)
        if plan.saves or plan.loads:
            clock.moved()
        return lost

    def upload(self, entry: int) -> None:
        """Copy what the plan added to the rows' page tables to those on the device."""
        if not self._table.updates:
            return
        rows, first, last = np.array(self._table.updates).T
        counts = last - first
        total = int(counts.sum())
        column = np.arange(total) + np.repeat(first - (np.cumsum(counts) - counts), counts)
        row = np.repeat(rows, counts)
        places, pages = row * self.full.shape[1] + column, self._table.pages[row, column]
        if len(self._tables) > 1:
            places = np.concatenate([places, places + self.full.numel()])
            pages = np.concatenate([pages, self._table.windows[row, column]])
        sent = self._entries.send(entry, places=places, pages=pages)
        self._tables.view(-1).index_copy_(0, sent["places"], sent["pages"])

    def hold_states(self, entry: int, step: StepRows) -> None:
        """Copy the state of each row that sat the step out to the slot that the row was to write.

        Raises PlanError if one of them ran several tokens: the state before its last one is lost.
        """
        if step.states is None or self._pool.states is None or step.asked is None:
            return
        n = step.extends
        ran = np.isin(step.rows[:n], step.asked) & ~np.isin(np.arange(n), step.sampling)
        if (step.counts[:n][ran] > 1).any():
            raise PlanError(f"rows {step.rows[:n][ran].tolist()} sit out behind several tokens")
        held = step.states[:0] if step.held is None else step.held
        sources, targets = np.unique(np.concatenate([held, step.states[:n][ran]]), axis=0).T
        sent = self._held.send(entry, sources=sources, targets=targets)
        self._pool.states.copy(sent["sources"], sent["targets"])

    def close(self) -> None:
        """Release the blocks' host memory."""
        if self.blocks is not None:
            self.blocks.close()
