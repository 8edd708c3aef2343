"""The watchdog on steps: when readiness is lost, when it comes back, when it is over."""

import asyncio

import pytest

from ramify.actors.watchdog import (
    CPU_TIMEOUT_SECONDS,
    LOOK_SECONDS,
    OVERDUE_SECONDS,
    TIMEOUT_SECONDS,
    StepWatch,
    step_timeout,
    watch_executor,
)
from tests.manual_clock import ManualClock

STEP = "the executor has not finished its step"


class Executor:
    def __init__(self) -> None:
        self.alive = True
        self.expected: str | None = None
        self.signs = 0
        self.tower_expected: str | None = None
        self.tower_signs = 0
        self.given_up: list[str] = []

    def give_up(self, reason: str) -> None:
        self.given_up.append(reason)
        self.alive = False


def looks(watch: StepWatch, start: float, seconds: float, signs: int, expected: str | None = STEP):
    """The faults of so many seconds of looking."""
    count = int(seconds / LOOK_SECONDS)
    return [watch.look(expected, signs, start + LOOK_SECONDS * (i + 1)) for i in range(count)]


def test_a_step_that_does_not_come_back() -> None:
    watch = StepWatch(10.0, 0.0)
    assert watch.look(STEP, 1, 0.0) is None
    assert not any(looks(watch, 0.0, OVERDUE_SECONDS - LOOK_SECONDS, 1))
    assert looks(watch, OVERDUE_SECONDS - LOOK_SECONDS, LOOK_SECONDS, 1) == [f"{STEP} for 4 s"]
    assert not watch.over
    looks(watch, OVERDUE_SECONDS, 6.0, 1)
    assert watch.over


def test_silence_without_work_means_nothing() -> None:
    watch = StepWatch(10.0, 0.0)
    assert not any(looks(watch, 0.0, 60.0, 1, expected=None))
    assert not watch.over
    assert not any(looks(watch, 60.0, 3.5, 1))  # it counts from the step's start


def test_long_steps_of_late_are_healthy() -> None:
    """A large model on a CPU: one step of 6 s costs readiness, the next ones do not."""
    watch = StepWatch(600.0, 0.0)
    watch.look(STEP, 1, 0.0)
    assert any(looks(watch, 0.0, 6.0, 1))
    at = 6.0
    for signs in range(2, 6):
        assert watch.look(STEP, signs, at) is None
        assert not any(looks(watch, at, 6.0, signs))
        at += 6.0
    assert watch.look(STEP, 6, at) is None
    assert any(looks(watch, at, 14.0, 6))


def test_the_timeout_of_a_device() -> None:
    assert step_timeout(7.0, "cpu") == 7.0
    assert step_timeout(None, "cpu") == CPU_TIMEOUT_SECONDS
    assert step_timeout(None, "cuda:0") == TIMEOUT_SECONDS


async def turns(clock: ManualClock, seconds: float) -> None:
    for _ in range(int(seconds / LOOK_SECONDS)):
        clock.advance(LOOK_SECONDS)
        for _ in range(3):
            await asyncio.sleep(0)


async def test_the_watch_tells_and_gives_up(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    clock, executor = ManualClock(), Executor()
    told: list[str | None] = []
    task = asyncio.create_task(watch_executor(executor, 10.0, clock, told.append))
    await turns(clock, 20)
    executor.expected, executor.signs = STEP, 1
    await turns(clock, 5)
    assert told
    assert told[-1] is not None
    executor.signs += 1
    await turns(clock, 1)
    assert told[-1] is None
    assert not executor.given_up
    await turns(clock, 15)
    await task
    assert len(executor.given_up) == 1
    assert "--step-timeout allows (10 s)" in executor.given_up[0]
    assert [r.getMessage() for r in caplog.records] == [
        "the executor is overdue",
        "the executor goes on",
        "the executor is overdue",
    ]


async def test_a_tower_that_hangs_beside_steps_is_noticed() -> None:
    """Steps go on; each layer of the tower may take as long as one of them."""
    clock, executor = ManualClock(), Executor()
    executor.tower_expected = "the tower has not run a layer of a picture"
    told: list[str | None] = []
    task = asyncio.create_task(watch_executor(executor, 10.0, clock, told.append))
    for _ in range(6):
        executor.signs += 1
        executor.tower_signs += 1
        await turns(clock, 3)
    assert told == []
    for _ in range(4):
        executor.signs += 1
        await turns(clock, 3)
    await task
    assert executor.given_up == [
        "the tower has not run a layer of a picture for 10 s, longer than --step-timeout allows (10 s)"
    ]


async def test_the_watch_ends_with_its_executor() -> None:
    clock, executor = ManualClock(), Executor()
    task = asyncio.create_task(watch_executor(executor, 10.0, clock, lambda fault: None))
    await turns(clock, 1)
    executor.alive = False
    await turns(clock, 1)
    await task
