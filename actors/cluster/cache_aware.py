"""The router as bindings see it: sessions and requests in, replicas out.

Keeps what it takes to say how many tokens a request is going to compute: up to where its session's
prompts were sent. Pure but for the clock that it is given. Does not know who moves a session, or how.
"""

from collections.abc import Callable

from ramify.actors.cluster.router import ReplicaRouter
from ramify.protocol.messages import Submit


class _Session:
    __slots__ = ("covered", "ticket")

    def __init__(self, covered: int, ticket: int) -> None:
        self.covered = covered  # tokens of its longest branch that have KV, or are sent to get it
        self.ticket = ticket  # of its place, until its first request goes there


class CacheAware:
    """Places sessions by `router`. `now`: clock seconds."""

    def __init__(self, router: ReplicaRouter, now: Callable[[], float]) -> None:
        self.router = router
        self._now = now
        self._sessions: dict[int, _Session] = {}

    def joined(self, replica: int) -> None:
        """The replica takes sessions from now on."""
        self.router.joined(replica)

    def shut(self, replica: int) -> None:
        """It takes no more."""
        self.router.drain(replica)

    def gone(self, replica: int) -> None:
        """It is not there any more."""
        self.router.gone(replica)

    def place(self, session: int, namespace: str, tokens: bytes) -> int | None:
        """The replica for a session whose first tokens these are; None: there is none."""
        placement = self.router.place(namespace, tokens, self._now())
        if placement is None:
            return None
        self._sessions[session] = _Session(placement.cached, placement.ticket)
        return placement.replica

    def submitted(self, session: int, replica: int, message: Submit) -> None:
        """A request goes to its session's replica, which counts it in the `heard` of its reports."""
        known = self._sessions.setdefault(session, _Session(0, 0))
        computes = max(0, message.prompt - known.covered)
        self.router.sent(replica, computes, self._now(), known.ticket, holds=message.prompt)
        known.covered = max(known.covered, message.prompt)
        known.ticket = 0

    def ended(self, session: int, replica: int, requests: int) -> None:
        """So many requests of a session have ended: the replica's next report knows."""

    def left(self, session: int, replica: int) -> None:
        """The session is not at the replica any more."""
        self._sessions.pop(session, None)
