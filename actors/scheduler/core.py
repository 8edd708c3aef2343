"""The scheduler without a loop: events in, plans, settlements and deliveries out.

After a batch of events the shell calls `plan` (until None), `settle` and `deliver`, in this
order: the executor's next step depends on nothing but the last result, and a session hears of
an end only after the cache did. Everything here is O(1) per step and per sampled token, apart
from retraction, which looks at all running requests. How requests begin and end is told in `lifecycle`.

An executor that dies takes all KV along, and nothing else: what ran waits, and goes on from its last
token when another executor is there (`renewed`). Until then nothing is planned.

Time is a number that the caller passes in; sockets, tensors and tasks are unknown here.
"""

import heapq
from array import array
from collections.abc import Callable, Iterable, Mapping
from math import inf

from ramify.actors.scheduler.deliveries import Deliveries, Segment
from ramify.actors.scheduler.lifecycle import RequestLifecycle
from ramify.actors.scheduler.planner import Planner
from ramify.actors.scheduler.preemption import for_growth
from ramify.actors.scheduler.replica_load import replica_load
from ramify.actors.scheduler.request import (
    Account,
    Request,
    RequestRun,
    RequestState,
    SentStep,
    Tenant,
    note_forced,
    scored,
)
from ramify.actors.scheduler.settlements import Settlements
from ramify.protocol.cluster import CopiedIn, PutBlocks, ReadBlocks, ReplicaLoad
from ramify.protocol.config import ScheduleConfig
from ramify.protocol.messages import (
    Brought,
    CancelRequest,
    CancelSession,
    Constrain,
    Granted,
    RenewPool,
    SchedulerEvent,
    Settle,
    Settled,
    Submit,
    Tokens,
    Unconstrain,
)
from ramify.protocol.plan import (
    NO_TOKEN,
    STUCK,
    ExecutorDown,
    ExecutorInfo,
    PicturesSeen,
    StepPlan,
    StepResult,
    pack,
    unpack,
    unpack_floats,
)

LOST = "it cannot be followed any further"
PLACES = 8  # of the waiting queue that a tenant may have, for each that is free


