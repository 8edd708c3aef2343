"""The main program of an executor's process: `python -m ramify.actors.executor.child FD`.

FD is a connected Unix stream socket, inherited from the engine. The process belongs to it: when
the socket ends, so does the process, at once while it waits, else with its step or at the next
report of progress. SIGINT is ignored, because the engine coordinates the stop.

It imports no asyncio, and torch only to load a model: it should start quickly. Until it is ready
garbage is not collected either: what imports and compilers make mostly stays, and walking through
it time and again takes a tenth of the start.

Exit codes: 0 stopped as told, 1 the executor failed, 2 it did not start, 3 the engine has gone
or talks nonsense.
"""

import gc
import os
import signal
import socket
import sys
from contextlib import closing

from ramify.actors.executor.runner import run
from ramify.actors.executor.spec import build
from ramify.actors.executor.wire import (
    FromExecutor,
    LoadFailed,
    Loading,
    Start,
    ToExecutor,
    Waiting,
    encoder,
    to_executor,
)
from ramify.actors.kit.console import configure_process
from ramify.actors.kit.log import get_log
from ramify.actors.links.blocking import BlockingLink
from ramify.actors.links.frames import LinkClosed, LinkError
from ramify.protocol.messages import ExecutorMessage
from ramify.protocol.plan import ExecutorDown

SWITCH_SECONDS = 0.0005  # that a thread which loads constraints may keep the interpreter from the steps
PARTING_SECONDS = 1.0
WAITING_SECONDS = 1.0  # between signs of life while there is nothing to do

Engine = BlockingLink[FromExecutor, ToExecutor]

log = get_log("ramify.actors.executor.child")


class _Inbox:
    """The runner's inbox: the link, on which only plans and the stop come now."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def take(self, timeout: float | None) -> ExecutorMessage | None:
        message = self._engine.receive(WAITING_SECONDS if timeout is None else timeout)
        while message is None and timeout is None:
            self._engine.send(Waiting())
            message = self._engine.receive(WAITING_SECONDS)
        if isinstance(message, Start):
            raise LinkError("a second Start")
        return message


def main(fd: int) -> int:
    """Serve the engine at the other end of `fd` until it is done. Returns the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the engine reads its tokens again; not for us
    gc.disable()
    sys.setswitchinterval(SWITCH_SECONDS)
    try:
        engine: Engine = BlockingLink(_adopt(fd), to_executor(), encoder())
        with closing(engine):
            return _serve(engine)
    except LinkClosed:
        log.warning("the engine has gone")
        return 3
    except LinkError as error:
        log.error("the engine cannot be understood", reason=str(error))
        return 3


def _serve(engine: Engine) -> int:
    start = engine.receive(None)
    if not isinstance(start, Start):
        raise LinkError(f"{type(start).__name__} came before Start")
    if start.log is not None:
        configure_process(start.log)
    try:
        executor = build(start.spec, lambda what, done: engine.send(Loading(what, done)))
    except LinkClosed:
        raise
    except Exception as error:
        log.debug("the executor did not start", exc_info=True)
        _part(engine, LoadFailed.of(error))
        return 2
    try:
        engine.send(executor.info)
        gc.collect()  # while the engine gets ready
        gc.freeze()  # no later collection needs to walk through what has come so far
        gc.enable()
        run(executor, _Inbox(engine), engine.send)
    except LinkClosed:
        raise
    except Exception as error:
        log.exception("the executor failed")
        _part(engine, ExecutorDown(f"{type(error).__name__}: {error}"))
        return 1
    finally:
        executor.close()
    engine.finish(PARTING_SECONDS)
    return 0


def _part(engine: Engine, message: FromExecutor) -> None:
    """Send the last message and see to it that it arrives."""
    engine.send(message)
    engine.finish(PARTING_SECONDS)


def _adopt(fd: int) -> socket.socket:
    """Own the inherited descriptor: under a low number (`select`), and not inherited further."""
    low = os.dup(fd)
    os.close(fd)
    return socket.socket(fileno=low)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
