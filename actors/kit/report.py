"""How a process of an engine is: what gateways and replicas say of themselves, some times a second.

The store actor reports `StoreHealth`, which `/readyz`, `/metrics` and `/v1/info` show. Gateways count
`CredentialUsage`, which metrics show, labelled with the credential's name.
"""

from collections.abc import Iterable

import msgspec

from ramify.protocol.cluster import ReplicaLoad


class KvTier(msgspec.Struct, frozen=True):
    """A place where KV is. `hit_tokens`: those that requests found there, since the start.

    `load_s`: in which KV was moved to and from it, where the cache knows. `read_s`, `write_s`: of one
    block now, 0: unknown. `slow`: one of these is longer than computing takes.
    """

    tier: str
    blocks: int
    bytes: int
    hit_tokens: int
    load_s: float | None = None
    read_s: float = 0.0
    write_s: float = 0.0
    slow: bool = False


class RankState(msgspec.Struct, frozen=True):
    """One of the processes that hold a model together. `steps`: told, by rank 0, or taken.

    `behind`: steps that it has not taken yet. `state`: what the system says it does, "stopped" among
    them. `resident_bytes`: of the host's memory.
    """

    rank: int
    pid: int
    steps: int
    behind: int
    state: str = "gone"
    resident_bytes: int = 0
    cpu_s: float = 0.0


class CredentialUsage(msgspec.Struct, array_like=True):
    """Of one credential. `sockets` are those open now; all else counts from the start of the process."""

    sockets: int = 0
    received_bytes: int = 0
    frames: int = 0
    refused_ops: int = 0
    abuses: int = 0  # sockets closed with 4429

    def plus(self, other: "CredentialUsage") -> "CredentialUsage":
        """The sum of two processes."""
        return CredentialUsage(
            self.sockets + other.sockets,
            self.received_bytes + other.received_bytes,
            self.frames + other.frames,
            self.refused_ops + other.refused_ops,
            self.abuses + other.abuses,
        )


class StoreHealth(msgspec.Struct, frozen=True):
    """Of the store. `error`: why nothing can be written now; None: it can be.

    `damaged`: sessions that cannot be written, because what the store has of them is damaged. `lost`:
    how often all of a session was saved again, because the store had lost some of it.
    """

    error: str | None = None
    damaged: int = 0
    lost: int = 0


def joined(healths: Iterable[StoreHealth]) -> StoreHealth:
    """The health over several processes that have sessions."""
    every = list(healths)
    return StoreHealth(
        next((each.error for each in every if each.error is not None), None),
        sum(each.damaged for each in every),
        sum(each.lost for each in every),
    )


class Report(msgspec.Struct, tag=True, array_like=True, frozen=True, kw_only=True):
    """What the process has now; what the other kind of process says is left as it is."""

    lag: float = 0.0  # of its event loop, in seconds
    # of a front
    sockets: int = 0
    sessions: int = 0
    session_bytes: int = 0  # of the host's memory
    usage: dict[str, CredentialUsage] = {}  # of the credentials for which it has changed
    histories: dict[str, int] = {}  # see `Histories.counts`
    store: StoreHealth = StoreHealth()
    # of a front that has replicas
    moves: int = 0  # sessions that went from one to another since the last report
    first_tokens: list[float] = []  # seconds that they took since the last report
    # of a core; its `sessions`: those that it has heard of
    running: int = 0  # requests
    waiting: int = 0
    free: int = 0  # token slots of the KV pool, as the next two
    evictable: int = 0
    referenced: int = 0
    fault: str | None = None  # why it makes no progress, if it does not
    load: ReplicaLoad | None = None  # for routing
