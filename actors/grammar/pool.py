"""Compiles constraints in processes of their own, so that no regex of a client can stop the engine.

`CompilePool.compile` answers from what is known, or waits for a worker. The same constraint is compiled
once for each name of a credential, however many of its sessions ask for it: names share no result and no
job, so that no time tells one of them what another one asked for. A worker that takes too long or too
much memory is killed, and another one is started; its job fails with a message for the client. The time
of a job counts from its arrival, so each has an answer by then, however many hostile ones are ahead of
it. A job for which nobody waits any more is taken from the queue; one that runs goes on, as its result
may be asked for again, unless others wait for its worker.

A worker is started when there are more jobs than workers, and in any case AHEAD_SECONDS after `run` has
begun: until then the server's start has the cores for itself.

It does not know what a constraint means.
"""

import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from functools import partial

import anyio
from anyio.abc import TaskStatus

from ramify.actors.grammar.job_queue import RETRY_MS, JobQueue, Owner
from ramify.actors.grammar.results import (
    MAX_FRAME,
    TOO_MUCH,
    CompileDone,
    CompileFailed,
    CompilerReady,
    FromWorker,
    Result,
    Results,
)
from ramify.actors.kit.clock import Clock, MonotonicClock
from ramify.actors.kit.log import get_log
from ramify.actors.kit.mailbox import MailboxClosed
from ramify.actors.processes.child_process import ChildProcess
from ramify.actors.processes.messages import decoder, encoder
from ramify.actors.processes.supervisor import Attempts, Ended, Policy, keep
from ramify.protocol.constraints import CompiledConstraint, ConstraintSpec, GrammarBackend
from ramify.protocol.errors import ConstraintError, Overloaded

PROGRAM = "ramify.actors.grammar.compile_program"
START_SECONDS = 30.0
AHEAD_SECONDS = 3.0  # after which workers are started though no job has come
SOON_SECONDS = 0.02
ENOUGH = 0.5  # of a job's time: who had less because it waited is not found guilty
GRACE_SECONDS = 0.25  # that a job may run though nobody wants it and others wait
FORGET_SECONDS = 60.0  # after which a constraint whose worker was killed may be tried again

NOBODY = Owner()

log = get_log(__name__)


@dataclass
class PoolLimits:
    """`seconds`: of one job from its arrival on, by the clock. `memory`: bytes a worker may take beyond
    what its start took.

    `waiting`: jobs in the queue, `waiting_each`: of one name; `kept_bytes`: of results. `backend`: what
    compiles regexes and choices.
    """

    workers: int = field(default_factory=lambda: max(2, min(16, (os.cpu_count() or 1) - 2)))
    seconds: float = 10.0
    memory: int = 512 << 20
    waiting: int = 256
    waiting_each: int = 64
    kept_bytes: int = 64 << 20
    backend: GrammarBackend = "auto"


@dataclass
class PoolCounters:
    """Counters since the start. `hits`: answered from kept results; `joined`: waited for another's job;
    `abandoned`: jobs withdrawn or ended because no request waited any more.
    """

    compiled: int = 0
    failed: int = 0
    killed: int = 0
    refused: int = 0
    hits: int = 0
    joined: int = 0
    abandoned: int = 0
    seconds: float = 0.0  # of workers


@dataclass(eq=False)
class _Task:
    spec: ConstraintSpec
    owner: Owner
    until: float  # when it has to be done
    done: "asyncio.Future[Result | Overloaded]" = field(repr=False)
    waiters: int = 0
    worker: "_Worker | None" = None  # that has it
    begun: float = 0.0

    @property
    def key(self) -> tuple[str, ConstraintSpec]:
        """The key under which a constraint is compiled only once."""
        return self.owner.name, self.spec


