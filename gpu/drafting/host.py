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
            return self._guess(plan, self._present(step))
        if plan.closes:
            for row in np.frombuffer(plan.closes, dtype=np.int32).tolist():
                drafter.close(row)
        for opened in plan.opens:
            drafter.open(opened)
        step = self._guess(plan, self._present(step))
        drafter.runs(step)
        return step

    def _present(self, step: StepRows) -> StepRows:
        """`step` without the decodes whose constraints are not ready."""
        rows = step.sampled_rows
        extends = int((step.sampling < step.extends).sum())  # that sample
        gone = self._constraints.absent(rows[extends:], alone=not step.extends)
        if gone is None:
            return step
        absent = np.concatenate([np.zeros(extends, dtype=np.bool_), gone])
        lines = np.ones_like(rows) if step.lines is None else step.lines
        self._table.sat_out(rows[absent], lines[absent])
        step = step.without(absent)
        self._planned = step.lines
        return step

    def _guess(self, plan: StepPlan, step: StepRows) -> StepRows:
        if step.lines is None or not plan.drafts:
            return step
        extends = int((step.sampling < step.extends).sum())
        rows, most = step.sampled_rows[extends:], step.lines[extends:] - 1
        if not len(rows):
            return step
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
        if self._constraints.late:
            self._leave_out(step, accepted)
        self._constraints.sampled(rows, accepted.counts, tokens[accepted.kept])
        if step.lines is None and self._drafter is None:
            return accepted
        some = accepted.counts > 0
        if step.lines is not None and planned is not None:
            self._table.settle(rows[some], planned[some] - 1, (planned - accepted.counts)[some])
            self.drafted += int(step.lines.sum()) - len(rows)
            self.accepted += int(accepted.counts.sum()) - int(some.sum())
        if self._drafter is not None:
            kept = tokens[accepted.kept].astype(np.int32)
            self._drafter.observe(rows[some], accepted.counts[some], kept)
        return accepted

    def _leave_out(self, step: StepRows, accepted: Accepted) -> None:
        """Rows whose masks were not there in time sat the step out, whatever their lines sampled."""
        rows, planned = step.sampled_rows, self._planned
        late = np.isin(rows, list(self._constraints.late))
        accepted.counts[late] = 0
        accepted.kept[late if step.lines is None else np.repeat(late, step.lines)] = False
        planned = np.ones_like(rows) if planned is None else planned
        self._table.sat_out(rows[late], planned[late])


def _with(guesses: Guesses, must: dict[int, list[int]]) -> Guesses:
    """`guesses` with other ones for the rows at these places, for which there were none."""
    parts = np.split(guesses.tokens, np.cumsum(guesses.counts)[:-1])
    for at, tokens in must.items():
        parts[at] = np.array(tokens, dtype=np.int32)
    return Guesses(np.array([len(part) for part in parts], dtype=np.int64), np.concatenate(parts))
