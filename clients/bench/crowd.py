"""The load in N processes, for servers that one Python process cannot keep busy.

Programs are dealt out; each process connects, says so, and starts when all have. Times of
different processes compare: `perf_counter` is one clock for the whole machine on Linux.
"""

import asyncio
import multiprocessing
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from types import TracebackType

import msgspec

from ramify.clients.bench.execute import execute
from ramify.clients.bench.load_program import LoadProgram, Outcome, Target
from ramify.clients.bench.session import BenchFailed
from ramify.protocol.errors import RamifyError

DEAD = "a process of the load has died"


class CrowdShare(msgspec.Struct, frozen=True, array_like=True):
    """The part of the load that one process runs."""

    target: Target
    programs: list[LoadProgram]


class Fault(msgspec.Struct, frozen=True, tag=True):
    message: str


class Ready(msgspec.Struct, frozen=True, tag=True):
    """From a process: all is connected. From the parent: begin."""


class LoadFinished(msgspec.Struct, frozen=True, tag=True):
    outcome: Outcome


_encode = msgspec.msgpack.Encoder().encode
_answers = msgspec.msgpack.Decoder(Fault | Ready | LoadFinished)


class Crowd:
    """The processes of a load, as a context manager. With one, the load runs in this process."""

    def __init__(self, processes: int) -> None:
        self._workers: list[tuple[BaseProcess, Connection]] = []
        context = multiprocessing.get_context("spawn")
        for _ in range(processes if processes > 1 else 0):
            ours, theirs = context.Pipe()
            worker = context.Process(target=work, args=(theirs,), daemon=True)
            worker.start()
            theirs.close()
            self._workers.append((worker, ours))

    def run(self, target: Target, programs: Sequence[LoadProgram]) -> Outcome:
        """Run all programs at once. Raises BenchFailed, OSError."""
        if not self._workers:
            return asyncio.run(execute(target, programs))
        busy = self._workers[: len(programs)]
        for place, (_, pipe) in enumerate(busy):
            _tell(pipe, CrowdShare(target, list(programs[place :: len(busy)])))
        for _, pipe in busy:
            _expect(pipe)
        begin = time.perf_counter()
        for _, pipe in busy:
            _tell(pipe, Ready())
        outcomes = [
            answer.outcome for _, pipe in busy if isinstance(answer := _expect(pipe), LoadFinished)
        ]
        traces = []
        for place, outcome in enumerate(outcomes):
            for trace in outcome.traces:
                trace.program = trace.program * len(busy) + place
                traces.append(trace)
        return Outcome(begin, traces, max(outcome.cpu for outcome in outcomes))

    def __enter__(self) -> "Crowd":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for worker, pipe in self._workers:
            pipe.close()
            worker.join(5 if error is None else 0.2)
            if worker.is_alive():
                worker.kill()
                worker.join()


def work(pipe: Connection) -> None:
    """Run a process of the crowd: one share after another, until the pipe closes."""
    while True:
        try:
            share = msgspec.msgpack.decode(pipe.recv_bytes(), type=CrowdShare)
        except (EOFError, OSError, KeyboardInterrupt):  # nobody has more work
            return
        answer: LoadFinished | Fault
        try:
            answer = LoadFinished(asyncio.run(execute(share.target, share.programs, lambda: _go(pipe))))
        except RamifyError as error:
            answer = Fault(error.message)
        except (OSError, EOFError, KeyboardInterrupt) as error:
            answer = Fault(str(error) or type(error).__name__)
        try:
            pipe.send_bytes(_encode(answer))
        except OSError:  # nobody wants it any more
            return


async def _go(pipe: Connection) -> None:
    pipe.send_bytes(_encode(Ready()))
    await asyncio.to_thread(pipe.recv_bytes)


def _tell(pipe: Connection, what: CrowdShare | Ready) -> None:
    try:
        pipe.send_bytes(_encode(what))
    except OSError:
        raise BenchFailed(DEAD) from None


def _expect(pipe: Connection) -> Ready | LoadFinished:
    try:
        answer: Fault | Ready | LoadFinished = _answers.decode(pipe.recv_bytes())
    except (EOFError, OSError):
        raise BenchFailed(DEAD) from None
    if isinstance(answer, Fault):
        raise BenchFailed(answer.message)
    return answer
