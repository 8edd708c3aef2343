"""The scheduler without a loop: events in, plans, settlements and deliveries out.

After a batch of events the shell calls `plan` (until None), `settle` and `deliver`, in this
order: the executor's next step depends on nothing but the last result, and a session hears of
an end only after the cache did. Everything here is O(1) per step and per sampled token, apart
from retraction, which looks at all running requests.

An executor that dies takes all KV along, and nothing else: what ran waits, and goes on from its last
token when another executor is there (`renewed`). Until then nothing is planned.

Time is a number that the caller passes in; sockets, tensors and tasks are unknown here.
"""

import heapq
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from itertools import repeat

from msgspec import structs

from ramify.actors.scheduler.admission import Admission, Cause
from ramify.actors.scheduler.deliveries import Deliveries, Segment
from ramify.actors.scheduler.planner import Planner
from ramify.actors.scheduler.preemption import for_growth
from ramify.actors.scheduler.request import (
    Account,
    Reason,
    Request,
    RequestRun,
    RequestState,
    SchedulerError,
    SentStep,
    Tenant,
    output_limit,
    scored,
)
from ramify.actors.scheduler.settlements import Settlements
from ramify.actors.scheduler.states import StateSlots
from ramify.actors.scheduler.suspects import TWICE, Suspects
from ramify.actors.scheduler.targets import Targets, targets_of
from ramify.protocol.cluster import LOT, CopiedIn, PutBlocks, ReadBlocks, ReplicaLoad
from ramify.protocol.config import ScheduleConfig
from ramify.protocol.errors import Code
from ramify.protocol.messages import (
    Brought,
    CancelRequest,
    CancelSession,
    Commit,
    Constrain,
    Denied,
    Granted,
    RenewPool,
    SchedulerEvent,
    Settle,
    Settled,
    Submit,
    Tokens,
    Unconstrain,
    session_of,
)
from ramify.protocol.pictures import missing
from ramify.protocol.plan import (
    NO_TOKEN,
    STUCK,
    ExecutorDown,
    ExecutorInfo,
    StepPlan,
    StepResult,
    pack,
    unpack,
    unpack_floats,
)

LOST = "it cannot be followed any further"
PLACES = 8  # of the waiting queue that a tenant may have, for each that is free
PROGRAMS = 4096  # histories of stateless requests whose service is remembered