class CompilePool:
    """Workers, the jobs that wait for them, and the results. Runs in one event loop: see `run`."""

    def __init__(self, limits: PoolLimits | None = None, clock: Clock | None = None) -> None:
        self.limits = limits or PoolLimits()
        self.counters = PoolCounters()
        self._clock: Clock = clock if clock is not None else MonotonicClock()
        self._queue: JobQueue[_Task] = JobQueue(
            self.limits.workers, self.limits.waiting, self.limits.waiting_each
        )
        self._results = Results(self.limits.kept_bytes)
        self._under_way: dict[tuple[str, ConstraintSpec], _Task] = {}
        self._news = asyncio.Event()

    @property
    def waiting(self) -> int:
        """Jobs that wait for a worker."""
        return len(self._queue)

    @property
    def kept_bytes(self) -> int:
        """Bytes of kept results."""
        return self._results.bytes

    async def compile(self, spec: ConstraintSpec, owner: Owner = NOBODY) -> CompiledConstraint:
        """Compile `spec`. Raises ConstraintError, and Overloaded if too many wait. `owner`: the unit of
        fairness.
        """
        result: Result | Overloaded
        known = self._results.get(owner.name, spec, self._clock.now())
        if known is not None:
            self.counters.hits += 1
            result = known
        else:
            task = self._task(spec, owner)
            task.waiters += 1
            try:
                result = await asyncio.shield(task.done)
            finally:
                task.waiters -= 1
                if not task.waiters and not task.done.done():
                    self._abandon(task)
        if isinstance(result, Overloaded):
            raise Overloaded(result.message, retry_ms=RETRY_MS)
        if isinstance(result, ConstraintError):
            raise ConstraintError(result.message, **(result.details or {}))
        return result

    def _task(self, spec: ConstraintSpec, owner: Owner) -> _Task:
        """The job for `spec`, an old or a new one."""
        task = self._under_way.get((owner.name, spec))
        if task is not None:
            self.counters.joined += 1
            return task
        until = self._clock.now() + self.limits.seconds
        task = _Task(spec, owner, until, asyncio.get_running_loop().create_future())
        try:
            gone = self._queue.add(owner, task)
        except Overloaded:
            self.counters.refused += 1
            raise
        self._under_way[task.key] = task
        if gone is not None:
            self.counters.refused += 1
            self._give_up(gone, "others, who have less in it, need its place in the queue")
        self._news.set()
        # an idle worker may take it at once
        asyncio.get_running_loop().call_later(SOON_SECONDS, self._make_way)
        asyncio.get_running_loop().call_later(self.limits.seconds, self._expire, task)
        return task

    def _expire(self, task: _Task) -> None:
        """Refuse it if it still waits: it may be a good one behind others."""
        if self._queue.withdraw(task.owner, task):
            self.counters.refused += 1
            self._give_up(task, self._late)

    @property
    def _late(self) -> str:
        return f"it had no turn to be compiled within {self.limits.seconds:g} s"

    def _give_up(self, task: _Task, why: str) -> None:
        """End `task` without a lasting verdict: it did not have its full time, so it may be compiled
        another time.
        """
        if self._under_way.get(task.key) is task:
            del self._under_way[task.key]
        if not task.done.done():
            task.done.set_result(Overloaded(f"{why}: try again later", retry_ms=RETRY_MS))

    def _abandon(self, task: _Task) -> None:
        """End `task`: no request waits for it."""
        if self._queue.withdraw(task.owner, task):
            self.counters.abandoned += 1
            del self._under_way[task.key]
            task.done.cancel()
        else:
            self._make_way()

    def _make_way(self) -> None:
        """End jobs that no request waits for, if others wait for their workers."""
        if not len(self._queue):
            return
        now = self._clock.now()
        for task in list(self._under_way.values()):
            if task.worker is None or task.waiters:
                continue
            left = task.begun + GRACE_SECONDS - now
            if left > 0:
                asyncio.get_running_loop().call_later(left, self._make_way)
            elif task.worker.alive:
                self.counters.abandoned += 1
                del self._under_way[task.key]  # who asks for it now begins anew
                task.worker.kill()

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Keep the workers; until it is cancelled, which ends them. Jobs that wait then are refused."""
        try:
            async with anyio.create_task_group() as group:
                for number in range(self.limits.workers):
                    group.start_soon(self._keep_worker, number)
                task_status.started()
        finally:
            self._refuse_all("the server is stopping: constraints are no longer compiled")

    async def _keep_worker(self, number: int) -> None:
        """The server does without them if need be, so they are started again without an end."""
        with anyio.move_on_after(AHEAD_SECONDS):
            while len(self._under_way) <= number:
                self._news.clear()
                await self._news.wait()
        name = f"compile worker {number}"
        await keep(partial(self._work, name), Attempts(name, Policy(trials=None, attempts=None)))

    async def _work(self, name: str) -> Ended:
        try:
            async with _Worker.started(name, self.limits) as worker:
                while worker.alive:
                    await self._serve(worker)
        except (OSError, _Lost) as error:
            log.error("a compile worker did not start", worker=name, reason=str(error))
            self._refuse_all(f"constraints cannot be compiled now: {error}")
            return Ended(str(error), False)
        return Ended("", True)

    async def _serve(self, worker: "_Worker") -> None:
        """The next job on `worker`; none if it dies before."""
        taken: tuple[Owner, _Task] | None = None
        while worker.alive and (taken := self._queue.take()) is None:
            self._news.clear()
            await worker.wait(self._news)
        if not worker.alive:
            return
        assert taken is not None
        owner, task = taken
        task.worker, task.begun = worker, self._clock.now()
        try:
            result, until = await self._done(worker, task)
            if result is None:
                self._give_up(task, self._late)
            else:
                self._settle(task, result, until)
        finally:
            self.counters.seconds += self._clock.now() - task.begun
            self._queue.finished(owner)
            self._news.set()  # the owner may have been waiting for this one to end
            if not task.done.done():  # cancelled
                self._settle(task, ConstraintError("the server is stopping"), self._clock.now())

    async def _done(self, worker: "_Worker", task: _Task) -> tuple[Result | None, float | None]:
        """The result of `task`, and until when to keep it; None: it had too little time."""
        spec = task.spec
        try:
            message = await worker.work(spec, max(0.0, task.until - self._clock.now()))
        except TimeoutError:
            if task.until - task.begun < self.limits.seconds * ENOUGH:
                self.counters.killed += 1
                return None, None
            why = f"it takes more than {self.limits.seconds:g} s to compile"
        except _Lost as error:
            why = f"compiling it failed ({error})"
        else:
            if isinstance(message, CompileDone):
                self.counters.compiled += 1
                return message.compiled, None
            self.counters.failed += 1
            return message.exception(), None
        if self._under_way.get(task.key) is not task:  # it was abandoned
            return ConstraintError(why), self._clock.now()
        self.counters.killed += 1
        log.warning("a compile worker was ended", reason=why, kind=spec.kind, bytes=len(spec.text))
        return ConstraintError(f"{why}: make the constraint smaller"), self._clock.now() + FORGET_SECONDS

    def _settle(self, task: _Task, result: Result, until: float | None) -> None:
        if self._under_way.get(task.key) is task:
            del self._under_way[task.key]
            self._results.put(*task.key, result, until)
        if not task.done.done():
            task.done.set_result(result)

    def _refuse_all(self, why: str) -> None:
        for task in self._queue.clear():
            self._settle(task, ConstraintError(why), self._clock.now())


class _Lost(Exception):
    """The worker's process has ended, or its link has."""


