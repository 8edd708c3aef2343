"""Admission: which waiting requests ask the cache for pages, and when.

Nothing is polled. A request that was denied for memory is tried again when pages may suffice: a run
ended, the page counts say so, or nothing runs. After a denial one request is tried at a time until one
is granted, so that small requests do not overtake a big one for ever. A denied request that only
computes a prompt ahead holds up only requests like it, and no request holds up a higher priority. A
newcomer (`memory_queue`) that fits into the free pages overtakes, `OVERTAKE` of them between two other
grants. A request whose prefix another run computes is parked on that run until a step with more of it
was sent.

Where rows or pages are missing, `preemption` names the runs that give them up: a row is free at once,
and pages are the cache's before it reads the Acquire.

Where the pool is too small for all sessions at once, those that have not begun wait in the
`memory_queue` until there is room beside what the sessions that have begun will need (`active`).

Long prompts whose KV is gone do not evict what others come back for: see `cold`.

Sizes: pages are claimed only about two steps ahead of prefill (`PromptQueue.lacking`), and a few slots
for every running request stay free, so that admission does not cause the next retraction.
"""

from collections import deque
from collections.abc import Callable, Iterable
from math import inf
from typing import Literal

from ramify.actors.scheduler.active import ActiveSessions
from ramify.actors.scheduler.cold import ColdPrompts
from ramify.actors.scheduler.memory_queue import MemoryQueue
from ramify.actors.scheduler.planner import Planner
from ramify.actors.scheduler.preemption import for_row, for_slots
from ramify.actors.scheduler.queue import WaitingQueue
from ramify.actors.scheduler.request import Account, Level, Request, RequestState, Run
from ramify.actors.scheduler.settlements import Settlements
from ramify.protocol.config import ScheduleConfig
from ramify.protocol.messages import Denied
from ramify.protocol.plan import ExecutorInfo

Cause = Literal["priority", "fairness", "memory", "ahead", "not finite", "executor"]
_RECHECK = 8  # steps until who was refused a row may have become entitled to one
PROBES = 16  # requests of a turn that are asked for before all others
OVERTAKE = 8  # newcomers that may overtake between two grants of other requests
_HIGHEST: Level = True, 1 << 30


