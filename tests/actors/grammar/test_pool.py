"""The pool with real workers: results, hostile constraints, deaths, fairness, and the loop's lag."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import pytest

from ramify.actors.grammar.job_queue import Owner
from ramify.actors.grammar.pool import CompilePool, PoolLimits
from ramify.actors.processes.child_process import ChildProcess
from ramify.actors.processes.main import GONE
from ramify.protocol.constraints import AutomatonBody, CompiledConstraint, ConstraintSpec, decode_body
from ramify.protocol.errors import ConstraintError, Overloaded

pytestmark = pytest.mark.usefixtures("children_are_forked")


@asynccontextmanager
async def running(limits: PoolLimits | None = None) -> AsyncIterator[CompilePool]:
    pool = CompilePool(limits)
    async with anyio.create_task_group() as group:
        await group.start(pool.run)
        try:
            yield pool
        finally:
            group.cancel_scope.cancel()


def regex(text: str) -> ConstraintSpec:
    return ConstraintSpec("regex", text)


@pytest.fixture
def pids(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The processes that were started."""
    found: list[int] = []
    start = ChildProcess.start

    async def noted(*args: object, **kwargs: object) -> object:
        process = await start(*args, **kwargs)  # type: ignore[arg-type]
        found.append(process.pid)
        return process

    monkeypatch.setattr(ChildProcess, "start", noted)
    return found


