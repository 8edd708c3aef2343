"""The queue of requests whose sessions have not begun and found no room: who is tried next, and when.

The request that fair queueing puts first is moved to the waiting queue, as the *candidate*,

- when as many pages are free as the last candidate lacked; or
- whatever is free, when no request has left this queue for a quantum of steps, and `PAID` times as
  many tokens were computed since the last such candidate as this one lacks. Others lose those tokens
  and compute them again, so the loss stays a bounded part of the work, and the k-th request waits for
  about k quanta at most. A request that only computes a prompt ahead waits for room.

The waiting queue decides on rows as always. When a candidate's session begins, that session's other
requests leave this queue too. A candidate of a tenant that runs something may last, for a tenant takes
no pages from its own runs. So while it lasts, a second one is tried, of a tenant that runs nothing.

A newcomer overtakes both queues: a tenant that runs nothing and has had no more than its share, in the
quantum of steps after its first request came, if no other did so for half a quantum. The shortest
prompt is first, and does not wait for the pages of a longer one. So whoever comes alone to a full pool
waits neither for a crowd that came at once nor for requests that lack many pages. A request that had to
give its pages back is no newcomer's, nor is one of a tenant that has just had an answer. If it is the
only request of its session, it is admitted for a *single answer*: the session does not begin with it
and queues here afterwards. So a crowd of newcomers gets first tokens soon without overfilling the pool.

This file knows steps and pages, not why there is no room.
"""

import heapq
from collections.abc import Callable

from ramify.actors.scheduler.queue import WaitingQueue
from ramify.actors.scheduler.request import Account, Request, RequestState

PAID = 6  # tokens that are computed for each that a candidate without room takes from others


class MemoryQueue:
    """`waiting`: the queue that candidates are moved to. `empty`: one that this object fills."""

    def __init__(self, waiting: WaitingQueue, empty: WaitingQueue, quantum: int) -> None:
        self._waiting = waiting
        self._queue = empty
        self._quantum = quantum
        self.newcomers: list[tuple[int, int, Request]] = []  # a heap: the shortest prompt is first
        self._refused = -1  # the step in which a candidate was last denied pages
        self._need = 0  # pages that the last denied candidate asked for
        self._overfilled = 0  # tokens computed when a candidate was last tried without room
        self._tried = self._tried_before = -quantum  # the steps of the last two candidates
        self._overtaken = -quantum  # the step of the last newcomer
        self._candidate: Request | None = None  # whose fate the waiting queue decides
        self._second: Request | None = None  # tried while the candidate lasts
        self._overtaker: Request | None = None  # the newcomer that overtook last

    def __len__(self) -> int:
        return len(self._queue)

    def add(self, request: Request, step: int, *, first: bool = False) -> None:
        """Queue `request`. `step`: the last planned step. `first`: before equal requests."""
        request.in_memory_queue = True
        owed = request.account.tenant.served <= self._waiting.virtual  # no more than its share
        self._queue.virtual = self._waiting.virtual  # later requests do not go before earlier ones
        self._queue.push(request, first=first)
        if request.came < 0:
            request.came = step
            if owed and not request.ahead and not request.started:
                heapq.heappush(self.newcomers, (request.prompt, request.seq, request))
                if len(self.newcomers) > 64 + 2 * len(self._queue):  # of those that have left; amortised
                    self.newcomers = [entry for entry in self.newcomers if entry[2].in_memory_queue]
                    heapq.heapify(self.newcomers)

    def denied(self, request: Request, need: int, step: int) -> None:
        """`request` was denied: it needs `need` available pages."""
        self._need = need
        self._refused = step
        if request is self._candidate:
            self._tried = self._tried_before  # for no request has left this queue
        self.add(request, step, first=True)

    def discard(self, request: Request) -> None:
        """Remove a request of this queue."""
        self._queue.discard(request)
        request.in_memory_queue = False

    def begin(self, account: Account) -> None:
        """Move all requests of a session that has begun to the waiting queue. O(its requests)."""
        for request in account.requests.values():
            if request.in_memory_queue:
                self._move(request)

    def advance(
        self, step: int, computed: int, room: int, missing: Callable[[Request], int], *, idle: bool,
        waits: Callable[[Request], bool] = lambda request: False,
    ) -> None:  # fmt: skip
        """Try the next candidate, if it is time.

        `computed`: tokens since the start. `room`: available pages. `missing(request)`: tokens that it
        takes from others if it is tried now. `idle`: nothing runs. `waits(request)`: room
        alone does not do for it.
        """
        if not self._queue:
            self.newcomers.clear()
            return
        if self._let_overtake(step):
            return
        candidate = self._candidate if _is_undecided(self._candidate) else None
        if candidate is not None and (not candidate.account.tenant.rows or _is_undecided(self._second)):
            return
        self._candidate, self._second = candidate, None
        first = self._queue.first()
        lacks = max(0, missing(first))
        overdue = idle or (
            step - self._tried >= self._quantum
            and not first.ahead
            and computed - self._overfilled >= PAID * lacks
        )
        if candidate is not None and (not overdue or first.account.tenant.rows):
            return
        if overdue or (room >= self._need and step != self._refused and not waits(first)):
            self._tried_before, self._tried = self._tried, step
            if lacks:
                self._overfilled = computed
            self._try(first, ignores_reserve=overdue)

    def _let_overtake(self, step: int) -> bool:
        """Move the first newcomer to the head of the waiting queue, if it is time. Whether it did."""
        new = self._newcomer(step)
        last = self._overtaker
        if new is None:
            return False
        if last is not None and last.overtakes and _is_undecided(last) and last.prompt <= new.prompt:
            return False
        if step - self._overtaken < self._quantum // 2:
            return False
        self._overtaken, self._overtaker = step, new
        new.single_answer = len(new.account.requests) == 1
        new.ignores_reserve = new.overtakes = True
        self.discard(new)
        self._waiting.push_before_all(new)
        return True

    def _try(self, request: Request, *, ignores_reserve: bool) -> None:
        self._move(request)
        request.ignores_reserve = ignores_reserve
        if self._candidate is None:
            self._candidate = request
        else:
            self._second = request

    def _move(self, request: Request) -> None:
        self.discard(request)
        self._waiting.push(request)

    def _newcomer(self, step: int) -> Request | None:
        """The queued request of a new tenant that has the shortest prompt, or None."""
        new = self.newcomers
        while new:
            request = new[0][2]
            if (
                request.in_memory_queue
                and step - request.came < self._quantum
                and not request.account.tenant.rows
            ):
                return request
            heapq.heappop(new)
        return None


def _is_undecided(request: Request | None) -> bool:
    return request is not None and request.state is RequestState.WAITING and not request.in_memory_queue