class Scheduler:
    """All requests of an engine. Raises SchedulerError when cache or executor contradict it."""

    def __init__(self, info: ExecutorInfo, config: ScheduleConfig) -> None:
        self._info = info
        self._config = config
        self.planner = Planner(info, config)
        self.exchange = self.planner.loads.exchange  # KV that goes to other replicas or comes from them
        self.plan: Callable[[], StepPlan | None] = self.planner.plan  # for the executor; until None
        self._settlements = Settlements(info, config.lookahead, self.planner.working)
        self._deliveries = Deliveries()
        self.lifecycle = lifecycle = RequestLifecycle(
            info, config, self.planner, self._settlements, self._deliveries
        )
        self.next_deadline = lifecycle.next_deadline
        self.requests, self._runs = lifecycle.requests, lifecycle.runs
        self._admission = lifecycle.admission
        self._hungry: list[RequestRun] = []  # their Grow found no memory
        # their prompts are computed, but they sat all steps since out
        self._tokenless: list[RequestRun] = []
        self._more = False  # the cache has more to save
        self._next: ExecutorInfo | None = None  # of the executor that takes the place of a dead one

    @property
    def accounts(self) -> Mapping[int, Account]:
        """The accounts of known sessions, by their numbers."""
        return self.lifecycle.accounts.sessions

    @property
    def tenants(self) -> Mapping[str, Tenant]:
        """The tenants with a credential, by its name."""
        return self.lifecycle.accounts.tenants

    @property
    def mixed_room(self) -> int:
        """Prompt tokens that a step beside decodes could take, as of the last time that was computed."""
        return self.planner.pace.allowed

    @property
    def running(self) -> int:
        return len(self._runs)

    @property
    def waiting(self) -> int:
        return len(self.requests) - len(self._runs)

    def load(self, heard: int = 0) -> ReplicaLoad:
        """The scheduler's load, for routers. O(requests): call it some times a second, not each step."""
        return replica_load(self.lifecycle, self.planner, self._settlements, self._info, heard)

    # --- events -------------------------------------------------------------------------------

    def handle(self, event: SchedulerEvent, now: float) -> None:
        match event:
            case StepResult():
                self._result(event, now)
            case Settled():
                self._settled(event, now)
            case Submit():
                self.lifecycle.submit(event, now)
            case CancelRequest():
                self.lifecycle.cancel(event.request, event.reason, event.keep, now)
            case Constrain():
                self.planner.constraints.add(event)
            case Unconstrain():
                self.planner.constraints.retire(event)
            case CancelSession():
                self.lifecycle.cancel_session(event.session, now)
            case ReadBlocks() | PutBlocks() | CopiedIn():
                self.exchange.ask(event)
            case Brought():
                self._more = True
                for ident in event.requests:
                    if (found := self.requests.get(ident)) and found.state is RequestState.PARKED:
                        self._admission.enqueue(found)
            case PicturesSeen():
                self.lifecycle.pictures_seen(event, now)
            case ExecutorDown():
                self._next = None
                self.lifecycle.lost(event.reason, now)
            case ExecutorInfo():  # of the next one, which may differ in the sizes of its pools alone
                self._next = event

    def expire(self, now: float) -> None:
        """End requests that are past their deadline."""
        while (deadlines := self.lifecycle.deadlines) and deadlines[0][0] <= now:
            self.lifecycle.cancel(heapq.heappop(deadlines)[1], "deadline", None, now)

    # --- commands -----------------------------------------------------------------------------

    def settle(self, now: float) -> Settle | None:
        """The next message for the cache, at most one per call."""
        self.lifecycle.batch += 1
        if self.planner.looks.parked:
            self.lifecycle.unpark()
        for run in self.planner.awaited:
            self._admission.offer(run)
        self.planner.awaited.clear()
        if self._hungry:
            self._relieve(now)
        waiting = len(self.requests) > len(self._runs) and self.lifecycle.down is None
        exchange = self.exchange
        wanted = self.planner.wanted or self._settlements.commits or exchange.asks or self._more
        if not (waiting or wanted):
            return None  # as after most steps
        if not self._settlements.ready:
            return None
        acquires = self.lifecycle.pick(now) if waiting else []
        wanted, self.planner.wanted = self.planner.wanted, []
        grows = [run for run in wanted if run.live]
        for run in grows:
            run.account.charge(self._settlements.growth(run))
        more, self._more = self._more and self.lifecycle.down is None, False
        rate = self._load_rate() if self._info.host_blocks else 0.0
        cost = self.planner.loads.cost(rate) if rate else 0
        return self._settlements.take(acquires, grows, rate, exchange, more, cost)

    def _load_rate(self) -> float:
        """See `Acquire.rate`."""
        rate = self.planner.pace.rate(0)
        return max(1.0, rate) if self.planner.loads.pays(rate) else 0.0

    def deliver(self) -> list[tuple[int, Tokens]]:
        """Messages for sessions: one for each, with its events in order."""
        return self._deliveries.take(ends=not self._settlements.finals)

    # --- results ------------------------------------------------------------------------------

    def _result(self, result: StepResult, now: float) -> None:
        step, tokens = self.planner.landed(result)
        if step.moved:
            self._moved(step, result)
        if result.forced:
            note_forced(step, result)
        if step.counts is not None:
            self._several(result, step, step.counts, tokens, now)
            return
        if NO_TOKEN in tokens or result.reasons:  # before anything of this step is committed
            reasons = iter(result.reasons)
            for run, token in zip(step.bound, tokens, strict=True):
                why = next(reasons, LOST) if token == STUCK else ""
                if token < 0 and run.live:
                    self.lifecycle.end_tokenless(run, why, now)
        over: list[RequestRun] = []
        if step.chunks:
            self._computed(step, unpack_floats(result.scores), over, now)
        bound = step.bound
        stale = False
        for run, token in zip(bound, tokens, strict=True):
            if run.live:
                out = run.out
                out.append(token)
                if token in run.stops or len(out) == run.limit:
                    over.append(run)
            else:
                stale = True
        live = [i for i, run in enumerate(bound) if run.live] if stale else None
        self._first_tokens(step, now)
        if bound:
            self._deliveries.landed(result, bound, live)
        self._over(over, now)
        if self.lifecycle.suspects.tried is not None:
            self.lifecycle.clear_suspect()

    def _several(
        self, result: StepResult, step: SentStep, counts: Iterable[int], tokens: "array[int]", now: float
    ) -> None:
        """Handle a result with several tokens for some runs, or none. Tokens behind a stop token or the
        limit are dropped: without drafts they would not have been sampled.
        """
        over: list[RequestRun] = []
        bad: list[tuple[RequestRun, str]] = []  # and why a constraint got stuck
        reasons = iter(result.reasons)
        segments: list[Segment] = []
        end = 0
        for run, count in zip(step.bound, counts, strict=True):
            first, end = end, end + count
            why = next(reasons, LOST) if count and tokens[end - 1] == STUCK else ""
            if not run.live:
                continue
            taken, out, stops = 0, run.out, run.stops
            for token in tokens[first:end]:
                if token < 0:
                    bad.append((run, why))
                    break
                out.append(token)
                taken += 1
                if token in stops or len(out) == run.limit:
                    over.append(run)
                    break
            if run.states is not None:  # the state is that behind all of them
                run.states.lost = run.states.lost or taken < count
            if taken:
                drafts = min(taken, count - 1)  # of which those that were forced are no guesses
                accepted = drafts - result.forced.count(1, first, first + drafts)
                run.request.accepted += accepted
                segments.append((run, first, first + taken, accepted))
        for run, why in bad:  # before anything of this step is committed
            self.lifecycle.end_tokenless(run, why, now)
        if step.chunks:
            self._computed(step, unpack_floats(result.scores), over, now)
        self._first_tokens(step, now)
        if segments:
            self._deliveries.landed_several(result, segments)
        self._over(over, now)
        if self.lifecycle.suspects.tried is not None:
            self.lifecycle.clear_suspect()

    def _moved(self, step: SentStep, result: StepResult) -> None:
        """Runs whose blocks are all there go on with their prompts. Where one is lost, the request comes
        again, and computes what was in it. What was saved may be for other replicas.
        """
        if step.exchanges:
            self.exchange.landed()
        if not step.loads:
            return
        self.planner.loads.learn(result, step.moved)
        lost = set(unpack(result.lost))
        for run, blocks, last in step.loads:
            if not run.live:
                continue
            run.lost = [block.key for block in blocks if block.slot in lost]
            if run.lost:
                self.lifecycle.retract(run, "lost")
                self._admission.unblock()
            elif last:
                run.computed = run.filled = run.offered = run.cached
                self.planner.admit(run)

    def _first_tokens(self, step: SentStep, now: float) -> None:
        if not step.firsts and not self._tokenless:
            return
        runs = [run for run in [*self._tokenless, *step.bound[: step.firsts]] if run.live]
        for run in runs:
            self.planner.pace.lacks(run.request, 0)
            if run.out and not run.request.first_token:
                run.request.first_token = now
                self._deliveries.began(run)
        self._tokenless = [run for run in runs if not run.out]

    def _over(self, over: list[RequestRun], now: float) -> None:
        """End runs that are complete."""
        for run in over:
            stopped = bool(run.out) and run.out[-1] in run.stops
            self.lifecycle.end(run.request, "stop" if stopped else "length", now)

    def _computed(
        self, step: SentStep, scores: "array[float]", over: list[RequestRun], now: float
    ) -> None:
        """Handle computed chunks of prompts. Adds complete runs to `over`."""
        if any(score != score for score in scores):
            for run, _, taken in scored(step.chunks, scores):
                if run.live and any(score != score for score in taken):
                    self.lifecycle.not_finite(run, now)
        for run, end, taken in scored(step.chunks, scores):
            if run.live:
                run.computed = end
                if run.request.targets is not None:
                    run.request.targets.scores.extend(taken)
                self._settlements.commit(run)
                if end == run.prompt:
                    if run.shows:
                        self.planner.looks.leave(run)
                    if run.states is not None or self._info.window_pages:
                        # slots or pages of its snapshots are the tree's now
                        self._admission.unblock()
                    run.priority = run.request.submit.priority  # nobody waits for its prompt now
                    if not run.limit:
                        over.append(run)

    # --- verdicts -----------------------------------------------------------------------------

    def _settled(self, message: Settled, now: float) -> None:
        acquires, grows = self._settlements.settled(message)
        self._more = self._more or message.more
        self._moves(message)
        starved: Request | None = None
        waited_for = False
        for request, verdict in zip(acquires, message.verdicts, strict=True):
            if isinstance(verdict, Granted):
                self.lifecycle.granted(request, verdict, now)
            elif self.lifecycle.denied(request, verdict, now):
                starved = starved or request
                waited_for = waited_for or not request.ahead
        for run, grown in zip(grows, message.grown, strict=True):
            if run.live and grown.pages:
                self.planner.grown(run, grown.pages, grown.windows)
                self._admission.grown(run, len(grown.pages) // 4 * self._info.page_size)
            elif run.live:
                self._hungry.append(run)
        pending = self._runs or self._settlements.finals or self._settlements.outstanding
        if starved is not None and not pending:
            # Nobody holds a page, and still it does not fit: it never will.
            if starved.done:
                self.lifecycle.end(starved, "length", now)
            else:
                self.lifecycle.end(
                    starved, "error", now, "too_long", "the branch does not fit into the KV cache"
                )
        elif waited_for:
            self._yield_pages()

    def _moves(self, message: Settled) -> None:
        """Copies that go with the next plans, and those between replicas."""
        down, loads = self.lifecycle.down is not None, self.planner.loads
        if message.saves and not down:
            loads.save(message.saves)
        if loads.saves:
            grown = b"".join(grown.pages for grown in message.grown)
            loads.write(grown + pack(unpack(message.copies)[1::2]))
        if message.copies and not down:
            self.planner.copy(message.copies)
        if message.slots or message.reads:
            self.exchange.settled(message, down, bool(loads.saves))

    # --- memory pressure ----------------------------------------------------------------------

    def _relieve(self, now: float) -> None:
        """Make room for runs whose Grow found no memory, then ask again.

        Pages that came back since, or are on their way, suffice. Otherwise the youngest run of the
        lowest priority is retracted, first those that compute ahead. A run that is alone always finds
        room, since its output limit accounts for the pool; should the cache disagree, it ends at its
        length. But one that has replayed tokens has their KV twice: it is retracted, and goes on from
        its newest state without.
        """
        settlements = self._settlements
        self._hungry = [run for run in self._hungry if run.live]
        if self._hungry and not settlements.finals:
            if settlements.outstanding or any(run.complete for run in self._runs.values()):
                return
            if not any(settlements.could_grow(run) for run in self._hungry):
                if len(self._runs) == 1 and not self._hungry[0].replayed:
                    self.lifecycle.end(self._hungry[0].request, "length", now)
                else:
                    run = min(self._runs.values(), key=for_growth)
                    self.lifecycle.retract(run, "memory")
                    self._admission.block(inf, run.request.level)
        self.planner.wanted += [run for run in self._hungry if run.live]
        self._hungry = []

    def _yield_pages(self) -> None:
        """A generation found no memory: what is computed ahead and has far to go gives way.

        It stays away until a run ends: else both would be tried again at once, and again.
        """
        runs = [run for run in self._runs.values() if run.ahead and run.filled < run.prompt]
        for run in runs:
            self.lifecycle.retract(run, "ahead")
        if runs:
            self._admission.unblock()
            self._admission.block(inf, runs[0].level)

    # --- another executor ---------------------------------------------------------------------

    def renewed(self) -> RenewPool | None:
        """Go on with the next executor, if it is there and the cache owes no answer.

        Returns what the cache has to hear before all else.
        """
        settlements = self._settlements
        if self._next is None or settlements.outstanding or settlements.finals:
            return None
        info = self._info = self._next
        self._next = None
        self.planner.resume(info)
        settlements.renew(info.pages)
        self.lifecycle.renew(info)
        return RenewPool(
            info.pages, info.state_slots, info.window_pages, info.host_blocks, info.host_memory
        )