async def test_workers_are_started_for_jobs_or_a_while_later(
    pids: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(PoolLimits(workers=2)) as pool:
        await asyncio.sleep(0.05)
        assert not pids
        await asyncio.gather(*(pool.compile(regex("a"), Owner("x")) for _ in range(2)))
        assert len(pids) == 1  # both wait for one job
    pids.clear()
    monkeypatch.setattr("ramify.actors.grammar.pool.AHEAD_SECONDS", 0.05)
    async with running(PoolLimits(workers=2)):
        with anyio.fail_after(60):
            while len(pids) < 2:
                await asyncio.sleep(0.01)


async def test_names_share_no_result_and_no_job() -> None:
    """Else the time of an answer tells one what another asked for."""
    async with running() as pool:
        names = [Owner("x"), Owner("y")]
        one, two = await asyncio.gather(*(pool.compile(regex("a+b"), each) for each in names))
        assert one is not two
        assert one == two
        assert await pool.compile(regex("a+b"), Owner("z")) == one
        assert (pool.counters.compiled, pool.counters.hits, pool.counters.joined) == (3, 0, 0)


async def test_a_constraint_is_compiled_once_for_a_name() -> None:
    async with running() as pool:
        owners = [Owner("x", session) for session in range(3)]
        one, two = await asyncio.gather(*(pool.compile(regex("a+b"), each) for each in owners[:2]))
        three = await pool.compile(regex("a+b"), owners[2])
        assert one is two is three
        body = decode_body(one.body)
        assert isinstance(body, AutomatonBody)
        assert body.words[4:8] == b"\x03\0\0\0"  # states
        for _ in range(2):
            with pytest.raises(ConstraintError, match="closed") as caught:
                await pool.compile(regex("(a"))
            assert caught.value.details == {"position": 0}
        counters = pool.counters
        assert (counters.compiled, counters.failed, counters.joined, counters.hits) == (1, 1, 1, 2)


async def test_a_caller_that_leaves_stops_nobody_else() -> None:
    async with running() as pool:
        with anyio.move_on_after(0):
            await pool.compile(regex("ab"))
        assert (await pool.compile(regex("ab"))).backend == "automaton"
        assert pool.counters.compiled == 1
        staying = asyncio.create_task(pool.compile(regex("abc")))
        leaving = asyncio.create_task(pool.compile(regex("abc")))
        await asyncio.sleep(0)
        leaving.cancel()
        assert (await staying).backend == "automaton"


async def held_up(pool: CompilePool, pids: list[int]) -> "asyncio.Task[object]":
    """The only worker has a job that will not end: its process is stopped."""
    await pool.compile(regex("ready"))
    os.kill(pids[0], signal.SIGSTOP)
    job = asyncio.create_task(pool.compile(regex("slow"), Owner("a")))
    while not any(task.worker for task in pool._under_way.values()):
        await asyncio.sleep(0.01)
    return job


async def test_what_nobody_waits_for_is_withdrawn(pids: list[int]) -> None:
    """A worker goes on with it only as long as nobody else needs that worker."""
    async with running(PoolLimits(workers=1)) as pool:
        under_way = await held_up(pool, pids)
        waiting = asyncio.create_task(pool.compile(regex("x{3}"), Owner("a")))
        await asyncio.sleep(0)
        assert pool.waiting == 1
        waiting.cancel()
        await asyncio.wait([waiting])
        assert (pool.waiting, pool.counters.abandoned) == (0, 1)
        under_way.cancel()
        await asyncio.sleep(0.3)
        assert len(pids) == 1  # it runs on
        assert (await pool.compile(regex("y"), Owner("b"))).backend == "automaton"
        assert (len(pids), pool.counters.abandoned, pool.counters.killed) == (2, 2, 0)
        assert (await pool.compile(regex("slow"), Owner("b"))).backend == "automaton"


async def test_a_job_that_is_asked_for_again_in_time_is_not_ended(pids: list[int]) -> None:
    async with running(PoolLimits(workers=1)) as pool:
        first = await held_up(pool, pids)
        first.cancel()
        await asyncio.wait([first])
        again = asyncio.create_task(pool.compile(regex("slow"), Owner("a", 2)))
        other = asyncio.create_task(pool.compile(regex("z"), Owner("c")))
        await asyncio.sleep(0.4)
        os.kill(pids[0], signal.SIGCONT)
        await asyncio.gather(again, other)
        assert (len(pids), pool.counters.abandoned, pool.counters.joined) == (1, 0, 1)


async def test_a_job_that_takes_too_long_is_killed(pids: list[int]) -> None:
    slow = regex("|".join(f"(?:a{{1,{n}}}b?){{1,20}}" for n in range(100, 140)))
    async with running(PoolLimits(workers=1, seconds=0.2)) as pool:
        await patiently(pool, regex("a"))
        with pytest.raises(ConstraintError, match=r"more than 0.2 s"):
            await pool.compile(slow)
        with pytest.raises(ConstraintError, match=r"more than 0.2 s"):  # known for a while
            await pool.compile(slow)
        assert pool.counters.killed == pool.counters.hits == 1
        assert (await patiently(pool, regex("ab"))).backend == "automaton"
        assert len(pids) >= 2  # a new worker may have been given too little time, and was ended too
        with pytest.raises(ProcessLookupError):
            os.kill(pids[0], 0)


async def patiently(pool: CompilePool, spec: ConstraintSpec) -> CompiledConstraint:
    """Ask until a worker has started."""
    with anyio.fail_after(60):
        while True:
            with contextlib.suppress(Overloaded):
                return await pool.compile(spec)


async def test_each_has_an_answer_by_its_time(pids: list[int]) -> None:
    """However many are ahead of it; and who had no turn is not found guilty."""
    slow = [
        regex("|".join(f"(?:a{{1,{n}}}b?){{1,20}}" for n in range(100, 140)) + "z" * i) for i in range(6)
    ]
    async with running(PoolLimits(workers=1, seconds=1.0)) as pool:
        await patiently(pool, regex("a"))
        found = await asyncio.gather(
            *(pool.compile(spec, Owner("hostile")) for spec in slow),
            pool.compile(regex("ab"), Owner("x")),
            return_exceptions=True,
        )  # fmt: skip
        assert pool.counters.killed <= 2  # the time of all was over when that of the first one was
        served = [each for each in found[:-1] if not isinstance(each, ConstraintError | Overloaded)]
        assert all(isinstance(each, CompiledConstraint) for each in served)
        assert any(isinstance(each, Overloaded) for each in found)
        assert (await patiently(pool, regex("ab"))).backend == "automaton"


async def test_a_worker_that_dies_fails_its_job_only(pids: list[int]) -> None:
    slow = regex("|".join(f"(?:a{{1,{n}}}b?){{1,20}}" for n in range(100, 140)))
    async with running(PoolLimits(workers=1)) as pool:
        await pool.compile(regex("ab"))

        async def kill() -> None:
            await anyio.sleep(0.05)
            os.kill(pids[0], signal.SIGKILL)

        async with anyio.create_task_group() as group:
            group.start_soon(kill)
            with pytest.raises(ConstraintError, match="SIGKILL"):
                await pool.compile(slow)
        assert (await pool.compile(regex("cd"))).backend == "automaton"


async def test_a_worker_that_died_while_it_waited_is_replaced(pids: list[int]) -> None:
    async with running(PoolLimits(workers=1)) as pool:
        await pool.compile(regex("ab"))
        os.kill(pids[0], signal.SIGKILL)
        with anyio.fail_after(60):
            while len(pids) < 2:
                await anyio.sleep(0.01)
        assert (await pool.compile(regex("cd"))).backend == "automaton"
        assert pool.counters.killed == 0


async def test_memory_is_limited() -> None:
    async with running(PoolLimits(workers=1, seconds=60, memory=20 << 20)) as pool:
        with pytest.raises(ConstraintError, match=r"memory|failed"):
            await pool.compile(regex("[a-y]*a[a-z]{18}"))
        assert (await pool.compile(regex("ab"))).backend == "automaton"


async def test_too_many_jobs_are_refused() -> None:
    """Those of a name that has more than its part; and one of them gives way to another name's."""
    pool = CompilePool(PoolLimits(waiting=3, waiting_each=2))
    owners = (("a", "1"), ("a", "2"), ("b", "3"))
    jobs = [asyncio.ensure_future(pool.compile(regex(text), Owner(owner))) for owner, text in owners]
    await anyio.wait_all_tasks_blocked()
    assert pool.waiting == 3
    with pytest.raises(Overloaded):
        await pool.compile(regex("4"), Owner("a"))
    jobs.append(asyncio.ensure_future(pool.compile(regex("5"), Owner("c"))))
    with pytest.raises(Overloaded, match="less in it"):
        await jobs[1]
    assert (pool.waiting, pool.counters.refused) == (3, 2)
    for job in jobs:
        job.cancel()
    await anyio.wait_all_tasks_blocked()
    assert pool.waiting == 0


async def test_workers_that_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(*args: object, **kwargs: object) -> object:
        raise OSError("no processes left")

    monkeypatch.setattr(ChildProcess, "start", broken)
    pool = CompilePool(PoolLimits(workers=1))
    async with anyio.create_task_group() as group:
        waiting = asyncio.ensure_future(pool.compile(regex("a")))
        await anyio.wait_all_tasks_blocked()
        await group.start(pool.run)
        with pytest.raises(ConstraintError, match="no processes left"):
            await waiting
        group.cancel_scope.cancel()


async def test_the_stop_ends_workers_and_refuses_what_waits(pids: list[int]) -> None:
    slow = regex("|".join(f"(?:a{{1,{n}}}b?){{1,20}}" for n in range(100, 140)))
    async with running(PoolLimits(workers=1)) as pool:
        await pool.compile(regex("ab"))
        tasks = [asyncio.ensure_future(pool.compile(each)) for each in (slow, regex("c"))]
        await anyio.sleep(0.05)
    for task in tasks:
        with pytest.raises(ConstraintError, match="stopping"):
            await task
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)


