"""The order in which waiting requests are tried.

Requests with output go before those that only compute a prompt ahead, which have a limit of their own
and hold no other request up when that is reached. Then priority. Then fairness, twice: the waiting
tenant with the least service goes first, and of its sessions the one with the least. This is start-time
fair queueing: an idle one starts at the current virtual time, so idling neither saves up service nor
costs any. Within a session, the longest cached prefix with ageing: score = resident + ageing * (tokens
processed since arrival).

The time-dependent part of that score is the same for all waiting requests. So the order is given by the
constant `resident - ageing * mark`, and a plain heap holds it; an entry is replaced when `resident` is
learnt anew. Service only grows in the common case, so a `ServiceHeap` is corrected lazily, when a stale
entry comes up. Nothing here walks over all waiting requests.

This file does not know about pages, rows or time.
"""

import heapq
from collections.abc import Callable
from typing import Generic, TypeVar

from ramify.actors.scheduler.request import Account, Level, Request, Tenant

_Entry = tuple[float, int, int, Request]  # score (less is better), arrival, ticket


class QueueMember:
    """A session or a tenant that waits at one level."""

    __slots__ = ("live", "posted", "who")

    def __init__(self, who: Account | Tenant) -> None:
        self.who = who
        self.live = 0  # its requests
        self.posted = -1  # the service in its valid note; -1: it has none


M = TypeVar("M", bound=QueueMember)


class ServiceHeap(Generic[M]):
    """Members by service, the least first."""

    __slots__ = ("_limit", "_serial", "notes")

    def __init__(self) -> None:
        self.notes: list[tuple[int, int, M]] = []
        self._serial = 0
        self._limit = 64

    def post(self, member: M, *, first: bool = False) -> None:
        """Note the member's service, unless a valid note is as low. `first`: before equal members."""
        served = member.who.served
        if member.posted < 0 or served < member.posted:
            member.posted = served
            self._serial += 1
            heapq.heappush(self.notes, (served, -self._serial if first else self._serial, member))
            if len(self.notes) > self._limit:  # of members that are gone; amortised O(1)
                self.notes = [note for note in self.notes if self._valid(note)]
                heapq.heapify(self.notes)
                self._limit = 64 + 2 * len(self.notes)

    def best(self) -> M | None:
        notes = self.notes
        while notes:
            posted, _, member = notes[0]
            if member.live <= 0 or member.posted != posted:  # not `_valid`
                heapq.heappop(notes)
            elif member.who.served > posted:
                member.posted = member.who.served
                self._serial += 1
                heapq.heapreplace(notes, (member.posted, self._serial, member))
            else:
                return member
        return None

    @staticmethod
    def _valid(note: tuple[int, int, M]) -> bool:
        return note[2].live > 0 and note[2].posted == note[0]


class SessionQueue(QueueMember):
    """The waiting requests of one session at one level."""

    __slots__ = ("heap", "party")

    def __init__(self, account: Account, party: "TenantQueue") -> None:
        super().__init__(account)
        self.party = party
        self.heap: list[_Entry] = []

    def top(self) -> Request:
        """The best live request. There must be one."""
        heap = self.heap
        while heap[0][2] != heap[0][3].ticket:
            heapq.heappop(heap)
        return heap[0][3]

    def compact(self) -> None:
        """Forget entries of requests that left; amortised O(1) per request."""
        if len(self.heap) > 32 and len(self.heap) > 2 * self.live:
            self.heap = [entry for entry in self.heap if entry[2] == entry[3].ticket]
            heapq.heapify(self.heap)


class TenantQueue(QueueMember):
    """The sessions of one tenant that wait at one level."""

    __slots__ = ("ring",)

    def __init__(self, tenant: Tenant) -> None:
        super().__init__(tenant)
        self.ring: ServiceHeap[SessionQueue] = ServiceHeap()


