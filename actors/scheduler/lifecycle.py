"""The life of a request, from `Submit` to `Finished`, and of its runs, from a grant to the final commit.

    submitted   refused, or queued by `admission`
    granted     a run begins: the request has pages and a row
    retracted   the run ends with what it achieved, the request is queued again
    ended       finished, cancelled, past its deadline, or failed: told to its session once

Does not know when requests are admitted, which runs give way, nor what a step computed.
"""

import heapq
from collections import Counter

from msgspec import structs

from ramify.actors.scheduler.accounts import Accounts
from ramify.actors.scheduler.admission import Admission, Cause
from ramify.actors.scheduler.deliveries import Deliveries
from ramify.actors.scheduler.planner import Planner
from ramify.actors.scheduler.request import (
    Reason,
    Request,
    RequestRun,
    RequestState,
    SchedulerError,
    output_limit,
)
from ramify.actors.scheduler.settlements import Settlements
from ramify.actors.scheduler.states import StateSlots
from ramify.actors.scheduler.suspects import TWICE, Suspects
from ramify.actors.scheduler.targets import Targets, targets_of
from ramify.protocol.config import ScheduleConfig
from ramify.protocol.errors import Code
from ramify.protocol.messages import Commit, Denied, Granted, Submit, session_of
from ramify.protocol.pictures import missing
from ramify.protocol.plan import ExecutorInfo, PicturesSeen

_MOST_REASON = 200  # characters
PLACES = 8  # of the waiting queue that a tenant may have, for each that is free


