"""Which rows run in the next step, and what became of the steps that were sent.

A plan is decodes first (they keep their inter-token latency), then prefill chunks as `prompt_queue`
hands them out. `max_rows` is at most the step's tokens, so decodes always leave room for a prompt.

All decoding rows advance together, so their progress is one number, `tick`: the tokens planned for a run
are `tick + run.offset`. A run is looked at only at ticks where something happens to it: it needs slots,
it has none left, or its last token is planned. Between those ticks a step costs nothing per request, and
the packed row array is reused.

A run with drafts (see `drafts`) is planned by its upper bound. At its bound it pauses until results say
how far it got.

This file knows rows and slots, not what the cache does, nor the clock, nor what a token means.
"""

from array import array
from collections import deque
from dataclasses import dataclass

from ramify.actors.scheduler.constraint_table import ConstraintTable
from ramify.actors.scheduler.drafts import DecodeDrafts, StepDrafts, counts_of, forced_drafts
from ramify.actors.scheduler.loads import NO_MOVES, KvLoads, Moves
from ramify.actors.scheduler.looks import NOTHING, Looked, PictureLooks
from ramify.actors.scheduler.pace import FIRST_ON_CPU, Pace
from ramify.actors.scheduler.prompt_queue import PromptQueue
from ramify.actors.scheduler.request import Chunk, Level, RequestRun, SchedulerError, SentStep
from ramify.protocol.config import ScheduleConfig
from ramify.protocol.messages import Commit
from ramify.protocol.plan import (
    ExecutorInfo,
    ExtendRow,
    GrowRow,
    LoadConstraint,
    OpenRow,
    StepPlan,
    StepResult,
    pack,
    unpack,
)


@dataclass(slots=True)
class Prefill:
    """The prompts' part of a step."""

    opens: list[OpenRow]
    extends: list[ExtendRow]
    chunks: list[Chunk]
    firsts: list[RequestRun]  # whose prompts are complete with it
    states: "array[int]"
    rows: bytes = b""  # of these
    tokens: int = 0
    work: int = 0  # see `SentStep`


NO_PREFILL = Prefill([], [], [], [], array("i"))  # never changed


