"""The replica for a session: the one with the earliest expected first token. Pure.

The expected time to first token at a replica is its queue and the tokens to compute, over its speed
beside its decodes, plus the time until it has room for the KV:

    (tokens queued ahead, reported or sent since + price * tokens without KV there) / rate
        + tokens that find no slots / slots that are given back a second
        + steps under way * seconds of a step for each token of context * context of what runs

- *Queued* is what the replica reported last. What this router has sent since is added until a report
  counts it in, so slow prefills do not pile up unseen on one replica.
- *Ahead*: schedulers compute prompts in lots, by turns. So of each longer prompt, a short one waits for
  one lot, or for as much as it has itself to be computed.
- *Slots* are held by what runs (a long prompt with a long answer holds many for long). A replica whose
  pool is nearly full also evicts prefixes that others would find there: `fill_s`.
- *KV* is what replicas publish (`KvEvents`), and what recently placed requests will compute: a burst
  with one new prefix goes where it is being computed.
- The *price* of computing rises with the queues of all replicas: other sessions wait for what one
  computes. A prefix at one replica only belongs to a conversation. That conversation leaves it only
  where that saves much, or its turns would fill all caches. A prefix at several replicas is hot, and
  spreads.
- A replica whose queue is longer than `imbalance` times the mean (and some slack) takes nothing,
  whatever it has cached. Some replica always has the mean or less, so one is always left.
- A tenant stays at few replicas (`tenancy.py`), unless going elsewhere saves more than `away_s`. A
  single tenant without a name is at home everywhere.
- Nearly equal replicas are chosen in turn, the longest unused first: never the one with the smallest
  tree, nor the one that all routers take for the best.

A session stays at its replica; `hot` says when it is worth computing its KV elsewhere.

Times are seconds that the caller passes in. Does not know sessions, sockets or processes.
"""

import random
from collections import deque

import numpy as np
import numpy.typing as npt

from ramify.actors.kit.blocks import BlockHasher, Hashes, seed
from ramify.actors.routing.index import PrefixIndex, Promises, levels, members
from ramify.actors.routing.policy import RoutedReplica, RoutingDecision, RoutingPolicy
from ramify.actors.routing.tenancy import Tenancy
from ramify.protocol.cluster import BLOCK, KvEvents, ReplicaLoad

MOST_UNHEARD = 1 << 16  # requests to a replica that has told nothing of them; the oldest are forgotten
PROMISE_S = 10.0  # what was placed is expected to be in an index by then
RESERVED_S = 5.0  # a place whose request does not come by then is not held
_RATE = 20_000.0  # prompt tokens a second, until anything was measured
_HOLD_S = 2.0  # likewise
_MUCH = 4096.0  # tokens of context, of all: with less nothing is said by how long steps last


