"""Admission: which waiting requests ask the cache for pages, and when.

Nothing is polled. A request that was denied for memory is tried again when pages may suffice: a run
ended, the page counts say so, or nothing runs. After a denial one request is tried at a time until one
is granted, so that small requests do not overtake a big one for ever. A denied request that only
computes a prompt ahead holds up only requests like it, and no request holds up a higher priority. A
newcomer (`queue`) that fits into the free pages overtakes, `OVERTAKE` of them between two other grants.
A request whose prefix another run computes is parked on that run until a step with more of it was sent.

Where rows or pages are missing, `preemption` names the runs that give them up: a row is free at once,
and pages are the cache's before it reads the Acquire. Where the pool is too small for all sessions at
once, those that have not begun are held (`queue`) until there is room beside what the others will need
(`active`).

Long prompts, which take more than a step, are those of agents: they come back after a pause with a long
history and a few new tokens. If whoever comes is let in, each evicts what the next one needs, and all
that compute hold the pool meanwhile (thrashing; Denning 1968). So of them,

- *warm* ones go before all others: at most one part in `WARM` of them is to be computed. That costs
  little now, and much once others have taken their pages. The cache says whether one is warm, in one
  question for each request that would have to wait (`Acquire.most`).
- *cold* ones for which KV of others has to go are held, while `MOST_COLD` long prompts are computed, or
  runs hold more than one part in `HELD` of the pool: the rest keeps histories through their pauses.
  `SPACED` times as long as the last cold one took to compute, the next one comes, whatever is held.
  It is sooner where what goes comes back from host memory; nobody is held where that is cheap (`loads`).

Sizes: pages are claimed only about two steps ahead of prefill (`PromptQueue.lacking`), and a few slots
for every running request stay free, so that admission does not cause the next retraction.
"""

from collections import deque
from collections.abc import Callable, Iterable
from math import inf
from typing import Literal

from ramify.actors.scheduler.active import ActiveSessions
from ramify.actors.scheduler.loads import HostReturns
from ramify.actors.scheduler.planner import Planner
from ramify.actors.scheduler.preemption import for_row, for_slots
from ramify.actors.scheduler.queue import MemoryQueue, WaitingQueue
from ramify.actors.scheduler.request import Account, Level, Request, RequestRun, RequestState
from ramify.actors.scheduler.settlements import Settlements
from ramify.protocol.config import ScheduleConfig
from ramify.protocol.messages import Denied
from ramify.protocol.plan import ExecutorInfo

Cause = Literal["priority", "fairness", "memory", "ahead", "not finite", "executor", "lost"]
_RECHECK = 8  # steps until who was refused a row, or what it needs beside pages, may have it
PROBES = 16  # requests of a turn that are asked for before all others
OVERTAKE = 8  # newcomers that may overtake between two grants of other requests
WARM, MOST_COLD, HELD, SPACED = 4, 2, 2, 4  # of long prompts: see above
MARGIN = 64  # slots that a warm request may need beside its prompt and its first output
_HIGHEST: Level = True, 1 << 30


