"""The executor in a process of its own, seen from the engine: the default on a GPU.

Launching kernels then never competes with sockets for the interpreter lock. The process is
`python -m ramify.actors.executor.child`; it is started fresh, not forked, because torch has
threads. Both ends of the socket pair are anonymous, so nothing is left in the file system.

The end of the process, however it comes about, is seen twice: as its exit and as the end of the
link. The exit gives the reason; the link's end guarantees that all results sent before have been
delivered first.
"""

import asyncio
import contextlib
import signal
import socket
import sys

import anyio

from ramify.actors.executor.handle import ExecutorHandle, log
from ramify.actors.executor.spec import ExecutorSpec, ProgressCallback
from ramify.actors.executor.wire import (
    FromExecutor,
    LoadFailed,
    Loading,
    Start,
    ToExecutor,
    Waiting,
    encoder,
    from_executor,
)
from ramify.actors.kit.link import Link, open_link
from ramify.actors.kit.log import LogConfig
from ramify.actors.kit.mailbox import MailboxClosed, MailboxFull
from ramify.protocol.messages import ExecutorMessage
from ramify.protocol.plan import ExecutorDown, ExecutorInfo, StepResult, StopExecutor

CHILD = "ramify.actors.executor.child"
PARTING_SECONDS = 1.0  # between the two signs of the process' end


class ProcessExecutor(ExecutorHandle):
    """An executor in a child process. Made by `start`."""

    def __init__(self, process: asyncio.subprocess.Process, progress: ProgressCallback) -> None:
        super().__init__(self._delivered)
        self._process = process
        self._progress = progress
        self._link: Link[ToExecutor, FromExecutor] | None = None
        self._broken: Exception | None = None  # why the link ended
        self._killed = False
        self._watch: asyncio.Task[None] | None = None

    @classmethod
    async def start(
        cls, spec: ExecutorSpec, progress: ProgressCallback, log_config: LogConfig | None
    ) -> "ProcessExecutor":
        """Start the process and wait until its executor is ready. Cancelled, it kills it."""
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                process = await _spawn(theirs)
        except BaseException:
            ours.close()
            raise
        self = cls(process, progress)
        try:
            self._link = await open_link(
                "executor",
                ours,
                from_executor(),
                encoder(),
                on_message=self._receive,
                on_end=self._link_ended,
            )
            self._watch = asyncio.create_task(self._watch_process(), name="executor-watch")
            self._link.tell(Start(spec, log_config))
            await asyncio.wait([self._ready])
            self._ready.result()
        except BaseException:
            with anyio.CancelScope(shield=True):
                await self._abandon()
            raise
        return self

    @property
    def pid(self) -> int:
        """The process' id."""
        return self._process.pid

    @property
    def expected(self) -> str | None:
        """A process gives signs of life also while it waits for a plan."""
        return super().expected or "the executor's process says nothing"

    def give_up(self, reason: str) -> None:
        super().give_up(reason)
        self._kill()

    async def stop(self, grace: float) -> bool:
        assert self._link is not None
        assert self._watch is not None
        if self.alive:
            try:
                self.tell(StopExecutor())
            except (MailboxClosed, MailboxFull):
                self._kill()
        await asyncio.wait([self._watch], timeout=grace)
        if not self._watch.done():
            log.warning("the executor does not end: killing its process", grace_s=grace)
            self._kill()
        await asyncio.wait([self._watch])
        await self._link.wait_closed()
        self._relay.close()
        return not self._killed and self._process.returncode == 0

    def _send(self, message: ExecutorMessage) -> None:
        assert self._link is not None
        self._link.tell(message)

    def _delivered(self) -> None:
        assert self._link is not None
        self._link.consumed()

    def _receive(self, message: FromExecutor) -> None:
        assert self._link is not None
        match message:
            case StepResult():
                self._result(message)  # its credit goes back when the scheduler has taken it
                return
            case Waiting():
                self.signs += 1
            case Loading(what, done):
                self._progress(what, done)
            case ExecutorInfo():
                if not self._ready.done():
                    self._ready.set_result(message)
            case LoadFailed():
                self._fail(message.message, message.exception())
                self._link.close()
            case ExecutorDown(reason):
                self._fail(reason)
                self._link.close()
        self._link.consumed()

    def _link_ended(self, error: Exception | None) -> None:
        self._broken = error
        if self._process.returncode is None:
            self._loop.call_later(PARTING_SECONDS, self._kill)

    async def _watch_process(self) -> None:
        """Wait for the process' exit, then for what it had sent, then judge."""
        assert self._link is not None
        code = await self._process.wait()
        with anyio.move_on_after(PARTING_SECONDS):
            await self._link.wait_closed()
        self._link.abort()  # a grandchild may hold the other end open
        await self._link.wait_closed()
        if code != 0 or not self._stopping:
            self._fail(self._explain(code))

    def _explain(self, code: int) -> str:
        if code < 0:
            with contextlib.suppress(ValueError):
                return f"its process {self.pid} was killed by {signal.Signals(-code).name}"
        broken = f" ({self._broken})" if self._broken is not None else ""
        return f"its process {self.pid} ended with exit code {code}{broken}; see its log"

    def _kill(self) -> None:
        if self._process.returncode is None:
            self._killed = True
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def _abandon(self) -> None:
        """Give up a start: no process, task or socket stays."""
        self._failed = True
        self._kill()
        if self._watch is not None:
            await asyncio.wait([self._watch])
        else:
            await self._process.wait()
        self._relay.close()


async def _spawn(theirs: socket.socket) -> asyncio.subprocess.Process:
    """Start the child with its end of the socket pair.

    A session of its own: Ctrl-C in the terminal reaches the engine only, which then stops it.
    `-P`: the working directory is no place to import from.
    """
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", CHILD, str(theirs.fileno())),
        stdin=asyncio.subprocess.DEVNULL,
        pass_fds=(theirs.fileno(),),
        start_new_session=True,
    )
