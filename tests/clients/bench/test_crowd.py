"""The load in several processes gives what one process gives."""

import asyncio
from typing import Any

import pytest

from ramify.clients.bench.crowd import Crowd
from ramify.clients.bench.load_program import GenerateJob, Level, LoadProgram, Outcome, Target
from ramify.clients.bench.session import BenchFailed

PROGRAMS = [
    LoadProgram([Level([GenerateJob([n], 3 + n)]), Level([GenerateJob([], 2)])]) for n in range(5)
]


def twice(target: Target) -> tuple[Outcome, Outcome]:
    with Crowd(2) as crowd:
        return crowd.run(target, PROGRAMS[:1]), crowd.run(target, PROGRAMS)


async def test_two_processes(http_serving: Any) -> None:
    async with http_serving() as server:
        alone, outcome = await asyncio.to_thread(twice, Target("sglang", server.url))
    assert [(trace.program, trace.output) for trace in alone.traces] == [(0, 3), (0, 2)]
    found = sorted((trace.program, trace.level, trace.output) for trace in outcome.traces)
    assert found == sorted((n, level, (3 + n, 2)[level]) for n in range(5) for level in (0, 1))
    assert all(trace.sent >= outcome.begin for trace in outcome.traces)
    assert 0 < outcome.seconds < 60


def test_faults_of_another_process() -> None:
    with Crowd(2) as crowd, pytest.raises(BenchFailed, match=r"Connect call failed|refused"):
        crowd.run(Target("sglang", "http://127.0.0.1:1"), PROGRAMS)
