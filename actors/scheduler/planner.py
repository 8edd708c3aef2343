"""Which rows run in the next step, and what became of the steps that were sent.

A plan is decodes first (they keep their inter-token latency), then prefill chunks as `prompt_queue`
hands them out. `max_rows` is at most the step's tokens, so decodes always leave room for a prompt.

All decoding rows advance together, so their progress is one number, `tick`: the tokens planned for a run
are `tick + run.offset`. A run is looked at only at ticks where something happens to it: it needs slots,
it has none left, or its last token is planned. Between those ticks a step costs nothing per request, and
the packed row array is reused.

Where the executor has a drafter, `speculation` says how many drafts each row runs. A run with drafts is
planned by its upper bound: `offset` grows by its drafts when they are planned, and falls by the refused
ones when the result is there. So pages cover all that it may have, and its limit is never passed. A run
at its bound pauses until results say how far it got.

This file knows rows and slots, not what the cache does, nor the clock, nor what a token means.
"""

from array import array
from collections import deque
from collections.abc import Iterable, Iterator

from ramify.actors.scheduler.constraint_table import ConstraintTable
from ramify.actors.scheduler.pace import FIRST_ON_CPU, Pace
from ramify.actors.scheduler.prompt_queue import PromptQueue
from ramify.actors.scheduler.request import Level, Run, SchedulerError
from ramify.actors.scheduler.speculation import DraftRecord, Speculation
from ramify.protocol.config import ScheduleConfig
from ramify.protocol.messages import Commit
from ramify.protocol.plan import (
    ExecutorInfo,
    ExtendRow,
    GrowRow,
    OpenRow,
    StepPlan,
    StepResult,
    pack,
    unpack,
)

FEW_FORCED = 8  # drafts that are asked for where a constraint said nothing the last time
Chunk = tuple[Run, int, int]  # of a prefill: the run, its length after it, how many scores it brings


class SentStep:
    """A plan that was sent. `bound`: the runs whose tokens come back, in the result's order.

    `counts`, once its result is there: tokens of each of them; None: one each.
    """

    __slots__ = (
        "asked", "bound", "chunks", "counts", "firsts", "guesses", "missing", "rows", "step", "work"
    )  # fmt: skip

    def __init__(
        self,
        step: int,
        bound: list[Run],
        rows: bytes,
        chunks: list[Chunk],
        firsts: int,
        work: int,
        asked: list[int] | None = None,
        missing: int = 0,
        guesses: list[int] | None = None,
    ) -> None:
        self.step = step
        self.bound = bound
        self.rows = rows
        self.chunks = chunks
        self.firsts = firsts  # so many leading entries of `bound` completed their prompt
        self.work = work  # of all chunks, in prompt tokens: see `Pace.work`
        self.asked = asked  # drafts for each decode; None: no draft for any
        # of each decode with a constraint, how many of these drafts may be guessed; None: of all none
        self.guesses = guesses
        self.missing = missing  # tokens that the drafter has to compute first, of rows that it begins
        self.counts: array[int] | None = None


