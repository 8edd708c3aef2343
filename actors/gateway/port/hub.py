"""What all connections of one gateway share: settings, tables, and the actors they talk to."""

import math
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from ramify.actors.gateway.port.access.auth import AccessTokens
from ramify.actors.gateway.port.access.shares import Shares
from ramify.actors.gateway.port.access.strangers import Guest, Idle, Strangers
from ramify.actors.gateway.port.access.unfinished import LONGEST, UNFINISHED_BYTES, Unfinished
from ramify.actors.gateway.port.interfaces import GatewayMetrics, Served, Status
from ramify.actors.gateway.port.notices import Notices
from ramify.actors.gateway.port.pump import Pump
from ramify.actors.gateway.port.routes import Routes
from ramify.actors.gateway.port.timers import Timers
from ramify.actors.kit.clock import Clock
from ramify.actors.kit.fanout import Router
from ramify.actors.kit.log import get_log
from ramify.actors.kit.mailbox import Address
from ramify.protocol.codec import Codec, CodecName
from ramify.protocol.config import Limits, ServerConfig
from ramify.protocol.messages import DirectoryMessage, SessionMessage
from ramify.protocol.wire import Error, ServerMessage

_LOG = get_log("ramify.gateway")

TOKEN_BYTES = 8  # of JSON, for a token of a conversation that comes whole with each request
SPARE = 1000  # connections over `max_sockets` that may still ask something by HTTP
IDLE = 256  # ... and more that have asked, and may ask again
ABUSE_LOG_S = 10.0  # between two lines of the log about abuse


class Socket(Protocol):
    """A connection, as the gateway actor uses it."""

    @property
    def websocket(self) -> bool: ...
    @property
    def attached(self) -> bool: ...
    def opened(self, session: int) -> None: ...
    def refused(self, error: Error) -> None: ...
    def retry(self) -> None:
        """Tell the session what waits: it may have room again."""

    def deliver(self, messages: list[ServerMessage]) -> bool: ...
    def flush(self) -> None: ...
    def close(self, code: int, reason: str) -> None: ...
    def abort(self) -> None: ...
    def on_timer(self, now: float) -> None: ...
    def recheck(self) -> None: ...


@dataclass(slots=True)
class Hub:
    """What connections share. `connections` holds every TCP connection, by its number."""

    config: ServerConfig
    limits: Limits
    clock: Clock
    tokens: AccessTokens
    routes: Routes
    status: Status
    metrics: GatewayMetrics
    directory: Address[DirectoryMessage]
    sessions: Router[SessionMessage]
    notices: Notices
    ids: Iterator[int]
    strangers: Strangers
    shares: Shares = field(default_factory=Shares)
    idle: Idle = field(default_factory=partial(Idle, IDLE))
    pump: Pump = field(default_factory=Pump)
    timers: Timers = field(default_factory=Timers)
    connections: dict[int, Socket] = field(default_factory=dict)
    blocked: set[int] = field(default_factory=set)  # sockets with frames for which sessions have no room
    codecs: dict[CodecName, Codec] = field(
        default_factory=lambda: {"json": Codec("json"), "msgpack": Codec("msgpack")}
    )
    vocabulary: Sequence[bytes] = ()  # what each token id stands for, once the model is loaded
    secret: bytes = field(default_factory=partial(secrets.token_bytes, 32))  # signs what clients keep
    served: Served = field(default_factory=Served)
    draining: bool = False
    failed: bool = False  # the engine is gone: sessions end, and sockets are about to be closed
    abuse_logged: float = -math.inf  # engine seconds
    unfinished: Unfinished = field(init=False)  # messages and requests
    body_bytes: int = field(init=False)  # of a request: as a frame, or what fills the context

    def __post_init__(self) -> None:
        self.body_bytes = self.limits.frame_bytes
        self.unfinished = Unfinished(max(UNFINISHED_BYTES, LONGEST * self.limits.frame_bytes))

    def loaded(self, vocabulary: Sequence[bytes], served: Served) -> None:
        """Note that the model is loaded. `vocabulary`: the bytes of each token id."""
        self.vocabulary, self.served = vocabulary, served
        self.body_bytes = max(self.limits.frame_bytes, TOKEN_BYTES * served.context)

    @property
    def full(self) -> bool:
        """Whether there is no room for another connection."""
        return self.busy >= self.config.max_sockets + SPARE

    @property
    def busy(self) -> int:
        """How many connections have a WebSocket or a request, or are about to have one."""
        return len(self.connections) - len(self.idle)

    def guest(self, address: str, now: float) -> Guest | None:
        """Find the account of a request or WebSocket from `address`; None: it needs no token."""
        guarded = self.tokens.required and not self.strangers.stands_for_many(address)
        return self.strangers.enter(address, now) if guarded else None

    def admits(self, address: str) -> bool:
        """Whether a connection from `address` is accepted at all."""
        if self.full:
            return False
        guarded = self.tokens.required and not self.strangers.stands_for_many(address)
        if guarded and self.strangers.refuses(address, self.clock.now()):
            self.log_abuse(
                "an address without a token has too many sockets, or costs too much", address=address
            )
            return False
        return True

    def log_abuse(self, reason: str, **fields: Any) -> None:
        """Log the abuse, but not each time: metrics count it."""
        now = self.clock.now()
        if now - self.abuse_logged >= ABUSE_LOG_S:
            self.abuse_logged = now
            _LOG.warning("a socket is closed for abuse", **fields, reason=reason)
