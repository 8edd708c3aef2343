"""The main program of an executor's process. See `processes.main`.

The process ends when its engine does: at once while it waits, else with its step or at the next report
of progress. It imports no asyncio, and torch only to load a model: it should start quickly. Until it is
ready garbage is not collected either: what imports and compilers make mostly stays, and walking through
it time and again takes a tenth of the start.
"""

import gc
import os
import socket
import sys
from contextlib import closing

from ramify.actors.executor.messages import FromExecutor, SignOfLife, StartExecutor, ToExecutor
from ramify.actors.executor.runner import run
from ramify.actors.executor.spec import build, build_rank
from ramify.actors.kit.log import get_log, mark
from ramify.actors.links.blocking import BlockingLink
from ramify.actors.links.frames import LinkClosed, LinkError
from ramify.actors.processes.main import FAILED, NOT_STARTED
from ramify.actors.processes.main import run as run_process
from ramify.actors.processes.messages import Loading, StartFailed, decoder, encoder
from ramify.gpu.executors.base import Executor, Follower
from ramify.protocol.messages import ExecutorMessage
from ramify.protocol.plan import ExecutorDown

SWITCH_SECONDS = 0.0005  # that a thread which loads constraints may keep the interpreter from the steps
PARTING_SECONDS = 1.0
WAITING_SECONDS = 1.0  # between signs of life while there is nothing to do

Engine = BlockingLink[FromExecutor, ToExecutor]

log = get_log("ramify.actors.executor")


class _LinkInbox:
    """The runner's inbox: the link, on which only plans and the stop come now."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def take(self, timeout: float | None) -> ExecutorMessage | None:
        message = self._engine.receive(WAITING_SECONDS if timeout is None else timeout)
        while message is None and timeout is None:
            self._engine.send(SignOfLife())
            message = self._engine.receive(WAITING_SECONDS)
        if isinstance(message, StartExecutor):
            raise LinkError("a second Start")
        return message


def serve(sock: socket.socket) -> int:
    """Serve the engine at the other end until it is done. Returns the exit code."""
    gc.disable()
    sys.setswitchinterval(SWITCH_SECONDS)
    engine: Engine = BlockingLink(sock, decoder(ToExecutor), encoder())
    with closing(engine):
        return _serve(engine)


def _serve(engine: Engine) -> int:
    start = engine.receive(None)
    if not isinstance(start, StartExecutor):
        raise LinkError(f"{type(start).__name__} came before Start")
    if start.place is not None:
        mark(rank=start.place.rank)
    try:
        executor = _built(engine, start)
    except LinkClosed:
        raise
    except Exception as error:
        log.debug("the executor did not start", exc_info=True)
        _part(engine, StartFailed.of(error))
        return NOT_STARTED
    try:
        engine.send(executor.info)
        gc.collect()  # while the engine gets ready
        gc.freeze()  # no later collection needs to walk through what has come so far
        gc.enable()
        if isinstance(executor, Follower):
            executor.follow(lambda: engine.send(SignOfLife()))
        else:
            run(executor, _LinkInbox(engine), engine.send)
    except LinkClosed:
        raise
    except Exception as error:
        log.exception("the executor failed")
        _part(engine, ExecutorDown(f"{type(error).__name__}: {error}"))
        return FAILED
    finally:
        executor.close()
    engine.finish(PARTING_SECONDS)
    if start.place is not None:
        os._exit(0)  # what ranks share of GPUs takes seconds to be taken apart, and the system does it
    return 0


def _built(engine: Engine, start: StartExecutor) -> Executor | Follower:
    def tell(what: str, done: float) -> None:
        engine.send(Loading(what, done))

    if start.place is None:
        return build(start.spec, tell)
    # rank 0 says how far all are
    return build_rank(start.spec, tell if not start.place.rank else lambda what, done: None, start.place)


def _part(engine: Engine, message: FromExecutor) -> None:
    """Send the last message and see to it that it arrives."""
    engine.send(message)
    engine.finish(PARTING_SECONDS)


if __name__ == "__main__":
    run_process(serve)
