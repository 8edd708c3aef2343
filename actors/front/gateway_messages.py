"""The messages between the engine and a gateway process, and between gateway processes.

    engine                      gateway process
    StartGateway      ------->  listens, reads the tokenizer
                      <-------  Listening, or StartFailed and the end
    Serve             ------->  opens sessions from now on
                      <-------  Serving
    ToSessions        ------->  see `core_messages`
                      <-------  ToCore
    Forwarded         ------->  from other gateway processes
    EngineState       ------->
                      <-------  Announced, once the engine is
    Load, Peers, Accept, MetricsText  ------->
    Drain, EndGateway ------->  ends with exit code 0

A number says where its owner lives: sockets and sessions are numbered
`count * MAX_WORKERS + worker`, and the public id of a session names its worker. Processes reach each
other through the core, which hands the bytes on and does not read them; only a client that resumes in
another process than its session's needs it.

This file does not know sockets or processes.
"""

from collections.abc import Iterable
from itertools import count
from typing import Any, TypeVar
from zlib import crc32

from ramify.actors.front.core_messages import ToCore, ToSessions
from ramify.actors.front.interface import Naming
from ramify.actors.kit.report import StoreHealth
from ramify.actors.processes.messages import MetricsText, ProcessMessage, StartFailed
from ramify.protocol.config import EngineConfig
from ramify.protocol.credentials import Credential
from ramify.protocol.messages import (
    CloseSocket,
    Deliver,
    Detached,
    Drained,
    Frame,
    Opened,
    OpenRefused,
    OpenSession,
    Throttled,
)
from ramify.protocol.pictures import PictureSettings
from ramify.protocol.wire import ServerInfo

T = TypeVar("T")

MAX_WORKERS = 64  # most gateway processes


# --- from the engine ------------------------------------------------------------------------------


class StartGateway(ProcessMessage, frozen=True):
    """Be the process of gateway worker `worker`.

    `incarnation`: how many processes it had before; `first`: what its sessions are counted from.

    `listeners`, `minted`, `working`, `door`: inherited file descriptors. `minted`: None if nobody shares
    tokens; `working`: where to write which session it works on; `door`: where replicas join, which know
    the `secret`; None: the engine is the core. `barred`: see `Bar`. `signing`: the secret of all gateway
    processes for what clients keep for them.
    """

    config: EngineConfig
    worker: int
    incarnation: int
    first: int
    listeners: list[int]
    minted: int | None
    credentials: list[Credential] = []
    working: int | None = None
    barred: list[str] = []
    door: int | None = None
    secret: bytes = b""
    signing: bytes = b""


class Bar(ProcessMessage, frozen=True):
    """A process hung while it worked on this session: it is not taken up again from the store."""

    session: str


class Serve(ProcessMessage, frozen=True):
    """The model is loaded. See `interface.Core`."""

    server: ServerInfo
    context: int
    vocab: int
    pictures: PictureSettings | None = None


class Forwarded(ProcessMessage, frozen=True):
    """`PeerMessages` of other gateway processes, in order."""

    bodies: list[bytes]


class EngineState(ProcessMessage, frozen=True):
    """The engine's state, as HTTP tells it."""

    ready: bool
    phase: str
    info: dict[str, Any]
    fault: str | None = None
    store: StoreHealth = StoreHealth()


class Load(ProcessMessage, frozen=True):
    """`pong.load`. `elsewhere`: how many sockets each credential has in other processes."""

    load: dict[str, float]
    elsewhere: dict[str, int] = {}


class Accept(ProcessMessage, frozen=True):
    """From now on these tokens are accepted, and no others."""

    credentials: list[Credential]


class Peers(ProcessMessage, frozen=True):
    """The gateway processes that serve now. One that is missing has lost its sessions."""

    workers: list[int]


class Drain(ProcessMessage, frozen=True):
    """No new connections and sessions; say `bye`."""

    reason: str
    grace: float


class EndGateway(ProcessMessage, frozen=True):
    """Wait for clients, close their sockets, end. See `Front.drain`."""

    grace: float
    failed: bool


FromEngine = (
    StartGateway
    | Serve
    | ToSessions
    | Forwarded
    | EngineState
    | Load
    | Accept
    | Bar
    | Peers
    | MetricsText
    | Drain
    | EndGateway
)

# --- to the engine ------------------------------------------------------------------------------


class Listening(ProcessMessage, frozen=True):
    """The port answers."""


class Serving(ProcessMessage, frozen=True):
    """Sessions can be opened."""


class Announced(ProcessMessage, frozen=True):
    """The process knows that the engine is ready, and answers `/readyz` so."""


ToEngine = ToCore | Listening | Serving | Announced | StartFailed

# --- between gateway processes ------------------------------------------------------------------


class ToSession(ProcessMessage, frozen=True):
    """From the gateway that holds a socket to the session that it is attached to."""

    session: int
    message: Frame | Detached | Throttled | Drained


PeerMessage = OpenSession | ToSession | Opened | OpenRefused | Deliver | CloseSocket
PeerMessages = list[PeerMessage]

# --- numbers and names --------------------------------------------------------------------------


def worker_of(number: int) -> int:
    """The gateway worker that a socket or a session lives in."""
    return number % MAX_WORKERS


def by_worker(messages: Iterable[tuple[int, T]]) -> dict[int, list[tuple[int, T]]]:
    """Group messages for sessions by the worker that each session lives in."""
    found: dict[int, list[tuple[int, T]]] = {}
    for each in messages:
        worker = each[0] % MAX_WORKERS
        if worker in found:
            found[worker].append(each)
        else:
            found[worker] = [each]
    return found


def count_of(session: int) -> int:
    """How many sessions its worker had opened when it opened this one."""
    return session // MAX_WORKERS


def naming(worker: int, incarnation: int, first: int, workers: int = 0) -> Naming:
    """The numbers of a gateway process, which no earlier process of its worker has used.

    `workers`: how many there are.
    """
    return Naming(
        sockets=count((incarnation << 32) * MAX_WORKERS + MAX_WORKERS + worker, MAX_WORKERS),
        sessions=count(first * MAX_WORKERS + worker, MAX_WORKERS),
        prefix=f"s_{worker}_",
        takes=lambda session: home(session, workers) == worker,
    )


def owner(session: str) -> int | None:
    """The worker that a public session id names; None if it is none of ours."""
    parts = session.split("_", 2)
    if len(parts) != 3 or not parts[1].isdecimal() or len(parts[1]) > len(str(MAX_WORKERS)):
        return None  # a client wrote it: it may be anything
    return int(parts[1])


def home(session: str, workers: int) -> int | None:
    """The worker that takes up a session: the one that made it, or, where there is none of that number
    (a store outlives a server that had more), always the same other one.
    """
    worker = owner(session)
    if worker is not None and (worker < workers or not workers):
        return worker
    return crc32(session.encode()) % workers if workers else None