class Planner:
    """Rows, the decode set, the prompts and the steps in flight."""

    def __init__(self, info: ExecutorInfo, config: ScheduleConfig) -> None:
        self._page_size = info.page_size
        self._limit = self._most_in_flight = config.in_flight
        self._on_cpu = info.device == "cpu"
        self._watermark = max(1, min(4, config.lookahead // 2))  # slots left when more are asked for
        self.pace = Pace(info, config)
        self._prompts = PromptQueue(info, config, self.pace)
        self.constraints = ConstraintTable()
        self.max_rows = min(info.max_rows, info.step_tokens)
        self.working = 0  # state slots that a run needs; 0: the model has no fixed states
        if info.state_slots:
            self.working = config.in_flight + 1
            # a row also reads one that is not its own
            self.max_rows = min(self.max_rows, info.state_slots // (self.working + 1))
            if not self.max_rows:
                raise SchedulerError(
                    f"{info.state_slots} state slots: one row needs {self.working + 1} of them"
                )
            if info.max_drafts or info.max_forced:
                raise SchedulerError("a model with fixed states runs no drafts yet")
        self._turns: list[bytes] = []  # the decodes' state slots in steps to come, from `_turned` on
        self._turned = 0
        self._rows = list(range(self.max_rows - 1, -1, -1))
        self._decoding: list[Run] = []
        self._joining: list[Run] = []
        self._decode_rows = b""
        self._changed = False  # the decode set is not what `_decoding` says
        self._speculation = Speculation(info.max_drafts) if info.drafter and info.max_drafts else None
        # of `_decoding`, if there is a drafter; None: a run for which nobody guesses
        self._records: list[DraftRecord | None] = []
        self._missing = 0  # see `SentStep`, of the one that is planned
        self._rebuilt = False  # it is not what `_speculation` has seen
        if self._speculation is not None:  # slots for what may be drafted until more are here
            self._watermark = max(self._watermark, min(config.lookahead // 2, 2 * (1 + info.max_drafts)))
        self._max_forced = info.max_forced
        self._guesses_constrained = info.guesses_constrained
        self._guesses: list[int] | None = None  # see `SentStep`, of the one that is planned
        self._jumping: list[int] = []  # places in `_decoding` of runs whose constraints may draft
        self._reviews: dict[int, list[Run]] = {}
        self._tick = 0
        self._step = 0
        self._closes: list[int] = []
        self._grows: list[GrowRow] = []
        self._copies: dict[int, int] = {}  # page by the page that it is copied to
        self.in_flight: deque[SentStep] = deque()
        self.wanted: list[Run] = []  # runs that need a Grow; the caller takes them away
        self.awaited: list[Run] = []  # of the last step, those that requests wait for; the same
        self.processed = 0  # tokens planned since the start

    @property
    def free_rows(self) -> int:
        return len(self._rows)

    @property
    def running(self) -> int:
        return self.max_rows - len(self._rows)

    @property
    def enough(self) -> int:
        """See `PromptQueue.enough`."""
        return self._prompts.enough

    @property
    def step(self) -> int:
        """The last step that was planned."""
        return self._step

    def take_row(self) -> int:
        return self._rows.pop()

    def admit(self, run: Run) -> None:
        """`run` (with a row from `take_row`) is prefilled from the next plan on."""
        self._prompts.add(run)

    @property
    def long_prompts(self) -> int:
        """Prompts being computed, not ahead, that take several of the largest steps."""
        return self._prompts.long_awaited

    def lacking(self, level: Level) -> int:
        """See `PromptQueue.lacking`."""
        return self._prompts.lacking(level, len(self._decoding))

    def hurry(self, run: Run, level: Level) -> None:
        """A request of `level` waits for the prompt of `run`."""
        self._prompts.hurry(run, level)

    def in_vain(self, run: Run) -> int:
        """Tokens of `run` in the steps under way, which count for nothing if it is dropped now."""
        planned = self.written(run) - run.filled
        return run.filled - run.kept + max(0, planned - len(run.out) - (run.computed < run.prompt))

    def written(self, run: Run) -> int:
        """Positions that the steps of `run` so far may write, but for drafts that were refused."""
        return run.filled + (self._tick + run.offset if run.decoding else run.planned)

    def drop(self, run: Run) -> None:
        """Leave `run` out of new plans; results in flight for it are ignored.

        Its row can be handed out at once: a plan closes rows before it opens any.
        """
        run.live = False
        if self._speculation is not None and run.out:
            self._speculation.ended(len(run.out))
        self._prompts.forget(run)
        if run.decoding:
            self._leave(run)
        if run.opened:
            self._closes.append(run.row)
            if self._grows:  # its next owner must not get them
                self._grows = [grow for grow in self._grows if grow.row != run.row]
        self._rows.append(run.row)

    def lost(self) -> None:
        """The executor is gone, with the steps in flight and its rows; their runs were dropped.

        Nothing is planned until `resume`.
        """
        self._limit = 0
        self.in_flight.clear()
        self._closes.clear()
        self._grows.clear()
        self._copies.clear()
        self.wanted.clear()
        self.awaited.clear()
        self.constraints.reload()

    def resume(self) -> None:
        """There is another executor."""
        self._limit = self._most_in_flight

    def grown(self, run: Run, pages: bytes, windows: bytes = b"") -> None:
        """`run` got the pages it asked for."""
        run.growing = False
        run.slots += len(pages) // 4 * self._page_size
        self._grows.append(GrowRow(run.row, pages, windows))
        if run.decoding:
            run.planned = self._tick + run.offset
        self._schedule(run)

    def copy(self, copies: bytes) -> None:
        """The next plan copies these pages: see `StepPlan`. A page is written as was said last."""
        pages = unpack(copies)
        self._copies.update(zip(pages[1::2], pages[::2], strict=True))

    def plan(self) -> StepPlan | None:
        """The next step, or None if there is nothing to do or enough is in flight."""
        if len(self.in_flight) >= self._limit or self._can_wait():
            return None
        for run in self._reviews.pop(self._tick, ()):
            if run.decoding and run.due == self._tick:
                run.planned = self._tick + run.offset
                self._schedule(run)
        if self._changed:
            self._rebuild()
        states: array[int] = array("i")
        bound, rows = self._decoding, self._decode_rows
        asked: list[int] | None = None
        self._missing, self._guesses = 0, None
        lines = decodes = len(bound)
        if bound and (self._speculation is not None or self._jumping):
            asked = self._draft()
            if asked is not None:
                lines += sum(asked)
                decodes += sum(count for run, count in zip(bound, asked, strict=True) if not run.jumps)
        opens: list[OpenRow] = []
        extends: list[ExtendRow] = []
        chunks: list[Chunk] = []
        firsts: list[Run] = []
        prompts = work = 0
        for run, start, end in self._prompts.take(decodes, lines) if self._prompts.order else ():
            if not run.opened:
                run.opened = True
                opens.append(self._open(run))
            extends.append(self._extend(run, start, end))
            if run.states is not None:
                states.extend(run.states.chunk(end))
                run.cut = run.states.cut or run.prompt
            targets = run.request.targets
            scores = len(extends[-1].targets) // 4 * targets.width if targets is not None else 0
            chunks.append((run, end, scores))
            prompts += end - start
            work += self.pace.work(run, start, end)
            if extends[-1].sample:
                firsts.append(run)
            if run.waiters:
                self.awaited.append(run)
        if firsts:
            bound = firsts + bound
            rows = pack(run.row for run in firsts) + rows
        news = self._closes or self.constraints.due
        if not extends and not bound and (self.in_flight or not news):
            return None
        slots = states.tobytes() + self._decode_states() if self.working else b""
        self._step += 1
        self._tick += 1
        self.processed += prompts + lines
        self.in_flight.append(
            SentStep(
                self._step, bound, rows, chunks, len(firsts), work, asked, self._missing, self._guesses
            )
        )  # fmt: skip
        grows, self._grows = self._grows, []
        closes = b""
        if self._closes:
            closes, self._closes = pack(self._closes), []
        drafts = guesses = b""
        if asked is not None:
            drafts = pack(asked)
            guesses = b"" if self._guesses is None else pack(self._guesses)
            for run, count in zip(self._decoding, asked, strict=True):
                if count:
                    run.planned = self._tick + run.offset
                    self._schedule(run)
        loads = self.constraints.loads() if self.constraints.due else []
        forgets = self.constraints.forgets() if self.constraints.dropped else b""
        copies = b""
        if self._copies:
            copies = pack(page for pair in self._copies.items() for page in reversed(pair))
            self._copies.clear()
        plan = StepPlan(
            self._step, closes, opens, grows, extends, self._decode_rows, drafts, loads, forgets,
            guesses, copies, slots,
        )  # fmt: skip
        for run in firsts:
            run.planned = 1
            self._schedule(run)
        return plan

    def _draft(self) -> list[int] | None:
        """Drafts for each decode of the next step; None: for no decode.

        The number of free rows bounds their sum, so that no more lines sample than there are rows.
        """
        wanted: list[int] | None = None
        room, speculation = len(self._rows), self._speculation
        if speculation is not None:
            wanted = speculation.choose(self._records, room, changed=self._rebuilt)
            self._rebuilt = False
        guesses = None
        if wanted is not None and self._guesses_constrained:
            guesses = [
                min(count, room) if run.jumps else 0
                for run, count in zip(self._decoding, wanted, strict=True)
            ]
        if self._jumping and (speculation is None or not speculation.measuring):
            wanted = self._jump(wanted, room)
        if wanted is None:
            return None
        if guesses is not None and any(guesses):
            self._guesses = guesses
        # One more decode has to fit behind it, or the run would have to wait for the result.
        behind = min(2, self._limit)
        some = False
        asked = [0] * len(wanted)
        tick, records = self._tick, self._records
        for i, (run, count) in enumerate(zip(self._decoding, wanted, strict=True)):
            if count:
                count = min(count, run.stop_at - tick - run.offset - behind)
                if count > 0:
                    record = records[i] if records else None
                    if record is not None and (guesses is None or not run.jumps or guesses[i]):
                        length = run.prompt + tick + run.offset
                        self._missing += max(0, length - record.known)
                        record.known = length
                    run.offset += count
                    asked[i] = count
                    some = True
        return asked if some else None

    def _jump(self, wanted: list[int] | None, room: int) -> list[int]:
        """`wanted` with more drafts for runs with constraints, as far as there is `room`.

        Forced tokens are always accepted, so they go ahead of guesses. Where the constraint forced
        nothing last time, few drafts are asked for until it forces that many. Guesses of such a run are
        among these drafts.
        """
        wanted = [0] * len(self._decoding) if wanted is None else wanted.copy()
        left = room
        for place, i in enumerate(self._jumping):
            most = max(self._decoding[i].jump, wanted[i])
            wanted[i] = min(most, left // (len(self._jumping) - place))
            left -= wanted[i]
        if sum(wanted) > room:
            for i, run in enumerate(self._decoding):
                if not run.jump:
                    wanted[i] = min(wanted[i], left)
                    left -= wanted[i]
        return wanted

    def _can_wait(self) -> bool:
        """Whether the next step is better planned later.

        Requests that wait for what the last step computes are granted before its result is back, and can
        join the next step. A second step in flight hides the time to plan and launch it. On a CPU that
        is nothing beside a step with many prompt tokens, and new requests would wait for one step more.
        """
        if not self.in_flight:
            return False
        return bool(self.awaited) or (self._on_cpu and self.in_flight[-1].work >= FIRST_ON_CPU)

    def landed(self, result: StepResult) -> tuple[SentStep, "array[int]"]:
        """The step that `result` belongs to, and its sampled tokens.

        Raises SchedulerError if it is not the oldest step in flight or does not fit its plan.
        """
        expected = self.in_flight[0].step if self.in_flight else None
        if result.step != expected:
            raise SchedulerError(f"result of step {result.step}, expected {expected}")
        step = self.in_flight.popleft()
        if result.counts:
            step.counts = self._counts(step, result)
        tokens = len(result.tokens) // 4
        if result.rows != step.rows or tokens != (sum(step.counts) if step.counts else len(step.bound)):
            rows, expected_rows = unpack(result.rows).tolist(), unpack(step.rows).tolist()
            raise SchedulerError(f"step {step.step}: {tokens} tokens, rows {rows}, not {expected_rows}")
        if result.logprobs and len(result.logprobs) != tokens:
            counts = f"{len(result.logprobs)} logprobs for {tokens} tokens"
            raise SchedulerError(f"step {step.step}: {counts}")
        targets = sum(count for _, _, count in step.chunks) if step.chunks else 0
        if len(result.scores) != 4 * targets:
            counts = f"{len(result.scores) // 4} scores, expected {targets}"
            raise SchedulerError(f"step {step.step}: {counts}")
        decodes = len(step.bound) - step.firsts
        drafted = sum(unpack(result.drafted)) if result.drafted else 0
        absent = step.counts[step.firsts :].count(0) if step.counts else 0
        forced = _forced(step, result) if drafted else 0
        work = step.work + self.pace.forced(forced)
        self.pace.learn(work, decodes - absent + drafted - forced, result.elapsed_us * 1e-6)
        if step.asked is not None or step.counts is not None:
            self._settle(step, result)
        if self._speculation is not None and decodes:
            self._measure(self._speculation, step, result)
        return step, unpack(result.tokens)

    def _counts(self, step: SentStep, result: StepResult) -> "array[int]":
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

    @staticmethod
    def _measure(speculation: Speculation, step: SentStep, result: StepResult) -> None:
        """Learn from the decodes of a step and its time. Steps with prompts, drafts of constraints or
        paused rows say nothing and are skipped.
        """
        first = step.firsts
        bound = step.bound[first:]
        if step.asked is None and step.counts is None:
            seconds = None if step.chunks else (result.busy_us or result.elapsed_us) * 1e-6
            speculation.took(len(bound), 0, 0, len(bound), seconds)
            return
        counts = step.counts[first:] if step.counts is not None else [1] * len(bound)
        ran = unpack(result.drafted)[first:] if result.drafted else [0] * len(bound)
        guessed, right = (part[first:] for part in _guessed(result, first + len(bound)))
        depth = drafts = tokens = 0
        alone = not step.chunks
        none = [0] * len(bound)
        for i, (run, count, asked, own, guesses) in enumerate(
            zip(bound, counts, step.asked or none, ran, step.guesses or none, strict=True)
        ):
            if run.jumps:
                depth = max(depth, guesses)
                drafts += guessed[i]
                tokens += 1 + right[i]
                alone = alone and own == guessed[i]
            else:
                depth = max(depth, asked)
                drafts += own
                tokens += count
            alone = alone and count > 0
        late = result.late_us * 1e-6
        seconds = (result.busy_us or result.elapsed_us) * 1e-6 - late if alone else None
        speculation.took(len(bound), drafts, depth, tokens, seconds, late, step.missing)

    def _settle(self, step: SentStep, result: StepResult) -> None:
        """Lower the bounds of runs that got fewer tokens than planned."""
        decodes = len(step.bound) - step.firsts
        asked = [0] * step.firsts + (step.asked or [0] * decodes)
        counts = step.counts or [1] * len(step.bound)
        ran = unpack(result.drafted) if result.drafted else [0] * len(step.bound)
        guesses = [0] * step.firsts + (step.guesses or [0] * decodes)
        guessed, right = _guessed(result, len(step.bound))
        for i, (run, count, tokens, drafts) in enumerate(
            zip(step.bound, asked, counts, ran, strict=True)
        ):
            if count and run.jump:
                said = drafts - guessed[i]
                run.jump = self._max_forced if said == count else min(self._max_forced, FEW_FORCED)
            if count and run.jumps:
                record = run.request.record
                if guesses[i] and tokens and self._speculation is not None and record is not None:
                    self._speculation.landed(record, guesses[i], guessed[i], right[i])
            elif count and tokens and self._speculation is not None and run.request.record is not None:
                self._speculation.landed(run.request.record, count, drafts, tokens - 1)
            if run.live and 1 + count > tokens:
                if run.decoding:
                    run.offset -= 1 + count - tokens
                else:
                    run.planned -= 1 + count - tokens
                    self._schedule(run)

    def _extend(self, run: Run, start: int, end: int) -> ExtendRow:
        """Positions [start, end) of the prompt; the last chunk lets go of its tokens."""
        tokens = run.tokens[4 * (start - run.cached) : 4 * (end - run.cached)]
        if end == run.prompt:
            run.tokens = b""
        places, wanted, targets = b"", b"", run.request.targets
        if targets is not None:
            places, wanted, run.target = targets.take(run.target, end)
        sample = end == run.prompt and run.limit > 0
        tops = targets.tops if targets is not None else 0
        return ExtendRow(run.row, start, tokens, sample, places, wanted, tops=tops)

    def _open(self, run: Run) -> OpenRow:
        submit = run.request.submit
        history, run.history = run.history, b""
        pages, run.pages = run.pages, b""
        windows, run.windows = run.windows, b""
        done = run.request.done
        return OpenRow(
            run.row,
            run.ident,
            pages,
            run.cached,
            submit.sampling,
            submit.sampled + done,
            history,
            submit.constraint,
            submit.obeyed + done if submit.constraint else 0,
            windows,
        )

    def _schedule(self, run: Run) -> None:
        """Enter, keep or take out `run` of the decode set, `run.planned` being up to date.

        Decode number k (k = 1 is the first after the prompt's own sample) runs output token k
        at position prompt + k - 1, so with `planned` tokens planned the next one needs
        `prompt + planned` slots.
        """
        planned = run.planned
        run.stop_at = min(run.limit, run.slots - run.prompt + 1)
        review = run.stop_at
        if run.slots < run.cap and not run.growing:
            watermark = self._watermark
            if run.jumps:
                watermark = max(watermark, 2 * (1 + self._max_forced))
            ask_at = run.slots - run.prompt + 1 - watermark
            if planned >= ask_at:
                run.growing = True
                self.wanted.append(run)
            else:
                review = ask_at
        if planned >= run.stop_at:
            if run.decoding:
                self._leave(run)
            return
        if not run.decoding:
            run.decoding = True
            if run.states is not None:
                run.states.decodes(self._tick)
            run.offset = planned - self._tick
            self._joining.append(run)
            self._changed = True
        due = review - run.offset
        if due != run.due:  # else it is noted
            run.due = due
            self._reviews.setdefault(due, []).append(run)

    def _leave(self, run: Run) -> None:
        """`run` decodes no more, or not for now."""
        run.decoding = False
        self._changed = True
        if run.states is not None:
            run.states.pauses(self._tick)

    def _decode_states(self) -> bytes:
        """The state slots of the next step's decodes. They recur as long as the same runs decode."""
        turn = (self._tick - self._turned) % self.working
        while len(self._turns) <= turn:
            tick = self._turned + len(self._turns)
            runs = self._decoding
            pairs = [run.states.pair(tick) for run in runs if run.states is not None]
            self._turns.append(pack(slot for pair in pairs for slot in pair))
        return self._turns[turn]

    def states_kept(self, run: Run, commit: Commit) -> bytes:
        """For the final commit of `run`, which was dropped: its snapshots that were not told yet, and
        its last known state.
        """
        states = run.states
        if states is None or run.bad:
            return b""
        kept = states.told(commit.computed)
        if run.out:
            position = run.prompt + len(run.out) - 1
            if position <= commit.computed:
                steps = sum(run in step.bound for step in self.in_flight)
                kept += states.after_prompt(position, steps)
        elif run.computed > run.cached and not (run.limit and run.computed == run.prompt):
            kept += states.in_prompt(run.computed)
        return pack(kept)

    def _rebuild(self) -> None:
        # one that left and came back since the last time stands in both
        runs = dict.fromkeys([*self._decoding, *self._joining])
        self._decoding = [run for run in runs if run.decoding]
        self._joining = []
        self._decode_rows = pack(run.row for run in self._decoding)
        self._turns.clear()
        self._turned = self._tick
        self._changed = False
        if self._max_forced:
            self._jumping = [i for i, run in enumerate(self._decoding) if run.jumps]
            for i in self._jumping:
                self._decoding[i].jump = self._decoding[i].jump or self._max_forced
        if self._speculation is not None:
            self._records = [
                None if run.jumps and not self._guesses_constrained else self._record(run)
                for run in self._decoding
            ]
            self._rebuilt = True

    def _record(self, run: Run) -> DraftRecord:
        """The run's draft record, with its current length and what it may still output."""
        request = run.request
        if request.record is None:
            request.record = DraftRecord()
        request.record.length = run.prompt + self._tick + run.offset
        request.record.rest = run.limit - len(run.out)
        return request.record


def _guessed(result: StepResult, count: int) -> "tuple[array[int], array[int]]":
    """For each of `count` runs with a constraint: guessed drafts, and how many of them were accepted."""
    if not result.guessed:
        none = array("i", bytes(4 * count))
        return none, none
    both = unpack(result.guessed)
    return both[::2], both[1::2]


def _forced(step: SentStep, result: StepResult) -> int:
    """Drafts that constraints forced. They are computed as a prompt's tokens are."""
    guessed, _ = _guessed(result, len(step.bound))
    return sum(
        ran - own
        for run, ran, own in zip(step.bound, unpack(result.drafted), guessed, strict=True)
        if run.jumps
    )


def scored(chunks: Iterable[Chunk], scores: "array[float]") -> Iterator[tuple[Run, int, "array[float]"]]:
    """Yield each chunk's run, its length after the chunk, and the chunk's part of the step's scores."""
    at = 0
    for run, end, count in chunks:
        yield run, end, scores[at : at + count]
        at += count
