"""The gateway actor: listens, and carries messages between sockets and sessions.

It listens before the model is loaded, so that probes and people see the progress; upgrades get
503 until the engine is ready. One wake-up handles everything in the mailbox, then each socket
that got something is written to once. Deltas are written in the turn of the session that says them,
where nothing waits in the mailbox (`GatewayActor.tell`).

The mailbox is told `Opened`, `OpenRefused`, `Deliver`, `CloseSocket` for sockets by number. A number
that is gone is no error, because a socket may end while a message to it is under way. A full mailbox
means that the loop is far behind its sessions: it must be large (a step's fan-out times a few), and a
session that meets it keeps its deltas and merges them later.
"""

import asyncio
import itertools
import logging
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import anyio
from anyio.abc import TaskStatus

from ramify.actors.gateway.apis.openai.effort import described
from ramify.actors.gateway.apis.registry import apis
from ramify.actors.gateway.port.access.auth import AccessTokens, HostPolicy
from ramify.actors.gateway.port.access.minted import Minted
from ramify.actors.gateway.port.access.strangers import Strangers
from ramify.actors.gateway.port.connection import RequestConnection
from ramify.actors.gateway.port.hub import Hub, Socket
from ramify.actors.gateway.port.interfaces import GatewayMetrics, Served, Status
from ramify.actors.gateway.port.notices import Notices
from ramify.actors.gateway.port.routes import Routes
from ramify.actors.gateway.port.server import bind_shared, listen, port_of
from ramify.actors.gateway.port.static import StaticFiles, browser_files
from ramify.actors.gateway.port.tcp import CLOSE_TIMEOUT_S
from ramify.actors.kit.clock import Clock
from ramify.actors.kit.fanout import Router
from ramify.actors.kit.mailbox import Address, Mailbox, MailboxClosed
from ramify.actors.kit.report import CredentialUsage
from ramify.protocol.config import Limits, ServerConfig
from ramify.protocol.credentials import Credential
from ramify.protocol.errors import Close
from ramify.protocol.messages import (
    CloseSocket,
    Deliver,
    Detached,
    DirectoryMessage,
    GatewayMessage,
    Opened,
    OpenRefused,
    SessionMessage,
)
from ramify.protocol.wire import Bye, Delta, Generate

_LOG = logging.getLogger("ramify.gateway")

TICK_S = 0.5  # how often deadlines are looked at
FAILED_CLOSE_S = 1.0  # for closing handshakes when the engine is broken
RETRY_S = 0.05  # while a session's mailbox has no room for a notice or a frame


