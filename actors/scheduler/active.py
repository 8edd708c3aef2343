"""Load control: which sessions have begun to use the KV pool, and how much of it is reserved for them.

A pool that is too small for all sessions at once serves none of them well if it lets all of them in:
each evicts what the next one needs (thrashing; Denning 1968, "The working set model"). So a session
*begins* when it is first granted pages. It stays *active* until it has had no request for a quantum of
steps, or for several quanta where it has said that more comes. Sessions that have not begun are granted
pages only beside a *reserve*:

- what the requests of active sessions may still grow by, as far as outputs of their tenant usually do,
  and what the ops behind them will add, as their session has said (`Submit.expects`);
- the KV that an active session has left in the tree while it runs nothing, as between two rounds.

A tenant reserves at most one part in `SHARE` of the pool, so that announcements alone keep no other
tenant out. Its own new sessions leave all of its reserve free.

Where others wait, a *stay* ends with a turn: when the session has had as many output tokens as its
next prompt is long, or after `STAY` quanta. A session that makes room computes its prompt anew when it
comes back, so that costs no more than what the stay gave. A session whose only run gave its pages back,
because other runs grew, is no longer active: more sessions had begun than the pool can serve.

An event costs O(1), whatever the number of sessions: the reserve of those that have changed is counted
anew when it is asked for. This file knows tokens and steps, not which requests wait.
"""

import heapq
from collections import Counter

from ramify.actors.scheduler.request import Account, Request, Tenant

FORESEEN = 64  # output tokens of a request that count at least, if it may have so many
LEARNT = 16  # outputs over which the usual length is learnt
BETWEEN = 8  # quanta that a session stays active whose next ops are known: their text is being prepared
STAY = 64  # quanta after which a session makes room for those that wait, whatever that costs
SHARE = 4  # a tenant reserves at most one part in so many


class ActiveSessions:
    """`pool`: its size in tokens. `quantum`: steps that a session without requests stays active."""

    def __init__(self, pool: int, quantum: int) -> None:
        self.renew(pool)
        self._quantum = quantum
        self._resting: list[tuple[int, int, Account]] = []  # a heap: until which step, `Account.rested`
        self._rests = 0
        self._rows: Counter[int] = Counter()  # that run, by priority
        self._reserved = 0  # tokens, without what `_changed` have more or less
        self._changed: set[Account] = set()  # since their reserve was counted

    @property
    def reserved(self) -> int:
        """Tokens that are kept for active sessions. Those of each are right after this is asked."""
        if self._changed:
            self._count()
        return self._reserved

    def renew(self, pool: int) -> None:
        """Set the size of the pool in tokens."""
        self._most = pool // SHARE

    def outranks(self, request: Request) -> bool:
        """Whether the request's priority is above that of everything that runs."""
        return request.submit.priority > max(self._rows, default=request.submit.priority)

    def begin(self, account: Account) -> None:
        """Count what `account` uses of the pool from now on; older KV of it belongs to no session."""
        account.active = True
        account.goal -= account.kept - account.held
        account.kept = account.held
        self._changed.add(account)

    def over(self, request: Request, step: int) -> bool:
        """Whether the stay of its session ends with the turn before `request`, as others wait."""
        account = request.account
        if not account.active or account.behind or len(account.requests) > 1:
            return False
        return account.given >= request.prompt or step - account.began >= STAY * self._quantum

    def end(self, account: Account) -> None:
        """Stop counting `account`: what it left in the tree belongs to no session."""
        account.active = False
        account.kept = account.goal = 0
        self._changed.add(account)
        self._count()  # it may be gone for good

    def announce(self, account: Account, tokens: int) -> None:
        """Note how many tokens the ops of `account` will still add, as its session says."""
        account.goal = account.kept + tokens
        account.behind = tokens > account.foreseen
        self._changed.add(account)

    def foresee(self, request: Request, slots: int) -> None:
        """Note that `request` may use `slots` more slots than it has."""
        account, slots = request.account, max(0, slots)
        if slots > FORESEEN:  # else all of them, whatever is usual
            most = int(account.tenant.output) - max(0, request.limit - slots)
            slots = min(slots, max(most, FORESEEN))
        account.foreseen += slots - request.foreseen
        request.foreseen = slots
        self._changed.add(account)

    def take(self, account: Account, slots: int) -> None:
        """Note that a run of `account` got `slots` slots of its own."""
        account.kept += slots
        account.held += slots
        self._changed.add(account)

    def granted(self, request: Request) -> None:
        self._rows[request.submit.priority] += 1

    def learn(self, request: Request) -> None:
        """Update the usual output length of the tenant of `request`, which has ended."""
        if request.done:
            tenant = request.account.tenant
            tenant.output += (request.done - tenant.output) / LEARNT if tenant.output else request.done

    def reserved_from(self, tenant: Tenant) -> int:
        """Tokens that new sessions of `tenant` must leave free, including the tenant's own reserve."""
        return self.reserved + max(0, tenant.reserved - self._most)

    def stopped(self, request: Request, slots: int, left: int) -> None:
        """Note the end of a run that had `slots` slots of its own; `left` of them stay in the tree."""
        account, priority = request.account, request.submit.priority
        account.held -= slots
        account.kept += left - slots
        self._changed.add(account)
        self._rows[priority] -= 1
        if not self._rows[priority]:
            del self._rows[priority]

    def needs(self, account: Account) -> int:
        """Tokens that `account` is expected to add to the pool."""
        return min(max(account.foreseen, account.goal - account.kept), self._most)

    def _count(self) -> None:
        """Recompute the reserve of each changed account from its rows, its kept KV and its needs."""
        most = self._most
        for account in self._changed:
            tokens = 0
            if account.active:
                tokens = self.needs(account) + (0 if account.rows else account.kept)
            more = tokens - account.reserved
            if more:
                account.reserved = tokens
                tenant = account.tenant
                self._reserved -= min(tenant.reserved, most)
                tenant.reserved += more
                self._reserved += min(tenant.reserved, most)
        self._changed.clear()

    def rest(self, account: Account, step: int) -> None:
        """Start the quantum of an account without requests; `BETWEEN` quanta if it expects more."""
        if not account.active:
            return
        self._rests += 1
        account.rested = self._rests
        quanta = BETWEEN if account.behind else 1
        heapq.heappush(self._resting, (step + quanta * self._quantum, account.rested, account))
        if not account.behind:
            account.goal = 0
            self._changed.add(account)

    def expire(self, step: int) -> None:
        """End accounts whose quantum is over at `step`."""
        while self._resting and self._resting[0][0] <= step:
            _, number, account = heapq.heappop(self._resting)
            if number == account.rested and not account.requests:
                self.end(account)