class Scheduler:
    """All requests of an engine. Raises SchedulerError when cache or executor contradict it."""

    def __init__(self, info: ExecutorInfo, config: ScheduleConfig) -> None:
        self._info = info
        self._config = config
        self.planner = Planner(info, config)
        self.exchange = self.planner.loads.exchange  # KV that goes to other replicas or comes from them
        self.plan: Callable[[], StepPlan | None] = self.planner.plan  # for the executor; until None
        self._settlements = Settlements(info, config.lookahead, self.planner.working)
        self._requests: dict[int, Request] = {}
        self._runs: dict[int, RequestRun] = {}
        self._admission = Admission(
            info, config, self.planner, self._settlements, self._runs, self._retract
        )
        self._accounts: dict[int, Account] = {}
        self._tenants: dict[str, Tenant] = {}  # by the name of their credential
        self._programs: dict[bytes, Account] = {}  # by the history of their request; the oldest first
        self._sweep_at = 1024
        self._deadlines: list[tuple[float, int]] = []
        self._hungry: list[RequestRun] = []  # their Grow found no memory
        # their prompts are computed, but they sat all steps since out
        self._tokenless: list[RequestRun] = []
        self._deliveries = Deliveries()
        self._count = 0
        self._batch = 0
        self.down: str | None = None  # why there is no executor; None: there is one
        self._more = False  # the cache has more to save
        self._next: ExecutorInfo | None = None  # of the executor that takes its place
        self._suspects = Suspects()
        self.retractions: Counter[str] = Counter()  # by Cause
        self._hold_s = 0.0  # seconds from a request's first grant to its end, a mean that forgets
        self.computed_twice = 0  # tokens: in flight at a retraction, or evicted before it went on

    @property
    def accounts(self) -> Mapping[int, Account]:
        """Of the sessions that are known, by their numbers."""
        return self._accounts

    @property
    def tenants(self) -> Mapping[str, Tenant]:
        """Of the credentials that have such sessions, by their names."""
        return self._tenants

    @property
    def requests(self) -> Mapping[int, Request]:
        """All that have not ended."""
        return self._requests

    @property
    def mixed_room(self) -> int:
        """Prompt tokens that a step beside decodes could take, as of the last time that was computed."""
        return self.planner.pace.allowed

    @property
    def running(self) -> int:
        return len(self._runs)

    @property
    def waiting(self) -> int:
        return len(self._requests) - len(self._runs)

    def load(self, heard: int = 0) -> ReplicaLoad:
        """The scheduler's load, for routers. O(requests): call it some times a second, not each step."""
        queued = decoding = wanted = context = excess = long = 0
        for request in self._requests.values():
            run = request.run
            if run is None:
                left = max(0, request.prompt - request.resident)
                wanted += request.prompt
            else:
                left = run.prompt - run.computed
                context += run.prompt + len(run.out)
                decoding += left <= 0
            if left > 0:
                queued += left
                if left > LOT:
                    excess += left - LOT
                    long += 1
        size, settlements = self._info.page_size, self._settlements
        return ReplicaLoad(
            heard=heard,
            queued=queued,
            waiting=self.waiting,
            wanted=wanted,
            decoding=decoding,
            context=context,
            free=settlements.free * size,
            evictable=(settlements.available - settlements.free) * size,
            slots=self._info.pages * size,
            prefill_rate=self.planner.pace.rate(decoding),
            step_s=self.planner.pace.step_s if self._runs else 0.0,
            hold_s=self._hold_s,
            excess=excess,
            long=long,
        )

    # --- events -------------------------------------------------------------------------------

    def handle(self, event: SchedulerEvent, now: float) -> None:
        match event:
            case StepResult():
                self._result(event, now)
            case Settled():
                self._settled(event, now)
            case Submit():
                self._submit(event, now)
            case CancelRequest():
                self._cancel(event.request, event.reason, event.keep, now)
            case Constrain():
                self.planner.constraints.add(event)
            case Unconstrain():
                self.planner.constraints.retire(event)
            case CancelSession():
                self._cancel_session(event.session, now)
            case ReadBlocks() | PutBlocks() | CopiedIn():
                self.exchange.ask(event)
            case Brought():
                self._more = True
                for ident in event.requests:
                    if (found := self._requests.get(ident)) and found.state is RequestState.PARKED:
                        self._admission.enqueue(found)
            case ExecutorDown():
                self._lost(event.reason, now)
            case ExecutorInfo():  # of the next one, which may differ in the sizes of its pools alone
                self._next = event

    def expire(self, now: float) -> None:
        """End requests that are past their deadline."""
        while self._deadlines and self._deadlines[0][0] <= now:
            self._cancel(heapq.heappop(self._deadlines)[1], "deadline", None, now)

    def next_deadline(self) -> float | None:
        while self._deadlines and self._deadlines[0][1] not in self._requests:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    # --- commands -----------------------------------------------------------------------------

    def settle(self, now: float) -> Settle | None:
        """The next message for the cache, at most one per call."""
        self._batch += 1
        for run in self.planner.awaited:
            self._admission.offer(run)
        self.planner.awaited.clear()
        if self._hungry:
            self._relieve(now)
        waiting = len(self._requests) > len(self._runs) and self.down is None
        exchange = self.exchange
        wanted = self.planner.wanted or self._settlements.commits or exchange.asks or self._more
        if not (waiting or wanted):
            return None  # as after most steps
        if not self._settlements.ready:
            return None
        acquires = self._pick(now) if waiting else []
        wanted, self.planner.wanted = self.planner.wanted, []
        grows = [run for run in wanted if run.live]
        for run in grows:
            run.account.charge(self._settlements.growth(run))
        more, self._more = self._more and self.down is None, False
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

    # --- the life of a request ----------------------------------------------------------------

    def _submit(self, submit: Submit, now: float) -> None:
        if submit.request in self._requests:
            raise SchedulerError(f"request {submit.request} is submitted twice")
        limit = output_limit(submit, self._info)
        account = self._account(session_of(submit.request), submit.owner)
        if submit.history:
            self._go_on(account, submit)
        self._count += 1
        refusal: tuple[Code, str] | None = None
        targets: Targets | None = None
        try:
            if submit.places or submit.targets:
                targets = targets_of(submit, self._info.vocab_size)
        except ValueError as error:  # a bug of that session, which must not stop the executor
            refusal = "internal", f"request {submit.request}: {error}"
        processed = self.planner.processed
        request = Request(submit, account, self._count, self._batch, processed, limit, targets)
        refusal = refusal or self._refusal(request)
        self._requests[submit.request] = account.requests[submit.request] = request
        account.tenant.requests += 1
        if refusal is None and submit.constraint:
            request.stale = not self.planner.constraints.take(submit.constraint)
            if request.stale:
                refusal = "overloaded", "its constraint had to give way: try again later"
        if refusal is not None:
            request.constrained = False
            self._end(request, "error", now, *refusal)
            return
        if submit.deadline is not None:
            heapq.heappush(self._deadlines, (submit.deadline, submit.request))
            if len(self._deadlines) > 64 + 2 * len(self._requests):
                self._deadlines = [d for d in self._deadlines if d[1] in self._requests]
                heapq.heapify(self._deadlines)
        if not request.ahead:
            self.planner.pace.lacks(request, request.prompt)
        self._admission.submitted(request)

    def _refusal(self, request: Request) -> tuple[Code, str] | None:
        """Why a request can never run, or not now: error code and message.

        The queue's places are shared by a dynamic threshold (Choudhury and Hahne 1998): a tenant may
        have `PLACES` times as many places as are free. So a tenant that fills the queue is refused while
        there is still room for tenants with few requests.
        """
        submit, tenant = request.submit, request.account.tenant
        info, pool = self._info, self._info.pages * self._info.page_size
        if submit.prompt < 1:
            return "bad_request", "the branch is empty: append something before generating"
        if submit.prompt > info.context:
            return (
                "too_long",
                f"the branch has {submit.prompt} tokens, the context {info.context}",
            )
        if submit.prompt > pool:
            return "too_long", f"the branch has {submit.prompt} tokens, the KV cache holds {pool}"
        most, waiting = self._config.max_waiting, self.waiting
        waited_for = submit.max_tokens > 0 or request.targets is not None
        if waiting >= (most if waited_for else most // 2):  # the rest: for those
            return "overloaded", f"{waiting} requests wait already: try again later"
        if tenant.waiting > PLACES * (most - waiting):
            return "overloaded", f"{tenant.waiting} of your requests wait already: try again later"
        return None

    def _cancel(self, ident: int, reason: Reason, keep: int | None, now: float) -> None:
        request = self._requests.get(ident)
        if request is None:
            return
        if request.state is RequestState.ACQUIRING:  # ends with its verdict, so that pages come back
            request.ending = request.ending or reason
        else:
            self._end(request, reason, now, keep=keep)

    def _cancel_session(self, session: int, now: float) -> None:
        account = self._accounts.pop(session, None)
        if account is None:
            return
        account.closed = True
        for ident in list(account.requests):
            self._cancel(ident, "cancelled", 0, now)
        self._admission.active.end(account)

    def _end(
        self,
        request: Request,
        reason: Reason,
        now: float,
        error: Code | None = None,
        message: str = "",
        keep: int | None = None,
    ) -> None:
        """The one end of a request. `keep`: of all its output tokens."""
        if request.state is RequestState.WAITING and request.ticket:
            self._admission.queue.discard(request)
        if request.run is not None:
            self._stop(request.run, None if keep is None else keep - request.done)
            self._admission.unblock()
        if request.lacking:
            self.planner.pace.lacks(request, 0)
        request.state = RequestState.ENDED
        if request.started:
            held = now - request.started
            self._hold_s += (held - self._hold_s) / 32 if self._hold_s else held
        ident = request.submit.request
        del self._requests[ident], request.account.requests[ident]
        request.account.tenant.requests -= 1
        if request.constrained:
            self.planner.constraints.give_back(request.submit.constraint)
        self._admission.ended(request)
        self._deliveries.ended(request, reason, now, error, message)

    def _stop(self, run: RequestRun, keep: int | None) -> Commit:
        """End a run, finished or retracted: its final commit, and no further plan."""
        commit, kept = run.final(keep)
        written = self.planner.written(run)
        self.planner.drop(run)
        if run.states is not None:
            commit = structs.replace(commit, states=self.planner.states_kept(run, commit))
        elif self._info.window_pages:
            commit = structs.replace(commit, written=written)
        if run.lost:
            commit = structs.replace(commit, lost=run.lost)
        self._settlements.final(commit)
        self._admission.wake(run)
        account = run.account
        account.hold(-1)
        self._admission.stopped(run, max(commit.computed, run.cached - run.loaded))
        self._admission.queue.refund(account, run.slots - max(commit.computed, run.cached))
        run.request.keep(kept)
        run.request.forced_tokens += run.forced.count(1, 0, kept)
        run.request.run = None
        del self._runs[run.ident]
        return commit

    # --- results ------------------------------------------------------------------------------

    def _result(self, result: StepResult, now: float) -> None:
        step, tokens = self.planner.landed(result)
        if step.moved:
            self._moved(step, result)
        if result.forced:
            _note_forced(step, result)
        if step.counts is not None:
            self._several(result, step, step.counts, tokens, now)
            return
        if NO_TOKEN in tokens or result.reasons:  # before anything of this step is committed
            reasons = iter(result.reasons)
            for run, token in zip(step.bound, tokens, strict=True):
                why = next(reasons, LOST) if token == STUCK else ""
                if token < 0 and run.live:
                    self._tokenless_end(run, why, now)
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
        if self._suspects.tried is not None:
            self._clear()

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
            self._tokenless_end(run, why, now)
        if step.chunks:
            self._computed(step, unpack_floats(result.scores), over, now)
        self._first_tokens(step, now)
        if segments:
            self._deliveries.landed_several(result, segments)
        self._over(over, now)
        if self._suspects.tried is not None:
            self._clear()

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
                self._retract(run, "lost")
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
            self._end(run.request, "stop" if stopped else "length", now)

    def _computed(
        self, step: SentStep, scores: "array[float]", over: list[RequestRun], now: float
    ) -> None:
        """Handle computed chunks of prompts. Adds complete runs to `over`."""
        if any(score != score for score in scores):
            for run, _, taken in scored(step.chunks, scores):
                if run.live and any(score != score for score in taken):
                    self._not_finite(run, now)
        for run, end, taken in scored(step.chunks, scores):
            if run.live:
                run.computed = end
                if run.request.targets is not None:
                    run.request.targets.scores.extend(taken)
                self._settlements.commit(run)
                if end == run.prompt:
                    if run.states is not None or self._info.window_pages:
                        # slots or pages of its snapshots are the tree's now
                        self._admission.unblock()
                    run.priority = run.request.submit.priority  # nobody waits for its prompt now
                    if not run.limit:
                        over.append(run)

    def _tokenless_end(self, run: RequestRun, stuck: str, now: float) -> None:
        """End or repeat `run`, which got no token: its logits are not finite, or its constraint is
        `stuck` (why).
        """
        if run.states is not None:
            run.states.lost = True
        if stuck:
            self._end(run.request, "error", now, "bad_constraint", f"the `constraint` is stuck: {stuck}")
        else:
            self._not_finite(run, now)

    def _not_finite(self, run: RequestRun, now: float) -> None:
        """Handle NaN or infinities in the logits of `run`.

        Its accepted tokens, if any, prove all KV but that of its last step. Without any, what it
        computed is dropped, and what it found that no request has sampled over yet. If it found such KV,
        perhaps only that was bad (KV computed ahead is never sampled over): the request computes it
        again, once.
        """
        request = run.request
        if not run.out:
            run.bad = True
            if request.targets is not None:
                del request.targets.scores[:]  # what they came from is computed anew
            if not run.proven and not request.repeated:
                request.repeated = True
                self._retract(run, "not finite")
                self._admission.unblock()
                return
        self._end(request, "error", now, "internal", "the model's output is not finite")

    # --- verdicts -----------------------------------------------------------------------------

    def _settled(self, message: Settled, now: float) -> None:
        acquires, grows = self._settlements.settled(message)
        self._more = self._more or message.more
        self._moves(message)
        starved: Request | None = None
        waited_for = False
        for request, verdict in zip(acquires, message.verdicts, strict=True):
            if isinstance(verdict, Granted):
                self._granted(request, verdict, now)
            elif self._denied(request, verdict, now):
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
                self._end(starved, "length", now)
            else:
                self._end(starved, "error", now, "too_long", "the branch does not fit into the KV cache")
        elif waited_for:
            self._yield_pages()

    def _moves(self, message: Settled) -> None:
        """Copies that go with the next plans, and those between replicas."""
        down, loads = self.down is not None, self.planner.loads
        if message.saves and not down:
            loads.save(message.saves)
        if loads.saves:
            grown = b"".join(grown.pages for grown in message.grown)
            loads.write(grown + pack(unpack(message.copies)[1::2]))
        if message.copies and not down:
            self.planner.copy(message.copies)
        if message.slots or message.reads:
            self.exchange.settled(message, down, bool(loads.saves))

    def _granted(self, request: Request, granted: Granted, now: float) -> None:
        ident = request.submit.request
        if self.down is not None and request.ending is None:
            request.account.hold(-1)
            self._settlements.final(Commit(ident, granted.cached - granted.loaded, b"", True))
            self._admission.queue.refund(request.account, request.charge)
            request.charge = 0
            self._admission.enqueue(request)
            return
        if not request.computed:
            request.started = now
            request.cached = granted.cached
            request.computed = request.prompt - granted.cached
        if request.ending is not None:
            request.account.hold(-1)
            self._settlements.final(Commit(ident, granted.cached - granted.loaded, b"", True))
            self._end(request, request.ending, now)
            return
        if self._info.pictures is not None and missing(granted.tokens, granted.cached, granted.pictures):
            request.account.hold(-1)
            self._settlements.final(Commit(ident, granted.cached - granted.loaded, b"", True))
            self._end(request, "error", now, "internal", "a picture of the branch is missing")
            return
        if 4 * (request.prompt - granted.cached) != len(granted.tokens):
            raise SchedulerError(
                f"request {ident}: {len(granted.tokens) // 4} tokens granted after {granted.cached} "
                f"cached, the branch has {request.prompt}"
            )
        run = RequestRun(
            request,
            self.planner.take_row(),
            granted.cached,
            granted.tokens,
            granted.pages,
            granted.history,
            granted.proven,
            self._info.page_size,
            self.planner.step,
            loaded=granted.loaded,
        )
        if self.planner.working:
            cuts = (run.prompt - 1,) if run.jumps and run.prompt - 1 > run.cached else ()
            run.states = StateSlots(granted, self.planner.working, cuts)
            run.cut = run.states.cut or run.prompt
        run.windows, run.replayed = granted.windows, granted.replayed
        if granted.pictures and self._info.pictures is not None:
            run.show(granted.pictures, self._info.pictures)
        request.replayed += granted.replayed
        self.computed_twice += max(0, request.reached - granted.cached)
        request.reached = 0
        if not request.ahead:
            self.planner.pace.lacks(request, run.prompt - run.cached)
        if request.constrained:
            self.planner.constraints.need(request.submit.constraint)
        request.state = RequestState.RUNNING
        request.run = self._runs[ident] = run
        self._admission.granted(request, run)
        if granted.loads:
            self.planner.loads.add(run, granted.loads)
        elif not (self.planner.loads.saves and self.planner.loads.waits(run)):
            self.planner.admit(run)

    def _denied(self, request: Request, verdict: Denied, now: float) -> bool:
        """It has no pages. Whether memory is missing, and it waits for that."""
        request.account.hold(-1)
        if request.ending is not None:
            self._end(request, request.ending, now)
        elif verdict.reason == "memory" and request.submit.spare:
            self._end(request, "cancelled", now)
        elif verdict.reason == "gone":
            self._end(request, "error", now, "no_branch", "the branch does not exist any more")
        else:
            self._admission.denied(request, verdict, self._runs.get(verdict.on))
            return verdict.reason == "memory" and not request.leave
        return False

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
                    self._end(self._hungry[0].request, "length", now)
                else:
                    run = min(self._runs.values(), key=for_growth)
                    self._retract(run, "memory")
                    self._admission.wait_for_end(run.request.level)
        self.planner.wanted += [run for run in self._hungry if run.live]
        self._hungry = []

    def _yield_pages(self) -> None:
        """A generation found no memory: what is computed ahead and has far to go gives way.

        It stays away until a run ends: else both would be tried again at once, and again.
        """
        runs = [run for run in self._runs.values() if run.ahead and run.filled < run.prompt]
        for run in runs:
            self._retract(run, "ahead")
        if runs:
            self._admission.unblock()
            self._admission.wait_for_end(runs[0].level)

    def _retract(self, run: RequestRun, cause: Cause) -> None:
        """Stop a run with all that it achieved; the next run of its request continues exactly there."""
        request = run.request
        self.retractions[cause] += 1
        self.computed_twice += self.planner.in_vain(run)
        request.reached = self._stop(run, None).computed
        request.resident = 0 if self.down is not None else request.reached
        self._admission.retracted(request, cause)

    # --- another executor ---------------------------------------------------------------------

    def _lost(self, reason: str, now: float) -> None:
        """The executor died, and all KV with it: what ran waits for the next one, where it was."""
        self.down, self._next = reason, None
        ran = []
        if self.planner.in_flight:  # a body that is loaded may be the cause as well
            ran = [run.request for run in self._runs.values() if run.opened or run.request.constrained]
        for run in list(self._runs.values()):
            self._retract(run, "executor")
            if run.request.record is not None:
                run.request.record.known = 0
        self.planner.lost()
        for request in self._suspects.died(ran):
            times = "twice" if request.losses == TWICE else f"{request.losses} times"
            why = f"the model executor died {times} while it ran this request, which is not tried again"
            self._end(request, "error", now, "internal", why)
        for request in ran:
            if request in self._suspects and request.ticket:
                self._admission.queue.discard(request)

    def renewed(self) -> RenewPool | None:
        """Go on with the next executor, if it is there and the cache owes no answer.

        Returns what the cache has to hear before all else.
        """
        settlements = self._settlements
        if self._next is None or settlements.outstanding or settlements.finals:
            return None
        self._info, self._next, self.down = self._next, None, None
        self.planner.resume(self._info)
        settlements.renew(self._info.pages)
        self._admission.renew(self._info.pages, self._accounts.values())
        info = self._info
        return RenewPool(
            info.pages, info.state_slots, info.window_pages, info.host_blocks, info.host_memory
        )

    def _pick(self, now: float) -> list[Request]:
        """Requests to acquire for now. One that is to run alone goes before all others."""
        suspects = self._suspects
        if (suspects.tried is None and not suspects.waiting) or not suspects:
            return self._admission.pick(now)
        if self._runs or self._settlements.outstanding:
            return []
        request = suspects.take()
        if request is None:
            return []
        self._admission.take(request)
        return [request]

    def _clear(self) -> None:
        """Let the others run again: the request that ran alone got a token."""
        cleared = self._suspects.cleared()
        if cleared is not None and cleared.run is not None:
            self._retract(cleared.run, "executor")
            self._admission.unblock()

    # --- accounts -----------------------------------------------------------------------------

    def _account(self, session: int, owner: str) -> Account:
        """The session's account. Without a credential a session is a tenant of its own."""
        account = self._accounts.get(session)
        if account is None:
            if len(self._accounts) >= self._sweep_at:
                self._sweep()
            tenant = self._tenants.setdefault(owner, Tenant()) if owner else Tenant()
            account = self._accounts[session] = Account(session, tenant)
        return account

    def _go_on(self, account: Account, submit: Submit) -> None:
        """Count the service of the request whose history `submit` goes on from: it has a session of its
        own, and would start as one that had none.
        """
        before = self._programs.get(submit.follows)
        if before is not None:
            account.served = max(account.served, before.served)
            account.tenant.served = max(account.tenant.served, before.tenant.served)
        self._programs.pop(submit.history, None)
        self._programs[submit.history] = account
        if len(self._programs) > PROGRAMS:
            del self._programs[next(iter(self._programs))]

    def _sweep(self) -> None:
        """Forget idle sessions that would start at the current virtual time anyway."""
        virtual = self._admission.queue.virtual
        self._accounts = {
            session: account
            for session, account in self._accounts.items()
            if account.requests
            or account.served > account.tenant.virtual
            or account.tenant.served > virtual
        }
        left = {id(account.tenant) for account in self._accounts.values()}
        self._tenants = {
            owner: tenant
            for owner, tenant in self._tenants.items()
            if id(tenant) in left or tenant.served > virtual
        }
        self._sweep_at = max(1024, 2 * len(self._accounts))


def _note_forced(step: SentStep, result: StepResult) -> None:
    """Note which new tokens were forced by their rows' constraints."""
    flags, at = result.forced, 0
    counts = unpack(result.counts) if result.counts else repeat(1, len(step.bound))
    for run, count in zip(step.bound, counts, strict=True):
        if run.live and run.request.constrained:
            run.forced += b"\0" * (len(run.out) - len(run.forced))  # of results that had none forced
            run.forced += flags[at : at + count]
        at += count
