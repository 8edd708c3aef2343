"""The executor in a thread of the engine's process: `--executor thread`.

A step that hangs here ends the engine, because a thread cannot be ended: the default is the process
of `process_executor.py`.

The model is loaded and run by the same thread, because torch keeps settings per thread. Torch
releases the interpreter lock in its kernels, so sockets are served meanwhile.
"""

import asyncio
import queue
import threading
from collections import deque
from collections.abc import Callable

import anyio

from ramify.actors.executor.handle import ExecutorHandle
from ramify.actors.executor.runner import run
from ramify.actors.executor.spec import ExecutorSpec, ProgressCallback, build
from ramify.actors.kit.mailbox import MailboxFull
from ramify.protocol.messages import ExecutorMessage
from ramify.protocol.plan import ExecutorInfo, PicturesSeen, StepResult, StopExecutor

INBOX = 64  # messages; a scheduler keeps two in flight


class _Abandoned(Exception):
    """Raised in the thread, out of the progress callback: nobody waits for this load any more."""


class _ThreadInbox(queue.SimpleQueue[ExecutorMessage]):
    """The runner's inbox."""

    def take(self, timeout: float | None) -> ExecutorMessage | None:
        try:
            return self.get(timeout != 0, timeout)
        except queue.Empty:
            return None


class ThreadExecutor(ExecutorHandle):
    """An executor in a thread of this process. Made by `start`."""

    def __init__(self, spec: ExecutorSpec, progress: ProgressCallback) -> None:
        super().__init__()
        self._progress = progress
        self._inbox = _ThreadInbox()
        self._abandoned = False
        self._results: deque[StepResult | PicturesSeen] = deque()  # from the thread to the loop
        self._wake_sent = False
        self._ended: asyncio.Future[None] = self._loop.create_future()
        # A daemon: a step that hangs must not keep a process alive whose engine has given up.
        self._thread = threading.Thread(
            target=self._main, args=(spec,), name="ramify-executor", daemon=True
        )

    @classmethod
    async def start(cls, spec: ExecutorSpec, progress: ProgressCallback) -> "ThreadExecutor":
        """Start the thread and wait until its executor is ready.

        Cancelled, it returns at once; the thread ends at its next report of progress.
        """
        self = cls(spec, progress)
        self._thread.start()
        try:
            await asyncio.wait([self._ready])
            self._ready.result()
        except BaseException:
            self._abandoned = True
            self.failure = "its start was given up"
            self._inbox.put(StopExecutor())
            if self._ready.done():
                with anyio.CancelScope(shield=True):
                    await self._join()
            self._relay.close()
            raise
        return self

    async def stop(self, grace: float) -> bool:
        if self.alive:
            self._stopping = True
            self._inbox.put(StopExecutor())
        await asyncio.wait([self._ended], timeout=grace)
        ended = self._ended.done()
        if ended:
            await self._join()
        else:
            self._fail(f"its thread did not end within {grace:g} s")
        self._relay.close()
        return ended and self.failure is None

    @property
    def replaceable(self) -> bool:
        """A thread that hangs cannot be ended."""
        return self._ended.done()

    def give_up(self, reason: str) -> None:
        self._abandoned = True
        self._inbox.put(StopExecutor())  # should it ever come back
        super().give_up(reason)

    def _send(self, message: ExecutorMessage) -> None:
        if self._inbox.qsize() >= INBOX:
            raise MailboxFull(f"executor: {INBOX} messages wait")
        self._inbox.put(message)

    async def _join(self) -> None:
        await asyncio.shield(self._ended)
        self._thread.join()  # it has nothing left to do

    # In the thread

    def _main(self, spec: ExecutorSpec) -> None:
        try:
            executor = build(spec, self._report)
            try:
                self._post(self._loaded, executor.info)
                run(executor, self._inbox, self._hand_over)
            finally:
                executor.close()
        except _Abandoned:
            pass
        except BaseException as error:
            self._post(self._fail, f"{type(error).__name__}: {error}", error)
        finally:
            self._post(self._end)

    def _report(self, what: str, done: float) -> None:
        if self._abandoned:
            raise _Abandoned
        self._post(self._progress, what, done)

    def _hand_over(self, result: StepResult | PicturesSeen) -> None:
        """Several results that are ready together wake the loop once."""
        self._results.append(result)
        if not self._wake_sent:
            self._wake_sent = True
            self._post(self._collect)

    def _post(self, call: Callable[..., None], *args: object) -> None:
        try:
            self._loop.call_soon_threadsafe(call, *args)
        except RuntimeError:  # the loop is closed: the engine gave this thread up
            self._abandoned = True

    # On the loop

    def _loaded(self, info: ExecutorInfo) -> None:
        if not self._ready.done():
            self._ready.set_result(info)

    def _collect(self) -> None:
        self._wake_sent = False  # before the look: a result that comes now wakes the loop again
        while self._results:
            self._result(self._results.popleft())

    def _end(self) -> None:
        if not self._ended.done():
            self._ended.set_result(None)
