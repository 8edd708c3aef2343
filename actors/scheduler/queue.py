"""The one queue of requests that wait for pages and a row: its order, and who waits for room in it.

The order is that of this key, the least first:

1. whether the request is *held*: its session has not begun to use the pool, which has no room for it;
2. whether nobody waits for its output: prompts that are computed ahead have a limit of their own, and
   hold no other request up when that is reached;
3. priority, the highest first;
4. the service of its tenant in tokens, then that of its session. This is start-time fair queueing: an
   idle one starts at the current virtual time, so idling neither saves up service nor costs any;
5. ageing * (tokens processed until it arrived) - cached tokens: the longest cached prefix goes first,
   and waiting counts like cached tokens, so no request starves.

The last part does not change while a request waits, so a plain heap holds it; an entry is replaced when
the cached prefix is learnt anew. Service only grows in the common case, so a `ServiceHeap` is corrected
lazily, when a stale entry comes up. Nothing here walks over all waiting requests.

Held requests are not picked. `MemoryQueue` releases the first of them as the *candidate*,

- when as many pages are free as the last candidate lacked; or
- whatever is free, when none was released for a quantum of steps, and `PAID` times as many tokens were
  computed since the last such candidate as this one lacks. Others lose those and compute them again, so
  the loss stays a bounded part of the work, and the k-th request waits for about k quanta at most. A
  request that only computes a prompt ahead waits for room.

When a candidate's session begins, all of that session's requests are released. A candidate of a tenant
that runs something may last, for a tenant takes no pages from its own runs. So while it lasts, a second
one is tried, of a tenant that runs nothing.

A *newcomer* overtakes all of its level: a tenant that runs nothing and has had no more than its share,
in the quantum of steps after its first request came, one each half quantum. The shortest prompt is first
and does not wait for the pages of a longer one. A request that gave its pages back is no newcomer's, nor
is one of a tenant that has just had an answer. The only request of its session is admitted for a *single
answer*: the session does not begin with it, and its next request is held. So a crowd of newcomers gets
first tokens soon without overfilling the pool.

This file knows steps, counts of pages and service; not runs, nor why there is no room.
"""

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from ramify.actors.scheduler.request import Account, Lane, Level, Request, RequestState, Tenant

PAID = 6  # tokens that are computed for each that a candidate without room takes from others

_Entry = tuple[float, int, int, Request]  # score (less is better), arrival, ticket
W = TypeVar("W", bound=Account | Tenant)


@dataclass(slots=True, eq=False)
class QueueMember(Generic[W]):
    """A session or a tenant that waits in one lane."""

    who: W
    live: int = 0  # its requests
    posted: int = -1  # the service in its valid note; -1: it has none


M = TypeVar("M", bound=QueueMember[Any])


@dataclass(slots=True, eq=False)
class ServiceHeap(Generic[M]):
    """Members by service, the least first."""

    notes: list[tuple[int, int, M]] = field(default_factory=list)
    _serial: int = 0
    _limit: int = 64

    def post(self, member: M, *, first: bool = False) -> None:
        """Note the member's service, unless a valid note is as low. `first`: before equal members."""
        served = member.who.served
        if member.posted < 0 or served < member.posted:
            member.posted = served
            self._serial += 1
            heapq.heappush(self.notes, (served, -self._serial if first else self._serial, member))
            if len(self.notes) > self._limit:  # of members that are gone; amortised O(1)
                self.notes = [n for n in self.notes if n[2].live > 0 and n[2].posted == n[0]]
                heapq.heapify(self.notes)
                self._limit = 64 + 2 * len(self.notes)

    def best(self) -> M | None:
        notes = self.notes
        while notes:
            posted, _, member = notes[0]
            if member.live <= 0 or member.posted != posted:
                heapq.heappop(notes)
            elif member.who.served > posted:
                member.posted = member.who.served
                self._serial += 1
                heapq.heapreplace(notes, (member.posted, self._serial, member))
            else:
                return member
        return None


@dataclass(slots=True, eq=False)
class SessionQueue(QueueMember[Account]):
    """The waiting requests of one session in one lane."""

    party: "TenantQueue" = field(kw_only=True)
    heap: list[_Entry] = field(default_factory=list)

    def top(self) -> Request:
        """The best live request. There must be one."""
        heap = self.heap
        while heap[0][2] != heap[0][3].ticket:
            heapq.heappop(heap)
        return heap[0][3]


