"""A replica that joins a front on its own: `ramify replica`, and each Ray actor.

It connects, serves, and connects again when the link ends: a front that was restarted finds it with its
model loaded. SIGTERM drains it.
"""

import asyncio
import math
import signal
import ssl
import time
from collections.abc import Callable

import anyio

from ramify.actors.cluster.replica import OpenLink, Replica
from ramify.actors.kit.clock import MonotonicClock
from ramify.actors.kit.collector import Collector
from ramify.actors.kit.files import allow_files
from ramify.actors.kit.log import get_log
from ramify.actors.links.handshake import Stranger
from ramify.actors.links.tcp import knock
from ramify.actors.processes.supervisor import BackOff
from ramify.protocol.config import EngineConfig

BACK_OFF_SECONDS, MOST_BACK_OFF = 0.25, 5.0
FILES = 4096

log = get_log("ramify.actors.cluster.joining")


async def join(
    host: str,
    port: int,
    secret: bytes,
    *,
    tls: ssl.SSLContext | None = None,
    name: str = "",
    adapt: Callable[[EngineConfig], EngineConfig] = lambda config: config,
    signals: bool = True,
    again: bool = True,
    patience: float = math.inf,
) -> None:
    """Serve the front at this address until it says that nothing more is wanted, or SIGTERM.

    `adapt`: what is other on this machine than the front says. `signals`: take SIGTERM and SIGINT.
    `again`: connect again whenever the link ends, and wait for a front that is not there, for `patience`
    seconds.

    Raises Stranger if one of the two does not know the secret, ModelError and ConfigError.
    """
    allow_files(FILES)
    collector = Collector(MonotonicClock())
    collector.begin()

    async def reach(gateway: int, _: bytes | None) -> OpenLink:
        return await knock(host, gateway, secret, tls)

    replica = Replica(name=name, adapt=adapt, reach=reach)
    stop = asyncio.Event()

    def ending() -> None:
        stop.set()
        if not replica.drain():  # nobody is there to wait for
            scope.cancel()

    if signals:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, ending)
    scope = anyio.CancelScope()
    try:
        with scope:
            async with anyio.create_task_group() as group:
                await _serve(replica, group, host, port, secret, tls, stop, again, patience)
                group.cancel_scope.cancel()
    finally:
        collector.end()
        with anyio.CancelScope(shield=True):
            await replica.close()


async def _serve(
    replica: Replica,
    group: anyio.abc.TaskGroup,
    host: str,
    port: int,
    secret: bytes,
    tls: ssl.SSLContext | None,
    stop: asyncio.Event,
    again: bool,
    patience: float,
) -> None:
    pauses, told = BackOff(BACK_OFF_SECONDS, MOST_BACK_OFF), False
    seen = time.monotonic()  # the front
    while not stop.is_set():
        try:
            open_link = await knock(host, port, secret, tls)
        except (OSError, TimeoutError) as error:
            if isinstance(error, ssl.SSLError):
                raise Stranger(f"TLS with the front failed: {error}") from error
            if not again:
                raise
            if time.monotonic() - seen > patience:
                log.error("the front has not come back", at=f"{host}:{port}", seconds=patience)
                return
            if not told:
                log.warning(
                    "the front cannot be joined; trying again", at=f"{host}:{port}", reason=_why(error)
                )
            told = True
            await anyio.sleep(pauses.failed())
            continue
        told, since = False, time.monotonic()
        log.info("joined", front=f"{host}:{port}")
        why = "it has ended the link"
        try:
            if await replica.serve(group, open_link) or not again:
                return
        except ConnectionError as error:  # it had gone before there was a link
            why = str(error)
        seen = time.monotonic()
        log.warning("the front has gone, or wants no such replica", front=f"{host}:{port}", reason=why)
        if time.monotonic() - since > MOST_BACK_OFF:
            pauses.succeeded()
        else:  # a front that sends it away at once is not asked again at once
            with anyio.move_on_after(pauses.failed()):
                await stop.wait()


def _why(error: OSError | TimeoutError) -> str:
    """What a failed greeting may mean: a front tells strangers nothing, it only closes."""
    if isinstance(error, ConnectionResetError):
        return "it closed the link: does it end, has it another secret, or TLS (--tls-ca)?"
    if isinstance(error, TimeoutError):
        return "it said nothing in time: is it a front with TLS (--tls-ca)?"
    return str(error)
