"""Binding the port, for this process or for several that share it, and accepting from it."""

import asyncio
import errno
import socket
import sys
from collections.abc import Callable, Sequence
from typing import Any

from ramify.protocol.config import ServerConfig
from ramify.protocol.errors import ConfigError

BACKLOG = 1024  # connections the kernel accepts ahead of us; a reconnect storm is a burst
ACCEPTS = 64  # connections that are taken in one turn of the loop: 10 ms
_ABSENT = (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL)  # of "localhost", a container often lacks ::1


async def listen(
    factory: Callable[[], asyncio.Protocol],
    sockets: Sequence[socket.socket],
    admits: Callable[[str], bool],
) -> list[asyncio.Server]:
    """Accept on sockets that `bind_shared` made, and own them.

    `admits`: asked with a client's address before anything is made for its connection.
    """
    loop = asyncio.get_running_loop()
    listeners = [Listener(sock.detach(), admits) for sock in sockets]
    return [await loop.create_server(factory, sock=sock, backlog=BACKLOG) for sock in listeners]


def bind_shared(config: ServerConfig, processes: int) -> list[list[socket.socket]]:
    """Bind the sockets on which several processes accept, for each its own; all have the same port.

    The kernel gives each new connection to one of them by its addresses (SO_REUSEPORT). They listen
    already: whoever makes them keeps them, so that connections which wait for a process outlive it.
    Raises ConfigError.
    """
    if processes > 1 and sys.platform != "linux":
        raise ConfigError("only Linux shares a port between processes: --gateways must be 0 or 1")
    made: list[list[socket.socket]] = []
    probe: list[socket.socket] = []
    share = processes > 1
    try:
        if config.port and share:  # sockets that share a port do not see who else shares it
            _close(_bind(config, config.port, share=False))
        port = config.port
        if not port:  # one that the system chose is lost when a socket is shut; a named one is not
            probe = _bind(config, 0, share=share, backlog=None)
            port = probe[0].getsockname()[1]
        for _ in range(processes):
            made.append(_bind(config, port, share=share))
    except OSError as error:
        for sockets in made:
            _close(sockets)
        raise _refused(config, error) from error
    finally:
        _close(probe)
    return made


def _close(sockets: list[socket.socket]) -> None:
    for sock in sockets:
        sock.close()


class Listener(socket.socket):
    """A listening socket: takes so many connections in a turn of the loop, and those that are admitted.

    It may be shared with the engine, which shuts it when this process hangs. Whoever accepts does not
    hang any more, and so listens again.
    """

    def __init__(self, fileno: int, admits: Callable[[str], bool]) -> None:
        super().__init__(fileno=fileno)
        self._admits = admits
        self._taken = 0  # in this turn: asyncio accepts until there is no more

    def accept(self) -> tuple[socket.socket, Any]:
        while self._taken < ACCEPTS:
            self._taken += 1
            try:
                connection, address = super().accept()
            except OSError as error:
                self._taken = 0
                if error.errno != errno.EINVAL:
                    raise
                self.listen(BACKLOG)
                raise BlockingIOError(error.errno, "listens again") from None
            if self._admits(address[0] if address else ""):
                return connection, address
            connection.close()
        self._taken = 0
        raise BlockingIOError(errno.EAGAIN, "the others next time")


def _bind(
    config: ServerConfig, port: int, *, share: bool, backlog: int | None = BACKLOG
) -> list[socket.socket]:
    """Bind listening sockets, one for each address of the host that this machine has. Raises OSError.

    `backlog` None: they do not listen.
    """
    found = socket.getaddrinfo(_host(config), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    sockets: list[socket.socket] = []
    absent: OSError | None = None
    try:
        for family, _, _, _, address in dict.fromkeys(found):
            chosen = port or (sockets[0].getsockname()[1] if sockets else 0)
            try:
                where = (address[0], chosen, *address[2:])
                sockets.append(_bind_one(family, where, share=share, backlog=backlog))
            except OSError as error:
                if error.errno not in _ABSENT:
                    raise
                absent = error
        if absent is not None and not sockets:
            raise absent
    except OSError:
        _close(sockets)
        raise
    return sockets


def _bind_one(
    family: int, address: tuple[Any, ...], *, share: bool, backlog: int | None
) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if share:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind(address)
        if backlog is not None:
            sock.listen(backlog)
        sock.setblocking(False)
    except OSError:
        sock.close()
        raise
    return sock


def _host(config: ServerConfig) -> str | None:
    # "localhost" is two addresses; with port 0 each would get a port of its own.
    host = "127.0.0.1" if config.host == "localhost" and config.port == 0 else config.host
    return host or None


def _refused(config: ServerConfig, error: OSError) -> ConfigError:
    return ConfigError(
        f"cannot listen on {config.host}:{config.port}: {error.strerror or error}; "
        "choose another --host or --port"
    )


def port_of(server: asyncio.Server) -> int:
    """Return the port that was bound."""
    port = server.sockets[0].getsockname()[1]
    assert isinstance(port, int)
    return port
