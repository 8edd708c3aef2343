"""The main program of a compile worker: `python -m ramify.actors.grammar.child FD MEMORY SECONDS`.

FD is a connected Unix stream socket, inherited from the engine; when it ends, so does the worker. The
system limits what a job may take: MEMORY bytes of address space more than the start took, and SECONDS of
CPU time (the engine kills a worker whose job takes too long; this ends one whose engine has died).

Exit codes: 0 the engine has gone, 3 it talks nonsense; a limit ends it by a signal.
"""

import contextlib
import os
import resource
import signal
import socket
import sys

from ramify.actors.grammar.compile import compile_constraint
from ramify.actors.grammar.wire import (
    MAX_FRAME,
    Done,
    Failed,
    FromWorker,
    Job,
    Waiting,
    encoder,
    to_worker,
)
from ramify.actors.kit.blocking_link import BlockingLink
from ramify.actors.kit.frames import LinkClosed, LinkError
from ramify.protocol.constraints import ConstraintSpec
from ramify.protocol.errors import ConstraintError


def main(fd: int, memory: int, seconds: int) -> int:
    """Work until the engine has gone. Returns the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    os.nice(5)  # steps of the model go first
    _limit(resource.RLIMIT_AS, _address_space() + memory)
    _limit(resource.RLIMIT_CORE, 0)
    try:
        engine: BlockingLink[FromWorker, Job] = BlockingLink(
            socket.socket(fileno=fd), to_worker(), encoder(), max_frame=MAX_FRAME
        )
    except LinkClosed:  # the engine has gone before the worker was there
        return 0
    try:
        engine.send(Waiting())
        while True:
            job = engine.receive(None)
            assert job is not None  # it waits for ever
            used = resource.getrusage(resource.RUSAGE_SELF)
            _limit(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime) + seconds + 1)
            engine.send(_result(job.spec))
    except LinkClosed:
        return 0
    except LinkError:
        return 3
    finally:
        engine.close()


def _result(spec: ConstraintSpec) -> FromWorker:
    try:
        return Done(compile_constraint(spec))
    except ConstraintError as error:
        return Failed.of(error)
    except MemoryError:
        return Failed("the constraint needs too much memory to compile: make it smaller", None, None)
    except RecursionError:
        return Failed("the constraint is nested too deep: flatten it", None, None)


def _address_space() -> int:
    """Bytes that the process has mapped: libraries reserve some for each core of the machine."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except OSError:  # not Linux
        return 1 << 34


def _limit(kind: int, value: int) -> None:
    """Set the soft limit; some systems know no such limit."""
    with contextlib.suppress(ValueError, OSError):
        hard = resource.getrlimit(kind)[1]
        resource.setrlimit(kind, (value if hard < 0 else min(value, hard), hard))


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main(*map(int, sys.argv[1:])))
