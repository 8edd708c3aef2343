"""The order in which waiting requests are tried.

Requests with output go before those that only compute a prompt ahead of time, whose work has a
limit of its own and, when that is reached, holds nobody up. Then priority. Then fairness: of the
sessions that wait, the one with the least service so far goes first (start-time fair queueing: a
session that was idle starts at the current virtual time, so it neither saves up service nor is
punished for being late). Within a session, the longest cached prefix with ageing: score =
resident + ageing * (tokens processed since arrival).

The time-dependent part of that score is the same for all who wait, so the order is given by the
constant `resident - ageing * mark` and a plain heap holds it; an entry is replaced when
`resident` is learnt anew. Service only grows in the common case, so session heaps are corrected
lazily, when a stale entry comes up. Nothing here walks over all who wait.

This file does not know about pages, rows or time.
"""

import heapq

from ramify.actors.scheduler.request import Account, Request

Level = tuple[bool, int]  # whether ahead of time, priority
_Entry = tuple[float, int, int, Request]  # score (less is better), arrival, ticket


class Share:
    """The waiting requests of one session at one level."""

    __slots__ = ("account", "heap", "level", "live", "posted")

    def __init__(self, account: Account, level: Level) -> None:
        self.account = account
        self.level = level
        self.heap: list[_Entry] = []
        self.live = 0
        self.posted = -1  # the service noted in its valid entry of the level's heap

    def top(self) -> Request:
        """The best live request. There must be one."""
        heap = self.heap
        while heap[0][2] != heap[0][3].ticket:
            heapq.heappop(heap)
        return heap[0][3]

    def pop(self) -> Request:
        request = self.top()
        heapq.heappop(self.heap)
        return request

    def compact(self) -> None:
        """Forget entries of requests that left; amortised O(1) per request."""
        if len(self.heap) > 32 and len(self.heap) > 2 * self.live:
            self.heap = [entry for entry in self.heap if entry[2] == entry[3].ticket]
            heapq.heapify(self.heap)


class WaitingQueue:
    """Requests that wait for pages and a row."""

    def __init__(self, ageing: float, lookahead: int) -> None:
        self._ageing = ageing
        self._lookahead = lookahead
        self._levels: dict[Level, list[tuple[int, int, Share]]] = {}
        self._order: dict[bool, list[Level]] = {False: [], True: []}  # priorities descending
        self._serial = 0
        self._count = 0
        self.virtual = 0  # service of the session picked last: where newcomers start

    def __len__(self) -> int:
        return self._count

    def push(self, request: Request) -> None:
        """Add a request; its `resident` may have changed since it was here last."""
        account, level = request.account, _level(request)
        share = account.shares.get(level)
        if not isinstance(share, Share):
            share = account.shares[level] = Share(account, level)
            if level not in self._levels:
                self._levels[level] = []
                self._order[request.ahead].append(level)
                self._order[request.ahead].sort(reverse=True)
            account.served = max(account.served, self.virtual)
        self._serial += 1
        request.ticket = self._serial
        key = self._ageing * request.mark - request.resident
        heapq.heappush(share.heap, (key, request.seq, request.ticket, request))
        share.live += 1
        self._count += 1
        self._post(share)

    def discard(self, request: Request) -> None:
        """Take out a request that is in the queue."""
        request.ticket = 0
        share = request.account.shares[_level(request)]
        assert isinstance(share, Share)
        self._left(share)
        share.compact()

    def refund(self, request: Request) -> None:
        """It was picked but could not run: its session gets the charge back."""
        account = request.account
        account.served -= request.charge
        request.charge = 0
        for share in account.shares.values():
            assert isinstance(share, Share)
            self._post(share)

    def pick(self, rows: int, tokens: int, ahead: int) -> list[Request]:
        """Take out at most `rows` requests whose prompts bring about `tokens` tokens of work, and
        `ahead` tokens those of requests without output.

        Requests with output that a session submitted together are taken together while there
        are rows, so that the children of a fork share steps and their prefix stays warm.
        """
        picked: list[Request] = []
        for is_ahead, room in ((False, tokens), (True, ahead)):
            while len(picked) < rows and room > 0 and (share := self._best(is_ahead)) is not None:
                account = share.account
                self.virtual = max(self.virtual, account.served)
                batch = share.top().batch
                while len(picked) < rows and share.live and share.top().batch == batch:
                    if is_ahead and room <= 0:
                        break
                    request = share.pop()
                    request.ticket = 0
                    work = max(1, request.prompt - request.resident)
                    request.charge = work + request.extra(self._lookahead)
                    account.served += request.charge
                    room -= work
                    picked.append(request)
                    self._left(share)
        return picked

    def _left(self, share: Share) -> None:
        share.live -= 1
        self._count -= 1
        if not share.live:
            share.heap.clear()
            share.posted = -1
            del share.account.shares[share.level]

    def _post(self, share: Share) -> None:
        """Note the session's service in its level's heap, unless a note as good is there."""
        served = share.account.served
        if share.posted < 0 or served < share.posted:
            share.posted = served
            self._serial += 1
            heap = self._levels[share.level]
            heapq.heappush(heap, (served, self._serial, share))
            if len(heap) > 64 + 2 * self._count:  # notes of shares that are gone
                heap[:] = [note for note in heap if note[2].live and note[2].posted == note[0]]
                heapq.heapify(heap)

    def _best(self, ahead: bool) -> Share | None:
        for level in self._order[ahead]:
            heap = self._levels[level]
            while heap:
                posted, _, share = heap[0]
                if not share.live or share.posted != posted:
                    heapq.heappop(heap)
                elif share.account.served > posted:
                    share.posted = share.account.served
                    self._serial += 1
                    heapq.heapreplace(heap, (share.posted, self._serial, share))
                else:
                    return share
        return None


def _level(request: Request) -> Level:
    return request.ahead, request.submit.priority
