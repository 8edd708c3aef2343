"""The loop around the core: order of what it tells, timers, failure, stop."""

import anyio
import pytest

from ramify.actors.kit.fanout import FanOut, Router
from ramify.actors.kit.mailbox import Mailbox, MailboxClosed, tell_each
from ramify.actors.scheduler.actor import SchedulerActor
from ramify.actors.scheduler.request import SchedulerError
from ramify.protocol.config import ScheduleConfig
from ramify.protocol.messages import RenewPool, Settle, Tokens
from ramify.protocol.plan import ExecutorDown, StepPlan, StepResult, unpack
from tests.manual_clock import ManualClock


class Listener:
    """An address that notes what it is told, and may answer."""

    def __init__(self, log, answer=None):
        self.log = log
        self.answer = answer

    def tell(self, message):
        self.log.append(message)
        if self.answer is not None:
            self.answer(message)

    def tell_all(self, messages):
        tell_each(self.tell, messages)


class Metrics:
    def __init__(self):
        self.steps = []
        self.pages = []
        self.ended = []

    def step(self, result, plan_seconds):
        self.steps.append((result.step, plan_seconds))

    def kv(self, free, evictable, referenced):
        self.pages.append((free, evictable, referenced))

    def finished(self, finished):
        self.ended.append(finished)

    def turn(self, running, waiting, retractions, twice, room):
        self.now = (running, waiting)
        self.shared = (dict(retractions), twice, room)


class Stage:
    """An actor between the fakes of `world`. `auto`: cache and executor answer at once."""

    def __init__(self, world, auto=True, **options):
        self.w = world(**options)
        self.log = []
        self.clock = ManualClock()
        self.mailbox = Mailbox("scheduler", 100)
        self.sessions = Router("sessions")
        self.done = anyio.Event()
        self.sessions.add(1, Listener(self.log, self._told))
        self.metrics = Metrics()
        self.actor = SchedulerActor(
            self.mailbox,
            self.w.info,
            ScheduleConfig(lookahead=4),
            Listener(self.log, self._settle if auto else None),
            Listener(self.log, self._plan if auto else None),
            FanOut(self.sessions),
            self.clock,
            self.metrics,
        )

    def _settle(self, settle):
        if isinstance(settle, RenewPool):
            self.w.cache.renew(settle.pages)
            return
        self.mailbox.tell(self.w.cache.settle(settle))

    def _plan(self, plan):
        self.w.executor.plans.append(plan)
        self.mailbox.tell(self.w.executor.run())

    def _told(self, tokens):
        if tokens.finished:
            self.done.set()


async def test_a_request_from_submit_to_finished(world, expected):
    stage = Stage(world)
    async with anyio.create_task_group() as tasks:
        await tasks.start(stage.actor.run)
        stage.mailbox.tell(stage.w.submit(max_tokens=6))
        with anyio.fail_after(60):
            await stage.done.wait()
        stage.mailbox.close()
    told = [m for m in stage.log if isinstance(m, Tokens)]
    got = [token for m in told for p in m.progress for token in unpack(p.tokens)]
    assert got == expected([1, 2, 3], 0, 6)
    assert [f.reason for f in stage.metrics.ended] == ["length"]
    assert [step for step, *_ in stage.metrics.steps][:6] == [1, 2, 3, 4, 5, 6]
    assert all(sum(pages) == 64 for pages in stage.metrics.pages)
    assert stage.metrics.shared == ({}, 0, 16)


async def test_the_plan_goes_first_then_settle_then_tokens(world):
    stage = Stage(world, auto=False)
    async with anyio.create_task_group() as tasks:
        await tasks.start(stage.actor.run)
        w = stage.w
        stage.mailbox.tell(w.submit(1, [1], max_tokens=9))
        stage.mailbox.tell(w.submit(2, [2], max_tokens=1))
        await anyio.wait_all_tasks_blocked()
        (settle,) = stage.log
        assert len(settle.acquires) == 2  # one Settle for all that was submitted
        stage.mailbox.tell(w.cache.settle(settle))
        await anyio.wait_all_tasks_blocked()
        w.executor.plans.append(stage.log[1])
        stage.log.clear()
        stage.mailbox.tell(w.executor.run())
        await anyio.wait_all_tasks_blocked()
        assert [type(m) for m in stage.log] == [StepPlan, Settle, Tokens]
        stage.mailbox.close()


