"""What routing weighs, what it decides, and what it knows of a replica. Pure."""

from collections import deque
from dataclasses import dataclass, field

import msgspec

from ramify.protocol.cluster import LOT


class RoutingPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """The weights of the score. Times in seconds, sizes in tokens."""

    lot: float = LOT  # tokens of each prompt that a scheduler computes before it goes on to the next
    imbalance: float = 2.0  # times the mean of the queues that a replica's may be
    slack_s: float = 1.0  # work beyond that which does not count as imbalance
    price_s: float = 0.5  # mean wait at which computing a token costs twice its time
    most_price: float = 3.0
    near_share: float = 0.05  # scores that differ by so much, and
    near_s: float = 0.05  # by so much, are taken to be equal: they are guesses
    away_s: float = 0.1  # what a tenant's session must save to be placed away from its home
    steps: float = 3.0  # that are under way before one that a request comes into
    fill_s: float = 0.1  # what a full pool costs beside waiting for slots: evicted KV, slower steps
    move_s: float = 0.5  # what a session must save to be moved
    move_share: float = 0.5  # and this share of what it would wait where it is
    keep: float = 0.5  # if one has this share of a prompt, it is left for as much only
    rest_s: float = 20.0  # it stays for so long after it has come, if no more than the bound waits there


class RoutingDecision(msgspec.Struct, frozen=True):
    """A session's replica. `cached`: tokens expected to have KV there; `computes`: the others.

    `seconds`: the expected time to first token. `ticket`: for `ReplicaRouter.sent`.
    """

    replica: int
    cached: int
    computes: int
    seconds: float
    ticket: int


@dataclass(slots=True, eq=False)
class RoutedReplica:
    number: int
    slot: int
    seq: int = -1  # of the last event; -1: no snapshot yet
    count: int = 0  # requests sent
    sent: deque[tuple[int, int, int]] = field(
        default_factory=deque
    )  # not heard of: count, computes, holds
    unheard: int = 0  # their tokens to be computed
    unheld: int = 0  # and to be held
    excess: float = 0.0  # and those beyond a lot of each prompt,
    long: float = 0.0  # of so many prompts
    reserved: dict[int, tuple[int, int]] = field(default_factory=dict)  # ticket: (computes, holds)

    def send(self, computes: int, holds: int, lot: float) -> None:
        """A request goes there."""
        self.count += 1
        self.sent.append((self.count, computes, holds))
        self.unheard += computes
        self.unheld += holds
        if computes > lot:
            self.excess += computes - lot
            self.long += 1

    def forget(self, lot: float) -> None:
        """The oldest of what was sent is in the replica's reports now."""
        _, computes, holds = self.sent.popleft()
        self.unheard -= computes
        self.unheld -= holds
        if computes > lot:
            self.excess -= computes - lot
            self.long -= 1
