"""Drafts of executors that compute a step before `launch` returns: the CPU's, and torch's.

`HostDrafts` asks for guesses before a step and settles rows after it. Tokens that a row's constraint
forces come before a drafter's guesses, of which only legal ones are taken. Without constraints and
drafter it still accepts the drafts in a plan's extends. This file knows neither models nor logits.
"""

from collections.abc import Sequence

import numpy as np

from ramify.gpu.constraints.rows import ConstrainedRows
from ramify.gpu.drafting.base import Drafter, Guesses, no_guesses
from ramify.gpu.sampling.acceptance import AcceptedTokens, accept
from ramify.gpu.step.rows import RowTable
from ramify.gpu.step.step_rows import Flags, Ints, StepRows
from ramify.protocol.plan import STUCK, StepPlan


class HostDrafts:
    """The drafts of the rows in `table`. `ends`: tokens that are never accepted as drafts."""

    def __init__(
        self,
        table: RowTable,
        drafter: Drafter | None = None,
        constraints: ConstrainedRows | None = None,
        ends: tuple[int, ...] = (),
    ) -> None:
        self.drafted = self.accepted = 0  # since the start
        self._late = 0.0  # `Guesses.late` of the step under way
        self._guessed: dict[int, list[bool]] = {}  # of its rows with constraints: which drafts were
        self._table = table
        if constraints is None:
            constraints = ConstrainedRows(len(table.requests), table.vocab_size)
        self._constraints = constraints
        self.drafter = drafter
        self._ends = ends

    @property
    def late_us(self) -> int:
        """`StepResult.late_us` of the step under way."""
        return int(self._late * 1e6)

    def begin(self, plan: StepPlan) -> StepRows:
        """Apply `plan` to the table. Returns what runs, with the drafts that were found.

        Decodes whose constraints are not ready are left out. Raises PlanError if the plan contradicts
        the rows.
        """
        table, drafter = self._table, self.drafter
        self._late, self._guessed = 0.0, {}
        table.change(plan)
        self._constraints.begin(plan)
        if drafter is not None:
            for row in np.frombuffer(plan.closes, dtype=np.int32).tolist():
                drafter.close(row)
            for opened in plan.opens:
                drafter.open(opened)
        absent = None
        if self._constraints.any:
            decodes = np.frombuffer(plan.decodes, dtype=np.int32).astype(np.int64)
            absent = self._constraints.absent(decodes, alone=not plan.extends)
        if plan.drafts:
            decodes = np.frombuffer(plan.decodes, dtype=np.int32).astype(np.int64)
            guesses = self._guess(plan, decodes, absent)
            self._late = guesses.late
            step = table.advance(plan, guesses.counts).guessed(guesses.tokens)
        else:
            step = table.advance(plan)
        if absent is not None:
            step = self._present(step, absent)
        if drafter is not None:
            drafter.runs(step)
        return step

    def _guess(self, plan: StepPlan, rows: Ints, absent: Flags | None) -> Guesses:
        """Guess for `rows`, the decodes of `plan`, except those that are `absent`."""
        most = np.frombuffer(plan.drafts, dtype=np.int32).astype(np.int64)
        if absent is not None:
            most[absent] = 0
        held, drafter = self._constraints.active[rows], self.drafter
        if not held.any():
            return no_guesses(len(rows)) if drafter is None else drafter.propose(rows, most)
        allowed = np.zeros_like(most)
        if plan.guesses and drafter is not None:
            allowed = np.minimum(most, np.frombuffer(plan.guesses, dtype=np.int32))
        own = np.where(held, 0, most)
        if allowed.any():
            own += np.where(held & self._constraints.leaves_a_choice(rows), allowed, 0)
        guesses = no_guesses(len(rows)) if drafter is None else drafter.propose(rows, own)
        parts = np.split(guesses.tokens, np.cumsum(guesses.counts)[:-1])

        def guess(at: int, behind: Sequence[int], count: int) -> Sequence[int]:
            if not behind:
                tokens: list[int] = parts[at][:count].tolist()
                return tokens
            return () if drafter is None else drafter.continued(int(rows[at]), behind, count)

        drafts = self._constraints.propose(rows, np.where(held, most, 0), allowed, guess)
        self._guessed = {int(rows[at]): one.guessed for at, one in drafts.items() if any(one.guessed)}
        for at in np.flatnonzero(held).tolist():
            tokens = drafts[at].tokens if at in drafts else []
            parts[at] = np.array(tokens, dtype=np.int32)
        counts = np.array([len(part) for part in parts], dtype=np.int64)
        return Guesses(counts, np.concatenate(parts), guesses.late)

    def _present(self, step: StepRows, gone: Flags) -> StepRows:
        """Return `step` without the decodes that are `gone`, none of which has a draft."""
        rows = step.sampled_rows
        absent = np.concatenate([np.zeros(len(rows) - len(gone), dtype=np.bool_), gone])
        self._table.sat_out(rows[absent], np.ones(int(gone.sum()), dtype=np.int64))
        return step.without(absent)

    def end(self, step: StepRows, tokens: Ints, inputs: Ints | None = None) -> AcceptedTokens:
        """Settle what the step sampled: `tokens` [S], NO_TOKEN where logits were not finite.

        Sets tokens to STUCK where a constraint allowed none. `inputs`: see `accept`.
        """
        stuck = self._constraints.stuck
        if stuck:
            tokens[list(stuck)] = STUCK
        accepted = accept(step, tokens, inputs, self._ends)
        accepted.reasons = [why for line, why in stuck.items() if accepted.kept[line]]
        rows = step.sampled_rows
        if self._constraints.late:
            self._leave_out(step, accepted)
        if self._constraints.any:
            self._constraints.sampled(rows, accepted.counts, tokens[accepted.kept])
        if self._guessed:
            accepted.guessed = self._count_guesses(rows, accepted.counts)
        if step.lines is None and self.drafter is None:
            return accepted
        some = accepted.counts > 0
        if step.lines is not None:
            lines, counts = step.lines[some], accepted.counts[some]
            self._table.settle(rows[some], lines - 1, lines - counts)
            self.drafted += len(tokens) - len(rows)
            self.accepted += int(counts.sum()) - len(counts)
        if self.drafter is not None:
            kept = tokens[accepted.kept].astype(np.int32)
            self.drafter.observe(rows[some], accepted.counts[some], kept)
        return accepted

    def _count_guesses(self, rows: Ints, counts: Ints) -> Ints:
        """Count `AcceptedTokens.guessed`."""
        found = np.zeros((len(rows), 2), dtype=np.int64)
        for at, (row, count) in enumerate(zip(rows.tolist(), counts.tolist(), strict=True)):
            own = self._guessed.get(row)
            if own is not None:
                found[at] = sum(own), sum(own[: max(0, count - 1)])
        return found

    def _leave_out(self, step: StepRows, accepted: AcceptedTokens) -> None:
        """Drop what rows sampled whose masks were not made in time: they sat the step out."""
        rows, lines = step.sampled_rows, step.lines
        late = np.isin(rows, list(self._constraints.late))
        accepted.counts[late] = 0
        accepted.kept[late if lines is None else np.repeat(late, lines)] = False
        lines = np.ones_like(rows) if lines is None else lines
        self._table.sat_out(rows[late], lines[late])
