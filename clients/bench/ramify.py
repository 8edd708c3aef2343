"""The driver of a Ramify server: a session per socket, a branch per line, only new tokens sent.

A spread is one frame: append, fork, and what each child appends and generates. Every op must get
exactly one terminal reply for each of its branches, and every position must agree with the count
of tokens; what does not fit raises BenchFailed.
"""

import asyncio
import time
from collections.abc import Sequence

from ramify.clients.bench.load_program import GenerateJob, Target, Trace
from ramify.clients.bench.session import BenchBranch, BenchFailed, check_output
from ramify.clients.bench.websocket import ClientWebSocket
from ramify.protocol.codec import Codec
from ramify.protocol.errors import RamifyError
from ramify.protocol.wire import (
    Append,
    ClientMessage,
    CloseSession,
    Delta,
    Done,
    Error,
    Fork,
    Generate,
    Ok,
    Open,
    StateReply,
)

SUBPROTOCOL = "ramify.v1+msgpack"
CLOSE_S = 30.0  # patience with the reply to `close`


class RamifyDriver:
    """The driver of a Ramify server: see `session.Driver`."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._codec = Codec("msgpack")

    async def session(self, width: int) -> "RamifySession":
        return await RamifySession.connect(self._target, self._codec)


class RamifySession:
    """One socket. Ops are numbered; `_due` says which still wait for their terminal reply."""

    def __init__(self, target: Target, codec: Codec) -> None:
        self.extras: list[Trace] = []
        self._temperature = target.temperature
        self._codec = codec
        self._socket: ClientWebSocket
        self._ids = 0
        self._lines: dict[str, RamifyLine] = {}
        self._due: dict[int, asyncio.Future[None] | None] = {}
        self._opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.fault: RamifyError | None = None
        self.root: BenchBranch = self.line("main", 0)

    @classmethod
    async def connect(cls, target: Target, codec: Codec) -> "RamifySession":
        """Raises BenchFailed if the server refuses, OSError if there is none."""
        self = cls(target, codec)
        self._socket = await ClientWebSocket.connect(
            target.url,
            subprotocol=SUBPROTOCOL,
            token=target.token,
            receive=self._receive,
            lost=lambda reason: self.fail(BenchFailed(reason)),
        )
        self._write([Open(client="bench", model=target.model)])
        await self._opened
        return self

    # --- what lines use -------------------------------------------------------------------------

    def line(self, name: str | None = None, position: int = 0) -> "RamifyLine":
        """Make a line whose branch exists, or will when the frame that forks it has run."""
        made = RamifyLine(self, name or f"b{len(self._lines)}", position)
        self._lines[made.name] = made
        return made

    def op(self, waiter: asyncio.Future[None] | None = None) -> int:
        """Make a new op id. `waiter` is resolved by its `ok`."""
        self._ids += 1
        self._due[self._ids] = waiter
        return self._ids

    def send(self, ops: list[ClientMessage]) -> None:
        """Send one frame. Raises what ended this session, if anything has."""
        if self.fault is not None:
            raise self.fault
        self._write(ops)

    def generate(self, line: "RamifyLine", job: GenerateJob) -> Generate:
        return Generate(
            id=self.op(),
            branch=line.name,
            max_tokens=job.output,
            temperature=self._temperature,
            ignore_eos=True,
            seed=job.seed,
        )

    async def close(self) -> None:
        """Close the session on the server. Raises BenchFailed if an op has no reply."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        try:
            if self.fault is None:
                self._write([CloseSession(id=self.op(waiter))])
                async with asyncio.timeout(CLOSE_S):
                    await waiter
                if self._due:
                    raise BenchFailed(f"no terminal reply to {len(self._due)} ops")
        finally:
            self._socket.abort()

    # --- what the server says -------------------------------------------------------------------

    def _write(self, ops: list[ClientMessage]) -> None:
        self._socket.send(self._codec.encode(ops))

    def _receive(self, now: float, payload: bytes) -> None:
        try:
            for message in self._codec.decode_server(payload):
                if type(message) is Delta:
                    self._lines[message.branch].grown(now, message.position)
                elif type(message) is Done:
                    self._settled(message.id)
                    self._lines[message.branch].done(now, message)
                elif type(message) is Ok:
                    self._settled(message.id)
                elif type(message) is StateReply:
                    self._opened.set_result(None)
                elif type(message) is Error:
                    raise BenchFailed(f"{message.code}: {message.message}")
        except (RamifyError, KeyError) as error:
            self.fail(error if isinstance(error, RamifyError) else BenchFailed(f"unknown: {error}"))

    def _settled(self, op: int) -> None:
        if op not in self._due:
            raise BenchFailed(f"op {op} has got a second terminal reply")
        waiter = self._due.pop(op)
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def fail(self, error: RamifyError) -> None:
        """End everything that waits, with the first fault."""
        self.fault = self.fault or error
        waiters = [self._opened, *self._due.values(), *[line.waiter for line in self._lines.values()]]
        for waiter in waiters:
            if waiter is not None and not waiter.done():
                waiter.set_exception(self.fault)


