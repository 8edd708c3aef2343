"""Links to replicas over TCP: the port where they join, and how one reaches it.

A connection is nobody's until its handshake is done (`handshake.py`, and TLS before it): until then it
may send a fixed number of bytes, within some seconds, and only so many connections may be in that state.
Then it is a link like any other. With TLS a replica accepts the certificate of its front and no other.

This file does not know what the messages mean.
"""

import asyncio
import socket
import ssl
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from ramify.actors.kit.files import read_secret_file, warn_of_readers
from ramify.actors.kit.log import get_log
from ramify.actors.links.handshake import (
    FROM_FRONT,
    FROM_REPLICA,
    LEAST_SECRET,
    PROOF,
    FrontHandshake,
    ReplicaHandshake,
    Stranger,
)
from ramify.actors.links.link import Link, link_over
from ramify.protocol.errors import ConfigError

PATIENCE_SECONDS = 5.0  # for a handshake, that of TLS included
# After 5 s without a byte a question every 3 s, three of them; 15 s for what was sent to be confirmed.
KEEP_ALIVE = {
    "TCP_KEEPIDLE": 5,
    "TCP_KEEPINTVL": 3,
    "TCP_KEEPCNT": 3,
    "TCP_USER_TIMEOUT": 15_000,
}
MOST_EARLY = 1 << 16  # bytes that are kept of what comes before they are asked for
STRANGERS = 64  # connections that have not proved anything yet; one more ends the oldest

log = get_log("ramify.actors.cluster")

MOST_SECRET = 1 << 12  # bytes of a secret's file


def watch_peer(transport: asyncio.Transport) -> None:
    """Have the kernel end the connection when the other machine has gone without a word.

    A front notices that by silence; a replica, whose front says nothing for long, only by this.
    """
    sock = transport.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEP_ALIVE.items():
        option = getattr(socket, name, None)  # as far as the system has them
        if option is not None:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)


class Knocking(asyncio.Protocol):
    """A connection before it is a link. `connected` is called when it is there."""

    def __init__(self, connected: "Callable[[Knocking], None] | None" = None) -> None:
        self._connected = connected
        self._buffer = bytearray()
        self._wanted = 0
        self._waiter: asyncio.Future[None] | None = None
        self._ended = False
        self.transport: asyncio.Transport | None = None

    async def read(self, count: int) -> bytes:
        """Exactly `count` bytes. Raises ConnectionError if they do not come."""
        self._wanted = count
        if len(self._buffer) < count:
            if self._ended:
                raise ConnectionResetError("the peer has closed")
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None  # its exception has a traceback, and that this connection
        data = bytes(self._buffer[:count])
        del self._buffer[:count]
        return data

    async def secure(self, context: ssl.SSLContext) -> None:
        """TLS as the server, from here on. Raises OSError (ssl.SSLError among them)."""
        if self.transport is None or self._ended:
            raise ConnectionResetError("the peer has closed")
        loop = asyncio.get_running_loop()
        self.transport = await loop.start_tls(
            self.transport, self, context, server_side=True, ssl_handshake_timeout=PATIENCE_SECONDS
        )

    def send(self, data: bytes) -> None:
        if self.transport is not None and not self._ended:
            self.transport.write(data)

    def abort(self) -> None:
        if self.transport is not None:
            self.transport.abort()

    def become(self, make: Callable[[asyncio.Transport, bytes], Link[Any, Any]]) -> Link[Any, Any]:
        """Hand the connection over. Raises ConnectionError if it has ended."""
        if self.transport is None or self._ended or self.transport.is_closing():
            raise ConnectionResetError("the peer has closed")
        self.transport.resume_reading()
        watch_peer(self.transport)
        return make(self.transport, bytes(self._buffer))

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        if self._connected is not None:
            self._connected(self)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if self.transport is not None and len(self._buffer) > MOST_EARLY:
            self.transport.pause_reading()
        if len(self._buffer) >= self._wanted and self._waiter is not None:
            waiter, self._waiter = self._waiter, None
            if not waiter.done():
                waiter.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self._ended = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(ConnectionResetError("the peer has closed"))


Joined = Callable[[Callable[..., Link[Any, Any]], str], None]


