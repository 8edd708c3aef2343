"""The two clocks."""

import asyncio

from ramify.actors.kit.clock import ManualClock, MonotonicClock


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
