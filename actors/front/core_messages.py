"""The messages between a front and a core, whichever of the two is in another process.

    front                       core
    ToCore            ------->  what its sessions want in one turn of the front's loop: one frame
                      <-------  ToSessions: a step's tokens for all sessions of the front: one frame
                      <-------  News of its cache, where a front chooses among several cores

Both say how they are with `Report`. This file does not know sockets or processes.
"""

from ramify.actors.kit.report import Report
from ramify.actors.processes.messages import AskMetrics, ProcessMessage
from ramify.protocol.cluster import KvEvents, MoveAnswer
from ramify.protocol.messages import (
    CacheMessage,
    ChangeCore,
    Compiled,
    GrammarMessage,
    Inspected,
    Lost,
    NotCompiled,
    RequestMessage,
    Tokens,
)

MAX_FRAME = 1 << 30  # bytes: what all sockets of a front may have sent in one turn of its loop

ForCore = CacheMessage | RequestMessage | GrammarMessage
FromCore = Tokens | Inspected | Compiled | NotCompiled | ChangeCore | Lost | MoveAnswer


class Forward(ProcessMessage, frozen=True):
    """Hand `body` to the process of gateway worker `worker`, if it serves."""

    worker: int
    body: bytes


Said = ForCore | Forward | Report | AskMetrics


class ToCore(ProcessMessage, frozen=True):
    """One turn's messages, in order: a session tells the cache before it tells the scheduler."""

    messages: list[Said]


class ToSessions(ProcessMessage, frozen=True):
    """What sessions are told, in order, by number."""

    messages: list[tuple[int, FromCore]]


class News(ProcessMessage, frozen=True):
    """What its cache has, and has no more, in order. What a front takes too slowly is left out."""

    events: list[KvEvents]