HOSTILE = [
    "[a-z]*a[a-z]{18}",
    "((((a{1,50}){1,50}){1,50}){1,50})",
    ".{2000}",
    "(.|a.){1,900}b{1,900}|x{40}",
    "(?:é{1,100}.){1,100}",
    "(" * 40 + "a" + ")" * 40,
]


async def test_twenty_hostile_constraints_hold_up_nobody() -> None:
    """All are refused, killed or left to llguidance; others are served meanwhile."""
    specs = [regex(f"{HOSTILE[i % len(HOSTILE)]}{'z' * i}") for i in range(20)]

    async with running() as pool:
        await pool.compile(regex("first"))
        hostile = [asyncio.ensure_future(pool.compile(spec, Owner("hostile"))) for spec in specs]
        await anyio.sleep(0.05)
        for n in range(5):
            await pool.compile(regex(f"honest{n}"), Owner("honest"))
        assert not all(each.done() for each in hostile)  # who is honest waits for none of their ends
        for found in await asyncio.gather(*hostile, return_exceptions=True):
            if isinstance(found, CompiledConstraint):
                assert found.backend == "grammar"  # what no table holds is followed step by step
            else:
                assert isinstance(found, ConstraintError | Overloaded)


def test_a_worker_whose_engine_has_gone_ends_quietly() -> None:
    """The engine was killed while the worker started: no traceback where a server's errors go."""
    here, there = socket.socketpair()
    here.close()
    lifeline, held = os.pipe()
    command = [
        sys.executable,
        "-m",
        "ramify.actors.grammar.compile_program",
        str(there.fileno()),
        str(lifeline),
        "null",
        str(1 << 30),
        "5",
        "auto",
    ]
    ended = subprocess.run(
        command, pass_fds=[there.fileno(), lifeline], capture_output=True, timeout=60, check=False
    )
    there.close()
    os.close(lifeline)
    os.close(held)
    assert (ended.returncode, ended.stderr) == (GONE, b"")