class Planner:
    """Rows, the decode set, the prompts and the steps in flight."""

    def __init__(self, info: ExecutorInfo, config: ScheduleConfig) -> None:
        self._page_size = info.page_size
        self._limit = self._most_in_flight = config.in_flight
        self._on_cpu = info.device == "cpu"
        self._watermark = max(1, min(4, config.lookahead // 2))  # slots left when more are asked for
        self.pace = Pace(info, config)
        self.prompts = PromptQueue(info, config, self.pace)
        self.constraints = ConstraintTable()
        self.working = config.in_flight + 1 if info.state_slots else 0  # state slots that a run needs
        self.max_rows = self._most_rows(info)
        self._turns: list[bytes] = []  # the decodes' state slots in steps to come, from `_turned` on
        self._turned = 0
        self._rows = list(range(self.max_rows - 1, -1, -1))
        self._decoding: list[RequestRun] = []
        self._joining: list[RequestRun] = []
        self._decode_rows = b""
        self._changed = False  # the decode set is not what `_decoding` says
        self.drafts = DecodeDrafts(info, config.in_flight)
        if self.drafts.speculation is not None:  # slots for what may be drafted until more are here
            self._watermark = max(self._watermark, min(config.lookahead // 2, 2 * (1 + info.max_drafts)))
        self._max_forced = info.max_forced
        self._reviews: dict[int, list[RequestRun]] = {}
        self._tick = 0
        self.step = 0  # the last one that was planned
        self._closes: list[int] = []
        self._grows: list[GrowRow] = []
        self._copies: dict[int, int] = {}  # page by the page that it is copied to
        self.loads = KvLoads(info)
        self.looks = PictureLooks(info, self.prompts)
        self.in_flight: deque[SentStep] = deque()
        self.wanted: list[RequestRun] = []  # runs that need a Grow; the caller takes them away
        self.awaited: list[RequestRun] = []  # of the last step, those that requests wait for; the same
        self.processed = 0  # tokens planned since the start

    @property
    def free_rows(self) -> int:
        return len(self._rows)

    @property
    def running(self) -> int:
        return self.max_rows - len(self._rows)

    def take_row(self) -> int:
        return self._rows.pop()

    def admit(self, run: RequestRun) -> None:
        """`run` (with a row from `take_row`) is prefilled next, or once its pictures are seen."""
        if not (run.pictures and self.looks.waits(run)):
            self.prompts.add(run)

    @property
    def long_prompts(self) -> int:
        """Prompts being computed, not ahead, that take several of the largest steps."""
        return self.prompts.long_awaited

    def lacking(self, level: Level) -> int:
        """See `PromptQueue.lacking`."""
        return self.prompts.lacking(level, len(self._decoding))

    def in_vain(self, run: RequestRun) -> int:
        """Tokens of `run` in the steps under way, which count for nothing if it is dropped now."""
        planned = self.written(run) - run.filled
        return run.filled - run.kept + max(0, planned - len(run.out) - (run.computed < run.prompt))

    def written(self, run: RequestRun) -> int:
        """Positions that the steps of `run` so far may write, but for drafts that were refused."""
        return run.filled + (self._tick + run.offset if run.decoding else run.planned)

    def drop(self, run: RequestRun) -> None:
        """Leave `run` out of new plans; results in flight for it are ignored.

        Its row can be handed out at once: a plan closes rows before it opens any.
        """
        run.live = False
        if self.drafts.speculation is not None and run.out:
            self.drafts.speculation.ended(len(run.out))
        self.prompts.forget(run)
        if run.shows or run.pictures:
            self.looks.leave(run)
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
        self.loads.clear()
        self.looks.clear()
        self.wanted.clear()
        self.awaited.clear()
        self.constraints.reload()

    def resume(self, info: ExecutorInfo) -> None:
        """Plan for another executor. Nothing runs. It may have fewer state slots, and so fewer rows."""
        self.max_rows, self._limit = self._most_rows(info), self._most_in_flight
        self._rows = list(range(self.max_rows - 1, -1, -1))

    def _most_rows(self, info: ExecutorInfo) -> int:
        rows = min(info.max_rows, info.step_tokens)
        if self.working:  # a row also reads a slot that is not its own
            rows = min(rows, info.state_slots // (self.working + 1))
            if not rows:
                raise SchedulerError(f"{info.state_slots} state slots: one row needs {self.working + 1}")
        return rows

    def grown(self, run: RequestRun, pages: bytes, windows: bytes = b"") -> None:
        """Note that `run` got the pages it asked for."""
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
        if self._tick in self._reviews:
            self._review()
        if self._changed:
            self._rebuild()
        bound, rows = self._decoding, self._decode_rows
        lines = decodes = len(bound)
        drafts: StepDrafts | None = None
        if self.drafts.due:
            drafts = self.drafts.choose(bound, self._tick, len(self._rows))
            if drafts is not None:
                lines += sum(drafts.asked)
                decodes += drafts.free
        prefill = NO_PREFILL
        if self.prompts.order:
            prefill = self._prefill(decodes, lines)
            bound, rows = prefill.firsts + bound, prefill.rows + rows
        firsts = prefill.firsts
        news = any((self._closes, self.constraints.due, self.loads.due, self.looks.due))
        if not bound and not prefill.extends and (self.in_flight or not news):
            return None
        slots = prefill.states.tobytes() + self._decode_states() if self.working else b""
        self.step += 1
        self._tick += 1
        self.processed += prefill.tokens + lines
        self.in_flight.append(
            SentStep(self.step, bound, rows, prefill.chunks, len(firsts), prefill.work)
        )
        grows, self._grows = self._grows, []
        closes = forgets = copies = b""
        loads: list[LoadConstraint] = []
        moved, looked = NO_MOVES, NOTHING
        if news or self._copies or self.constraints.dropped:
            closes, loads, forgets, copies, moved, looked = self._news()
        asked, guesses = (b"", b"") if drafts is None else self._ask(drafts)
        plan = StepPlan(
            self.step, closes, prefill.opens, grows, prefill.extends, self._decode_rows, asked, loads,
            forgets, guesses, copies, slots, *moved, *looked,
        )  # fmt: skip
        for run in firsts:
            run.planned = 1
            self._schedule(run)
        return plan

    def _review(self) -> None:
        """PictureLook at the runs to which something happens at this tick."""
        for run in self._reviews.pop(self._tick):
            if run.decoding and run.due == self._tick:
                run.planned = self._tick + run.offset
                self._schedule(run)

    def _prefill(self, decodes: int, lines: int) -> "Prefill":
        """The prompts' part of a step with so many decodes, which sample in so many lines."""
        found = Prefill([], [], [], [], array("i"))
        for run, start, end in self.prompts.take(decodes, lines):
            if not run.opened:
                run.opened = True
                found.opens.append(self._open(run))
            extend = self._extend(run, start, end)
            found.extends.append(extend)
            if run.states is not None:
                found.states.extend(run.states.chunk(end))
                run.cut = run.states.cut or run.prompt
            targets = run.request.targets
            scores = len(extend.targets) // 4 * targets.width if targets is not None else 0
            found.chunks.append((run, end, scores))
            found.tokens += end - start
            found.work += self.pace.work(run, start, end)
            if extend.sample:
                found.firsts.append(run)
            if run.waiters:
                self.awaited.append(run)
        found.rows = pack(run.row for run in found.firsts)
        return found

    def _news(self) -> tuple[bytes, list[LoadConstraint], bytes, bytes, Moves, Looked]:
        """Rows that close, constraints to load and forget, copies of pages, blocks, and pictures: see
        `StepPlan`."""
        closes, self._closes = pack(self._closes), []
        loads = self.constraints.loads() if self.constraints.due else []
        forgets = self.constraints.forgets() if self.constraints.dropped else b""
        copies, moved = b"", NO_MOVES
        if self._copies:
            copies = pack(page for pair in self._copies.items() for page in reversed(pair))
            self._copies.clear()
        if self.loads.due:
            moved = self.loads.plan(self.in_flight[-1], self.pace.step_s)
            for run in self.loads.saved():
                self.admit(run)
        looked = self.looks.plan() if self.looks.due else NOTHING
        return closes, loads, forgets, copies, moved, looked

    def _ask(self, drafts: StepDrafts) -> tuple[bytes, bytes]:
        """Note the drafts of the step that was just planned. Returns them for its plan."""
        step = self.in_flight[-1]
        step.asked, step.guesses, step.missing = drafts.asked, drafts.guesses, drafts.missing
        for run, count in zip(self._decoding, drafts.asked, strict=True):
            if count:
                run.planned = self._tick + run.offset
                self._schedule(run)
        return pack(drafts.asked), b"" if drafts.guesses is None else pack(drafts.guesses)

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
            step.counts = counts_of(step, result)
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
        forced = forced_drafts(step, result) if drafted else 0
        work = step.work + self.pace.forced(forced)
        seconds = (result.elapsed_us - result.load_us) * 1e-6
        self.pace.learn(work, decodes - absent + drafted - forced, seconds)
        if step.asked is not None or step.counts is not None:
            for run in self.drafts.settle(step, result):
                self._schedule(run)
        if self.drafts.speculation is not None and decodes:
            self.drafts.measure(self.drafts.speculation, step, result)
        return step, unpack(result.tokens)

    def _extend(self, run: RequestRun, start: int, end: int) -> ExtendRow:
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

    def _open(self, run: RequestRun) -> OpenRow:
        submit = run.request.submit
        history, run.history = run.history, b""
        pages, run.pages = run.pages, b""
        windows, run.windows = run.windows, b""
        done = run.request.done
        pictures, run.pictures = run.pictures, []
        obeyed = submit.obeyed + done if submit.constraint else 0
        return OpenRow(
            run.row, run.ident, pages, run.cached, submit.sampling, submit.sampled + done, history,
            submit.constraint, obeyed, windows, pictures,
        )  # fmt: skip

    def _schedule(self, run: RequestRun) -> None:
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

    def _leave(self, run: RequestRun) -> None:
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

    def states_kept(self, run: RequestRun, commit: Commit) -> bytes:
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
        if self._max_forced or self.drafts.speculation is not None:
            self.drafts.changed(self._decoding, self._tick)
