"""The messages between a front and a replica.

    front                       replica
    StartReplica      ------->  loads the model
                      <-------  Loading ... Loading
                      <-------  Up, or StartFailed and the end
    ToCore            ------->  what sessions want of it in one turn of the front's loop: one frame
                      <-------  ToSessions: a step's tokens for all its sessions: one frame
                      <-------  Report, ten times a second; News of its cache
    AskMetrics        ------->
                      <-------  MetricsText
    Dismiss           ------->  ends

Times are seconds of the front's clock: a replica on another machine, whose clock began at another time,
adds the difference (`Shift`).

This file does not know sockets or processes.
"""

import msgspec

from ramify.actors.executor.spec import ExecutorSpec
from ramify.actors.front.gateway_messages import ToSessions
from ramify.actors.processes.messages import (
    AskMetrics,
    Loading,
    MetricsText,
    ProcessMessage,
    StartFailed,
)
from ramify.protocol.cluster import KvEvents, ReplicaLoad
from ramify.protocol.config import EngineConfig
from ramify.protocol.messages import CacheMessage, GrammarMessage, RequestMessage
from ramify.protocol.plan import ExecutorInfo

MAX_FRAME = 1 << 29  # bytes: one message of the largest size, and what a bundle had collected before it

LISTENER = 1  # the front, to the replica's cache

ForCore = CacheMessage | RequestMessage | GrammarMessage


# --- from the front -----------------------------------------------------------------------------


class StartReplica(ProcessMessage, frozen=True):
    """Be replica `number`. `now`: the front's clock on the machine of this name.

    `check_idle`: see `CacheActor`.
    """

    number: int
    config: EngineConfig
    spec: ExecutorSpec | None
    epoch: str
    now: float
    machine: str
    check_idle: bool = False


class ToCore(ProcessMessage, frozen=True):
    """In order: a session tells the cache before it tells the scheduler."""

    messages: list[ForCore]


class Dismiss(ProcessMessage, frozen=True):
    """Nothing more is wanted: end."""


FromFront = StartReplica | ToCore | AskMetrics | Dismiss

# --- to the front -------------------------------------------------------------------------------


class Up(ProcessMessage, frozen=True):
    """Sessions can come. `pid`, `host`: of the process, for people. `name`: what it was started as."""

    info: ExecutorInfo
    pid: int
    host: str
    name: str = ""


class Report(ProcessMessage, frozen=True):
    """How it is. `free`, `evictable`, `referenced`: token slots of the KV pool.

    `fault`: why it makes no progress, if it does not. `lag`: of its event loop, in seconds. `load`: for
    routing.
    """

    running: int = 0
    waiting: int = 0
    free: int = 0
    evictable: int = 0
    referenced: int = 0
    lag: float = 0.0
    fault: str | None = None
    load: ReplicaLoad | None = None


class News(ProcessMessage, frozen=True):
    """What its cache has, and has no more, in order. What a front takes too slowly is left out."""

    events: list[KvEvents]


class Draining(ProcessMessage, frozen=True):
    """It was told to end: it wants its sessions to move, and then a `Dismiss`."""


class Relayed(ProcessMessage, frozen=True, tag="ToSessions"):
    """A `ToSessions` for gateway processes, to which the messages go as they are."""

    messages: list[tuple[int, bool, msgspec.Raw]]


_Said = Loading | Up | StartFailed | Report | News | Draining | MetricsText
ToFront = _Said | ToSessions
ToGateways = _Said | Relayed
