"""Guesses by a smaller model with the same tokens (Leviathan et al. 2023): its greedy continuation.

Its keys and values have the page numbers of the model's, under a layout of their own. So forks,
rollbacks and shared prefixes hold for it as well, without a message.

It computes only what it needs: a row without drafts costs nothing, and one that is drafted again first
catches up, in a run of its own, whose time is reported apart (`Guesses.late`). A flag for each slot says
whether its keys fit the tokens of the slot's owner: the model's writes make a slot stale, the drafter's
make it fresh. A new row finds the keys of an earlier one with the same prefix.

This file knows rows, tokens and slots; a `DraftRunner` knows the model. A row longer than the drafter's
context gets no guesses.
"""

import time
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from ramify.gpu.drafting.base import Guesses, no_guesses
from ramify.gpu.drafting.histories import DraftHistories
from ramify.gpu.step.rows import RowTable
from ramify.gpu.step.step_rows import Ints, StepRows, Tokens, leading, within
from ramify.protocol.plan import OpenRow

CATCH_UP = 512  # tokens in a step at most: longer prompts are caught up with in several
FEW = 8  # missing tokens that run beside the last one, at next to no cost; more are caught up with first


class DraftRunner(Protocol):
    """Interface: a model that continues rows greedily."""

    def run(self, step: StepRows, most: Ints) -> Ints:
        """Run `step`, whose tokens are all given, and continue its S lines that sample to `most` tokens.

        `most` [S] descends. Returns int64 [S, most[0]]; beyond a row's own tokens is garbage.
        """
        ...


