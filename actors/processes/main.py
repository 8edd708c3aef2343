"""The main program of every process that the engine starts: `python -m MODULE FD LIFELINE LOG ...`.

FD is a connected Unix stream socket, inherited; the process belongs to whoever holds the other end.
LIFELINE is the reading end of a pipe whose other end only the parent holds, and never writes: a process
whose loop hangs when its parent ends is ended by a thread. LOG says how to log, as JSON.

Signals are the parent's, which coordinates the stop: a terminal and a service manager may signal every
process.

Exit codes: 0 ended as told, 1 it failed, 2 it did not start, 3 the parent has gone or talks nonsense.

It imports no asyncio, unless the process needs it: the executor's should start quickly.
"""

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn

import msgspec

from ramify.actors.kit.console import configure_process
from ramify.actors.kit.log import get_log
from ramify.actors.links.frames import LinkClosed, LinkError
from ramify.protocol.config import LogConfig

FAILED, NOT_STARTED, GONE = 1, 2, 3  # exit codes
HUNG_SECONDS = 5.0  # after the parent's end a process that is still there has hung

log = get_log(__name__)

Serve = Callable[..., int | Coroutine[Any, Any, int]]


class ParentGone(Exception):
    """The link has ended."""


def run(serve: Serve) -> NoReturn:
    """Be the process: `serve(socket, *arguments)` returns the exit code, or a coroutine that does."""
    fd, lifeline, log_config, *arguments = sys.argv[1:]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    watch(int(lifeline))
    config = msgspec.json.decode(log_config, type=LogConfig | None)
    if config is not None:
        configure_process(config)
    sys.exit(_served(serve, _adopt(int(fd)), arguments))


def _served(serve: Serve, sock: socket.socket, arguments: list[str]) -> int:
    try:
        served = serve(sock, *arguments)
        if isinstance(served, int):
            return served
        import asyncio

        return asyncio.run(served)
    except (ParentGone, LinkClosed):
        log.warning("the engine has gone")
        return GONE
    except LinkError as error:
        log.error("the engine cannot be understood", reason=str(error))
        return GONE
    except Exception:
        log.exception("the process failed")
        return FAILED


def _adopt(fd: int) -> socket.socket:
    """Own the inherited descriptor: under a low number (`select`), and not inherited further."""
    low = os.dup(fd)
    os.close(fd)
    return socket.socket(fileno=low)


def watch(lifeline: int) -> None:
    """Watch the reading end of the pipe, in a thread. Processes that are started do not inherit it."""
    os.set_inheritable(lifeline, False)
    threading.Thread(target=_watch, args=(lifeline,), name="lifeline", daemon=True).start()


def _watch(lifeline: int) -> None:
    os.read(lifeline, 1)
    time.sleep(HUNG_SECONDS)
    os._exit(GONE)
