"""How often a process is started again, how long is waited before, and what is said in the end."""

import asyncio

import anyio
import pytest

from ramify.actors.processes.messages import NotStarted
from ramify.actors.processes.supervisor import Attempts, BackOff, Deaths, Ended, Policy, keep

FAILED, SERVED = Ended("no memory", False), Ended("killed", True)


def test_pauses_double_up_to_the_most() -> None:
    pauses = BackOff(0.5, 3.0)
    assert [pauses.failed() for _ in range(5)] == [0.5, 1.0, 2.0, 3.0, 3.0]
    assert pauses.failures == 5
    pauses.succeeded()
    assert (pauses.failures, pauses.failed()) == (0, 0.5)
    assert [pauses.failed() for _ in range(5000)][-1] == 3.0


def test_a_first_start_has_fewer_attempts_than_a_replacement() -> None:
    with pytest.raises(NotStarted, match=r"^it did not start: no memory$"):
        Attempts("it", Policy(trials=1)).ended(FAILED, 0.0)
    again = Attempts("it", Policy(trials=1, attempts=3))
    assert again.ended(SERVED, 9.0) == 0.0
    assert [again.ended(FAILED, 0.0), again.next(), again.ended(FAILED, 0.0)] == [0.5, "2 of 3", 1.0]
    assert again.ended(SERVED, 9.0) == 0.0  # and all of them are there again
    assert [again.ended(FAILED, 0.0), again.ended(FAILED, 0.0)] == [0.5, 1.0]
    with pytest.raises(NotStarted, match=r"^it could not be started 3 times in a row; last: no memory$"):
        again.ended(FAILED, 0.0)


def test_where_others_have_served_it_counts_as_a_replacement() -> None:
    attempts = Attempts("it", Policy(trials=2, attempts=None))
    assert [attempts.ended(FAILED, 0.0, proven=True) for _ in range(9)][-1] == 30.0
    assert (attempts.next(proven=True), attempts.next()) == ("10", "10 of 2")


def test_one_that_ends_soon_after_its_start_is_a_failure() -> None:
    attempts = Attempts("it", Policy(trials=None, steady=60.0, first=1.0))
    assert [attempts.ended(SERVED, s) for s in (5.0, 59.0, 61.0, 1.0)] == [1.0, 2.0, 0.0, 1.0]


def test_deaths_count_within_a_time() -> None:
    deaths = Deaths(2, 60.0)
    assert [deaths.too_many(now) for now in (0.0, 30.0, 60.0, 61.0, 125.0)] == [
        False, False, False, True, False,
    ]  # fmt: skip


class Runs:
    """What each start gives: an end, or an exception."""

    def __init__(self, *ends: Ended | Exception) -> None:
        self.left = list(ends)

    async def __call__(self) -> Ended:
        end = self.left.pop(0)
        if isinstance(end, Exception):
            raise end
        return end


async def test_one_follows_the_other_while_it_is_wanted() -> None:
    runs = Runs(SERVED, OSError("no process is left"), SERVED, FAILED)
    await keep(runs, Attempts("it", Policy(first=0.0)), wanted=lambda: len(runs.left) > 1)
    assert runs.left == [FAILED]
    failing = Runs(OSError("no process is left"))
    with pytest.raises(NotStarted, match="no process is left"):
        await keep(failing, Attempts("it", Policy(trials=1)))
    with pytest.raises(ValueError, match="a bug"):
        await keep(Runs(ValueError("a bug")), Attempts("it", Policy()))


async def test_a_stop_ends_the_pause_and_no_other_one_starts() -> None:
    stop, runs = asyncio.Event(), Runs(FAILED, SERVED)
    async with anyio.create_task_group() as group:
        group.start_soon(lambda: keep(runs, Attempts("it", Policy(first=1e6, most=1e6)), stop=stop))
        await anyio.wait_all_tasks_blocked()
        assert len(runs.left) == 1
        stop.set()
    assert len(runs.left) == 1
