"""Where the sessions of a front go: keeps a `ReplicaRouter` told of what the front sends.

A session is placed with its first request, so the router sees the whole prompt. It stays until its
replica goes, or is far busier than the others: then its next request is placed anew.

With *roles* the first replicas, by number, compute long prompts (prefill apart from decode; Splitwise
and DistServe, 2024). What is long follows from what was measured: a prompt that takes a while, of a
model whose KV moves in a part of that. Both kinds have a router of their own. A session whose prompts
are computed goes on at one of the others.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from ramify.actors.routing.policy import RoutingPolicy
from ramify.actors.routing.router import ReplicaRouter
from ramify.protocol.cluster import LOT, KvEvents, ReplicaLoad
from ramify.protocol.messages import Finished, Submit

LONG, LONG_S = 2.0 * LOT, 0.1  # tokens and seconds that a prompt takes at least to be computed apart
MOVE_SHARE = 0.5  # of the time to compute KV that its move may take
_RATE = 20_000.0  # prompt tokens a second, until any were measured


@dataclass(slots=True, eq=False)
class _Place:
    """A session at `replica`."""

    replica: int
    tokens: int  # that it has to compute and no request has named yet
    ticket: int
    since: float
    length: int = 0  # of the longest prompt of its requests


class SessionRouter:
    """Replicas by number. `now()`: the time in seconds. `late` hears how late first tokens are.

    `prefill`: so many replicas, the first by number, compute long prompts and nothing else, as long as
    there are others. `token_s()`: seconds until the KV of a token has moved, set by who moves it.
    """

    def __init__(
        self,
        now: Callable[[], float],
        policy: RoutingPolicy | None = None,
        late: Callable[[float], None] = lambda seconds: None,
        prefill: int = 0,
    ) -> None:
        self._late = late
        self.router = ReplicaRouter(policy)
        self._apart = ReplicaRouter(policy, memory=1 << 20) if prefill else None
        self._prefill = prefill
        self._computed: set[int] = set()  # sessions that come from a replica for prompts
        self.token_s: Callable[[], float] = lambda: 0.0
        self._now = now
        self._places: dict[int, _Place] = {}
        self._rates: dict[int, float] = {}

    # --- replicas --------------------------------------------------------------------------------

    def joined(self, replica: int) -> None:
        """The replica takes sessions from now on."""
        self._of(replica).joined(replica)

    def shut(self, replica: int) -> None:
        """Send no new sessions to `replica`."""
        self._of(replica).drain(replica)

    def resume(self, replica: int) -> None:
        """Send sessions to `replica` again."""
        self._of(replica).resume(replica)

    def gone(self, replica: int) -> None:
        """Remove `replica`."""
        self._rates.pop(replica, None)
        self._of(replica).gone(replica)

    def rate(self, replica: int) -> float:
        """Prompt tokens a second there, as it has said; 0.0: unknown."""
        return self._rates.get(replica, 0.0)

    def load(self, replica: int, load: ReplicaLoad) -> None:
        """Note a replica's load."""
        self._rates[replica] = load.prefill_rate
        self._of(replica).update(replica, load, self._now())

    def events(self, replica: int, events: list[KvEvents]) -> bool:
        """Note changes of a replica's cache. False: some were missed, so it has to be asked for all."""
        router = self._of(replica)
        missed = [each for each in events if not router.events(replica, each)]  # hears of them all
        return not missed

    def prefills(self, replica: int) -> bool:
        """Whether it is for long prompts: sessions leave it when these are computed."""
        return replica < self._prefill

    def _of(self, replica: int) -> ReplicaRouter:
        apart = self._apart
        return apart if apart is not None and self.prefills(replica) else self.router

    # --- sessions --------------------------------------------------------------------------------

    def place(self, session: int, namespace: str, tokens: bytes) -> int | None:
        """The replica for a session whose first request has these `tokens` (int32), if there is one."""
        now, computed = self._now(), session in self._computed
        apart, decision = self._apart, None
        if apart is not None and not computed and self._is_long(namespace, tokens):
            decision = apart.place(namespace, tokens, now)
        decision = decision or self.router.place(namespace, tokens, now)
        if decision is None and apart is not None:
            decision = apart.place(namespace, tokens, now)
        if decision is None:
            return None
        self._computed.discard(session)
        rest = 0 if computed else decision.computes  # its KV moves along
        self._places[session] = _Place(decision.replica, rest, decision.ticket, now)
        return decision.replica

    def _is_long(self, namespace: str, tokens: bytes) -> bool:
        router, long = self.router, self._long
        return router.there and len(tokens) >= 4 * long and router.lacking(namespace, tokens) >= long

    @property
    def _long(self) -> float:
        """Tokens from which on a prompt is computed apart."""
        rates = [rate for replica, rate in self._rates.items() if rate and self.prefills(replica)]
        rate = min(rates, default=_RATE)
        return inf if self.token_s() * rate > MOVE_SHARE else max(LONG, LONG_S * rate)

    def goes_on(self, replica: int) -> bool:
        """Whether a session whose prompts `replica` has computed had better go on elsewhere."""
        return self.prefills(replica) and self.router.there

    def hot(self, session: int, replica: int) -> bool:
        """Whether a session in which nothing runs had better be placed anew for its next request."""
        place = self._places.get(session)
        if place is None:
            return False
        if self.prefills(replica):
            return False  # it leaves anyway
        if self._apart is not None and self._apart.there and place.length <= place.tokens >= self._long:
            return True
        return self.router.hot(replica, place.length, self._now(), since=place.since)

    def extended(self, session: int, tokens: int) -> None:
        """Note that `tokens` more tokens go to the session's replica."""
        place = self._places.get(session)
        if place is not None:
            place.tokens += tokens

    def submitted(self, session: int, replica: int, message: Submit) -> None:
        """A request goes to its session's replica."""
        place = self._places.get(session)
        if place is not None:
            now, ticket, prompt = self._now(), place.ticket, message.prompt
            self._of(replica).sent(replica, place.tokens, now, ticket, holds=prompt)
            place.tokens = place.ticket = 0
            place.length = max(place.length, prompt)

    def finished(self, finished: list[Finished]) -> None:
        """Requests have ended."""
        for each in finished:
            if each.first_token:
                self._late(each.first_token - each.arrived)

    def left(self, session: int) -> None:
        """The session is at no replica any more, and none of its requests."""
        place = self._places.pop(session, None)
        if (
            place is not None
            and self.prefills(place.replica)
            and place.replica in self._of(place.replica)
        ):
            self._computed.add(session)

    def over(self, session: int) -> None:
        """The session has ended."""
        self._computed.discard(session)
