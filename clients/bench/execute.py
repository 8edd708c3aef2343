"""Runs programs on a server, in this process: connect all, wait for the word, run all at once."""

import asyncio
import gc
import time
from collections.abc import Awaitable, Callable, Sequence

from ramify.clients.bench.history import HistoryDriver
from ramify.clients.bench.load_program import GenerateJob, Level, LoadProgram, Outcome, Target, Trace
from ramify.clients.bench.openai import OpenaiDialect
from ramify.clients.bench.ramify import RamifyDriver
from ramify.clients.bench.session import BenchBranch, BenchFailed, BenchSession, Driver
from ramify.clients.bench.sglang import SglangDialect

CONNECT_AT_ONCE = 64  # a listener's backlog may be short


def make_driver(target: Target) -> Driver:
    """Make the driver for a target. Raises BenchFailed for a target that lacks something."""
    match target.kind:
        case "ramify":
            return RamifyDriver(target)
        case "sglang":
            return HistoryDriver(target, SglangDialect(target))
        case "openai":
            return HistoryDriver(target, OpenaiDialect(target))
    raise BenchFailed(f"no driver for {target.kind!r}: ramify, sglang or openai")


async def at_once() -> None:
    """Begin at once: the start signal where there is no other process to wait for."""


async def execute(
    target: Target,
    programs: Sequence[LoadProgram],
    go: Callable[[], Awaitable[None]] = at_once,
) -> Outcome:
    """Run `programs`, each in a session of its own. `go`: awaited when all are connected.

    Raises BenchFailed if anything came out otherwise than asked for, OSError without a server.
    """
    driver = make_driver(target)
    sessions: list[BenchSession] = []
    try:
        for first in range(0, len(programs), CONNECT_AT_ONCE):
            some = programs[first : first + CONNECT_AT_ONCE]
            sessions += await asyncio.gather(*(driver.session(program.width) for program in some))
        await go()
        barrier = asyncio.Barrier(len(programs))
        gc.collect()
        gc.disable()  # a collection would be in somebody's latency
        begin, cpu = time.perf_counter(), time.process_time()
        jobs = [
            perform(number, program, session, barrier)
            for number, (program, session) in enumerate(zip(programs, sessions, strict=True))
        ]
        parts = await _all(jobs)
        share = (time.process_time() - cpu) / (time.perf_counter() - begin)
    finally:
        gc.enable()
        # Ending sessions tells of faults too, but the first one is what matters.
        ends = await asyncio.gather(*(s.close() for s in sessions), return_exceptions=True)
    for end in ends:
        if isinstance(end, BaseException):
            raise end
    return Outcome(begin, [trace for part in parts for trace in part], round(share, 3))


async def perform(
    number: int, program: LoadProgram, session: BenchSession, barrier: asyncio.Barrier
) -> list[Trace]:
    """Run one program to its end."""
    lines: list[BenchBranch] = [session.root]
    found: list[Trace] = []
    for place, level in enumerate(program.levels):
        if level.together:
            await barrier.wait()
        more = place + 1 < len(program.levels)
        before = len(session.extras)
        if level.parent is None:
            traces = await _continue(lines, level, more=more)
        else:
            pairs = await lines[level.parent].spread(level.prefix, level.jobs, more=more)
            lines = [line for line, _ in pairs]
            traces = [trace for _, trace in pairs]
        for trace in (*session.extras[before:], *traces):
            trace.level, trace.program = place, number
            found.append(trace)
    return found


async def _continue(lines: list[BenchBranch], level: Level, *, more: bool) -> list[Trace]:
    """Run job i on line i."""
    jobs = level.jobs
    if level.ahead_s:
        for line, job in zip(lines, jobs, strict=True):
            await line.append(job.tokens)
        await asyncio.sleep(level.ahead_s)
        jobs = [GenerateJob([], job.output, job.seed) for job in jobs]
    if len(lines) == 1:
        return [await lines[0].say(jobs[0], more=more)]
    pairs = zip(lines, jobs, strict=True)
    return list(await asyncio.gather(*(line.say(job, more=more) for line, job in pairs)))


async def _all(jobs: Sequence[Awaitable[list[Trace]]]) -> list[list[Trace]]:
    """Wait for all results. Raises the first error, after the other jobs have been cancelled."""
    tasks = [asyncio.ensure_future(job) for job in jobs]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
