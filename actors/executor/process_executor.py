"""The executor in a process of its own, seen from the engine: the default.

It can be ended whatever it does, and launching kernels never competes with sockets for the
interpreter lock.
"""

import asyncio

import anyio

from ramify.actors.executor.handle import ExecutorHandle, log
from ramify.actors.executor.messages import FromExecutor, SignOfLife, StartExecutor, ToExecutor
from ramify.actors.executor.spec import ExecutorSpec, ProgressCallback
from ramify.actors.kit.mailbox import MailboxClosed, MailboxFull
from ramify.actors.processes.child_process import ChildProcess
from ramify.actors.processes.messages import Loading, StartFailed, decoder, encoder
from ramify.protocol.messages import ExecutorMessage
from ramify.protocol.plan import ExecutorDown, ExecutorInfo, StepResult, StopExecutor

PROGRAM = "ramify.actors.executor.executor_program"


class ProcessExecutor(ExecutorHandle):
    """An executor in a child process. Made by `start`."""

    _child: ChildProcess[ToExecutor, FromExecutor]  # from `start` on

    def __init__(self, progress: ProgressCallback) -> None:
        super().__init__(self._taken)
        self._progress = progress
        self._watch: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, spec: ExecutorSpec, progress: ProgressCallback) -> "ProcessExecutor":
        """Start the process and wait until its executor is ready. Cancelled, it kills it."""
        self = cls(progress)
        self._child = await ChildProcess.start(
            "executor", PROGRAM, decoder(FromExecutor), encoder(), self._receive
        )
        self._watch = watch = asyncio.create_task(self._watch_process(), name="executor-watch")
        try:
            self._child.link.tell(StartExecutor(spec))
            await asyncio.wait([self._ready])
            self._ready.result()
        except BaseException:
            with anyio.CancelScope(shield=True):
                await self._abandon(watch)
            raise
        return self

    @property
    def pid(self) -> int:
        """The process' id."""
        return self._child.pid

    @property
    def expected(self) -> str | None:
        """A process gives signs of life also while it waits for a plan."""
        return super().expected or "the executor's process says nothing"

    def give_up(self, reason: str) -> None:
        super().give_up(reason)
        self._child.kill()

    async def stop(self, grace: float) -> bool:
        child = self._child
        assert self._watch is not None
        if self.alive:
            try:
                self.tell(StopExecutor())
            except (MailboxClosed, MailboxFull):
                child.kill()
        await asyncio.wait([self._watch], timeout=grace)
        if not self._watch.done():
            log.warning("the executor does not end: killing its process", grace_s=grace)
            child.kill()
        await asyncio.wait([self._watch])
        self._relay.close()
        return not child.killed and child.exit_code == 0

    def _send(self, message: ExecutorMessage) -> None:
        self._child.link.tell(message)

    def _taken(self) -> None:
        """The scheduler has a result: the process may send one more."""
        self._child.link.consumed()

    def _receive(self, message: FromExecutor) -> None:
        link = self._child.link
        match message:
            case StepResult():
                self._result(message)  # its credit goes back when the scheduler has taken it
                return
            case SignOfLife():
                self.signs += 1
            case Loading(what, done):
                self._progress(what, done)
            case ExecutorInfo():
                if not self._ready.done():
                    self._ready.set_result(message)
            case StartFailed():
                self._fail(message.message, message.exception("the executor"))
                link.close()
            case ExecutorDown(reason):
                self._fail(reason)
                link.close()
        link.consumed()

    async def _watch_process(self) -> None:
        """Wait for the end of the process and for what it had sent, then judge."""
        code = await self._child.ended()
        if code != 0 or not self._stopping:
            self._fail(self._child.explain(code))

    async def _abandon(self, watch: "asyncio.Task[None]") -> None:
        """Give up a start: no process, task or socket stays."""
        self.failure = "its start was given up"
        self._child.kill()
        await asyncio.wait([watch])
        self._relay.close()
