"""The messages between an engine or a gateway process and a replica.

    engine                      replica
    StartReplica      ------->  loads the model
                      <-------  Loading ... Loading
                      <-------  Up, or StartFailed and the end
                      <-------  Report, ten times a second
    AskMetrics        ------->
                      <-------  MetricsText
                      <-------  Draining: it was told to end
    Leave             ------->  has its other fronts take their sessions
    Dismiss           ------->  ends

    front                       replica
    Hello             ------->
                      <-------  Up; Report, ten times a second; Draining
                                and what `front.core_messages` has

An engine without gateway processes is the front itself. Else a replica joins each of them too, at the
ports that the engine names. Times are seconds of the front's clock: a replica on another machine, whose
clock began at another time, adds the difference (`Shift`).

This file does not know sockets or processes.
"""

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

LISTENER = 1  # a front, to the replica's cache
ENGINE = 64  # the number of an engine's process that has no sessions: that of no gateway worker

# --- to the replica -----------------------------------------------------------------------------


class Hello(ProcessMessage, frozen=True):
    """From a front. `front`: the number of its gateway worker. `now`: its clock, on the machine of this
    name.
    """

    front: int
    now: float
    machine: str


class StartReplica(ProcessMessage, frozen=True):
    """Be replica `number`. `hello`: of the engine itself.

    `ports`: where gateway processes wait, at the engine's address. `secret`: theirs; None: the one by
    which the replica joined.
    """

    number: int
    config: EngineConfig
    spec: ExecutorSpec | None
    epoch: str
    hello: Hello
    ports: list[int] = []
    secret: bytes | None = None


class Leave(ProcessMessage, frozen=True):
    """Its sessions are to move."""


class Dismiss(ProcessMessage, frozen=True):
    """Nothing more is wanted: end."""


ToReplica = StartReplica | Hello | ToCore | AskMetrics | Leave | Dismiss

# --- from the replica ---------------------------------------------------------------------------


class Up(ProcessMessage, frozen=True):
    """Sessions can come. `pid`, `host`: of the process, for people. `name`: what it was started as."""

    number: int
    info: ExecutorInfo
    pid: int
    host: str
    name: str = ""


class Draining(ProcessMessage, frozen=True):
    """To the engine: it was told to end, and wants its sessions to move, and then a `Dismiss`.

    To a gateway process: the engine wants that.
    """


FromReplica = Loading | Up | StartFailed | Report | News | Draining | MetricsText | ToSessions