class Admission:
    """`retract(run, cause)` ends a run and puts its request back into the queue."""

    def __init__(
        self,
        info: ExecutorInfo,
        config: ScheduleConfig,
        planner: Planner,
        settlements: Settlements,
        runs: dict[int, RequestRun],
        retract: Callable[[RequestRun, Cause], object],
    ) -> None:
        self._planner = planner
        self._settlements = settlements
        self._runs = runs
        self._retract = retract
        self._page_size = info.page_size
        self._quantum = config.quantum_steps
        self._lookahead = config.lookahead
        self._reserve = config.lookahead / info.page_size  # pages kept free for each running request
        self.queue = WaitingQueue(config.ageing, config.lookahead, planner.prompts.enough)
        self.active = ActiveSessions(info.pages * info.page_size, self._quantum)
        self._memory_queue = MemoryQueue(self.queue, self._quantum)
        self._single = False  # after a denial: one at a time
        self._overtook = 0  # newcomers that did since the last grant of another request
        # Available pages that end the block of requests with output (and then of all), and of those
        # without; 0: there is none. It holds for `_barred` and lower levels.
        self._need: list[float] = [0, 0]
        self._barred: Level = _HIGHEST
        self._refused: tuple[Request, int] | None = None  # who could not be made room for, and when
        self._pushes = 0  # of the queue, when that was
        self._dry = -_RECHECK  # the step in which state slots or window pages were short
        self._step = info.step_tokens  # longer prompts are long
        self._pages = info.pages
        self.now = 0.0  # clock seconds
        self.returns = HostReturns()
        self._next_cold = 0.0  # when a cold prompt may come whatever is held
        self._probes: deque[Request] = deque()  # that may be warm; some may have ended

    def pick(self, now: float = 0.0) -> list[Request]:
        """Take the requests to acquire pages for now; they are ACQUIRING from here on.

        `now`: clock seconds.
        """
        planner = self._planner
        self.now = now
        if self._settlements.outstanding:
            return []
        probes = self._probe() if self._probes else []
        if not (self.queue.held or self.queue):
            return probes
        self.active.expire(planner.step)
        self._memory_queue.advance(
            planner.step, planner.processed, self._room, self._missing, idle=not planner.running,
            waits=self._put_off,
        )  # fmt: skip
        rows = planner.free_rows - len(probes)
        if not rows and self._nothing_new():
            return probes
        if planner.running:
            self._hold_cold()
        else:
            self.unblock()
        available = self._settlements.available
        self._need = [0 if available >= need else need for need in self._need]
        picked = self.queue.pick(rows, planner.lacking, self._admit, 1 if self._single else None)
        self._spare(picked)
        for request in picked:
            request.state = RequestState.ACQUIRING
        return probes + picked

    def _probe(self) -> list[Request]:
        """Take requests that may be warm, before all others.

        They get half of the free rows: where rows are short, turns decide and not what is warm.
        """
        taken: list[Request] = []
        rows, tried = self._planner.free_rows // 2, 0
        while self._probes and tried < PROBES:
            request = self._probes.popleft()
            if request.state is not RequestState.WAITING:
                continue  # it has ended: one step of this loop for each that was submitted
            tried += 1
            if len(taken) < rows:
                self.take(request)
                request.most = request.prompt // WARM + request.extra(MARGIN) + MARGIN
                taken.append(request)
            else:
                self.enqueue(request)
        self._spare(taken)
        return taken

    def is_cold(self, request: Request) -> bool:
        """Whether `request` is long and cold, takes pages of others, and has to wait for that."""
        planner, settlements = self._planner, self._settlements
        missing = request.prompt - request.resident - request.stored
        if missing <= self._step or missing * WARM <= request.prompt or request.ahead:
            return False
        if not planner.running or missing <= settlements.free * self._page_size:
            return False
        crowded = (self._pages - settlements.available) * HELD > self._pages
        return planner.long_prompts >= MOST_COLD or (crowded and self.now < self._next_cold)

    def _put_off(self, request: Request) -> bool:
        """Whether `request` is a cold prompt that has to wait, and does not outrank all that runs."""
        return self.is_cold(request) and not self.active.outranks(request)

    def _hold_cold(self) -> None:
        """Hold cold prompts at the head of the queue: others pass them."""
        for _ in range(PROBES):
            if not self.queue or (first := self.queue.first()).overtakes or not self._put_off(first):
                return
            self.queue.discard(first)
            self._memory_queue.add(first, self._planner.step, first=True)

    def _spare(self, picked: list[Request]) -> None:
        """Set `leave` of each request: the reserved pages, and what the requests picked before it will
        need.
        """
        more = 0  # that those before are going to need
        before: set[Account] = set()
        for request in picked:
            account = request.account
            request.leave = 0
            if not account.active and account not in before:
                more += self.active.needs(account)
            spared = self.active.reserved_from(account.tenant) + more
            if account.active:
                spared -= account.reserved
            if self._waits_for_room(request) and (self._planner.running or before):
                request.leave = -(-max(0, spared) // self._page_size)
            before.add(account)

    def _missing(self, request: Request) -> int:
        """Tokens that `request` takes from others if it begins now, for lack of room."""
        need = request.prompt - request.resident + self.active.needs(request.account)
        reserved = self.active.reserved_from(request.account.tenant)
        return need + min(0, reserved - self._settlements.available * self._page_size)

    @property
    def _room(self) -> int:
        """Available pages, less those that are reserved for active sessions."""
        return self._settlements.available - -(-self.active.reserved // self._page_size)

    def _waits_for_room(self, request: Request) -> bool:
        """Whether `request` must leave the reserved pages free."""
        if request.ignores_reserve or self.returns.cheap or self.active.outranks(request):
            return False
        return request.ahead or not request.account.active

    def _nothing_new(self) -> bool:
        """Whether the first request was refused a row lately and no request has come since."""
        refused, new = self._refused, self.queue.pushes != self._pushes
        return refused is not None and not new and self._planner.step - refused[1] < _RECHECK

    def enqueue(self, request: Request) -> None:
        request.state = RequestState.WAITING
        cold = request.prompt > self._step and self._put_off(request)
        begins = self.queue.held and not request.account.active
        if cold or (begins and self._waits_for_room(request)):
            self._memory_queue.add(request, self._planner.step)
        else:
            self.queue.push(request)

    def submitted(self, request: Request) -> None:
        """Queue a new request."""
        if self.queue.held and self.active.over(request, self._planner.step):
            self.active.end(request.account)
        self.active.foresee(request, request.limit)
        self.active.announce(request.account, request.submit.expects)
        asks = request.prompt > self._step and not request.ahead
        if asks and (self.queue or self.queue.held or self._probes or self._put_off(request)):
            self._probes.append(request)
        else:
            self.enqueue(request)

    def grown(self, run: RequestRun, slots: int) -> None:
        """Note that `run` got `slots` more slots."""
        run.account.tenant.slots += slots
        self.active.take(run.account, slots)
        self.active.foresee(run.request, run.cap - run.slots)

    def stopped(self, run: RequestRun, length: int) -> None:
        """Note the end of a run. `length`: positions of its branch whose KV stays in the tree."""
        held = run.held
        run.account.tenant.slots -= held
        run.account.given += len(run.out)
        self.active.stopped(run.request, held, length - run.cached + run.loaded)
        self.active.foresee(run.request, run.request.remaining)

    def retracted(self, request: Request, cause: Cause) -> None:
        """Queue `request` again after its run was retracted."""
        if cause == "memory" and not request.account.rows:
            self.active.end(request.account)
        self.enqueue(request)

    def ended(self, request: Request) -> None:
        """Forget a request that is over."""
        self.active.learn(request)
        self.active.foresee(request, 0)
        if not request.account.requests:
            self.active.rest(request.account, self._planner.step)

    def granted(self, request: Request, run: RequestRun) -> None:
        """Note a grant, and correct the request's charge to what it really holds."""
        account, held = request.account, run.held
        self.active.granted(request)
        if not account.active:
            account.began, account.given = self._planner.step, 0
        if not account.active and not request.single_answer:
            self.active.begin(account)
            self._memory_queue.begin(account)
        request.ignores_reserve = request.single_answer = False
        request.most = 0
        missing = run.prompt - run.cached
        if run.prompt > self._step and (rate := self._planner.pace.rate(0)):
            self.returns.note(run, self._planner.loads.cost(rate))
            if missing > self._step and missing * WARM > run.prompt:
                self._next_cold = self.now + SPACED * self.returns.price * missing / rate
        self.active.take(account, held)
        self.active.foresee(request, run.cap - run.slots)
        if request.level <= self._barred and not request.overtakes:
            self._single = False
            self._overtook = 0
        request.overtakes = False
        if held - run.loaded != request.charge:
            account.charge(held - run.loaded - request.charge)
        account.tenant.slots += held
        request.charge = request.need = 0

    def denied(self, request: Request, verdict: Denied, owner: RequestRun | None) -> None:
        """Put back a request that was not granted. `owner`: the run its verdict names."""
        request.resident, request.stored = verdict.resident, verdict.stored
        self.queue.refund(request.account, request.charge)
        probing, request.most, request.charge = request.most > 0, 0, 0
        if verdict.reason == "disk":
            request.state, request.fetched = RequestState.PARKED, True
            return
        if verdict.reason == "shared" and owner is not None and not self._settlements.owes(verdict.on):
            if owner.filled == owner.kept:
                request.state = RequestState.PARKED
                owner.waiters.append(request)
                self._planner.prompts.hurry(owner, request.level)
                return
            self.offer(owner)
        if verdict.slots and not probing:  # they come back as runs go on, at the latest when one ends
            self.enqueue(request)
            self.block(inf, request.level)
            self._dry = self._planner.step
            return
        begun = request.account.active
        if verdict.reason == "memory" and (probing or (request.leave and begun and not request.ahead)):
            self.enqueue(request)  # its session has begun since: now it does not have to leave anything
            return
        if verdict.reason == "memory" and request.leave and not begun:
            request.state = RequestState.WAITING
            size, account = self._page_size, request.account
            need = request.prompt - verdict.resident + request.extra(self._lookahead)
            need += self.active.needs(account) + self.active.reserved_from(account.tenant)
            need = -(-(need - self.active.reserved) // size) + 1
            # pages that it has in the tree do not count twice: those that were short must come
            need = max(need, self._room + verdict.short)
            self._memory_queue.denied(request, need, self._planner.step)
            return
        self.enqueue(request)
        if verdict.reason == "memory":
            short = max(1, verdict.short)
            request.need = self._settlements.available + short
            if request.ahead or not self._make_pages(request, short):
                self.block(request.need, request.level)
                self._single = True

    def take(self, request: Request) -> None:
        """Acquire for a request that is not in the queue: it is ACQUIRING from here on."""
        request.leave = 0
        self.queue.charge(request)
        request.state = RequestState.ACQUIRING

    def renew(self, pages: int, accounts: Iterable[Account]) -> None:
        """Begin anew with an empty pool of `pages` pages, of which `accounts` hold nothing."""
        self.unblock()
        self._single = False
        for account in accounts:
            if account.active:
                self.active.end(account)
        self.active.renew(pages * self._page_size)
        self._pages = pages

    def offer(self, run: RequestRun) -> None:
        """Let the cache hand out a prefix of `run` that steps under way compute, because requests wait
        for it.

        Requests that get it run in a later step, and steps run in order, so it is there when it is read.
        It is never taken back: these steps run even if `run` ends, and an executor that dies with them
        takes all KV along. Whether it is finite stays in doubt until `run` has seen logits.
        """
        run.offered = run.filled
        self._settlements.commit(run)
        self.wake(run)

    def wake(self, run: RequestRun) -> None:
        """Try the requests parked on `run` again: more of it is offered, or it ends."""
        waiters, run.waiters = run.waiters, []
        for request in waiters:
            if request.state is RequestState.PARKED:
                self.enqueue(request)

    def unblock(self) -> None:
        """Lift all blocks: a run has ended and its pages are on their way back."""
        self._need = [0, 0]
        self._refused, self._dry = None, -_RECHECK

    def block(self, need: float, level: Level) -> None:
        """Admit no request of `level` or below until `need` pages are available or a run ends."""
        ahead = not level[0]
        if not ahead:
            self._barred = max(self._barred, level) if self._need[False] else level
        self._need[ahead] = min(need, self._need[ahead] or inf)

    def _admit(self, request: Request, rowless: bool) -> bool:
        """Whether `request` may be taken; makes room for it if it is entitled to some."""
        level = request.level
        if request.prompt > self._step and not request.overtakes and self._put_off(request):
            return False
        if self._short_of_pages(level):
            if request.promised:
                request.promised = False
            elif self._may_overtake(request):
                self._overtook += 1
            elif request.ahead or not self._ask(request, self._find_pages):
                return False
        if rowless and self._planner.free_rows:
            return False
        return not rowless or (not request.ahead and self._ask(request, self._make_row))

    def _short_of_pages(self, level: Level) -> bool:
        available = self._settlements.available
        if available < self._planner.running * self._reserve:
            return True
        if not level[0]:
            return available < max(self._need)
        return available < self._need[False] and level <= self._barred

    def _may_overtake(self, request: Request) -> bool:
        """Whether `request` is a newcomer's that fits into the pages that a larger one waits for."""
        pages = self._wanted(request) + self._planner.running * self._reserve
        return request.overtakes and self._overtook < OVERTAKE and pages <= self._settlements.available

    def _wanted(self, request: Request) -> int:
        """Pages that `request` needs at most for its prompt."""
        tokens = request.prompt - request.resident + request.extra(self._lookahead)
        return -(-tokens // self._page_size) + 1

    def _ask(self, request: Request, make: Callable[[Request], bool]) -> bool:
        """Call `make(request)`, but not each turn for a request that was refused."""
        step = self._planner.step
        refused, self._refused = self._refused, None
        if refused is not None and refused[0] is request and step - refused[1] < _RECHECK:
            self._refused = refused
            return False
        if make(request):
            return True
        self._refused, self._pushes = (request, step), self.queue.pushes
        return False

    def _make_row(self, request: Request) -> bool:
        found = for_row(request, self._runs.values(), self._planner.step, self._quantum)
        if found is None:
            return False
        run, lower = found
        self._retract(run, "priority" if lower else "fairness")
        return True

    def _find_pages(self, request: Request) -> bool:
        """Find pages for a request that waits while they are short: as many as its last denial said, or
        its prompt needs.

        If enough are free, they are kept for other requests. Then this one may have them only if it is
        entitled to take some from a running one.
        """
        short = (request.need or self._wanted(request)) - self._settlements.available
        if short <= 0:
            runs, _ = for_slots(request, 1, self._runs.values(), self._planner.step, self._quantum)
            return bool(runs) and self._planner.step - self._dry >= _RECHECK  # else denied in each turn
        done = self._make_pages(request, short)
        request.promised = False
        return done

    def _make_pages(self, request: Request, short: int) -> bool:
        slots = short * self._page_size
        runs, lower = for_slots(request, slots, self._runs.values(), self._planner.step, self._quantum)
        for run in runs:
            self._retract(run, "priority" if lower else "fairness")
        request.promised = bool(runs)
        return request.promised