class ModelDrafter:
    """Drafter over the pages of `table`, up to position `context`."""

    def __init__(
        self, runner: DraftRunner, table: RowTable, context: int, vocabulary: int, slots: int
    ) -> None:
        """`vocabulary`: the drafter's; `slots`: of the pool."""
        rows = len(table.requests)
        self._runner, self._table = runner, table
        self._context, self._vocabulary = context, vocabulary
        self._histories = DraftHistories(rows)
        self._fresh = np.zeros(slots, dtype=np.bool_)
        self._ready: Ints = np.zeros(rows, dtype=np.int64)  # positions below it have their KV
        # inputs that ran from the last token's position on, in the step under way
        self._ran: Ints = np.zeros(rows, dtype=np.int64)
        self._said: dict[int, list[int]] = {}  # the guesses of the rows that ran

    def open(self, opened: OpenRow) -> None:
        row, table = opened.row, self._table
        self._histories.open(row, opened.history)
        known = min(opened.cached, int(self._histories.lengths[row]))
        copied = table.slots(row, opened.cached - opened.cached % table.page_size, opened.cached)
        self._fresh[copied] = False  # the model's keys only: see `StepPlan.copies`
        self._ready[row] = leading(self._fresh[table.slots(row, 0, known)])
        self._ran[row] = 0

    def close(self, row: int) -> None:
        self._histories.close(row)

    def propose(self, rows: Ints, most: Ints) -> Guesses:
        lengths = self._histories.lengths[rows]  # the last token included, which has no KV yet
        most = np.where(lengths > 0, np.clip(self._context - lengths + 1, 0, most), 0)
        missing = lengths - self._ready[rows]
        late = 0.0
        behind = (missing > FEW) & (most > 0)
        if behind.any():
            begin = time.thread_time()
            self._catch_up(rows[behind])
            late = time.thread_time() - begin
            missing = lengths - self._ready[rows]
            most[missing > FEW] = 0
        if FEW * len(rows) > CATCH_UP:
            most[np.cumsum(np.where(most > 0, missing, 0)) > CATCH_UP] = 0
        asked = np.flatnonzero(most)
        if not len(asked):
            return no_guesses(len(rows), late)
        asked = asked[np.argsort(-most[asked], kind="stable")]
        own = rows[asked]
        step = self._step(own, missing[asked], np.arange(len(asked)))
        guesses = self._runner.run(step, most[asked])
        if step.extends:  # else only the last tokens ran, whose slots the model is going to write
            self._mark(step.rows, step.starts, step.counts)
        self._ready[own] = lengths[asked]
        self._ran[own] = most[asked]
        place = np.empty(len(rows), dtype=np.int64)
        place[asked] = np.arange(len(asked))
        for at, number, count in zip(own.tolist(), range(len(own)), most[asked].tolist(), strict=True):
            self._said[at] = guesses[number, :count].tolist()
        tokens = guesses[np.repeat(place, most), within(most)]
        limit = self._table.vocab_size - 1
        return Guesses(most, np.minimum(tokens, limit).astype(np.int32), late)

    def continued(self, row: int, behind: Sequence[int], most: int) -> list[int]:
        return []

    def _catch_up(self, rows: Ints) -> None:
        """Compute what `rows` miss before their last tokens, `CATCH_UP` tokens in all at most.

        Rows that miss the same tokens of a common prefix: the first of them computes it, the others
        find it in the next step.
        """
        ends = self._histories.lengths[rows] - 1
        for row, end in zip(rows.tolist(), ends.tolist(), strict=True):  # others may have left something
            first = int(self._ready[row])
            self._ready[row] = first + leading(self._fresh[self._table.slots(row, first, end)])
        starts = self._ready[rows]
        _, firsts = np.unique(self._table.slots_at(rows, starts), return_index=True)
        firsts = np.sort(firsts)
        rows, missing = rows[firsts], (ends - starts)[firsts]
        counts = np.minimum(missing, np.maximum(0, CATCH_UP - (np.cumsum(missing) - missing)))
        rows, counts = rows[counts > 0], counts[counts > 0]
        if not len(rows):
            return
        none = np.empty(0, dtype=np.int64)
        step = self._step(rows, counts, none)
        self._runner.run(step, none)
        self._mark(step.rows, step.starts, counts)
        self._ready[rows] = step.starts + counts

    def runs(self, step: StepRows) -> None:
        self._histories.runs(step)
        rows, positions = step.rows, step.starts
        if step.extends:
            rows = np.repeat(rows, step.counts)
            positions = np.repeat(positions, step.counts) + within(step.counts)
        if len(rows):
            self._fresh[self._table.slots_at(rows, positions)] = False

    def observe(self, rows: Ints, counts: Ints, tokens: Tokens) -> None:
        drafted = np.flatnonzero(self._ran[rows])
        if len(drafted):  # so many of the inputs that ran are the row's tokens now
            own, ends = rows[drafted], np.cumsum(counts)[drafted]
            sampled = (
                tokens[end - count : end] for end, count in zip(ends, counts[drafted], strict=True)
            )
            right = np.array([self._right(*one) for one in zip(own.tolist(), sampled, strict=True)])
            starts = self._histories.lengths[own] - 1
            self._mark(own, starts, right)
            self._ready[own] = starts + right
            self._ran[own] = 0
        end = 0
        for row, count in zip(rows.tolist(), counts.tolist(), strict=True):
            self._histories.append(row, tokens[end : end + count])
            end += count

    def _right(self, row: int, sampled: Tokens) -> int:
        """Count the inputs that ran and are now the row's tokens: its last one, then its right guesses.

        The last guess did not run. A constraint may have put other drafts in the place of guesses.
        """
        right = 1
        for said, token in zip(self._said[row][:-1], sampled.tolist(), strict=False):
            if said != token:
                break
            right += 1
        return right

    def _step(self, rows: Ints, counts: Ints, complete: Ints) -> StepRows:
        """Make extends of `rows` by `counts` missing tokens; decodes if that is one token each.

        Those at `complete` sample.
        """
        starts = self._ready[rows]
        runs = [
            self._histories.of(row)[start : start + count]
            for row, start, count in zip(rows.tolist(), starts.tolist(), counts.tolist(), strict=True)
        ]
        tokens = np.clip(np.concatenate(runs), 0, self._vocabulary - 1)
        if len(tokens) == len(rows) == len(complete):
            return StepRows(rows, starts, counts, 0, tokens[:0], complete, complete, given=tokens)
        return StepRows(rows, starts, counts, len(rows), tokens, complete, complete)

    def _mark(self, rows: Ints, starts: Ints, counts: Ints) -> None:
        """Mark `counts` positions from `starts` on: they have their KV."""
        positions = np.repeat(starts, counts) + within(counts)
        self._fresh[self._table.slots_at(np.repeat(rows, counts), positions)] = True
