"""The driver of a stateless server: a line is a history that the client keeps and sends again.

What differs between servers is a `ServerApi`. It does not know workloads.
"""

import asyncio
import time
from collections.abc import Sequence
from typing import Protocol

from ramify.clients.bench.http import HttpConnection
from ramify.clients.bench.load_program import GenerateJob, Target, Trace
from ramify.clients.bench.session import BenchBranch, BenchFailed, check_output


class AnswerReader(Protocol):
    """Reads the events of one generation."""

    prompt: int | None  # prompt tokens, by the server's account
    cached: int | None
    ids: list[int]  # all output tokens, where they were asked for
    finish: str | None  # why it ended, as the server says; None until then

    def event(self, data: bytes) -> int:
        """Take one event. Returns how many new tokens it brings. Raises BenchFailed."""
        ...


class ServerApi(Protocol):
    """The API of one kind of server."""

    path: str

    def body(self, prompt: Sequence[int], job: GenerateJob, *, ids: bool) -> bytes:
        """Make the request. `ids`: the output's token ids will be needed."""
        ...

    def answer(self, *, ids: bool) -> AnswerReader: ...


class HistoryDriver:
    """The driver of a stateless server: see `session.Driver`."""

    def __init__(self, target: Target, dialect: ServerApi) -> None:
        self._target = target
        self._dialect = dialect

    async def session(self, width: int) -> "HistorySession":
        session = HistorySession(self._target, self._dialect)
        await session.connect(width)
        return session


class HistorySession:
    """A pool of kept connections, one for each generation at once."""

    def __init__(self, target: Target, dialect: ServerApi) -> None:
        self.extras: list[Trace] = []
        self.warm = target.warm_prefix
        self.root: BenchBranch = HistoryLine(self, [])
        self._target = target
        self._dialect = dialect
        self._connections: list[HttpConnection] = []
        self._idle: list[HttpConnection] = []

    async def connect(self, width: int) -> None:
        """Raises OSError."""
        for _ in range(width):
            self._connections.append(HttpConnection(self._target.url, self._target.token))
        await asyncio.gather(*(connection.connect() for connection in self._connections))
        self._idle = list(self._connections)

    async def close(self) -> None:
        for connection in self._connections:
            connection.close()

    async def generate(
        self, prompt: list[int], job: GenerateJob, *, ids: bool
    ) -> tuple[Trace, list[int]]:
        """Send one request. Returns its trace, and its output if `ids`. Raises BenchFailed."""
        connection = self._idle.pop()
        body = self._dialect.body(prompt, job, ids=ids)
        answer = self._dialect.answer(ids=ids)
        trace = Trace(sent=time.perf_counter(), prompt=len(prompt))
        async for now, events in connection.post(self._dialect.path, body):
            count = sum(answer.event(data) for data in events if data != b"[DONE]")
            if count:
                trace.arrived(now, count)
                trace.ended = now
        self._idle.append(connection)
        check_output(trace, job, self._dialect.path)
        if answer.finish != "length":
            raise BenchFailed(f"{self._dialect.path}: the end is {answer.finish!r}, not 'length'")
        if answer.prompt not in (None, len(prompt)):
            raise BenchFailed(f"{len(prompt)} prompt tokens were sent, the server saw {answer.prompt}")
        if ids and len(answer.ids) != job.output:
            raise BenchFailed(f"{self._dialect.path}: {len(answer.ids)} token ids came of {job.output}")
        if answer.cached is not None:
            trace.cached, trace.computed = answer.cached, len(prompt) - answer.cached
        return trace, answer.ids


class HistoryLine:
    """A line, which keeps all its tokens so far."""

    def __init__(self, session: HistorySession, tokens: list[int]) -> None:
        self._session = session
        self._tokens = tokens

    async def append(self, tokens: Sequence[int]) -> None:
        raise BenchFailed("a stateless server takes input only with its generation")

    async def say(self, job: GenerateJob, *, more: bool) -> Trace:
        prompt = self._tokens + job.tokens
        trace, output = await self._session.generate(prompt, job, ids=more)
        self._tokens = prompt + output
        return trace

    async def spread(
        self, prefix: Sequence[int], jobs: Sequence[GenerateJob], *, more: bool
    ) -> list[tuple[BenchBranch, Trace]]:
        self._tokens = [*self._tokens, *prefix]
        if self._session.warm and self._tokens:
            warm, _ = await self._session.generate(self._tokens, GenerateJob([], 1), ids=False)
            warm.extra = True
            self._session.extras.append(warm)
        lines = [HistoryLine(self._session, self._tokens) for _ in jobs]
        pairs = zip(lines, jobs, strict=True)
        traces = await asyncio.gather(*(line.say(job, more=more) for line, job in pairs))
        return list(zip(lines, traces, strict=True))