@dataclass(slots=True, eq=False)
class TenantQueue(QueueMember[Tenant]):
    """The sessions of one tenant that wait in one lane."""

    ring: ServiceHeap[SessionQueue] = field(default_factory=ServiceHeap[SessionQueue])


class WaitingQueue:
    """Requests that wait for pages and a row, by lane, tenant and session. `len`: those not held."""

    def __init__(self, ageing: float, lookahead: int, enough: int) -> None:
        self._ageing = ageing
        self._lookahead = lookahead
        self._enough = enough  # tokens of a prompt that count in a pick; see `PromptQueue.enough`
        self._levels: dict[Lane, ServiceHeap[TenantQueue]] = {}
        self._order: tuple[list[Level], list[Level]] = [], []  # from the highest; and of held requests
        self._serial = 0
        self._waiting = 0
        self.held = 0  # requests that wait for room
        self.pushes = 0  # requests added since the start, without held ones
        self.virtual = 0  # service of the tenant picked last: where newcomers start

    def __len__(self) -> int:
        return self._waiting

    def push(self, request: Request, *, first: bool = False) -> None:
        """Add a request; its `resident` may have changed since it was here last.

        `first`: its session and tenant go before those that had as much service.
        """
        held = request.in_memory_queue
        share = self._share(request.account, (held, request.level))
        self._serial += 1
        request.ticket = self._serial
        key = self._ageing * request.mark - request.resident
        heapq.heappush(share.heap, (key, request.seq, request.ticket, request))
        share.live += 1
        share.party.live += 1
        self.held += held
        self._waiting += not held
        self.pushes += not held
        share.party.ring.post(share, first=first)
        self._levels[held, request.level].post(share.party, first=first)

    def push_before_all(self, request: Request) -> None:
        """Add a request of a tenant that runs nothing, before all others of its level."""
        lane = False, request.level
        ring = self._levels.get(lane)
        first = ring.best() if ring is not None else None
        self.push(request)
        if first is not None:
            self._put_before(first.who, request.account.tenant.shares[lane], lane)

    def discard(self, request: Request) -> None:
        """Take out a request that is in the queue. It is not held any more."""
        lane = request.in_memory_queue, request.level
        request.ticket, request.in_memory_queue = 0, False
        share: SessionQueue = request.account.shares[lane]
        self._left(share, lane)
        if len(share.heap) > 32 and len(share.heap) > 2 * share.live:  # amortised O(1) per request
            share.heap = [entry for entry in share.heap if entry[2] == entry[3].ticket]
            heapq.heapify(share.heap)

    def release(self, request: Request) -> None:
        """Let a held request be picked."""
        self.discard(request)
        self.push(request)

    def refund(self, account: Account, tokens: int) -> None:
        """Take back a charge of `tokens` that were not used; the account moves up."""
        if tokens:
            account.charge(-tokens)
            for share in account.shares.values():
                share.party.ring.post(share)
            self._repost(account.tenant)

    def first(self, *, held: bool = False) -> Request:
        """The request that goes before all others. There must be one."""
        for level in self._order[held]:
            party = self._levels[held, level].best()
            share = party.ring.best() if party is not None else None
            if share is not None:
                return share.top()
        raise LookupError("nobody waits")

    def pick(
        self,
        rows: int,
        room: Callable[[Level], int],
        admit: Callable[[Request, bool], bool],
        most: int | None = None,
    ) -> list[Request]:
        """Take out requests for at most `rows` free rows. `most`: at most so many, with or without free
        rows.

        `room(level)`: prompt tokens that may be taken at that level; `enough` of each prompt count. A
        tenant of which no prompt is being computed may exceed it by one request, so that the long
        prompts of others do not keep it out.

        `admit(request, rowless)` is asked before a request is taken; with `rowless` it has to free a
        row. Where it refuses, no request behind it is taken at its level, and none at all if rows are
        missing. But a tenant that runs nothing does not wait behind a refused one that runs something,
        which may itself hold what is missing.

        Requests with output that a session submitted together are taken together while there are rows,
        so that the children of a fork share steps and their prefix stays warm.
        """
        picked: list[Request] = []
        served: set[Tenant] = set()  # of which one is picked
        spent = {True: 0, False: 0}
        for level in self._order[False]:
            left: int | None = None
            while (party := self._levels[False, level].best()) is not None:
                if left is None:
                    left = room(level) - spent[level[0]]
                tenant = party.who
                if left <= 0 and (not level[0] or tenant.prefilling or tenant in served):
                    break
                share = party.ring.best()
                assert share is not None  # a party of nobody is not live
                head = share.top()
                if not admit(head, not rows):
                    if level[0] and tenant.rows and self._bring_forward((False, level), tenant):
                        continue
                    if not rows:
                        return picked
                    break
                rows = max(1, rows)
                self.virtual = max(self.virtual, tenant.served)
                tenant.virtual = max(tenant.virtual, share.who.served)
                limit = rows if most is None else min(rows, most - len(picked))
                taken, cost = self._take_batch(share, limit, None if level[0] else left)
                rows -= len(taken)
                left -= cost
                spent[level[0]] += cost
                picked += taken
                served.add(tenant)
                if len(picked) == most:
                    return picked
        return picked

    def _take_batch(self, share: SessionQueue, most: int, room: int | None) -> tuple[list[Request], int]:
        """Take up to `most` requests that came together, while there is `room`; and what they cost."""
        batch = share.top().batch
        taken: list[Request] = []
        spent = 0
        while len(taken) < most and share.live and (request := share.top()).batch == batch:
            if room is not None and room <= spent:
                break
            heapq.heappop(share.heap)
            request.ticket = 0
            spent += min(self.charge(request), self._enough)
            self._left(share, (False, request.level))
            taken.append(request)
        return taken, spent

    def _bring_forward(self, lane: Lane, refused: Tenant) -> bool:
        """Put the first tenant that runs nothing before `refused`. False: there is none.

        Then all waiting tenants run something, so there are no more of them than rows. If there is one,
        it goes first until it runs, so this is not called again before.
        """
        idle = [note for note in self._levels[lane].notes if note[2].live and not note[2].who.rows]
        if not idle:
            return False
        party = min(idle, key=lambda note: (note[2].who.served, note[1]))[2]
        self._put_before(refused, party, lane)
        return True

    def _put_before(self, first: Tenant, party: TenantQueue, lane: Lane) -> None:
        """Put the tenant of `party` before `first`, the first one of `lane`."""
        party.who.served = min(party.who.served, first.served)
        party.posted = -1  # a note of the same service would do, but not be the first
        self._levels[lane].post(party, first=True)
        self._repost(party.who)

    def _repost(self, tenant: Tenant) -> None:
        """The tenant's service is less than it was."""
        for lane, party in tenant.shares.items():
            self._levels[lane].post(party)

    def charge(self, request: Request) -> int:
        """`request` has a row, and what it is expected to use is charged. Returns its prompt's part."""
        work = max(1, request.prompt - request.resident)
        request.charge = work + request.extra(self._lookahead)
        request.account.charge(request.charge)
        request.account.hold(1)
        return work

    def _share(self, account: Account, lane: Lane) -> SessionQueue:
        """The session's place in `lane`; it and its tenant come in at the virtual time."""
        tenant = account.tenant
        if lane not in tenant.shares:
            if lane not in self._levels:
                self._levels[lane] = ServiceHeap()
                self._order[lane[0]].append(lane[1])
                self._order[lane[0]].sort(reverse=True)
            tenant.shares[lane] = TenantQueue(tenant)
            tenant.served = max(tenant.served, self.virtual)
        if lane not in account.shares:
            account.shares[lane] = SessionQueue(account, party=tenant.shares[lane])
            account.served = max(account.served, tenant.virtual)
        share: SessionQueue = account.shares[lane]
        return share

    def _left(self, share: SessionQueue, lane: Lane) -> None:
        party = share.party
        share.live -= 1
        party.live -= 1
        self.held -= lane[0]
        self._waiting -= not lane[0]
        if not share.live:
            share.heap.clear()
            del share.who.shares[lane]
            if not party.live:
                del party.who.shares[lane]
                party.ring.notes.clear()  # of shares, which know it: a ring for the collector