class RequestLifecycle:
    """All requests that have not ended, and those of them that run, by number."""

    def __init__(
        self,
        info: ExecutorInfo,
        config: ScheduleConfig,
        planner: Planner,
        settlements: Settlements,
        deliveries: Deliveries,
    ) -> None:
        self._info = info
        self._config = config
        self._planner = planner
        self._settlements = settlements
        self._deliveries = deliveries
        self.requests: dict[int, Request] = {}
        self.runs: dict[int, RequestRun] = {}
        self.admission = Admission(info, config, planner, settlements, self.runs, self.retract)
        self.accounts = Accounts(self.admission.queue)
        self.down: str | None = None  # why there is no executor; None: there is one
        self.suspects = Suspects()
        self.deadlines: list[tuple[float, int]] = []  # a heap; some requests may have ended
        self._count = 0
        self.batch = 0  # number of the turn: requests that come in one were submitted together
        self.retractions: Counter[str] = Counter()  # by Cause
        self.hold_s = 0.0  # seconds from a request's first grant to its end, a mean that forgets
        self.computed_twice = 0  # tokens: in flight at a retraction, or evicted before it went on

    @property
    def waiting(self) -> int:
        """Requests without a run."""
        return len(self.requests) - len(self.runs)

    def renew(self, info: ExecutorInfo) -> None:
        """Go on with another executor, which has no KV. Nothing runs."""
        self._info, self.down = info, None
        self.admission.renew(info.pages, self.accounts.sessions.values())

    def submit(self, submit: Submit, now: float) -> None:
        """Queue a new request, or end it with the reason why it cannot run."""
        if submit.request in self.requests:
            raise SchedulerError(f"request {submit.request} is submitted twice")
        limit = output_limit(submit, self._info)
        account = self.accounts.of(session_of(submit.request), submit.owner)
        if submit.history:
            self.accounts.go_on(account, submit)
        self._count += 1
        refusal: tuple[Code, str] | None = None
        targets: Targets | None = None
        try:
            if submit.places or submit.targets:
                targets = targets_of(submit, self._info.vocab_size)
        except ValueError as error:  # a bug of that session, which must not stop the executor
            refusal = "internal", f"request {submit.request}: {error}"
        processed = self._planner.processed
        request = Request(submit, account, self._count, self.batch, processed, limit, targets)
        refusal = refusal or self._refusal(request)
        self.requests[submit.request] = account.requests[submit.request] = request
        account.tenant.requests += 1
        if refusal is None and submit.constraint:
            request.stale = not self._planner.constraints.take(submit.constraint)
            if request.stale:
                refusal = "overloaded", "its constraint had to give way: try again later"
        if refusal is not None:
            request.constrained = False
            self.end(request, "error", now, *refusal)
            return
        if submit.deadline is not None:
            heapq.heappush(self.deadlines, (submit.deadline, submit.request))
            if len(self.deadlines) > 64 + 2 * len(self.requests):
                self.deadlines = [d for d in self.deadlines if d[1] in self.requests]
                heapq.heapify(self.deadlines)
        if not request.ahead:
            self._planner.pace.lacks(request, request.prompt)
        self.admission.submitted(request)

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

    def cancel(self, ident: int, reason: Reason, keep: int | None, now: float) -> None:
        """End a request, if it has not ended. `keep`: of all its output tokens; None: all."""
        request = self.requests.get(ident)
        if request is None:
            return
        if request.state is RequestState.ACQUIRING:  # ends with its verdict, so that pages come back
            request.ending = request.ending or reason
        else:
            self.end(request, reason, now, keep=keep)

    def cancel_session(self, session: int, now: float) -> None:
        """End the requests of a session that is gone. It is told nothing more."""
        account = self.accounts.forget(session)
        if account is None:
            return
        account.closed = True
        for ident in list(account.requests):
            self.cancel(ident, "cancelled", 0, now)
        self.admission.active.end(account)

    def end(
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
            self.admission.queue.discard(request)
        if request.run is not None:
            self._stop(request.run, None if keep is None else keep - request.done)
            self.admission.unblock()
        if request.lacking:
            self._planner.pace.lacks(request, 0)
        request.state = RequestState.ENDED
        if request.started:
            held = now - request.started
            self.hold_s += (held - self.hold_s) / 32 if self.hold_s else held
        ident = request.submit.request
        del self.requests[ident], request.account.requests[ident]
        request.account.tenant.requests -= 1
        if request.constrained:
            self._planner.constraints.give_back(request.submit.constraint)
        self.admission.ended(request)
        self._deliveries.ended(request, reason, now, error, message)

    def _stop(self, run: RequestRun, keep: int | None) -> Commit:
        """End a run, finished or retracted: its final commit, and no further plan."""
        commit, kept = run.final(keep)
        written = self._planner.written(run)
        self._planner.drop(run)
        if run.states is not None:
            commit = structs.replace(commit, states=self._planner.states_kept(run, commit))
        elif self._info.window_pages:
            commit = structs.replace(commit, written=written)
        if run.lost:
            commit = structs.replace(commit, lost=run.lost)
        self._settlements.final(commit)
        self.admission.wake(run)
        account = run.account
        account.hold(-1)
        self.admission.stopped(run, max(commit.computed, run.cached - run.loaded))
        self.admission.queue.refund(account, run.slots - max(commit.computed, run.cached))
        run.request.keep(kept)
        run.request.forced_tokens += run.forced.count(1, 0, kept)
        run.request.run = None
        del self.runs[run.ident]
        return commit

    def granted(self, request: Request, granted: Granted, now: float) -> None:
        """Begin a run, unless the request has been cancelled meanwhile or there is no executor.

        Raises SchedulerError if the grant does not fit the branch.
        """
        ident = request.submit.request
        if (self.down is not None or granted.pictures) and self._put_back(request, granted):
            return
        if not request.computed:
            request.started = now
            request.cached, request.host, request.disk = granted.cached, granted.host, granted.disk
            request.computed = request.prompt - granted.cached
        if request.ending is not None:
            self._give_back(request, granted)
            self.end(request, request.ending, now)
            return
        if self._info.pictures is not None and missing(granted.tokens, granted.cached, granted.pictures):
            self._give_back(request, granted)
            self.end(request, "error", now, "internal", "a picture of the branch is missing")
            return
        if 4 * (request.prompt - granted.cached) != len(granted.tokens):
            raise SchedulerError(
                f"request {ident}: {len(granted.tokens) // 4} tokens granted after {granted.cached} "
                f"cached, the branch has {request.prompt}"
            )
        run = RequestRun(
            request,
            self._planner.take_row(),
            granted.cached,
            granted.tokens,
            granted.pages,
            granted.history,
            granted.proven,
            self._info.page_size,
            self._planner.step,
            loaded=granted.loaded,
        )
        if self._planner.working:
            cuts = (run.prompt - 1,) if run.jumps and run.prompt - 1 > run.cached else ()
            run.states = StateSlots(granted, self._planner.working, cuts)
            run.cut = run.states.cut or run.prompt
        run.windows, run.replayed = granted.windows, granted.replayed
        if granted.pictures:
            run.show(granted.pictures, self._info.pictures)
        request.replayed += granted.replayed
        self.computed_twice += max(0, request.reached - granted.cached)
        request.reached = 0
        if not request.ahead:
            self._planner.pace.lacks(request, run.prompt - run.cached)
        if request.constrained:
            self._planner.constraints.need(request.submit.constraint)
        request.state = RequestState.RUNNING
        request.run = self.runs[ident] = run
        self.admission.granted(request, run)
        if granted.loads:
            self._planner.loads.add(run, granted.loads)
        elif not (self._planner.loads.saves and self._planner.loads.waits(run)):
            self._planner.admit(run)

    def _put_back(self, request: Request, granted: Granted) -> bool:
        """Whether `request` cannot begin now: there is no executor, or many wait for pictures."""
        looks = self._planner.looks
        crowded = looks.full and any(each.picture is not None for each in granted.pictures)
        if request.ending is not None or not (self.down is not None or crowded):
            return False
        self._give_back(request, granted)
        self.admission.queue.refund(request.account, request.charge)
        request.charge = 0
        if self.down is not None:
            self.admission.enqueue(request)
        else:
            request.state = RequestState.PARKED
            looks.parked.append(request)
        return True

    def unpark(self) -> None:
        """Queue again the requests that were put aside because too many others waited for pictures."""
        for request in self._planner.looks.unparked():
            self.admission.enqueue(request)

    def pictures_seen(self, message: PicturesSeen, now: float) -> None:
        """Let prompts with seen pictures go on. End the requests whose picture the tower failed at."""
        for run in self._planner.looks.seen(message):
            why = f"the model could not look at a picture of the branch: {message.reason}"
            self.end(run.request, "error", now, "internal", why)

    def _give_back(self, request: Request, granted: Granted) -> None:
        request.account.hold(-1)
        computed = granted.cached - granted.loaded
        self._settlements.final(Commit(granted.request, computed, b"", True))

    def denied(self, request: Request, verdict: Denied, now: float) -> bool:
        """Queue the request again, or end it. Returns whether it waits for memory."""
        request.account.hold(-1)
        if request.ending is not None:
            self.end(request, request.ending, now)
        elif verdict.reason == "memory" and request.submit.spare:
            self.end(request, "cancelled", now)
        elif verdict.reason == "gone":
            self.end(request, "error", now, "no_branch", "the branch does not exist any more")
        else:
            self.admission.denied(request, verdict, self.runs.get(verdict.on))
            return verdict.reason == "memory" and not request.leave
        return False

    def end_tokenless(self, run: RequestRun, stuck: str, now: float) -> None:
        """End or repeat `run`, which got no token: its logits are not finite, or its constraint is
        `stuck` (why).
        """
        if run.states is not None:
            run.states.lost = True
        if stuck:
            self.end(run.request, "error", now, "bad_constraint", f"the `constraint` is stuck: {stuck}")
        else:
            self.not_finite(run, now)

    def not_finite(self, run: RequestRun, now: float) -> None:
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
                self.retract(run, "not finite")
                self.admission.unblock()
                return
        self.end(request, "error", now, "internal", "the model's output is not finite")

    def retract(self, run: RequestRun, cause: Cause) -> None:
        """Stop a run with all that it achieved; the next run of its request continues exactly there."""
        request = run.request
        self.retractions[cause] += 1
        self.computed_twice += self._planner.in_vain(run)
        request.reached = self._stop(run, None).computed
        request.resident = 0 if self.down is not None else request.reached
        self.admission.retracted(request, cause)

    def lost(self, reason: str, now: float) -> None:
        """The executor died, and all KV with it: what ran waits for the next one, where it was."""
        self.down = reason
        looks, ran = self._planner.looks, []
        if self._planner.in_flight or looks.under_way:
            # a body that is loaded, or a picture that the tower runs on, may be the cause as well
            ran = [
                run.request
                for run in self.runs.values()
                if run.opened or run.request.constrained or looks.looking(run)
            ]
        for run in list(self.runs.values()):
            self.retract(run, "executor")
            if run.request.record is not None:
                run.request.record.known = 0
        self._planner.lost()
        for request in self.suspects.died(ran):
            times = "twice" if request.losses == TWICE else f"{request.losses} times"
            why = f"the model executor died {times} while it ran this request, which is not tried again"
            why += f": {reason[:_MOST_REASON]}"
            self.end(request, "error", now, "internal", why)
        for request in ran:
            if request in self.suspects and request.ticket:
                self.admission.queue.discard(request)

    def pick(self, now: float) -> list[Request]:
        """Requests to acquire for now. One that is to run alone goes before all others."""
        suspects = self.suspects
        if (suspects.tried is None and not suspects.waiting) or not suspects:
            return self.admission.pick(now)
        if self.runs or self._settlements.outstanding:
            return []
        request = suspects.take()
        if request is None:
            return []
        self.admission.take(request)
        return [request]

    def clear_suspect(self) -> None:
        """Let the others run again: the request that ran alone got a token."""
        cleared = self.suspects.cleared()
        if cleared is not None and cleared.run is not None:
            self.retract(cleared.run, "executor")
            self.admission.unblock()

    def next_deadline(self) -> float | None:
        """Clock seconds at which a request may have to end."""
        while self.deadlines and self.deadlines[0][1] not in self.requests:
            heapq.heappop(self.deadlines)
        return self.deadlines[0][0] if self.deadlines else None
