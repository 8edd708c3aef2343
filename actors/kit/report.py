"""How a process of an engine is: what gateways and replicas say of themselves, some times a second."""

import msgspec

from ramify.actors.kit.health import StoreHealth
from ramify.actors.kit.usage import CredentialUsage
from ramify.protocol.cluster import ReplicaLoad


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
