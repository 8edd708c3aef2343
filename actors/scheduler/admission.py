"""Who is asked pages for, and when: the gate between the waiting queue and the cache.

Nothing is polled. A request that was denied for memory is tried again when pages may suffice: a
run ended, the page counts say so, or nothing runs. After a denial one request at a time is tried
until one is granted, so that small ones do not overtake a big one for ever; but what is computed
ahead and finds no memory holds up nothing but its like. A request whose prefix another run
computes is parked on that run and comes back with its next commit.

Sizes: pages are claimed only about two steps ahead of prefill (`Prompts.lacking`), and a few slots
for every running request stay free, so that admission does not cause the next retraction.
"""

from math import inf

from ramify.actors.scheduler.ledger import Ledger
from ramify.actors.scheduler.planner import Planner
from ramify.actors.scheduler.queue import WaitingQueue
from ramify.actors.scheduler.request import Request, Run, State
from ramify.protocol.config import ScheduleConfig
from ramify.protocol.messages import Denied
from ramify.protocol.plan import ExecutorInfo


class Admission:
    def __init__(
        self, info: ExecutorInfo, config: ScheduleConfig, planner: Planner, ledger: Ledger
    ) -> None:
        self._planner = planner
        self._ledger = ledger
        self._reserve = config.lookahead / info.page_size  # pages kept free for each running request
        self.queue = WaitingQueue(config.ageing, config.lookahead)
        self._single = False  # after a denial: one at a time
        # Available pages that end the block of requests with output (and then of all), and of those
        # without; 0: there is none.
        self._need: list[float] = [0, 0]

    def pick(self) -> list[Request]:
        """Requests to acquire for now; they are ACQUIRING from here on."""
        planner = self._planner
        if not self.queue or self._ledger.outstanding or not planner.free_rows:
            return []
        if not planner.running:
            self.unblock()
        available = self._ledger.available
        if available < max(self._need[False], planner.running * self._reserve):
            return []
        self._need[False] = 0
        rows = 1 if self._single else planner.free_rows
        tokens, ahead = planner.lacking()
        if available < self._need[True]:
            ahead = 0
        else:
            self._need[True] = 0
        picked = self.queue.pick(rows, tokens, ahead)
        for request in picked:
            request.state = State.ACQUIRING
        return picked

    def enqueue(self, request: Request) -> None:
        request.state = State.WAITING
        self.queue.push(request)

    def granted(self, request: Request, run: Run) -> None:
        """Correct the charge of a request that runs now."""
        self._single = False
        request.account.served += run.slots - run.cached - request.charge
        request.charge = 0

    def denied(self, request: Request, verdict: Denied, owner: Run | None) -> None:
        """Put back a request that was not granted. `owner`: the run its verdict names."""
        request.resident = verdict.resident
        self.queue.refund(request)
        if verdict.reason == "shared" and owner is not None and not self._ledger.owes(verdict.on):
            request.state = State.PARKED
            owner.waiters.append(request)
            if not request.ahead:
                self._planner.hurry(owner)
            return
        self.enqueue(request)
        if verdict.reason == "memory":
            self._block(self._ledger.available + max(1, verdict.short), ahead=request.ahead)
            self._single = True

    def wake(self, run: Run) -> None:
        """`run` commits or ends: who is parked on it is tried again."""
        waiters, run.waiters = run.waiters, []
        for request in waiters:
            if request.state is State.PARKED:
                self.enqueue(request)

    def retracted(self, request: Request) -> None:
        """Put back a request whose pages others need: admit nobody until a run ends, or nothing runs."""
        self.enqueue(request)
        self._block(inf, ahead=False)

    def unblock(self) -> None:
        """A run has ended and its pages are on their way back."""
        self._need = [0, 0]

    def _block(self, need: float, *, ahead: bool) -> None:
        """Admit nobody (`ahead`: only nothing ahead) until `need` pages are available or a run ends."""
        self._need[ahead] = min(need, self._need[ahead] or inf)