async def test_a_deadline_passes_while_nothing_happens(world):
    stage = Stage(world, auto=False)
    async with anyio.create_task_group() as tasks:
        await tasks.start(stage.actor.run)
        now = stage.clock.now()
        stage.mailbox.tell(stage.w.submit(1, arrived=now, deadline=now + 50))
        await anyio.wait_all_tasks_blocked()
        stage.mailbox.tell(stage.w.cache.settle(stage.log.pop()))
        await anyio.wait_all_tasks_blocked()
        stage.mailbox.tell(stage.w.submit(2, [4], arrived=now, deadline=now + 9))  # an earlier one
        await anyio.wait_all_tasks_blocked()
        stage.mailbox.tell(stage.w.cache.settle(stage.log[-1]))
        await anyio.wait_all_tasks_blocked()
        stage.clock.advance(9)
        await anyio.wait_all_tasks_blocked()
        assert [(f.request & 255, f.reason) for f in stage.metrics.ended] == [(2, "deadline")]
        stage.clock.advance(41)
        await anyio.wait_all_tasks_blocked()
        # The Settle with the first end is not answered yet; final commits may follow it.
        assert [f.request & 255 for f in stage.metrics.ended] == [2, 1]
        stage.mailbox.close()


async def test_another_executor_takes_over(world, expected):
    stage = Stage(world)
    first = stage.actor._executor
    async with anyio.create_task_group() as tasks:
        await tasks.start(stage.actor.run)
        stage.actor.tell(ExecutorDown("out of memory"))
        assert stage.actor.down
        stage.mailbox.tell(stage.w.submit(max_tokens=6))
        await anyio.wait_all_tasks_blocked()
        assert stage.log == []
        log = []
        stage.actor.resume(Listener(log, stage._plan), stage.w.info)
        with anyio.fail_after(60):
            await stage.done.wait()
        stage.mailbox.close()
    assert stage.log[0] == RenewPool(64)
    assert not any(isinstance(message, StepPlan) for message in stage.log)
    assert [type(message) for message in log] == [StepPlan] * len(log)
    assert stage.actor._executor is not first
    assert [f.reason for f in stage.metrics.ended] == ["length"]


async def test_an_executor_that_is_dead_takes_no_plan(world):
    """Its ExecutorDown may come a moment later."""
    stage = Stage(world)

    def dead(plan):
        raise MailboxClosed("executor")

    stage.actor._executor = Listener([], dead)
    async with anyio.create_task_group() as tasks:
        await tasks.start(stage.actor.run)
        stage.mailbox.tell(stage.w.submit())
        await anyio.wait_all_tasks_blocked()
        stage.actor.tell(ExecutorDown("killed"))
        stage.actor.resume(Listener([], stage._plan), stage.w.info)
        with anyio.fail_after(60):
            await stage.done.wait()
        stage.mailbox.close()
    assert [f.reason for f in stage.metrics.ended] == ["length"]


async def test_an_unknown_step_raises(world):
    stage = Stage(world)
    stage.mailbox.tell(StepResult(3, b"", b"", 0, 0))
    with pytest.raises(SchedulerError, match="step 3"):
        await stage.actor.run()


async def test_a_closed_mailbox_stops_it(world):
    stage = Stage(world)
    stage.mailbox.close()
    with anyio.fail_after(60):
        await stage.actor.run()


async def test_tokens_for_a_session_that_is_gone_are_dropped(world):
    stage = Stage(world)
    async with anyio.create_task_group() as tasks:
        await tasks.start(stage.actor.run)
        stage.mailbox.tell(stage.w.submit(1, session=5))
        stage.mailbox.tell(stage.w.submit(1, max_tokens=9))
        with anyio.fail_after(60):
            await stage.done.wait()
        stage.mailbox.close()
    stage.w.cache.check_idle()


async def test_an_event_of_the_executor_is_handled_at_once(world):
    stage = Stage(world, auto=False)
    async with anyio.create_task_group() as tasks:
        await tasks.start(stage.actor.run)
        w = stage.w
        stage.mailbox.tell(w.submit(1, [1], max_tokens=9))
        await anyio.wait_all_tasks_blocked()
        stage.mailbox.tell(w.cache.settle(stage.log[0]))
        await anyio.wait_all_tasks_blocked()
        w.executor.plans.append(stage.log[1])
        stage.log.clear()
        stage.actor.tell(w.executor.run())
        assert [type(m) for m in stage.log] == [StepPlan, Settle, Tokens]
        stage.mailbox.close()


async def test_what_fails_at_once_is_raised_by_run(world):
    stage = Stage(world)

    async def report() -> None:
        await anyio.wait_all_tasks_blocked()
        stage.actor.tell(StepResult(3, b"", b"", 0, 0))

    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(report)
            with pytest.raises(SchedulerError, match="step 3"):
                await stage.actor.run()
