"""The two clocks."""

import asyncio

from ramify.actors.kit.clock import MonotonicClock
from tests.manual_clock import ManualClock


async def test_monotonic_clock_moves_and_sleeps() -> None:
    clock = MonotonicClock()
    start = clock.now()
    await clock.sleep_until(start + 0.002)
    assert clock.now() >= start + 0.002
    await clock.sleep_until(start)  # has passed


async def test_manual_clock_wakes_sleepers_in_the_order_of_their_times() -> None:
    clock = ManualClock(start=100.0)
    woken: list[str] = []

    async def sleep(name: str, when: float) -> None:
        await clock.sleep_until(when)
        woken.append(name)

    tasks = [
        asyncio.create_task(sleep(name, when))
        for name, when in (("late", 103.0), ("early", 101.0), ("same", 101.0), ("past", 99.0))
    ]
    for _ in range(3):
        await asyncio.sleep(0)
    assert woken == ["past"]
    clock.advance(1.0)
    assert clock.now() == 101.0
    await asyncio.gather(*tasks[1:3])
    assert woken == ["past", "early", "same"]
    clock.advance(5.0)
    await tasks[0]
    assert woken[-1] == "late"


async def test_monotonic_clock_calls_unless_cancelled() -> None:
    clock = MonotonicClock()
    called = asyncio.Event()
    cancelled: list[str] = []
    clock.call_at(clock.now() + 0.001, lambda: cancelled.append("no")).cancel()
    clock.call_at(clock.now() + 0.002, called.set)
    await asyncio.wait_for(called.wait(), 60)
    assert cancelled == []


def test_manual_clock_calls_what_is_due_in_order() -> None:
    clock = ManualClock(start=0.0)
    calls: list[str] = []
    clock.call_at(2.0, lambda: calls.append("second"))
    clock.call_at(1.0, lambda: calls.append("first"))
    timer = clock.call_at(1.5, lambda: calls.append("cancelled"))
    clock.call_at(9.0, lambda: calls.append("later"))
    timer.cancel()
    clock.advance(0.5)
    assert calls == []
    clock.advance(2.0)
    assert calls == ["first", "second"]
    timer.cancel()
