"""The scheduler's loop: drains the mailbox, then lets the core decide, in this order.

1. the next StepPlan to the executor: the device must never wait for anything below;
2. `Settle` to the cache;
3. `Tokens` to the sessions, a few of them per turn of the event loop;
4. metrics.

Mailbox: a full one means that sessions submit faster than the loop turns; `tell` raises in the
sender. The scheduler itself has at most `in_flight` plans in the executor's mailbox and a few
Settles in the cache's, so a full one there is a bug and ends the engine.
"""

from collections.abc import Callable, Mapping
from typing import Protocol

import anyio
from anyio.abc import TaskStatus

from ramify.actors.kit.clock import Clock
from ramify.actors.kit.fanout import Spread
from ramify.actors.kit.mailbox import Address, Mailbox, MailboxClosed
from ramify.actors.scheduler.core import Scheduler
from ramify.protocol.cluster import CopyIn, CopyOut, ReplicaLoad
from ramify.protocol.config import ScheduleConfig
from ramify.protocol.messages import (
    CacheMessage,
    ExecutorMessage,
    Finished,
    SchedulerEvent,
    SessionMessage,
    Settled,
)
from ramify.protocol.plan import ExecutorInfo, PicturesSeen, StepResult


class MetricsSink(Protocol):
    """The scheduler's metrics, reported after a step's work is done."""

    def step(self, result: StepResult, plan_seconds: float) -> None:
        """Report a step. `plan_seconds`: from its result's arrival to the next plan's departure."""

    def seen(self, seen: PicturesSeen) -> None:
        """Report pictures that the vision tower has run on."""

    def kv(self, free: int, evictable: int, referenced: int) -> None:
        """Report the pool's token slots after a Settled."""

    def finished(self, finished: Finished, /) -> None:
        """Report the end of a request."""

    def turn(
        self, running: int, waiting: int, retractions: Mapping[str, int], twice: int, room: int
    ) -> None:
        """Report the state after a turn. `running`, `waiting`: requests. `retractions`: by cause, and
        `twice`: tokens computed twice, since the start. `room`: prompt tokens that a step beside decodes
        may take.
        """


class SchedulerActor:
    def __init__(
        self,
        mailbox: Mailbox[SchedulerEvent],
        info: ExecutorInfo,
        config: ScheduleConfig,
        cache: Address[CacheMessage],
        executor: Address[ExecutorMessage],
        sessions: Spread[SessionMessage],
        clock: Clock,
        metrics: MetricsSink,
        copy: Callable[[CopyOut | CopyIn], None] = lambda what: None,
    ) -> None:
        """`copy`: copies blocks of host memory, and tells the scheduler of those that came."""
        self._mailbox = mailbox
        self._core = Scheduler(info, config)
        self._page_size = info.page_size  # of every executor
        self._cache = cache
        self._executor = executor
        self._sessions = sessions
        self._clock = clock
        self._metrics = metrics
        self._copy = copy
        self._failure: Exception | None = None
        self._alarm_at: float | None = None  # what the alarm sleeps for
        self._alarm_scope = anyio.CancelScope()

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Serve until the mailbox is closed.

        Raises SchedulerError if the cache or the executor contradicts a plan.
        """
        async with anyio.create_task_group() as tasks:
            await tasks.start(self._alarm)
            task_status.started()
            try:
                while True:
                    self._turn(await self._mailbox.drain())
            except MailboxClosed:
                pass
            except Exception as error:  # raised below as it is, not inside a group
                self._failure = error
            tasks.cancel_scope.cancel()
        if self._failure is not None:
            raise self._failure

    def load(self, heard: int) -> ReplicaLoad:
        """See `Scheduler.load`."""
        return self._core.load(heard)

    @property
    def down(self) -> bool:
        """Whether the executor has died and has no successor yet."""
        return self._core.lifecycle.down is not None

    def resume(self, executor: Address[ExecutorMessage], info: ExecutorInfo) -> None:
        """Continue with another executor. Call it while `down`."""
        self._executor = executor
        self.tell(info)

    def tell(self, event: SchedulerEvent, /) -> None:
        """Handle an executor's event now, in the caller's turn of the event loop.

        By way of the mailbox alone, a result waits until the sessions and sockets that are ready
        to run have run, and the device waits with it. Raises as the mailbox does.
        """
        events = self._mailbox.drain_with(event)
        try:
            self._turn(events)
        except Exception as error:  # `run` raises it
            self._failure = error
            self._mailbox.close()

    def _turn(self, events: list[SchedulerEvent]) -> None:
        """Handle `events` and send all that follows from them. Never awaits."""
        core, clock = self._core, self._clock
        now = clock.now()
        for event in events:
            core.handle(event, now)
        core.expire(now)
        if core.lifecycle.down is not None and (renewed := core.renewed()) is not None:
            self._cache.tell(renewed)
        while (plan := core.plan()) is not None:
            try:
                self._executor.tell(plan)
            except MailboxClosed:  # it has died: ExecutorDown is on its way
                break
        plan_seconds = clock.now() - now
        if (settle := core.settle(now)) is not None:
            self._cache.tell(settle)
        self._deliver()
        running, waiting, room = core.running, core.waiting, core.mixed_room
        for event in events:
            if type(event) is StepResult:
                self._metrics.step(event, plan_seconds)
            elif type(event) is PicturesSeen:
                self._metrics.seen(event)
            elif type(event) is Settled:
                size = self._page_size
                self._metrics.kv(event.free * size, event.evictable * size, event.referenced * size)
        lifecycle = core.lifecycle
        self._metrics.turn(running, waiting, lifecycle.retractions, lifecycle.computed_twice, room)
        deadline = core.next_deadline()
        if deadline is not None and (self._alarm_at is None or deadline < self._alarm_at):
            self._alarm_scope.cancel()

    def _deliver(self) -> None:
        told = self._core.deliver()
        self._sessions.put(told)
        for _, tokens in told:
            for finished in tokens.finished:
                self._metrics.finished(finished)
        exchange = self._core.exchange
        while exchange.answers:
            answer = exchange.answers.pop(0)
            self._sessions.put([(answer.session, answer)])
        while exchange.copies:
            self._copy(exchange.copies.pop(0))
        self._sessions.start()

    async def _alarm(self, *, task_status: TaskStatus[None]) -> None:
        """Run a turn when the earliest deadline passes, for an engine where nothing else happens."""
        task_status.started()
        while True:
            self._alarm_at = deadline = self._core.next_deadline()
            with anyio.CancelScope() as self._alarm_scope:
                if deadline is None:
                    await anyio.sleep_forever()
                else:
                    await self._clock.sleep_until(deadline)
                    self._turn([])