class RamifyLine:
    """One branch. At most one generation runs on it."""

    def __init__(self, session: RamifySession, name: str, position: int) -> None:
        self.name = name
        self.waiter: asyncio.Future[Trace] | None = None
        self._session = session
        self._position = position
        self._trace = Trace()
        self._job = GenerateJob([], 0)

    async def append(self, tokens: Sequence[int]) -> None:
        self._session.send([self._appending(tokens)])

    async def say(self, job: GenerateJob, *, more: bool) -> Trace:
        frame: list[ClientMessage] = []
        waiter = self._ask(job, frame)
        self._session.send(frame)
        return await waiter

    async def spread(
        self, prefix: Sequence[int], jobs: Sequence[GenerateJob], *, more: bool
    ) -> list[tuple[BenchBranch, Trace]]:
        session = self._session
        frame: list[ClientMessage] = [self._appending(prefix)] if prefix else []
        children = [session.line(position=self._position) for _ in jobs]
        names = [child.name for child in children]
        frame.append(Fork(id=session.op(), branch=self.name, as_=names))
        waiters = [child._ask(job, frame) for child, job in zip(children, jobs, strict=True)]
        session.send(frame)
        traces = await asyncio.gather(*waiters)
        return list(zip(children, traces, strict=True))

    def _appending(self, tokens: Sequence[int]) -> Append:
        self._position += len(tokens)
        return Append(id=self._session.op(), branch=self.name, tokens=list(tokens))

    def _ask(self, job: GenerateJob, frame: list[ClientMessage]) -> "asyncio.Future[Trace]":
        """Put the job's ops on `frame`, which the caller sends at once."""
        if job.tokens:
            frame.append(self._appending(job.tokens))
        frame.append(self._session.generate(self, job))
        self._job = job
        self._trace = Trace(sent=time.perf_counter(), prompt=self._position)
        self.waiter = asyncio.get_running_loop().create_future()
        return self.waiter

    def grown(self, now: float, position: int) -> None:
        """Note a delta: the branch is `position` tokens long."""
        count = position - self._position
        if count <= 0 or self.waiter is None or self.waiter.done():
            raise BenchFailed(f"{self.name}: a delta to {position} at {self._position}")
        self._trace.arrived(now, count)
        self._position = position

    def done(self, now: float, message: Done) -> None:
        """Note the end. Raises BenchFailed if it is not the one that was asked for."""
        trace, usage, waiter = self._trace, message.usage, self.waiter
        if waiter is None or waiter.done():
            raise BenchFailed(f"{self.name}: an end of no generation")
        if message.position > self._position:  # control tokens without text have no delta
            self.grown(now, message.position)
        if message.reason != "length":
            raise BenchFailed(
                f"{self.name} ended with {message.reason}: {message.message or 'too early'}"
            )
        check_output(trace, self._job, self.name)
        if (usage.prompt, usage.output) != (trace.prompt, trace.output):
            raise BenchFailed(
                f"{self.name}: the server counts {usage.prompt} + {usage.output} tokens, "
                f"the client {trace.prompt} + {trace.output}"
            )
        trace.ended = now
        trace.cached, trace.computed = usage.cached, usage.computed
        trace.server_ttft_ms = usage.ttft_ms
        waiter.set_result(trace)
