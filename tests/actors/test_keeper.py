"""The keeper: which executors it starts, when, and when it gives up."""

from collections.abc import Callable
from typing import Any

import anyio
import msgspec
import pytest

from ramify.actors import keeper as keeping
from ramify.actors.keeper import ExecutorKeeper, ExecutorLost
from ramify.actors.kit.clock import MonotonicClock
from ramify.actors.processes.messages import NotStarted
from ramify.protocol.plan import ExecutorInfo

INFO = ExecutorInfo(
    model="fake", architecture="Fake", parameters=1, vocab_size=9, context=9, page_size=1, pages=9,
    max_rows=2, step_tokens=16, device="cpu", dtype="float32", attention="fake", eos_token_ids=[],
    kv_bytes_per_token=1, load_seconds=0.0,
)  # fmt: skip


class Executor:
    expected = tower_expected = None
    signs = tower_signs = 0

    def __init__(self, **more: Any) -> None:
        self.info = msgspec.structs.replace(INFO, **more)
        self.failure: str | None = None
        self.replaceable = True
        self.told: Any = None
        self.stopped = False

    @property
    def alive(self) -> bool:
        return self.failure is None and not self.stopped

    def connect(self, results: Any) -> None:
        self.told = results

    async def stop(self, grace: float) -> bool:
        self.stopped = True
        return False


class Scheduler:
    down = True

    def __init__(self) -> None:
        self.executors: list[Any] = []

    def resume(self, executor: Any, info: ExecutorInfo) -> None:
        self.executors.append((executor, info.pages))


class Kept:
    """`starts`: what each start gives: an executor, or an exception."""

    def __init__(self, *starts: Any) -> None:
        self.first = Executor()
        self.scheduler = Scheduler()
        self.faults: list[str | None] = []
        self.deaths = 0
        self.starts = list(starts)
        self.keeper = ExecutorKeeper(
            self.first,  # type: ignore[arg-type]
            self._start,
            self.scheduler,  # type: ignore[arg-type]
            timeout=60.0,
            clock=MonotonicClock(),
            faulty=self.faults.append,
            died=self._died,
        )

    async def _start(self, progress: Callable[[str, float], None]) -> Any:
        progress("reading weights", 0.5)
        started = self.starts.pop(0)
        if isinstance(started, Exception):
            raise started
        return started

    def _died(self) -> None:
        self.deaths += 1


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ramify.actors.watchdog.LOOK_SECONDS", 0.001)
    monkeypatch.setattr(keeping, "BACK_OFF_SECONDS", 0.0001)


async def test_another_executor_takes_the_place_of_one_that_died() -> None:
    second, third = Executor(pages=7, state_slots=8, window_pages=6), Executor()
    kept = Kept(second, NotStarted("no memory"), third)
    kept.first.failure = "killed"
    with anyio.fail_after(60):
        async with anyio.create_task_group() as group:
            group.start_soon(kept.keeper.run)
            while kept.faults[-1:] != [None]:
                await anyio.sleep(0.001)
            assert kept.keeper.executor is second  # type: ignore[comparison-overlap]
            second.failure = "killed again"
            while len(kept.scheduler.executors) < 2:
                await anyio.sleep(0.001)
            third.stopped = True  # the engine stops: `run` returns
    assert kept.scheduler.executors == [(second, 7), (third, 9)]
    assert second.told is third.told is kept.scheduler
    assert kept.first.stopped
    assert kept.deaths == 2
    assert kept.faults[0] == "the executor died: killed"
    assert kept.faults[1] == "the executor died (killed), another one starts: reading weights 50%"


async def test_four_starts_that_fail_are_enough() -> None:
    kept = Kept(*(NotStarted("no memory") for _ in range(4)))
    kept.first.failure = "killed"
    with pytest.raises(NotStarted, match=r"4 times in a row; last: no memory .*died: killed"):
        await kept.keeper.run()
    assert not kept.starts


async def test_a_thread_that_hangs_is_not_replaced() -> None:
    kept = Kept()
    kept.first.failure, kept.first.replaceable = "it hangs", False
    with pytest.raises(ExecutorLost, match="it hangs, in a thread, which cannot be ended"):
        await kept.keeper.run()


async def test_another_model_does_not_take_over() -> None:
    kept = Kept(Executor(context=8, load_seconds=3.0))
    kept.first.failure = "killed"
    with pytest.raises(ExecutorLost, match="differs from the one that died in its context"):
        await kept.keeper.run()
    assert not kept.scheduler.executors


async def test_layers_with_a_window_that_would_keep_all_do_not_take_over() -> None:
    kept = Kept(Executor())
    kept.first.info = msgspec.structs.replace(INFO, window=4, window_pages=8, window_bytes=2)
    kept.first.failure = "killed"
    with pytest.raises(ExecutorLost, match=r"in its window, window_bytes: .*give --window-tokens"):
        await kept.keeper.run()
