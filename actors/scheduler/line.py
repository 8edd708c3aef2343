"""Requests of sessions that have not begun and found no room: who is tried next, and when.

The one that fair queueing puts first is tried

- when as much room is there as the last one needed; or
- whatever room there is, when nobody has left the line for a quantum of steps, and `PAID` times as many
  tokens were computed since the last such trial as are missing for this one: so what it takes from
  others, who compute it again, stays a part of what is computed. So the first of the line waits for
  so long at most, and the k-th k times that. But input ahead of its generation waits for room.

Who is new goes past the line, and before all who wait: a client that runs nothing, in the quantum of
steps after its first request came, if nobody has done so for half a quantum. So who comes alone to a
full pool does not wait for those who came all at once, nor for those who lack many pages; who had to
give its pages back is not new. If that is all its session asks for, the session has not begun with it
(a *visit*): a crowd of newcomers has its first tokens soon, and does not overfill the pool.

One request is on trial at a time: it goes to the waiting queue, which decides on rows as always. When
its session begins, the others of that session follow. A trial may last: a client takes no pages from
its own runs. So while one of a client that runs something lasts, one of a client that runs nothing is
tried beside it. This file knows steps and pages, not why there is no room.
"""

from collections import deque
from collections.abc import Callable

from ramify.actors.scheduler.queue import WaitingQueue
from ramify.actors.scheduler.request import Account, Request, RequestState

PAID = 6  # tokens that are computed for each that a trial without room takes from others


class Line:
    """`waiting`: the queue of those who have begun, or need not wait here. `line`: an empty one."""

    def __init__(self, waiting: WaitingQueue, line: WaitingQueue, quantum: int) -> None:
        self._waiting = waiting
        self._line = line
        self._quantum = quantum
        self._new: deque[Request] = deque()  # in the order in which they came
        self._refused = -1  # the step when one was refused
        self._need = 0  # pages of the one that was tried last
        self._overfilled = 0  # tokens that were computed when one was last tried without room
        self._tried = self._tried_before = -quantum  # the step when one of the line was last tried
        self._passed = -quantum  # the step when one went past it
        self._trial: Request | None = None
        self._beside: Request | None = None  # on trial while another one lasts
        self._guest: Request | None = None  # who went past the line last

    def __len__(self) -> int:
        return len(self._line)

    def add(self, request: Request, step: int, *, first: bool = False) -> None:
        """Let `request` wait here. `step`: the last one that was planned. `first`: before its equals."""
        request.in_line = True
        self._line.virtual = self._waiting.virtual  # who comes later does not go before who waits
        self._line.push(request, first=first)
        if request.came < 0:
            request.came = step
            if not request.ahead and not request.started:
                self._new.append(request)

    def denied(self, request: Request, need: int, step: int) -> None:
        """`request` was tried, and so many pages were not to be had."""
        self._need = need
        self._refused = step
        if request is self._trial:
            self._tried = self._tried_before  # for nobody has left the line
        self.add(request, step, first=True)

    def discard(self, request: Request) -> None:
        """Take out a request that waits here."""
        self._line.discard(request)
        request.in_line = False

    def begin(self, account: Account) -> None:
        """The session has begun: none of its requests waits here any more. O(its requests)."""
        for request in account.requests.values():
            if request.in_line:
                self._move(request)

    def advance(
        self, step: int, computed: int, room: int, missing: Callable[[Request], int], *, idle: bool
    ) -> None:
        """Put the next one on trial, if it is time.

        `computed`: tokens since the start. `room`: pages to be had. `missing`: tokens for which there is
        none, if a request is tried now. `idle`: nothing runs.
        """
        if not self._line:
            self._new.clear()
            return
        if self._let_pass(step):
            return
        trial = self._trial if _undecided(self._trial) else None
        if trial is not None and (not trial.account.client.rows or _undecided(self._beside)):
            return
        self._trial, self._beside = trial, None
        first = self._line.first()
        lacks = max(0, missing(first))
        overdue = idle or (
            step - self._tried >= self._quantum
            and not first.ahead
            and computed - self._overfilled >= PAID * lacks
        )
        if trial is not None and (not overdue or first.account.client.rows):
            return
        if overdue or (room >= self._need and step != self._refused):
            self._tried_before, self._tried = self._tried, step
            if lacks:
                self._overfilled = computed
            self._try(first, forced=overdue)

    def _let_pass(self, step: int) -> bool:
        """Let the first newcomer go past all who wait, if it is time; whether one went."""
        new = self._newcomer(step)
        guest = self._guest
        if new is None or (guest is not None and guest.passes and _undecided(guest)):
            return False
        if step - self._passed < self._quantum // 2:
            return False
        self._passed, self._guest = step, new
        new.visits = len(new.account.requests) == 1
        new.forced = new.passes = True
        self.discard(new)
        self._waiting.push_before_all(new)
        return True

    def _try(self, request: Request, *, forced: bool) -> None:
        self._move(request)
        request.forced = forced
        if self._trial is None:
            self._trial = request
        else:
            self._beside = request

    def _move(self, request: Request) -> None:
        self.discard(request)
        self._waiting.push(request)

    def _newcomer(self, step: int) -> Request | None:
        """The first request of a new client; None: there is none."""
        new = self._new
        while new:
            request = new[0]
            if (
                request.in_line
                and step - request.came < self._quantum
                and not request.account.client.rows
            ):
                return request
            new.popleft()
        return None


def _undecided(trial: Request | None) -> bool:
    return trial is not None and trial.state is RequestState.WAITING and not trial.in_line
