"""The messages between a front and a replica.

    front                       replica
    StartReplica      ------->  loads the model
                      <-------  Loading ... Loading
                      <-------  Up, or StartFailed and the end
    ToCore            ------->  see `front.core_messages`
                      <-------  ToSessions, News; Report, ten times a second
    AskMetrics        ------->
                      <-------  MetricsText
    Dismiss           ------->  ends

Times are seconds of the front's clock: a replica on another machine, whose clock began at another time,
adds the difference (`Shift`).

This file does not know sockets or processes.
"""

import msgspec

from ramify.actors.executor.spec import ExecutorSpec
from ramify.actors.front.core_messages import News, ToCore, ToSessions
from ramify.actors.kit.report import Report
from ramify.actors.processes.messages import (
    AskMetrics,
    Loading,
    MetricsText,
    ProcessMessage,
    StartFailed,
)
from ramify.protocol.config import EngineConfig
from ramify.protocol.plan import ExecutorInfo

LISTENER = 1  # the front, to the replica's cache

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


class Draining(ProcessMessage, frozen=True):
    """It was told to end: it wants its sessions to move, and then a `Dismiss`."""


class Relayed(ProcessMessage, frozen=True, tag="ToSessions"):
    """A `ToSessions` for gateway processes, to which the messages go as they are."""

    messages: list[tuple[int, bool, msgspec.Raw]]


_Said = Loading | Up | StartFailed | Report | News | Draining | MetricsText
ToFront = _Said | ToSessions
ToGateways = _Said | Relayed
