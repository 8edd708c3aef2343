"""What the engine holds of an executor, wherever it runs: an address, its info, and its end.

`thread_executor.py` and `process_executor.py` (with `executor_program.py`) differ in how messages get
there; everything that the rest of the engine sees of them is here.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from types import TracebackType
from typing import TypeVar

from ramify.actors.kit.log import get_log
from ramify.actors.kit.mailbox import Address, MailboxClosed, MailboxFull
from ramify.actors.kit.relay import Relay
from ramify.actors.processes.messages import NotStarted
from ramify.protocol.errors import RamifyError
from ramify.protocol.messages import ExecutorMessage, SchedulerEvent
from ramify.protocol.plan import ExecutorDown, ExecutorInfo, PicturesSeen, StepResult, StopExecutor

Self = TypeVar("Self", bound="ExecutorHandle")

log = get_log(__name__)


class ExecutorHandle(ABC):
    """A started executor. An `Address[ExecutorMessage]`; results go to the connected address.

    Every plan is answered by its StepResult, in order, or by one ExecutorDown for all that are
    outstanding. After `stop` has returned nothing more is delivered.
    """

    def __init__(self, delivered: Callable[[], None] | None = None) -> None:
        """`delivered` is called when a result has reached its address."""
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[ExecutorInfo] = self._loop.create_future()
        self._relay: Relay[SchedulerEvent] = Relay(delivered)
        self._delivered = delivered
        self._direct: Address[SchedulerEvent] | None = None  # results need not wait in the relay
        self._stopping = False
        self.failure: str | None = None  # why it is lost
        self._outstanding = 0  # plans without a result
        self.signs = 0  # of life: see `actors.watchdog`
        self.tower_signs = 0
        self._looks = 0  # pictures that the tower has yet to run on
        self._layers = 0  # that the tower had run when it was last heard

    @property
    def info(self) -> ExecutorInfo:
        """What the executor says of itself."""
        return self._ready.result()

    @property
    def alive(self) -> bool:
        """False once the executor has failed or was told to stop."""
        return self.failure is None and not self._stopping

    @property
    def replaceable(self) -> bool:
        """Whether nothing is left of it once it has failed and `stop` has returned."""
        return True

    @property
    def expected(self) -> str | None:
        """What the executor owes a sign of life for, in words; None if silence means nothing."""
        return "the executor has not finished its step" if self._outstanding else None

    @property
    def tower_expected(self) -> str | None:
        """The same of the tower, which may hang while steps go on."""
        return "the tower has not run a layer of a picture" if self._looks else None

    def give_up(self, reason: str) -> None:
        """The executor hangs: its results are not waited for any more."""
        self._fail(reason)

    def connect(self, results: Address[SchedulerEvent]) -> None:
        """Deliver results, also those that came before, to `results`. Once only."""
        self._relay.connect(results)
        if not self._relay:
            self._direct = results

    def tell(self, message: ExecutorMessage, /) -> None:
        """Queue a plan. Raises MailboxClosed once the executor has failed or is stopping.

        Raises MailboxFull when far more plans wait than a scheduler keeps in flight: its bug.
        """
        if not self.alive:
            raise MailboxClosed("executor")
        if isinstance(message, StopExecutor):
            self._stopping = True
        else:
            if not self._outstanding:
                self.signs += 1  # it is from now on that its silence counts
            self._outstanding += 1
            if message.looks:
                if not self._looks:
                    self.tower_signs += 1
                self._looks += len(message.looks)
        self._send(message)

    @abstractmethod
    async def stop(self, grace: float) -> bool:
        """Finish the plans told so far, then end. Idempotent.

        Gives up after `grace` seconds, with ExecutorDown: a process is killed; a thread cannot be
        and is left to end with its step. Returns whether the executor ended by itself, in order.
        """

    async def __aenter__(self: Self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop(grace=10.0 if error is None else 1.0)

    @abstractmethod
    def _send(self, message: ExecutorMessage) -> None:
        """Bring `message` to the executor."""

    def _result(self, result: StepResult | PicturesSeen) -> None:
        if isinstance(result, StepResult):
            self._outstanding -= 1
        else:
            self._heard_of_tower(result)
        self.signs += 1
        if self.failure is not None:
            return
        if self._direct is None:
            self._relay.tell(result)
            return
        try:
            self._direct.tell(result)
        except (MailboxFull, MailboxClosed):
            self._direct = None  # from now on by the relay, which waits for room and keeps the order
            self._relay.tell(result)
        else:
            if self._delivered is not None:
                self._delivered()

    def _heard_of_tower(self, seen: PicturesSeen) -> None:
        done = len(seen.keys) + len(seen.failed)
        self._looks -= done
        if done or seen.layers != self._layers:
            self._layers = seen.layers
            self.tower_signs += 1

    def _fail(self, reason: str, error: BaseException | None = None) -> None:
        """The executor is lost. Fails the start, or tells ExecutorDown. The first call counts."""
        if self.failure is not None:
            return
        self.failure = reason
        if self._ready.done():
            log.error("the executor failed", reason=reason, exc_info=error)
            self._relay.tell(ExecutorDown(reason))
        elif isinstance(error, RamifyError):
            self._ready.set_exception(error)
        else:
            failure = NotStarted(f"the executor did not start: {reason}")
            failure.__cause__ = error
            self._ready.set_exception(failure)