class WaitingQueue:
    """Requests that wait for pages and a row, by level, tenant and session."""

    def __init__(self, ageing: float, lookahead: int, enough: int) -> None:
        self._ageing = ageing
        self._lookahead = lookahead
        self._enough = enough  # tokens of a prompt that count in a pick; see `PromptQueue.enough`
        self._levels: dict[Level, ServiceHeap[TenantQueue]] = {}
        self._order: list[Level] = []  # from the highest to the lowest
        self._serial = 0
        self._count = 0
        self.virtual = 0  # service of the tenant picked last: where newcomers start

    def __len__(self) -> int:
        return self._count

    @property
    def pushes(self) -> int:
        """Requests added since the start."""
        return self._serial

    def push(self, request: Request, *, first: bool = False) -> None:
        """Add a request; its `resident` may have changed since it was here last.

        `first`: its session and tenant go before those that had as much service.
        """
        share = self._share(request.account, request.level)
        self._serial += 1
        request.ticket = self._serial
        key = self._ageing * request.mark - request.resident
        heapq.heappush(share.heap, (key, request.seq, request.ticket, request))
        share.live += 1
        share.party.live += 1
        self._count += 1
        share.party.ring.post(share, first=first)
        self._levels[request.level].post(share.party, first=first)

    def push_before_all(self, request: Request) -> None:
        """Add a request of a tenant that runs nothing, before all others of its level."""
        ring = self._levels.get(request.level)
        first = ring.best() if ring is not None else None
        self.push(request)
        if first is not None:
            party = request.account.tenant.shares[self, request.level]
            assert isinstance(party, TenantQueue)
            assert isinstance(first.who, Tenant)
            self._put_before(first.who, party, request.level)

    def discard(self, request: Request) -> None:
        """Take out a request that is in the queue."""
        request.ticket = 0
        share = request.account.shares[self, request.level]
        assert isinstance(share, SessionQueue)
        self._left(share, request.level)
        share.compact()

    def refund(self, account: Account, tokens: int) -> None:
        """Take back a charge of `tokens` that were not used; the account moves up."""
        if not tokens:
            return
        account.charge(-tokens)
        for share in account.shares.values():
            assert isinstance(share, SessionQueue)
            share.party.ring.post(share)
        self._repost(account.tenant)

    def first(self) -> Request:
        """The request that goes before all others. There must be one."""
        for level in self._order:
            party = self._levels[level].best()
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
        spent = {True: 0, False: 0}
        for level in self._order:
            left: int | None = None
            while (party := self._levels[level].best()) is not None:
                if left is None:
                    left = room(level) - spent[level[0]]
                tenant = party.who
                assert isinstance(tenant, Tenant)
                if left <= 0 and (not level[0] or tenant.prefilling or tenant.picked):
                    break
                share = party.ring.best()
                assert share is not None  # a party of nobody is not live
                head = share.top()
                if not admit(head, not rows):
                    if level[0] and tenant.rows and self._bring_forward(level, tenant):
                        continue
                    if not rows:
                        return self._settle(picked)
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
                if len(picked) == most:
                    return self._settle(picked)
        return self._settle(picked)

    def _take_batch(self, share: SessionQueue, most: int, room: int | None) -> tuple[list[Request], int]:
        """Take up to `most` requests that came together, while there is `room`; and what they cost."""
        batch = share.top().batch
        taken: list[Request] = []
        spent = 0
        while len(taken) < most and share.live and (request := share.top()).batch == batch:
            if room is not None and room <= spent:
                break
            spent += self._take(request, share)
            taken.append(request)
        return taken, spent

    def _bring_forward(self, level: Level, refused: Tenant) -> bool:
        """Put the first tenant that runs nothing before `refused`. False: there is none.

        Then all waiting tenants run something, so there are no more of them than rows. If there is one,
        it goes first until it runs, so this is not called again before.
        """
        ring = self._levels[level]
        idle = [note for note in ring.notes if note[2].live and not note[2].who.rows]
        if not idle:
            return False
        party = min(idle, key=lambda note: (note[2].who.served, note[1]))[2]
        self._put_before(refused, party, level)
        return True

    def _put_before(self, other: Tenant, party: TenantQueue, level: Level) -> None:
        """Put the tenant of `party` before `other`, the first one of `level`."""
        tenant = party.who
        assert isinstance(tenant, Tenant)
        tenant.served = min(tenant.served, other.served)
        party.posted = -1  # a note of the same service would do, but not be the first
        self._levels[level].post(party, first=True)
        self._repost(tenant)

    @staticmethod
    def _repost(tenant: Tenant) -> None:
        """The tenant's service is less than it was."""
        for (queue, level), party in tenant.shares.items():
            assert isinstance(party, TenantQueue)
            assert isinstance(queue, WaitingQueue)
            queue._levels[level].post(party)

    def _take(self, request: Request, share: SessionQueue) -> int:
        """`request` has a row from here on. Returns how much of the room it takes."""
        heapq.heappop(share.heap)
        request.ticket = 0
        work = self.charge(request)
        request.account.tenant.picked = True
        self._left(share, request.level)
        return min(work, self._enough)

    def charge(self, request: Request) -> int:
        """`request` has a row, and what it is expected to use is charged. Returns its prompt's part."""
        work = max(1, request.prompt - request.resident)
        request.charge = work + request.extra(self._lookahead)
        request.account.charge(request.charge)
        request.account.hold(1)
        return work

    @staticmethod
    def _settle(picked: list[Request]) -> list[Request]:
        for request in picked:
            request.account.tenant.picked = False
        return picked

    def _share(self, account: Account, level: Level) -> SessionQueue:
        """The session's place at `level`; it and its tenant come in at the virtual time."""
        share = account.shares.get((self, level))
        if isinstance(share, SessionQueue):
            return share
        tenant = account.tenant
        party = tenant.shares.get((self, level))
        if not isinstance(party, TenantQueue):
            if level not in self._levels:
                self._levels[level] = ServiceHeap()
                self._order.append(level)
                self._order.sort(reverse=True)
            party = tenant.shares[self, level] = TenantQueue(tenant)
            tenant.served = max(tenant.served, self.virtual)
        share = account.shares[self, level] = SessionQueue(account, party)
        account.served = max(account.served, tenant.virtual)
        return share

    def _left(self, share: SessionQueue, level: Level) -> None:
        party = share.party
        share.live -= 1
        party.live -= 1
        self._count -= 1
        if not share.live:
            account = share.who
            assert isinstance(account, Account)
            share.heap.clear()
            del account.shares[self, level]
            if not party.live:
                del account.tenant.shares[self, level]
                party.ring.notes.clear()  # of shares, which know it: a ring for the collector
