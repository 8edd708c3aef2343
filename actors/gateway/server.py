"""Binding the port."""

import asyncio
from collections.abc import Callable

from ramify.protocol.config import ServerConfig
from ramify.protocol.errors import ConfigError

BACKLOG = 1024  # connections the kernel accepts ahead of us; a reconnect storm is a burst


async def listen(factory: Callable[[], asyncio.Protocol], config: ServerConfig) -> asyncio.Server:
    """Bind and listen. Port 0: any free one. Raises ConfigError that names the address."""
    # "localhost" is two addresses; with port 0 each would get a port of its own.
    host = "127.0.0.1" if config.host == "localhost" and config.port == 0 else config.host
    loop = asyncio.get_running_loop()
    try:
        return await loop.create_server(factory, host or None, config.port, backlog=BACKLOG)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {config.host}:{config.port}: {error.strerror or error}; "
            "choose another --host or --port"
        ) from error


def port_of(server: asyncio.Server) -> int:
    """The port that was bound."""
    port = server.sockets[0].getsockname()[1]
    assert isinstance(port, int)
    return port