class MemoryQueue:
    """Requests held in `queue`, and when each is tried again. `len`: how many are held."""

    def __init__(self, queue: WaitingQueue, quantum: int) -> None:
        self._queue = queue
        self._quantum = quantum
        self.newcomers: list[tuple[int, int, Request]] = []  # a heap: the shortest prompt is first
        self._refused = -1  # the step in which a candidate was last denied pages
        self._need = 0  # pages that the last denied candidate asked for
        self._overfilled = 0  # tokens computed when a candidate was last tried without room
        self._tried = self._tried_before = -quantum  # the steps of the last two candidates
        self._overtaken = -quantum  # the step of the last newcomer
        self._candidate: Request | None = None  # whose fate `pick` decides
        self._second: Request | None = None  # tried while the candidate lasts
        self._overtaker: Request | None = None  # the newcomer that overtook last

    def __len__(self) -> int:
        return self._queue.held

    def add(self, request: Request, step: int, *, first: bool = False) -> None:
        """Hold `request`. `step`: the last planned step. `first`: before equal requests."""
        owed = request.account.tenant.served <= self._queue.virtual  # no more than its share
        request.in_memory_queue = True
        self._queue.push(request, first=first)
        if request.came < 0:
            request.came = step
            if owed and not request.ahead and not request.started:
                heapq.heappush(self.newcomers, (request.prompt, request.seq, request))
                if len(self.newcomers) > 64 + 2 * self._queue.held:  # of those that have left; amortised
                    self.newcomers = [entry for entry in self.newcomers if entry[2].in_memory_queue]
                    heapq.heapify(self.newcomers)

    def denied(self, request: Request, need: int, step: int) -> None:
        """`request` was denied: it needs `need` available pages."""
        self._need = need
        self._refused = step
        if request is self._candidate:
            self._tried = self._tried_before  # for no request has left this queue
        self.add(request, step, first=True)

    def begin(self, account: Account) -> None:
        """Hold no request of a session that has begun. O(its requests)."""
        for request in account.requests.values():
            if request.in_memory_queue:
                self._queue.release(request)

    def advance(
        self, step: int, computed: int, room: int, missing: Callable[[Request], int], *, idle: bool,
        waits: Callable[[Request], bool] = lambda request: False,
    ) -> None:  # fmt: skip
        """Try the next candidate, if it is time.

        `computed`: tokens since the start. `room`: available pages. `missing(request)`: tokens that it
        takes from others if tried now. `idle`: nothing runs. `waits(request)`: room alone will not do.
        """
        if not self._queue.held:
            self.newcomers.clear()
            return
        if self._let_overtake(step):
            return
        candidate = self._candidate if _is_undecided(self._candidate) else None
        if candidate is not None and (not candidate.account.tenant.rows or _is_undecided(self._second)):
            return
        self._candidate, self._second = candidate, None
        first = self._queue.first(held=True)
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
            self._queue.release(first)
            first.ignores_reserve = overdue
            if candidate is None:
                self._candidate = first
            else:
                self._second = first

    def _let_overtake(self, step: int) -> bool:
        """Move the first newcomer to the head of the queue, if it is time. Whether it did."""
        new, last = self._newcomer(step), self._overtaker
        if new is None or step - self._overtaken < self._quantum // 2:
            return False
        if last is not None and last.overtakes and _is_undecided(last) and last.prompt <= new.prompt:
            return False
        self._overtaken, self._overtaker = step, new
        new.single_answer = len(new.account.requests) == 1
        new.ignores_reserve = new.overtakes = True
        self._queue.discard(new)
        self._queue.push_before_all(new)
        return True

    def _newcomer(self, step: int) -> Request | None:
        """The held request of a new tenant that has the shortest prompt, or None."""
        new = self.newcomers
        while new:
            request = new[0][2]
            young = request.in_memory_queue and step - request.came < self._quantum
            if young and not request.account.tenant.rows:
                return request
            heapq.heappop(new)
        return None


def _is_undecided(request: Request | None) -> bool:
    return request is not None and request.state is RequestState.WAITING and not request.in_memory_queue