class ReplicaRouter:
    """One of possibly several routers of a cluster; each knows what it sends itself.

    `memory`: bytes for the index of prefixes, about. `block`: tokens of a block, as the replicas'.
    `seed`: routers with different seeds begin with different replicas among equals.
    """

    def __init__(
        self,
        policy: RoutingPolicy | None = None,
        *,
        memory: int = 256 << 20,
        block: int = BLOCK,
        seed: int = 0,
    ) -> None:
        self.policy = policy if policy is not None else RoutingPolicy()
        self.index = PrefixIndex(memory)
        self._hasher = BlockHasher(block)
        self._dice = random.Random(seed)
        self._promises = Promises(PROMISE_S, 1 << 16)
        self._tenancy = Tenancy()
        self._replicas: dict[int, RoutedReplica] = {}
        self._at: list[RoutedReplica | None] = []  # by slot
        self._tickets = 0
        self._reservations: deque[tuple[float, int, int]] = deque()  # (until, replica, ticket)
        self._version = 0
        self._resize(8)

    def __contains__(self, replica: int) -> bool:
        return replica in self._replicas

    def __len__(self) -> int:
        return len(self._replicas)

    @property
    def there(self) -> bool:
        """Whether any may be chosen."""
        return self._count > 0

    # --- who is there -----------------------------------------------------------------------

    def joined(self, replica: int) -> None:
        """Add a replica. Nothing was sent to it, and it has no KV."""
        if replica in self._replicas:
            self.gone(replica)
        slot = self.index.join()
        while slot >= len(self._live):
            self._resize(2 * len(self._live))
        self._replicas[replica] = self._at[slot] = RoutedReplica(replica, slot)
        self._ids[slot] = replica & (1 << 63) - 1
        self._queued[slot] = self._work[slot] = 0.0
        self._rate[slot] = self._rates()
        self._turn[slot] = -self._dice.random()
        self._told[slot] = self._held[slot] = self._release[slot] = 0.0
        self._read[slot] = self._context[slot] = self._step[slot] = 0.0
        self._beyond[slot] = self._many[slot] = self._excess[slot] = self._long[slot] = 0.0
        self._slots[slot] = np.inf
        self._live[slot] = True
        self._changed()

    def drain(self, replica: int) -> None:
        """Choose the replica no more. Unknown ids are ignored."""
        known = self._replicas.get(replica)
        if known is not None:
            self._live[known.slot] = False
            self._changed()

    def resume(self, replica: int) -> None:
        """Choose the replica again. Unknown ids are ignored."""
        known = self._replicas.get(replica)
        if known is not None:
            self._live[known.slot] = True
            self._changed()

    def gone(self, replica: int) -> None:
        """Remove the replica and all that it had. Unknown ids are ignored."""
        known = self._replicas.pop(replica, None)
        if known is None:
            return
        slot = known.slot
        self.index.leave(slot)
        self._promises.leave(slot)
        self._at[slot] = None
        self._live[slot] = False
        self._work[slot] = self._queued[slot] = 0.0
        self._changed()

    # --- what replicas tell -----------------------------------------------------------------

    def update(self, replica: int, load: ReplicaLoad, now: float) -> None:
        """A report of a replica's load. Of an unknown one: nothing."""
        known = self._replicas.get(replica)
        if known is None:
            return
        self._expire(now)
        while known.sent and known.sent[0][0] <= load.heard:
            known.forget(self.policy.lot)
        slot = known.slot
        self._queued[slot] = load.queued
        self._beyond[slot], self._many[slot] = min(load.excess, load.queued), load.long
        if load.prefill_rate > 0.0:
            self._rate[slot] = max(1.0, load.prefill_rate)
        self._read[slot] = load.context + load.wanted
        self._step[slot] = load.step_s
        if load.slots:
            held = max(0, load.slots - load.free - load.evictable)
            self._slots[slot] = load.slots
            self._told[slot] = held + load.wanted
            self._release[slot] = (load.hold_s or _HOLD_S) / max(held, load.slots / 8)
        self._weigh(known)

    def events(self, replica: int, events: KvEvents) -> bool:
        """Note what became resident or cold there. False: some events were missed, so ask it for a
        snapshot.
        """
        known = self._replicas.get(replica)
        if known is None:
            return True
        if events.listener:
            if events.reset and known.seq >= 0:
                self._forget(known)
        else:
            if events.seq <= known.seq:
                return True  # it was in a snapshot, or comes twice
            if known.seq < 0 or events.seq != known.seq + 1:
                return False
        known.seq = events.seq
        if events.removed:
            self.index.remove(known.slot, np.frombuffer(events.removed, dtype=np.uint64))
        if events.stored:
            self.index.add(known.slot, np.frombuffer(events.stored, dtype=np.uint64))
        return True

    # --- placing ----------------------------------------------------------------------------

    def place(
        self, namespace: str, tokens: bytes, now: float, *, tenant: str | None = None
    ) -> RoutingDecision | None:
        """The replica for a session whose branch has these `tokens` (int32); None: there is none.

        The place is reserved: `sent` with its ticket says that the request is on its way. `tenant`: the
        session's tenant, where several share a namespace.
        """
        self._expire(now)
        if not self._count:
            return None
        size = len(tokens) // 4
        hashes, cached = self._look(namespace, tokens)
        seconds, wait = self._seconds(size, cached)
        name = namespace if tenant is None else tenant
        strangers = self._strangers(name, now)
        if strangers is not None:
            seconds[strangers] += self.policy.away_s
        slot = self._choose(seconds)
        most = float(cached.max())
        if cached[slot] < most and most >= self.policy.keep * size:
            there = int(cached.argmax())
            if np.count_nonzero(cached == most) == 1 and np.isfinite(seconds[there]):
                wait += (size - cached) / self._rate
                enough = max(self.policy.move_s, self.policy.move_share * float(wait[there]))
                if wait[there] - wait[slot] <= enough:
                    slot = there
        return self._placed(name, slot, size, cached, hashes, now)

    def lacking(self, namespace: str, tokens: bytes) -> int:
        """How many of these tokens (int32) the replica computes that has most of them."""
        _, cached = self._look(namespace, tokens)
        return len(tokens) // 4 - int((cached * self._live).max())

    def hot(self, replica: int, tokens: int, now: float, *, since: float) -> bool:
        """Whether a session should be placed anew before its next request.

        `tokens`: of the session, taken to have KV at `replica` only. `since`: when it came there. A
        replica that is gone or drains is not hot: all sessions leave it anyway.
        """
        known, policy = self._replicas.get(replica), self.policy
        if known is None or not self._live[known.slot]:
            return False
        if now - since < policy.rest_s and self._work[known.slot] <= self.bound:
            return False
        stays = float(self._wait(tokens, 0.0)[known.slot])
        enough = max(policy.move_s, policy.move_share * stays)
        if stays <= enough:
            return False
        seconds, _ = self._seconds(tokens, np.zeros(len(self._live)))
        seconds[known.slot] = np.inf
        return stays - float(seconds.min()) > enough

    def sent(self, replica: int, tokens: int, now: float, ticket: int = 0, *, holds: int = 0) -> int:
        """Note that a request goes to a replica, which has to compute about `tokens` tokens of it.

        Returns how many requests were sent there: see `ReplicaLoad.heard`. `holds`: tokens of its whole
        prompt. `ticket`: of its reserved place. 0 for an unknown replica.
        """
        known = self._replicas.get(replica)
        if known is None:
            return 0
        known.reserved.pop(ticket, None)
        known.send(tokens, max(holds, tokens), self.policy.lot)
        if len(known.sent) > MOST_UNHEARD:
            known.forget(self.policy.lot)
        self._weigh(known)
        return known.count

    def work(self, replica: int) -> float:
        """Tokens that wait at a replica, as far as this router knows."""
        return float(self._work[self._replicas[replica].slot])

    @property
    def bound(self) -> float:
        """Tokens that may wait at a replica which is chosen."""
        return self.policy.imbalance * self._mean(self._work) + self.policy.slack_s * self._rates()

    # --- internals --------------------------------------------------------------------------

    def _resize(self, slots: int) -> None:
        def grown(name: str, dtype: npt.DTypeLike, fill: float) -> None:
            array = np.full(slots, fill, dtype=dtype)
            old = getattr(self, name, None)
            if old is not None:
                array[: len(old)] = old
            setattr(self, name, array)

        self._live: npt.NDArray[np.bool_]
        self._ids: npt.NDArray[np.uint64]
        self._queued: npt.NDArray[np.float64]
        self._work: npt.NDArray[np.float64]  # queued, sent and reserved
        self._rate: npt.NDArray[np.float64]
        self._slots: npt.NDArray[np.float64]  # of the KV pool
        self._told: npt.NDArray[np.float64]  # of them, held or waited for as the replica told
        self._held: npt.NDArray[np.float64]  # and with what was sent and reserved since
        self._read: npt.NDArray[np.float64]  # tokens of context, as the replica told
        self._context: npt.NDArray[np.float64]  # and with what was sent and reserved since
        self._release: npt.NDArray[np.float64]  # seconds until a held slot more is given back
        self._step: npt.NDArray[np.float64]  # seconds of a step
        self._beyond: npt.NDArray[np.float64]  # tokens beyond a lot of each prompt, as the replica told
        self._many: npt.NDArray[np.float64]  # the prompts that have such
        self._excess: npt.NDArray[np.float64]  # those tokens with what was sent and reserved since
        self._long: npt.NDArray[np.float64]  # those prompts likewise
        self._turn: npt.NDArray[np.float64]  # the ticket that last chose it
        grown("_live", np.bool_, 0)
        grown("_ids", np.uint64, 0)
        for name in (
            "_queued",
            "_work",
            "_told",
            "_held",
            "_read",
            "_context",
            "_release",
            "_step",
            "_turn",
            "_beyond",
            "_many",
            "_excess",
            "_long",
        ):
            grown(name, np.float64, 0)
        grown("_rate", np.float64, _RATE)
        grown("_slots", np.float64, np.inf)
        self._at += [None] * (slots - len(self._at))
        self._changed()

    def _changed(self) -> None:
        """Forget what depends on the set of replicas that may be chosen."""
        self._version += 1
        self._count = int(self._live.sum())
        self._share = self._live / max(1, self._count)

    def _mean(self, array: npt.NDArray[np.float64]) -> float:
        """The mean over replicas that may be chosen; 0.0 without any."""
        return float(array @ self._share)

    def _rates(self) -> float:
        """Tokens a second of a replica, the mean."""
        return self._mean(self._rate) if self._count else _RATE

    def _weigh(self, known: RoutedReplica) -> None:
        work, held, excess, long = known.unheard, known.unheld, known.excess, known.long
        lot = self.policy.lot
        for computes, holds in known.reserved.values():
            work += computes
            held += holds
            if computes > lot:
                excess += computes - lot
                long += 1
        self._excess[known.slot] = self._beyond[known.slot] + excess
        self._long[known.slot] = self._many[known.slot] + long
        self._work[known.slot] = self._queued[known.slot] + work
        self._held[known.slot] = self._told[known.slot] + held
        self._context[known.slot] = self._read[known.slot] + held

    def _expire(self, now: float) -> None:
        """Give up places whose request did not come."""
        while self._reservations and self._reservations[0][0] <= now:
            _, number, ticket = self._reservations.popleft()
            known = self._replicas.get(number)
            if known is not None and known.reserved.pop(ticket, None) is not None:
                self._weigh(known)

    def _forget(self, known: RoutedReplica) -> None:
        """A snapshot comes: what was known of its cache does not count any more."""
        slot = self.index.join()
        while slot >= len(self._live):
            self._resize(2 * len(self._live))
        old = known.slot
        for array in (
            self._live, self._ids, self._queued, self._work, self._rate, self._slots, self._told,
            self._held, self._read, self._context, self._release, self._step, self._turn,
            self._beyond, self._many, self._excess, self._long,
        ):  # fmt: skip
            array[slot] = array[old]
        self._at[slot], self._at[old] = known, None
        self._live[old] = False
        self._work[old] = self._queued[old] = 0.0
        self.index.leave(old)
        self._promises.leave(old)
        known.slot = slot
        self._changed()

    def _look(self, namespace: str, tokens: bytes) -> tuple[Hashes, npt.NDArray[np.float64]]:
        """The prompt's hashes, and how many of its tokens each slot has."""
        array = np.frombuffer(tokens, dtype=np.int32)
        hashes = self._hasher.chain(seed(namespace), array)
        cached = np.zeros(len(self._live))
        if len(hashes):
            for blocks, slots in reversed(levels(self.index, self._promises, hashes)):
                cached[members(slots)] = blocks * self._hasher.size
        return hashes, cached

    def _seconds(
        self, size: int, cached: npt.NDArray[np.float64]
    ) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """The score of each slot, infinite for those that may not be chosen; and the wait in it."""
        policy = self.policy
        computes = np.maximum(size - cached, 1.0)
        wait = self._wait(size, computes)
        price = min(policy.most_price, 1.0 + self._mean(wait) / policy.price_s)
        seconds = wait + price * computes / self._rate
        seconds[~self._live | (self._work > self.bound)] = np.inf
        return seconds, wait

    def _wait(self, size: int, computes: npt.NDArray[np.float64] | float) -> npt.NDArray[np.float64]:
        """Seconds that a request of `size` tokens waits for others at each slot, with the cost of a full
        pool.

        `computes`: its tokens without KV there. Schedulers compute prompts in lots, by turns, so of each
        longer prompt only that many tokens go first.
        """
        held = self._held + size
        others = np.maximum(computes - self.policy.lot, 0.0) * self._long
        ahead = self._work - np.maximum(self._excess - others, 0.0)
        seconds = ahead / self._rate + self.policy.fill_s * (held / self._slots)
        seconds += np.maximum(held - self._slots, 0.0) * self._release
        slope = self._mean(self._step) / max(_MUCH / max(1, self._count), self._mean(self._read))
        seconds += self.policy.steps * slope * (self._context + size)
        return seconds

    def _choose(self, seconds: npt.NDArray[np.float64]) -> int:
        """The least; of those that are nearly so, the one that was chosen longest ago."""
        best, policy = float(seconds.min()), self.policy
        near = np.flatnonzero(seconds <= best * (1 + policy.near_share) + policy.near_s)
        return int(near[0] if len(near) == 1 else near[self._turn[near].argmin()])

    def _strangers(self, name: str, now: float) -> npt.NDArray[np.intp] | None:
        if not name:  # the server asks for no tokens: all sessions are one tenant's
            return None
        slots = np.flatnonzero(self._live)
        found = self._tenancy.strangers(name, self._ids[slots], self._version, self._rates(), now)
        return None if found is None else slots[found]

    def _placed(
        self,
        name: str,
        slot: int,
        size: int,
        cached: npt.NDArray[np.float64],
        hashes: Hashes,
        now: float,
    ) -> RoutingDecision:
        known = self._at[slot]
        assert known is not None
        had = min(int(cached[slot]), size)
        computes = size - had
        seconds = float((self._work[slot] + computes) / self._rate[slot])
        self._tickets += 1
        self._turn[slot] = ticket = self._tickets
        known.reserved[ticket] = computes, size
        self._reservations.append((now + RESERVED_S, known.number, ticket))
        self._weigh(known)
        self._tenancy.computes(name, computes, now)
        new = hashes[had // self._hasher.size :]
        if self.index.stride > 1:
            new = new[new % np.uint64(self.index.stride) == 0]
        self._promises.add(slot, new.tolist(), now)
        return RoutingDecision(known.number, had, computes, seconds, ticket)