class GatewayActor:
    """Owns the port and every socket on it.

    `listeners`: sockets to accept on, where several processes share the port (else it binds);
    `credentials`: the tokens that are accepted; without any, everybody is.
    `numbers`: what its sockets are called; `minted`: the single-use tokens, where they are shared.
    """

    def __init__(
        self,
        mailbox: Mailbox[GatewayMessage],
        config: ServerConfig,
        limits: Limits,
        directory: Address[DirectoryMessage],
        sessions: Router[SessionMessage],
        status: Status,
        metrics: GatewayMetrics,
        clock: Clock,
        static: StaticFiles | None = None,
        *,
        credentials: Sequence[Credential] = (),
        listeners: Sequence[socket.socket] = (),
        numbers: Iterator[int] | None = None,
        minted: Minted | None = None,
    ) -> None:
        self._mailbox = mailbox
        self._static = StaticFiles(browser_files()) if static is None else static
        self._listeners = listeners
        self._servers: list[asyncio.Server] = []
        self._failure: Exception | None = None
        tokens = AccessTokens(credentials, config.token_ttl_s, minted)
        self._apis = apis()
        self.hub = Hub(
            config=config,
            limits=limits,
            clock=clock,
            tokens=tokens,
            routes=self._routes(config, config.port, tokens, status, metrics),
            status=status,
            metrics=metrics,
            directory=directory,
            sessions=sessions,
            notices=Notices(sessions),
            ids=numbers if numbers is not None else itertools.count(1),
            strangers=Strangers(config.max_sockets, config.proxies),
        )

    @property
    def sockets(self) -> int:
        """Open WebSockets."""
        return sum(1 for connection in self.hub.connections.values() if connection.websocket)

    def signs(self, secret: bytes) -> None:
        """Begin to sign with this secret."""
        self.hub.secret = secret

    def loaded(self, vocabulary: Sequence[bytes], served: Served) -> None:
        """Note that the model is loaded. `vocabulary`: the bytes of each token id."""
        self.hub.loaded(vocabulary, served)

    def accept(self, credentials: Sequence[Credential]) -> None:
        """Accept these tokens from now on. Sockets whose token is gone close with 4401."""
        hub = self.hub
        now = hub.clock.now()
        hub.tokens.replace(credentials)
        for credential in credentials:
            hub.shares.configure(credential, now)
        for connection in list(hub.connections.values()):
            connection.recheck()

    def told(self, elsewhere: Mapping[str, int]) -> None:
        """Note how many sockets each credential has in other processes."""
        self.hub.shares.told(elsewhere, self.hub.clock.now())

    def usage(self) -> dict[str, CredentialUsage]:
        """Count the sockets and work of each credential in this process."""
        return self.hub.shares.usage()

    def tell(self, message: GatewayMessage, /) -> None:
        """Write deltas now, in the caller's turn of the event loop, if nothing waits.

        All else goes by way of the mailbox. Raises as the mailbox does.
        """
        if (
            type(message) is not Deliver
            or type(message.messages[0]) is not Delta
            or not self._mailbox.awaited
        ):
            self._mailbox.tell(message)
            return
        connection = self.hub.connections.get(message.socket)
        if connection is None:
            return
        try:
            if connection.deliver(message.messages):
                connection.flush()
        except Exception:
            self._failed(connection, message)

    async def run(self, *, task_status: TaskStatus[int] = anyio.TASK_STATUS_IGNORED) -> None:
        """Listen, report the port as started, and serve until the mailbox is closed.

        Raises ConfigError if the address cannot be bound. At the end, for whatever reason, the
        port is closed and every connection is cut; call `drain` before for a polite stop.
        """
        hub, others = self.hub, self._apis
        listeners = self._listeners or bind_shared(hub.config, 1)[0]
        self._servers = await listen(lambda: RequestConnection(hub, others), listeners, hub.admits)
        try:
            port = port_of(self._servers[0])
            hub.routes = self._routes(hub.config, port, hub.tokens, hub.status, hub.metrics)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._watch)
                tasks.start_soon(self._serve, tasks.cancel_scope)
                task_status.started(port)
            if self._failure is not None:
                raise self._failure
        finally:
            self._stop_listening()
            for connection in list(hub.connections.values()):
                connection.abort()

    def fail(self) -> None:
        """Note that the engine is gone. Sessions end, and `drain` follows."""
        self.hub.failed = True

    def begin_drain(self, reason: str, grace: float) -> None:
        """Stop accepting, and say `bye` to every socket that has not been told yet."""
        self.hub.draining = True
        self._stop_listening()
        for connection in list(self.hub.connections.values()):
            connection.deliver([Bye(reason=reason, after_ms=int(grace * 1000))])
            connection.flush()

    async def drain(
        self, grace: float, reason: str = "the server is stopping", *, failed: bool = False
    ) -> None:
        """Say `bye`, wait until all clients have left or `grace` seconds are over, close with 1001.

        `run` must still be running: sessions may go on sending meanwhile. `failed`: the engine is
        broken. Sockets close with 1012: those of a session when it has said the ends of its
        requests, if that takes no longer than `grace`, the others at once.
        """
        clock = self.hub.clock
        code = Close.RESTART if failed else Close.DRAINING
        self.begin_drain(reason, 0.0 if failed else grace)
        if failed:
            for connection in list(self.hub.connections.values()):
                if not connection.attached:
                    connection.close(code, reason)
        waits = self._any_attached if failed else self._any
        await self._until_not(waits, clock.now() + grace)
        for connection in list(self.hub.connections.values()):
            connection.close(code, reason)
        handshake = FAILED_CLOSE_S if failed else CLOSE_TIMEOUT_S
        await self._until_not(self._any, clock.now() + handshake)
        for connection in list(self.hub.connections.values()):
            connection.abort()

    async def _serve(self, scope: anyio.CancelScope) -> None:
        """Handle the mailbox, in a task of its own. Once it is closed, cancel `scope`."""
        while True:
            try:
                self._take(await self._mailbox.drain())
            except Exception as error:
                if not isinstance(error, MailboxClosed):
                    self._failure = error  # `run` raises it as it is, not inside a group
                scope.cancel()
                return

    def _take(self, batch: list[GatewayMessage]) -> None:
        """Handle messages. `_serve` would hold on to connections by its local names."""
        touched: list[Socket] = []
        for message in batch:
            self._handle(message, touched)
        for connection in touched:
            connection.flush()

    def _handle(self, message: GatewayMessage, touched: list[Socket]) -> None:
        connection = self.hub.connections.get(message.socket)
        if connection is None:
            if isinstance(message, Opened):  # it went before it got its session
                self.hub.notices.tell(message.session, Detached(message.socket))
            return
        try:
            match message:
                case Deliver():
                    if connection.deliver(message.messages):
                        touched.append(connection)
                case Opened():
                    connection.opened(message.session)
                    touched.append(connection)
                case OpenRefused():
                    connection.refused(message.error)
                    touched.append(connection)
                case CloseSocket():
                    connection.close(message.code, message.reason)
        except Exception:
            self._failed(connection, message)

    def _failed(self, connection: Socket, message: GatewayMessage) -> None:
        """End one socket because of a bug of ours."""
        _LOG.exception("socket %d: cannot handle %s", message.socket, type(message).__name__)
        connection.close(Close.SERVER_BUG, "internal error")

    async def _watch(self) -> None:
        """Look after deadlines and owed notices."""
        hub = self.hub
        while True:
            pause = RETRY_S if hub.notices.owed or hub.blocked else TICK_S
            await hub.clock.sleep_until(hub.clock.now() + pause)
            hub.notices.retry()
            self._retry()
            now = hub.clock.now()
            for key in hub.timers.due(now):
                connection = hub.connections.get(key)
                if connection is not None:
                    connection.on_timer(now)

    def _retry(self) -> None:
        """Try frames again that sessions had no room for."""
        blocked, self.hub.blocked = self.hub.blocked, set()
        for number in blocked:
            connection = self.hub.connections.get(number)
            if connection is not None:
                connection.retry()

    def _any(self) -> bool:
        return bool(self.hub.connections)

    def _any_attached(self) -> bool:
        return any(connection.attached for connection in self.hub.connections.values())

    async def _until_not(self, waits: Callable[[], bool], deadline: float) -> None:
        """Wait until nothing `waits`, or for the deadline."""
        clock = self.hub.clock
        while waits() and clock.now() < deadline:
            await clock.sleep_until(min(deadline, clock.now() + RETRY_S))

    def _stop_listening(self) -> None:
        servers, self._servers = self._servers, []
        for server in servers:
            server.close()

    def _routes(
        self,
        config: ServerConfig,
        port: int,
        tokens: AccessTokens,
        status: Status,
        metrics: GatewayMetrics,
    ) -> Routes:
        policy = HostPolicy(config.host, port, config.allowed_hosts, config.allowed_origins)
        return Routes(
            tokens,
            policy,
            status,
            metrics,
            self._static,
            metrics_auth=config.metrics_auth,
            model=lambda: _usual(self.hub.served),
        )


def _usual(served: Served) -> dict[str, Any]:
    """Describe `generate` for `/v1/info`: its defaults, and how much the model may think."""
    most = Generate(id=0).max_tokens
    return {"sampling": {**served.sampling, "max_tokens": most}, "thinking": described(served)}
