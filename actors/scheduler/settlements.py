"""What the cache is still to be told, what it was asked, and its last page counts.

Commits and grows are collected until they go out as one `Settle`. What each `Settle` asked is
remembered, so that the answers (FIFO) find their requests. Usually one `Settle` is outstanding. One that
carries final commits may follow at once, because sessions wait behind it for `Finished`.
`MAX_OUTSTANDING` bounds them, and so what the scheduler puts into the cache's mailbox.

This file does not decide who runs.
"""

from collections import deque

from msgspec import structs

from ramify.actors.scheduler.exchange import KvExchange
from ramify.actors.scheduler.request import Request, RequestRun, SchedulerError
from ramify.protocol.messages import Acquire, Commit, Grow, Settle, Settled
from ramify.protocol.plan import ExecutorInfo, pack

MAX_OUTSTANDING = 4
# With drafts, steps for which a run gets slots: two are in flight, and one while it waits for more.
STEPS_AHEAD = 3


class Settlements:
    def __init__(self, info: ExecutorInfo, lookahead: int, working: int = 0) -> None:
        self._working = working  # state slots that a run needs
        self._windows = info.window_pages > 0
        self._history = info.drafts_from_history
        self._page_size = info.page_size
        self._lookahead = lookahead
        # A step may use so many slots of a run where it would use one.
        self._growth = max(lookahead, STEPS_AHEAD * (1 + info.max_drafts)) if info.drafter else lookahead
        # And one with a constraint so many more.
        self._jump = max(self._growth, STEPS_AHEAD * (1 + info.max_forced)) if info.max_forced else 0
        self.commits: dict[int, Commit] = {}  # that wait to be sent
        self._sent: deque[tuple[list[Request], list[RequestRun], dict[int, Commit]]] = deque()
        self.finals = 0  # final commits that wait to be sent
        self.available = info.pages  # free and evictable pages after the last Settled
        self.free = info.pages  # those that are free

    @property
    def outstanding(self) -> int:
        return len(self._sent)

    @property
    def ready(self) -> bool:
        """Whether a Settle may be sent now."""
        return not self._sent or (self.finals > 0 and len(self._sent) < MAX_OUTSTANDING)

    def owes(self, request: int) -> bool:
        """Whether the cache decided its last verdict before it saw the last commit of `request`."""
        return request in self.commits or any(request in commits for _, _, commits in self._sent)

    def commit(self, run: RequestRun) -> None:
        """A prefill chunk of `run` was computed, or is offered; behind the last one, logits may have
        been seen.
        """
        finite = True if run.seen else None
        states = b""
        if run.states is not None:
            states = self._untold(run.ident) + pack(run.states.told(run.kept))
        self.commits[run.ident] = Commit(run.ident, run.kept, finite=finite, states=states)

    def final(self, commit: Commit) -> None:
        """A run has ended. Replaces what was collected for it before, but for its snapshots."""
        untold = self._untold(commit.request)
        if untold and commit.finite is not False:
            commit = structs.replace(commit, states=untold + commit.states)
        self.commits[commit.request] = commit
        self.finals += 1

    def take(
        self,
        acquires: list[Request],
        grows: list[RequestRun],
        rate: float = 0.0,
        exchange: KvExchange | None = None,
        more: bool = False,
        cost: int = 0,
    ) -> Settle | None:
        """The next Settle, or None if there is nothing to say, and the cache has no `more` to save.

        `rate`, `cost`: see `Acquire`; no rate: nothing is to be loaded. `exchange`: what goes between
        replicas.
        """
        asks = exchange is not None and exchange.asks
        if not (self.commits or acquires or grows or asks or more):
            return None
        settle = Settle(
            list(self.commits.values()),
            [Grow(run.ident, self.growth(run)) for run in grows],
            [
                Acquire(
                    request.submit.request,
                    request.submit.branch,
                    request.extra(self._lookahead),
                    request.limit > 0 and (self._history or request.reads_history),
                    request.prompt,
                    request.targets.rerun if request.targets else None,
                    request.leave,
                    request.submit.spare,
                    self._slots(request),
                    request.most,
                    rate > 0,
                    0.0 if request.fetched else rate,
                    cost,
                )
                for request in acquires
            ],
        )
        if exchange is not None and asks:
            exchange.settle(settle)
        self._sent.append((acquires, grows, self.commits))
        self.commits = {}
        self.finals = 0
        return settle

    def _slots(self, request: Request) -> int:
        """See `Acquire.slots`."""
        if self._windows:
            return max(0, request.remaining - 1 - request.extra(self._lookahead))
        return self._working

    def settled(self, message: Settled) -> tuple[list[Request], list[RequestRun]]:
        """The requests and runs that `message` answers. Raises SchedulerError if it fits nothing."""
        if not self._sent:
            raise SchedulerError("Settled without a Settle")
        acquires, grows, _ = self._sent.popleft()
        asked = [request.submit.request for request in acquires], [run.ident for run in grows]
        answered = [v.request for v in message.verdicts], [g.request for g in message.grown]
        if asked != answered:
            raise SchedulerError(f"Settled answers requests {answered}, asked were {asked}")
        self.available = message.free + message.evictable
        self.free = message.free
        return acquires, grows

    def _untold(self, request: int) -> bytes:
        """The snapshots of a commit that is not sent yet."""
        commit = self.commits.get(request)
        return b"" if commit is None else commit.states

    def renew(self, pages: int) -> None:
        """Set the size of the pool: `pages` pages, all of them free."""
        self.available = self.free = pages

    def growth(self, run: RequestRun) -> int:
        """Slots to ask for: whole pages, at most what the run can still use."""
        want = max(self._growth, self._jump) if run.jumps else self._growth
        want = min(want, run.cap - run.slots)
        return -(-want // self._page_size) * self._page_size

    def could_grow(self, run: RequestRun) -> bool:
        """Whether the last page counts, which may be newer than the denial of its Grow, have room for
        `run`.
        """
        return self.growth(run) <= self.available * self._page_size
