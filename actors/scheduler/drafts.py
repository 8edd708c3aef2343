"""How many drafts each decode of a step runs, and what became of them.

Where the executor has a drafter, `speculation` says how many. Where a run has a constraint, the executor
is asked for what it forces, too. A run with drafts is planned by its upper bound: `offset` grows by its
drafts when they are planned, and falls by the refused ones when the result is there. So pages cover all
that it may have, and its limit is never passed.

This file knows runs, steps and their results, not prompts, pages or plans.
"""

from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ramify.actors.scheduler.request import RequestRun, SchedulerError, SentStep
from ramify.actors.scheduler.speculation import DraftRecord, Speculation
from ramify.protocol.plan import ExecutorInfo, StepResult, unpack

FEW_FORCED = 8  # drafts that are asked for where a constraint said nothing the last time


class StepDrafts(NamedTuple):
    """The drafts of the next step. `asked`, `guesses`, `missing`: see `SentStep`."""

    asked: list[int]
    guesses: list[int] | None
    missing: int
    free: int  # those of runs without a constraint


class DecodeDrafts:
    """The drafts of the runs that decode. `in_flight`: steps that may be under way."""

    def __init__(self, info: ExecutorInfo, in_flight: int) -> None:
        self.speculation = Speculation(info.max_drafts) if info.drafter and info.max_drafts else None
        self._most_forced = info.max_forced
        self._guesses_constrained = info.guesses_constrained
        # One more decode has to fit behind a draft, or the run would have to wait for the result.
        self._behind = min(2, in_flight)
        # of the runs that decode, if there is a drafter; None: a run for which nobody guesses
        self._records: list[DraftRecord | None] = []
        self._changed = False  # they are not what `speculation` has seen
        self._jumping: list[int] = []  # places of runs whose constraints may draft
        self.due = self.speculation is not None  # a step may have drafts

    def changed(self, runs: Sequence[RequestRun], tick: int) -> None:
        """Replace the set of runs that decode."""
        if self._most_forced:
            self._jumping = [i for i, run in enumerate(runs) if run.jumps]
            for i in self._jumping:
                runs[i].jump = runs[i].jump or self._most_forced
        if self.speculation is not None:
            self._records = [
                None if run.jumps and not self._guesses_constrained else _record(run, tick)
                for run in runs
            ]
            self._changed = True
        self.due = self.speculation is not None or bool(self._jumping)

    def choose(self, runs: Sequence[RequestRun], tick: int, room: int) -> StepDrafts | None:
        """The drafts of `runs` in the next step; None: there are none.

        Their sum is at most `room`, so that no more lines sample than there are rows.
        """
        if not runs:
            return None
        wanted: list[int] | None = None
        guesses: list[int] | None = None
        speculation = self.speculation
        if speculation is not None:
            wanted = speculation.choose(self._records, room, changed=self._changed)
            self._changed = False
        if wanted is not None and self._guesses_constrained:
            pairs = zip(runs, wanted, strict=True)
            guesses = [min(count, room) if run.jumps else 0 for run, count in pairs]
        if self._jumping and (speculation is None or not speculation.measuring):
            wanted = self._jump(runs, wanted, room)
        if wanted is None:
            return None
        asked, free, missing = [0] * len(wanted), 0, 0
        for i, (run, count) in enumerate(zip(runs, wanted, strict=True)):
            count = min(count, run.stop_at - tick - run.offset - self._behind)
            if count <= 0:
                continue
            if guesses is None or not run.jumps or guesses[i]:
                missing += self._begin(i, run.prompt + tick + run.offset)
            run.offset += count
            asked[i] = count
            free += 0 if run.jumps else count
        if not any(asked):
            return None
        return StepDrafts(asked, guesses if guesses and any(guesses) else None, missing, free)

    def _begin(self, place: int, length: int) -> int:
        """Tokens of a run that the drafter has to compute, to know all `length` of them."""
        record = self._records[place] if self._records else None
        if record is None:
            return 0
        missing, record.known = max(0, length - record.known), length
        return missing

    def _jump(self, runs: Sequence[RequestRun], wanted: list[int] | None, room: int) -> list[int]:
        """`wanted` with more drafts for runs with constraints, as far as there is `room`.

        Forced tokens are always accepted, so they go ahead of guesses. Where the constraint forced
        nothing last time, few drafts are asked for until it forces that many. Guesses of such a run are
        among these drafts.
        """
        wanted = [0] * len(runs) if wanted is None else wanted.copy()
        left = room
        for place, i in enumerate(self._jumping):
            most = max(runs[i].jump, wanted[i])
            wanted[i] = min(most, left // (len(self._jumping) - place))
            left -= wanted[i]
        if sum(wanted) > room:
            for i, run in enumerate(runs):
                if not run.jump:
                    wanted[i] = min(wanted[i], left)
                    left -= wanted[i]
        return wanted

    def settle(self, step: SentStep, result: StepResult) -> list[RequestRun]:
        """Lower the bounds of runs that got fewer tokens than planned, and learn how their drafts did.

        Returns those that do not decode now, whose `planned` has fallen.
        """
        decodes = len(step.bound) - step.firsts
        asked = [0] * step.firsts + (step.asked or [0] * decodes)
        counts = step.counts or [1] * len(step.bound)
        if step.asked is not None:
            self._learn(step, result, step.asked, counts[step.firsts :])
        fallen = []
        for run, more, tokens in zip(step.bound, asked, counts, strict=True):
            less = 1 + more - tokens
            if not run.live or less <= 0:
                continue
            if run.decoding:
                run.offset -= less
            else:
                run.planned -= less
                fallen.append(run)
        return fallen

    def _learn(
        self, step: SentStep, result: StepResult, asked: Sequence[int], counts: Iterable[int]
    ) -> None:
        """Note how the drafts of each decode did: `asked` of the executor, `counts` tokens there are."""
        runs, none = step.bound[step.firsts :], [0] * len(asked)
        ran, guessed, right = _ran(step, result)
        each = zip(runs, asked, counts, ran, step.guesses or none, guessed, right, strict=True)
        for run, count, tokens, drafts, guesses, own, accepted in each:
            if not count:
                continue
            if run.jump:
                most = self._most_forced
                run.jump = most if drafts - own == count else min(most, FEW_FORCED)
            record = run.request.record
            if self.speculation is None or record is None or not tokens:
                continue
            if not run.jumps:
                self.speculation.landed(record, count, drafts, tokens - 1)
            elif guesses:
                self.speculation.landed(record, guesses, own, accepted)

    def measure(self, speculation: Speculation, step: SentStep, result: StepResult) -> None:
        """Learn from the decodes of a step and its time. Steps with prompts, drafts of constraints or
        paused rows say nothing and are skipped.
        """
        bound = step.bound[step.firsts :]
        if step.asked is None and step.counts is None:
            seconds = None if step.chunks else (result.busy_us or result.elapsed_us) * 1e-6
            speculation.took(len(bound), 0, 0, len(bound), seconds)
            return
        counts = step.counts[step.firsts :] if step.counts is not None else [1] * len(bound)
        depth = drafts = tokens = 0
        alone, none = not step.chunks, [0] * len(bound)
        each = zip(
            bound, counts, step.asked or none, step.guesses or none, *_ran(step, result), strict=True
        )
        for run, count, asked, guesses, ran, guessed, right in each:
            if run.jumps:
                depth = max(depth, guesses)
                drafts += guessed
                tokens += 1 + right
                alone = alone and ran == guessed
            else:
                depth = max(depth, asked)
                drafts += ran
                tokens += count
            alone = alone and count > 0
        late = result.late_us * 1e-6
        seconds = (result.busy_us or result.elapsed_us) * 1e-6 - late if alone else None
        speculation.took(len(bound), drafts, depth, tokens, seconds, late, step.missing)


def _record(run: RequestRun, tick: int) -> DraftRecord:
    """The run's draft record, with its current length and what it may still output."""
    request = run.request
    if request.record is None:
        request.record = DraftRecord()
    request.record.length = run.prompt + tick + run.offset
    request.record.rest = run.limit - len(run.out)
    return request.record


def _ran(step: SentStep, result: StepResult) -> tuple[Sequence[int], Sequence[int], Sequence[int]]:
    """For each decode: drafts that it ran; those of them that were guessed under a constraint, and how
    many of these were accepted."""
    first, none = step.firsts, [0] * (len(step.bound) - step.firsts)
    ran = unpack(result.drafted)[first:] if result.drafted else none
    if not result.guessed:
        return ran, none, none
    both = unpack(result.guessed)
    return ran, both[2 * first :: 2], both[2 * first + 1 :: 2]


def counts_of(step: SentStep, result: StepResult) -> "array[int]":
    """Tokens of each run of `step`. Raises SchedulerError if they fit no plan."""
    counts, drafted = unpack(result.counts), unpack(result.drafted)
    asked = [0] * step.firsts + (step.asked or [0] * (len(step.bound) - step.firsts))
    fits = len(counts) == len(asked) and len(drafted or asked) == len(asked)
    if not fits or any(
        not 0 <= count <= 1 + ran <= 1 + most
        for count, ran, most in zip(counts, drafted or [0] * len(asked), asked, strict=True)
    ):
        raise SchedulerError(
            f"step {step.step}: {counts.tolist()} tokens and {drafted.tolist()} drafts, "
            f"asked were {asked}"
        )
    return counts


def forced_drafts(step: SentStep, result: StepResult) -> int:
    """Drafts that constraints forced. They are computed as a prompt's tokens are."""
    ran, guessed, _ = _ran(step, result)
    each = zip(step.bound[step.firsts :], ran, guessed, strict=True)
    return sum(count - own for run, count, own in each if run.jumps)
