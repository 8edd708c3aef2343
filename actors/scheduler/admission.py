"""Who is asked pages for, and when: the gate between the waiting queue and the cache.

Nothing is polled. A request that was denied for memory is tried again when pages may suffice:
a run ended, the page counts say so, or nothing runs. After a denial one request at a time is
tried until one is granted, so that small ones do not overtake a big one for ever. A request
whose prefix another run computes is parked on that run and comes back with its next commit.

Sizes: pages are claimed only about two steps ahead of prefill (`Prompts.lacking`), and a few slots
for every running request stay free, so that admission does not cause the next retraction.
"""

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
        self._blocked = False
        self._single = False  # after a denial: one at a time
        self._need: float = 0  # available pages that end the block

    def pick(self) -> list[Request]:
        """Requests to acquire for now; they are ACQUIRING from here on."""
        planner = self._planner
        if not self.queue or self._ledger.outstanding or not planner.free_rows:
            return []
        if planner.running:
            floor = max(self._need if self._blocked else 0.0, planner.running * self._reserve)
            if self._ledger.available < floor:
                return []
        self._blocked = False
        rows = 1 if self._single else planner.free_rows
        picked = self.queue.pick(rows, *planner.lacking())
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
            self.block(self._ledger.available + max(1, verdict.short))
            self._single = True

    def wake(self, run: Run) -> None:
        """`run` commits or ends: who is parked on it is tried again."""
        waiters, run.waiters = run.waiters, []
        for request in waiters:
            if request.state is State.PARKED:
                self.enqueue(request)

    def block(self, need: float) -> None:
        """Admit nobody until `need` pages are available, a run ends, or nothing runs."""
        self._need = min(need, self._need) if self._blocked else need
        self._blocked = True

    def unblock(self) -> None:
        """A run has ended and its pages are on their way back."""
        self._blocked = False