class _Worker:
    """One worker process. Made by `started`, which also ends it."""

    def __init__(self, process: "ChildProcess[ConstraintSpec, FromWorker]") -> None:
        self._process = process
        self._ended = asyncio.ensure_future(process.ended())
        self._answer: asyncio.Future[FromWorker] | None = None
        self._killed = False

    @classmethod
    @contextlib.asynccontextmanager
    async def started(cls, name: str, limits: PoolLimits) -> "AsyncGenerator[_Worker]":
        """A worker that can take a job. Raises OSError and _Lost."""
        early: list[FromWorker] = []
        self: _Worker | None = None

        def receive(message: FromWorker) -> None:
            if self is None:
                early.append(message)
            else:
                self._received(message)

        process: ChildProcess[ConstraintSpec, FromWorker] = await ChildProcess.start(
            name,
            PROGRAM,
            decoder(FromWorker),
            encoder(),
            receive,
            arguments=[str(limits.memory), str(int(limits.seconds) + 1), limits.backend],
            max_frame=MAX_FRAME,
        )
        self = cls(process)
        try:
            if not early:
                try:
                    await self._next(START_SECONDS)
                except TimeoutError:
                    raise _Lost(f"it was not ready within {START_SECONDS:g} s") from None
            yield self
        finally:
            process.kill()
            with anyio.CancelScope(shield=True):
                await self._ended

    @property
    def alive(self) -> bool:
        """Whether it can take a job."""
        return not self._killed and not self._ended.done()

    async def wait(self, event: asyncio.Event) -> None:
        """Wait until `event` is set or the process has ended."""
        task = asyncio.ensure_future(event.wait())
        try:
            await asyncio.wait({task, self._ended}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            task.cancel()

    async def work(self, spec: ConstraintSpec, seconds: float) -> CompileDone | CompileFailed:
        """Raises TimeoutError or _Lost; then the process is gone."""
        try:
            self._process.link.tell(spec)
            message = await self._next(seconds)
        except MailboxClosed:
            self.kill()
            raise _Lost(self._why()) from None
        except BaseException:
            self.kill()
            raise
        if isinstance(message, CompilerReady):
            self.kill()
            raise _Lost("it talks nonsense")
        return message

    async def _next(self, seconds: float) -> FromWorker:
        self._answer = answer = asyncio.get_running_loop().create_future()
        done, _ = await asyncio.wait(
            {answer, self._ended}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED
        )
        if answer in done:
            message: FromWorker = answer.result()
            return message
        if not done:
            raise TimeoutError
        raise _Lost(self._why())

    def _received(self, message: FromWorker) -> None:
        self._process.link.consumed()
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(message)

    def kill(self) -> None:
        self._killed = True
        self._process.kill()

    def _why(self) -> str:
        if self._ended.done() and not self._ended.cancelled():
            if self._ended.result() == TOO_MUCH:
                return "it needs too much memory"
            return self._process.explain(self._ended.result())
        return "its process has gone"