class JoinPort:
    """Where replicas join.

    `joined(open_link, host)` is called for each: it makes the link at once, or raises ConnectionError.
    """

    def __init__(self, secret: bytes, joined: Joined) -> None:
        self._secret = secret
        self._joined = joined
        self._server: asyncio.Server | None = None
        self._tls: ssl.SSLContext | None = None
        self._knocking: dict[asyncio.Task[None], Knocking] = {}  # the oldest first

    async def listen(self, host: str, port: int, context: ssl.SSLContext | None) -> int:
        """Open the port; returns its number. Raises OSError."""
        await self._serve(context, host=host, port=port)
        assert self._server is not None
        number: int = self._server.sockets[0].getsockname()[1]
        return number

    async def take(self, sock: socket.socket, context: ssl.SSLContext | None) -> None:
        """As `listen`, at a socket that is open."""
        await self._serve(context, sock=sock)

    async def _serve(self, context: ssl.SSLContext | None, **where: Any) -> None:
        self._tls = context
        make = partial(Knocking, self._connected)
        self._server = await asyncio.get_running_loop().create_server(make, **where)

    def close(self) -> None:
        """No more replicas."""
        if self._server is not None:
            self._server.close()
        for task in self._knocking:
            task.cancel()

    def _connected(self, who: Knocking) -> None:
        """It is a stranger until `_welcome` is done, in its TLS handshake too."""
        if self._tls is not None and who.transport is not None:
            who.transport.pause_reading()  # what comes is for TLS, once `_welcome` has begun it
        if len(self._knocking) >= STRANGERS:  # who knows the secret has soon said so
            oldest = next(iter(self._knocking))
            self._knocking.pop(oldest).abort()
            oldest.cancel()
        task = asyncio.create_task(self._welcome(who))
        self._knocking[task] = who
        task.add_done_callback(lambda done: self._knocking.pop(done, None))

    async def _welcome(self, who: Knocking) -> None:
        assert who.transport is not None
        peer = who.transport.get_extra_info("peername")
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                if self._tls is not None:
                    await who.secure(self._tls)
                handshake = FrontHandshake(self._secret)
                who.send(handshake.greeting)
                who.send(handshake.check(await who.read(FROM_REPLICA)))
        except (Stranger, TimeoutError, OSError) as error:
            who.abort()
            log.warning("a stranger at the port for replicas", peer=str(peer), reason=str(error))
            return
        except asyncio.CancelledError:
            who.abort()
            raise

        def open_link(name: str, decoder: Any, encoder: Any, **fields: Any) -> Link[Any, Any]:
            return who.become(partial(link_over, name, decoder, encoder, **fields))

        try:
            self._joined(open_link, str(peer[0]) if peer else "")
        except ConnectionError:  # it has gone, or is not wanted
            who.abort()


async def knock(
    host: str, port: int, secret: bytes, context: ssl.SSLContext | None = None
) -> Callable[..., Any]:
    """Join at a front. Returns what makes the link: `await open_link(decoder, encoder, ...)`.

    Raises OSError, TimeoutError and Stranger.
    """
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(PATIENCE_SECONDS):
        _, who = await loop.create_connection(Knocking, host, port, ssl=context)
        try:
            handshake = ReplicaHandshake(secret)
            who.send(handshake.answer(await who.read(FROM_FRONT)))
            handshake.check(await who.read(PROOF))
        except BaseException:
            who.abort()
            raise

    async def open_link(decoder: Any, encoder: Any, **fields: Any) -> Link[Any, Any]:
        return who.become(partial(link_over, "front", decoder, encoder, **fields))

    return open_link


# --- secrets and certificates ---------------------------------------------------------------------


def read_secret(path: Path) -> bytes:
    """The secret in a file, without what stands around it. Raises ConfigError."""
    secret = read_secret_file(path, MOST_SECRET, "the secret file").strip()
    if len(secret) < LEAST_SECRET:
        raise ConfigError(
            f"the secret file {path} holds {len(secret)} bytes: at least {LEAST_SECRET}, such as "
            "those of `openssl rand -hex 32`"
        )
    return secret


def server_context(cert: Path, key: Path) -> ssl.SSLContext:
    """TLS with this certificate. Raises ConfigError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    try:
        warn_of_readers(key)
        context.load_cert_chain(cert, key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"--replica-tls-cert {cert} cannot be used: {error}") from error
    return context


def client_context(pem: str) -> ssl.SSLContext:
    """TLS to whoever has a certificate of this authority, or this very certificate; by any name.

    Raises ConfigError.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    try:
        context.load_verify_locations(cadata=pem)
    except (ValueError, ssl.SSLError) as error:
        raise ConfigError(f"--tls-ca holds no certificate: {error}") from error
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # a certificate that is no authority, too
    return context
