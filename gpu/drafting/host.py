"""A drafter beside an executor that computes a step before it returns: the CPU's, and torch's.

It asks for guesses before a step and settles the rows behind it. Without a drafter it still accepts the
drafts that a plan's extends bring. It knows neither models nor logits.
"""

import numpy as np

from ramify.gpu.drafting.base import Drafter
from ramify.gpu.sampling.acceptance import Accepted, accept
from ramify.gpu.step.rows import RowTable
from ramify.gpu.step.step_rows import Ints, StepRows
from ramify.protocol.plan import StepPlan


class HostDrafts:
    """The drafts of the rows in `table`."""

    def __init__(self, table: RowTable, drafter: Drafter | None = None) -> None:
        self.drafted = self.accepted = 0  # since the start
        self._table = table
        self._drafter = drafter
        self._planned: Ints | None = None  # lines of the step under way

    def begin(self, plan: StepPlan, step: StepRows) -> StepRows:
        """The step that the table made of `plan`, with the drafts that were found."""
        self._planned = step.lines
        drafter = self._drafter
        if drafter is None:
            return step
        if plan.closes:
            for row in np.frombuffer(plan.closes, dtype=np.int32).tolist():
                drafter.close(row)
        for opened in plan.opens:
            drafter.open(opened)
        if step.lines is not None and plan.drafts:
            rows = np.frombuffer(plan.decodes, dtype=np.int32).astype(np.int64)
            guesses = drafter.propose(rows, step.lines[len(step.lines) - len(rows) :] - 1)
            step = step.guessed(guesses.counts, guesses.tokens)
        drafter.runs(step)
        return step

    def end(self, step: StepRows, tokens: Ints) -> Accepted:
        """Settle what the step sampled: `tokens` [S], NO_TOKEN where logits were not finite."""
        accepted, planned = accept(step, tokens), self._planned
        if step.lines is None and self._drafter is None:
            return accepted
        rows = step.sampled_rows
        if step.lines is not None and planned is not None:
            self._table.settle(rows, planned - 1, planned - accepted.counts)
            self.drafted += int(step.lines.sum()) - len(rows)
            self.accepted += int(accepted.counts.sum()) - len(rows)
        if self._drafter is not None:
            self._drafter.observe(rows, accepted.counts, tokens[accepted.kept].astype(np.int32))
        return accepted