class Admission:
    """`retract(run, cause)` ends a run and puts its request back into the queue."""

    def __init__(
        self,
        info: ExecutorInfo,
        config: ScheduleConfig,
        planner: Planner,
        settlements: Settlements,
        runs: dict[int, Run],
        retract: Callable[[Run, Cause], object],
    ) -> None:
        self._planner = planner
        self._settlements = settlements
        self._runs = runs
        self._retract = retract
        self._page_size = info.page_size
        self._quantum = config.quantum_steps
        self._lookahead = config.lookahead
        self._reserve = config.lookahead / info.page_size  # pages kept free for each running request
        self.queue = WaitingQueue(config.ageing, config.lookahead, planner.enough)
        self.active = ActiveSessions(info.pages * info.page_size, self._quantum)
        empty = WaitingQueue(config.ageing, config.lookahead, planner.enough)
        self._memory_queue = MemoryQueue(self.queue, empty, self._quantum)
        self._single = False  # after a denial: one at a time
        self._overtook = 0  # newcomers that did since the last grant of another request
        # Available pages that end the block of requests with output (and then of all), and of those
        # without; 0: there is none. It holds for `_barred` and lower levels.
        self._need: list[float] = [0, 0]
        self._barred: Level = _HIGHEST
        self._refused: tuple[Request, int] | None = None  # who could not be made room for, and when
        self._pushes = 0  # of the queue, when that was
        self.cold = ColdPrompts(info, planner, settlements)
        self._step = info.step_tokens  # longer prompts are what `cold` is about
        self._probes: deque[Request] = deque()  # that may be warm; some may have ended
        self._held_up = False  # the queue, by a cold prompt at its head

    def pick(self, now: float = 0.0) -> list[Request]:
        """Take the requests to acquire pages for now; they are ACQUIRING from here on.

        `now`: clock seconds.
        """
        planner = self._planner
        self.cold.now = now
        if self._settlements.outstanding:
            return []
        probes = self._probe() if self._probes else []
        if not (self.queue or self._memory_queue):
            return probes
        self.active.expire(planner.step)
        self._memory_queue.advance(
            planner.step, planner.processed, self._room, self._missing, idle=not planner.running,
            waits=self._put_off,
        )  # fmt: skip
        rows = planner.free_rows - len(probes)
        if not rows and self._nothing_new():
            return probes
        if not planner.running:
            self.unblock()
        available = self._settlements.available
        if available >= self._need[False]:
            self._need[False] = 0
        if available >= self._need[True]:
            self._need[True] = 0
        most = 1 if self._single else None
        picked = self.queue.pick(rows, planner.lacking, self._admit, most)
        if self._held_up and not picked:
            self._set_aside()
            picked = self.queue.pick(rows, planner.lacking, self._admit, most)
        self._held_up = False
        self._spare(picked)
        for request in picked:
            request.state = RequestState.ACQUIRING
        return probes + picked

    def _probe(self) -> list[Request]:
        """Take requests that may be warm, before all others; see `cold`.

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
                request.most = self.cold.most(request)
                taken.append(request)
            else:
                self.enqueue(request)
        self._spare(taken)
        return taken

    def _put_off(self, request: Request) -> bool:
        """Whether `request` is a cold prompt that has to wait; see `cold`."""
        return self.cold.waits(request) and not self.active.outranks(request)

    def _set_aside(self) -> None:
        """Let cold prompts at the head of the queue wait in the memory queue: others pass them."""
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
        if request.ignores_reserve or self.active.outranks(request):
            return False
        return request.ahead or not request.account.active

    def _nothing_new(self) -> bool:
        """Whether the first request was refused a row lately and no request has come since."""
        if self._refused is None or self.queue.pushes != self._pushes:
            return False
        return self._planner.step - self._refused[1] < _RECHECK

    def enqueue(self, request: Request) -> None:
        request.state = RequestState.WAITING
        if (request.prompt > self._step and self._put_off(request)) or (
            self._memory_queue and not request.account.active and self._waits_for_room(request)
        ):
            self._memory_queue.add(request, self._planner.step)
        else:
            self.queue.push(request)

    def discard(self, request: Request) -> None:
        """Remove a waiting request."""
        if request.in_memory_queue:
            self._memory_queue.discard(request)
        else:
            self.queue.discard(request)

    def submitted(self, request: Request) -> None:
        """Queue a new request."""
        if self._memory_queue and self.active.over(request, self._planner.step):
            self.active.end(request.account)
        self.active.foresee(request, request.limit)
        self.active.announce(request.account, request.submit.expects)
        if (
            request.prompt > self._step
            and not request.ahead
            and (self.queue or self._memory_queue or self._probes or self._put_off(request))
        ):
            self._probes.append(request)
        else:
            self.enqueue(request)

    def grown(self, run: Run, slots: int) -> None:
        """Note that `run` got `slots` more slots."""
        run.account.tenant.slots += slots
        self.active.take(run.account, slots)
        self.active.foresee(run.request, run.cap - run.slots)

    def stopped(self, run: Run, length: int) -> None:
        """Note the end of a run. `length`: positions of its branch whose KV stays in the tree."""
        held = run.held
        run.account.tenant.slots -= held
        run.account.given += len(run.out)
        self.active.stopped(run.request, held, length - run.cached)
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

    def granted(self, request: Request, run: Run) -> None:
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
        if run.prompt > self._step:
            self.cold.granted(run)
        self.active.take(account, held)
        self.active.foresee(request, run.cap - run.slots)
        if request.level <= self._barred and not request.overtakes:
            self._single = False
            self._overtook = 0
        request.overtakes = False
        if held != request.charge:
            account.charge(held - request.charge)
        account.tenant.slots += held
        request.charge = 0
        request.need = 0

    def denied(self, request: Request, verdict: Denied, owner: Run | None) -> None:
        """Put back a request that was not granted. `owner`: the run its verdict names."""
        request.resident = verdict.resident
        self.queue.refund(request.account, request.charge)
        request.charge = 0
        probing, request.most = request.most > 0, 0
        if probing and verdict.reason == "memory":
            self.enqueue(request)
            return
        if verdict.reason == "shared" and owner is not None and not self._settlements.owes(verdict.on):
            if owner.filled == owner.kept:
                request.state = RequestState.PARKED
                owner.waiters.append(request)
                self._planner.hurry(owner, request.level)
                return
            self.offer(owner)
        begun = request.account.active
        if verdict.slots:  # they come back as runs go on, and at the latest when one ends
            self.enqueue(request)
            self._block(inf, request.level)
            return
        if verdict.reason == "memory" and request.leave and begun and not request.ahead:
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
                self._block(request.need, request.level)
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
        self.cold.renew(pages)

    def offer(self, run: Run) -> None:
        """Let the cache hand out a prefix of `run` that steps under way compute, because requests wait
        for it.

        Requests that get it run in a later step, and steps run in order, so it is there when it is read.
        It is never taken back: these steps run even if `run` ends, and an executor that dies with them
        takes all KV along. Whether it is finite stays in doubt until `run` has seen logits.
        """
        run.offered = run.filled
        self._settlements.commit(run)
        self.wake(run)

    def wake(self, run: Run) -> None:
        """Try the requests parked on `run` again: more of it is offered, or it ends."""
        waiters, run.waiters = run.waiters, []
        for request in waiters:
            if request.state is RequestState.PARKED:
                self.enqueue(request)

    def wait_for_end(self, level: Level) -> None:
        """Admit no request of `level` or below until a run ends or nothing runs: pages are short."""
        self._block(inf, level)

    def unblock(self) -> None:
        """Lift all blocks: a run has ended and its pages are on their way back."""
        self._need = [0, 0]
        self._refused = None

    def _block(self, need: float, level: Level) -> None:
        """Admit no request of `level` or below until `need` pages are available or a run ends."""
        ahead = not level[0]
        if not ahead:
            self._barred = max(self._barred, level) if self._need[False] else level
        self._need[ahead] = min(need, self._need[ahead] or inf)

    def _admit(self, request: Request, rowless: bool) -> bool:
        """Whether `request` may be taken; makes room for it if it is entitled to some."""
        level = request.level
        if request.prompt > self._step and not request.overtakes and self._put_off(request):
            self._held_up = True
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
        tokens = request.prompt - request.resident + request.extra(self._lookahead)
        pages = -(-tokens // self._page_size) + 1 + self._planner.running * self._reserve
        return request.overtakes and self._overtook < OVERTAKE and pages <= self._settlements.available

    def _ask(self, request: Request, make: Callable[[Request], bool]) -> bool:
        """Call `make(request)`, but not each turn for a request that was refused."""
        step = self._planner.step
        if self._refused is not None:
            refused, since = self._refused
            if refused is request and step - since < _RECHECK:
                return False
        self._refused = None
        if make(request):
            return True
        self._refused = request, step
        self._pushes = self.queue.pushes
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
        tokens = request.prompt - request.resident + request.extra(self._lookahead)
        short = (request.need or -(-tokens // self._page_size) + 1) - self._settlements.available
        if short <= 0:
            runs, _ = for_slots(request, 1, self._runs.values(), self._planner.step, self._quantum)
            return bool(runs)
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
