"""Where sessions go: keeps a `ReplicaRouter` told of what this front sends. Pure, but for the clock.

A session is placed with its first request, so the router sees the whole prompt. It stays until its
replica goes, or has far more to do than the others: then its next request is placed anew.
"""

from ramify.actors.cluster.router import Policy, ReplicaRouter
from ramify.actors.cluster.scaling import Scaling
from ramify.actors.kit.clock import Clock
from ramify.protocol.cluster import KvEvents, ReplicaLoad
from ramify.protocol.messages import Finished, Submit


class _Place:
    """A session at a replica. `tokens`: that it has to compute and no request has named yet;
    `length`: of the longest prompt of its requests."""

    __slots__ = ("length", "since", "ticket", "tokens")

    def __init__(self, tokens: int, ticket: int, since: float) -> None:
        self.tokens = tokens
        self.length = 0
        self.ticket = ticket
        self.since = since


class Placing:
    """A `bindings.Placing`. `scaling` hears how late first tokens are."""

    def __init__(
        self, clock: Clock, policy: Policy | None = None, scaling: Scaling | None = None
    ) -> None:
        self.scaling = scaling
        self.router = ReplicaRouter(policy)
        self._clock = clock
        self._places: dict[int, _Place] = {}

    # --- replicas --------------------------------------------------------------------------------

    def joined(self, replica: int) -> None:
        """The replica takes sessions from now on."""
        self.router.joined(replica)

    def shut(self, replica: int) -> None:
        """It takes no more."""
        self.router.drain(replica)

    def resume(self, replica: int) -> None:
        """It takes sessions again."""
        self.router.resume(replica)

    def gone(self, replica: int) -> None:
        """It is not there any more."""
        self.router.gone(replica)

    def load(self, replica: int, load: ReplicaLoad) -> None:
        """How busy it is."""
        self.router.update(replica, load, self._clock.now())

    def events(self, replica: int, events: list[KvEvents]) -> bool:
        """What its cache has. False: some were missed, so it has to be asked for all."""
        missed = [each for each in events if not self.router.events(replica, each)]  # hears of them all
        return not missed

    # --- sessions --------------------------------------------------------------------------------

    def place(self, session: int, namespace: str, tokens: bytes) -> int | None:
        now = self._clock.now()
        placement = self.router.place(namespace, tokens, now)
        if placement is None:
            return None
        self._places[session] = _Place(placement.computes, placement.ticket, now)
        return placement.replica

    def hot(self, session: int, replica: int) -> bool:
        place = self._places.get(session)
        if place is None:
            return False
        return self.router.hot(replica, place.length, self._clock.now(), since=place.since)

    def extended(self, session: int, tokens: int) -> None:
        place = self._places.get(session)
        if place is not None:
            place.tokens += tokens

    def submitted(self, session: int, replica: int, message: Submit) -> None:
        place = self._places.get(session)
        if place is not None:
            now, ticket, prompt = self._clock.now(), place.ticket, message.prompt
            self.router.sent(replica, place.tokens, now, ticket, holds=prompt)
            place.tokens = place.ticket = 0
            place.length = max(place.length, prompt)

    def finished(self, finished: list[Finished]) -> None:
        if self.scaling is not None:
            now = self._clock.now()
            for each in finished:
                if each.first_token:
                    self.scaling.first_token(each.first_token - each.arrived, now)

    def left(self, session: int) -> None:
        self._places.pop(session, None)
