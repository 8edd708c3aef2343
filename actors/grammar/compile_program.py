"""The main program of a compile worker. See `processes.main`; its arguments: MEMORY SECONDS BACKEND.

At its start it compiles a schema of its own, so the first job finds warm what schemas share. A job may
take MEMORY bytes more than the start took: a thread looks, and ends the process. It may take SECONDS of
CPU time (the engine kills a worker whose job takes too long; this ends one whose engine has died).
BACKEND compiles regexes and choices (`protocol.constraints.GrammarBackend`).
The system's own limit of memory is behind the thread's, for code that lets no thread look: at it, Python
may try for ever to allocate what an exception needs.

One more exit code: 4 (`TOO_MUCH`), it took too much memory. A limit of the system ends it by a signal.
"""

import contextlib
import json
import os
import resource
import socket
import threading
import time
from contextlib import closing

import msgspec

from ramify.actors.grammar.compile import compile_constraint
from ramify.actors.grammar.results import (
    MAX_FRAME,
    TOO_MUCH,
    CompileDone,
    CompileFailed,
    CompilerReady,
    FromWorker,
)
from ramify.actors.links.blocking import BlockingLink
from ramify.actors.links.frames import LinkClosed
from ramify.actors.processes.main import GONE, run
from ramify.actors.processes.messages import decoder, encoder
from ramify.protocol.constraints import ConstraintSpec, GrammarBackend
from ramify.protocol.errors import ConstraintError

LOOK_SECONDS = 0.02
BEYOND = 256 << 20  # bytes between the thread's limit and the system's: what is taken between two looks


def serve(sock: socket.socket, memory: str, seconds: str, backend: str) -> int:
    """Work until the engine has gone. Returns the exit code."""
    by = msgspec.convert(backend, GrammarBackend)
    os.nice(5)  # steps of the model go first
    warm_up()
    working = threading.Event()  # there is a job
    threading.Thread(target=_watch, args=(_resident() + int(memory), working), daemon=True).start()
    _limit(resource.RLIMIT_AS, _address_space() + int(memory) + BEYOND)
    _limit(resource.RLIMIT_CORE, 0)
    try:
        engine: BlockingLink[FromWorker, ConstraintSpec] = BlockingLink(
            sock, decoder(ConstraintSpec), encoder(), max_frame=MAX_FRAME
        )
        with closing(engine):
            engine.send(CompilerReady())
            while (spec := engine.receive(None)) is not None:
                used = resource.getrusage(resource.RUSAGE_SELF)
                _limit(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime) + int(seconds) + 1)
                working.set()
                engine.send(_result(spec, by))
                working.clear()
    except LinkClosed:  # of many workers none needs to say so
        pass
    return GONE


def warm_up() -> None:
    """Make what most schemas have in common (strings, numbers, values of any kind), which is kept."""
    of_all_kinds = {
        "properties": {
            "text": {"type": "string", "maxLength": 9},
            "number": {"type": "number"},
            "count": {"type": "integer", "minimum": 0, "maximum": 9},
            "list": {"type": "array", "items": {"enum": ["a", 1, None, True]}},
        }
    }
    with contextlib.suppress(ConstraintError):
        compile_constraint(ConstraintSpec("json_schema", json.dumps(of_all_kinds)))


def _watch(most: int, working: threading.Event) -> None:
    """End the process once it has more than `most` bytes of memory, while there is a job."""
    while working.wait() and _resident() <= most:
        time.sleep(LOOK_SECONDS)
    os._exit(TOO_MUCH)


def _result(spec: ConstraintSpec, backend: GrammarBackend) -> FromWorker:
    try:
        return CompileDone(compile_constraint(spec, backend))
    except ConstraintError as error:
        return CompileFailed.of(error)
    except MemoryError:
        return CompileFailed(
            "the constraint needs too much memory to compile: make it smaller", None, None
        )
    except RecursionError:
        return CompileFailed("the constraint is nested too deep: flatten it", None, None)


def _address_space() -> int:
    """Bytes that the process has mapped: libraries reserve some for each core of the machine."""
    return _statm(0, 1 << 34)


def _resident() -> int:
    """Bytes of memory that the process has."""
    return _statm(1, 0)


def _statm(place: int, unknown: int) -> int:
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[place]) * resource.getpagesize()
    except OSError:  # not Linux
        return unknown


def _limit(kind: int, value: int) -> None:
    """Set the soft limit; some systems know no such limit."""
    with contextlib.suppress(ValueError, OSError):
        hard = resource.getrlimit(kind)[1]
        resource.setrlimit(kind, (value if hard < 0 else min(value, hard), hard))


if __name__ == "__main__":
    run(serve)
