"""A drafter beside an executor that computes a step before it returns: the CPU's, and torch's.

It asks for guesses before a step and settles the rows behind it. What a row's constraint says must
follow goes ahead of what a drafter guesses. Without either it still accepts the drafts that a plan's
extends bring. It knows neither models nor logits.
"""

import numpy as np

from ramify.gpu.constraints.rows import ConstrainedRows
from ramify.gpu.drafting.base import Drafter, Guesses, no_guesses
from ramify.gpu.sampling.acceptance import Accepted, accept
from ramify.gpu.step.rows import RowTable
from ramify.gpu.step.step_rows import Ints, StepRows
from ramify.protocol.plan import StepPlan


class HostDrafts:
    """The drafts of the rows in `table`."""

    def __init__(
        self,
        table: RowTable,
        drafter: Drafter | None = None,
        constraints: ConstrainedRows | None = None,
    ) -> None:
        self.drafted = self.accepted = 0  # since the start
        self._table = table
        if constraints is None:
            constraints = ConstrainedRows(len(table.requests), table.vocab_size)
        self._constraints = constraints
        self._drafter = drafter
        self._planned: Ints | None = None  # lines of the step under way

    def begin(self, plan: StepPlan, step: StepRows) -> StepRows:
        """The step that the table made of `plan`, with the drafts that were found."""
        self._planned = step.lines
        self._constraints.begin(plan)
        drafter = self._drafter
        if drafter is None:
            return self._guess(plan, step)
        if plan.closes:
            for row in np.frombuffer(plan.closes, dtype=np.int32).tolist():
                drafter.close(row)
        for opened in plan.opens:
            drafter.open(opened)
        step = self._guess(plan, step)
        drafter.runs(step)
        return step

    def _guess(self, plan: StepPlan, step: StepRows) -> StepRows:
        if step.lines is None or not plan.drafts:
            return step
        rows = np.frombuffer(plan.decodes, dtype=np.int32).astype(np.int64)
        most = step.lines[len(step.lines) - len(rows) :] - 1
        must = self._constraints.propose(rows, most)
        most = np.where(self._constraints.active[rows], 0, most)
        drafter = self._drafter
        guesses = no_guesses(len(rows)) if drafter is None else drafter.propose(rows, most)
        if must:
            guesses = _with(guesses, must)
        return step.guessed(guesses.counts, guesses.tokens)

    def end(self, step: StepRows, tokens: Ints) -> Accepted:
        """Settle what the step sampled: `tokens` [S], NO_TOKEN where logits were not finite."""
        accepted, planned = accept(step, tokens), self._planned
        rows = step.sampled_rows
        self._constraints.sampled(rows, accepted.counts, tokens[accepted.kept])
        if step.lines is None and self._drafter is None:
            return accepted
        if step.lines is not None and planned is not None:
            self._table.settle(rows, planned - 1, planned - accepted.counts)
            self.drafted += int(step.lines.sum()) - len(rows)
            self.accepted += int(accepted.counts.sum()) - len(rows)
        if self._drafter is not None:
            self._drafter.observe(rows, accepted.counts, tokens[accepted.kept].astype(np.int32))
        return accepted


def _with(guesses: Guesses, must: dict[int, list[int]]) -> Guesses:
    """`guesses` with other ones for the rows at these places, for which there were none."""
    parts = np.split(guesses.tokens, np.cumsum(guesses.counts)[:-1])
    for at, tokens in must.items():
        parts[at] = np.array(tokens, dtype=np.int32)
    return Guesses(np.array([len(part) for part in parts], dtype=np.int64), np.concatenate(parts))
