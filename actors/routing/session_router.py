"""Where the sessions of a front go: keeps a `ReplicaRouter` told of what the front sends.

A session is placed with its first request, so the router sees the whole prompt. It stays until its
replica goes, or is far busier than the others: then its next request is placed anew.
"""

from collections.abc import Callable
from dataclasses import dataclass

from ramify.actors.routing.policy import RoutingPolicy
from ramify.actors.routing.router import ReplicaRouter
from ramify.protocol.cluster import KvEvents, ReplicaLoad
from ramify.protocol.messages import Finished, Submit


@dataclass(slots=True, eq=False)
class _Place:
    """A session at a replica."""

    tokens: int  # that it has to compute and no request has named yet
    ticket: int
    since: float
    length: int = 0  # of the longest prompt of its requests


class SessionRouter:
    """Replicas by number. `now()`: the time in seconds. `late` hears how late first tokens are."""

    def __init__(
        self,
        now: Callable[[], float],
        policy: RoutingPolicy | None = None,
        late: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        self._late = late
        self.router = ReplicaRouter(policy)
        self._now = now
        self._places: dict[int, _Place] = {}

    # --- replicas --------------------------------------------------------------------------------

    def joined(self, replica: int) -> None:
        """The replica takes sessions from now on."""
        self.router.joined(replica)

    def shut(self, replica: int) -> None:
        """Send no new sessions to `replica`."""
        self.router.drain(replica)

    def resume(self, replica: int) -> None:
        """Send sessions to `replica` again."""
        self.router.resume(replica)

    def gone(self, replica: int) -> None:
        """Remove `replica`."""
        self.router.gone(replica)

    def load(self, replica: int, load: ReplicaLoad) -> None:
        """Note a replica's load."""
        self.router.update(replica, load, self._now())

    def events(self, replica: int, events: list[KvEvents]) -> bool:
        """Note changes of a replica's cache. False: some were missed, so it has to be asked for all."""
        missed = [each for each in events if not self.router.events(replica, each)]  # hears of them all
        return not missed

    # --- sessions --------------------------------------------------------------------------------

    def place(self, session: int, namespace: str, tokens: bytes) -> int | None:
        """The replica for a session whose first request has these `tokens` (int32), if there is one."""
        now = self._now()
        decision = self.router.place(namespace, tokens, now)
        if decision is None:
            return None
        self._places[session] = _Place(decision.computes, decision.ticket, now)
        return decision.replica

    def hot(self, session: int, replica: int) -> bool:
        """Whether a session in which nothing runs had better be placed anew for its next request."""
        place = self._places.get(session)
        if place is None:
            return False
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
            self.router.sent(replica, place.tokens, now, ticket, holds=prompt)
            place.tokens = place.ticket = 0
            place.length = max(place.length, prompt)

    def finished(self, finished: list[Finished]) -> None:
        """Requests have ended."""
        for each in finished:
            if each.first_token:
                self._late(each.first_token - each.arrived)

    def left(self, session: int) -> None:
        """The session is at no replica any more, and none of its requests."""
        self._places.pop(session, None)
