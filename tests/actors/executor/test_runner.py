"""The executor's loop, with a device that a test drives by hand."""

from collections import deque

import pytest

from ramify.actors.executor.runner import IN_FLIGHT, run
from ramify.gpu.executors.base import BadLogits, Counters, PictureTower
from ramify.gpu.executors.fake import FakeExecutor
from ramify.gpu.executors.fake_tower import FakeTower
from ramify.protocol.messages import ExecutorMessage
from ramify.protocol.pictures import Picture, PictureLook
from ramify.protocol.plan import (
    ExecutorInfo,
    PicturesSeen,
    StepPlan,
    StepResult,
    StopExecutor,
    pack,
    unpack,
)


class Device:
    """Writes down what happens. A step is done once somebody waits for it, or `polls` looks later.

    It is also the inbox and the receiver of results: a test reads one list of events.
    """

    info: ExecutorInfo

    def __init__(self, script: list[ExecutorMessage | None], polls: int = 0) -> None:
        self.script = deque(script)  # None: nothing is in the inbox at this moment
        self.polls = polls
        self.events: list[str] = []
        self.counters = Counters()
        self.tower: PictureTower | None = None

    def take(self, timeout: float | None) -> ExecutorMessage | None:
        if timeout is None:
            while self.script and self.script[0] is None:
                self.script.popleft()
        return self.script.popleft() if self.script else None

    def launch(self, plan: StepPlan) -> "Step":
        self.events.append(f"launch {plan.step}")
        return Step(self, plan.step)

    def send(self, result: StepResult | PicturesSeen) -> None:
        if isinstance(result, PicturesSeen):
            self.events.append("seen")
        else:
            self.events.append(f"send {result.step}")

    def close(self) -> None:
        raise AssertionError("the runner does not own the executor")


class Step:
    def __init__(self, device: Device, number: int) -> None:
        self.device = device
        self.number = number
        self.looks = 0

    def ready(self) -> bool:
        self.looks += 1
        return self.looks > self.device.polls

    def result(self) -> StepResult:
        if self.looks <= self.device.polls:
            self.device.events.append(f"wait {self.number}")
        return StepResult(self.number, b"", b"", 0, 0)


def plans(*numbers: int) -> list[ExecutorMessage | None]:
    return [StepPlan(number) for number in numbers]


def test_ready_steps_are_reported_before_the_next_is_launched() -> None:
    device = Device([*plans(1, 2), StopExecutor()], polls=0)
    run(device, device, device.send)
    assert device.events == ["launch 1", "send 1", "launch 2", "send 2"]


def test_next_plan_is_launched_while_a_step_runs() -> None:
    device = Device([*plans(1, 2, 3, 4), StopExecutor()], polls=1000)
    run(device, device, device.send)
    assert device.events == [
        *("launch 1", "launch 2", "wait 1", "send 1"),
        *("launch 3", "wait 2", "send 2"),
        *("launch 4", "wait 3", "send 3"),
        *("wait 4", "send 4"),
    ]


def test_lone_step_is_reported_when_done_without_a_message() -> None:
    device = Device([StepPlan(1), None, None, None, None, None, StepPlan(2), StopExecutor()], polls=3)
    run(device, device, device.send)
    assert device.events == ["launch 1", "send 1", "launch 2", "wait 2", "send 2"]


def test_message_ends_the_wait_for_a_lone_step() -> None:
    device = Device([StepPlan(1), None, None, StepPlan(2), StopExecutor()], polls=1000)
    run(device, device, device.send)
    assert device.events[:2] == ["launch 1", "launch 2"]


def test_news_of_pictures_is_sent_while_no_step_runs() -> None:
    """The inbox is asked again and again while the tower runs; then it is waited for."""
    device = Device([StepPlan(1), None, None, StepPlan(2), StopExecutor()], polls=0)
    device.tower = tower = FakeTower(0.0)
    tower.take(StepPlan(1, looks=[PictureLook(b"a", Picture(1, 1, b"abc"))]))
    run(device, device, device.send)
    assert device.events == ["seen", "launch 1", "send 1", "launch 2", "send 2"]
    assert not tower.busy


def test_stop_finishes_what_was_launched() -> None:
    device = Device([*plans(1), StopExecutor(), *plans(2)], polls=1000)
    run(device, device, device.send)
    assert device.events == ["launch 1", "wait 1", "send 1"]


@pytest.mark.parametrize("polls", [0, 1, 2, 5, 1000])
def test_never_more_than_two_in_flight_and_always_in_order(polls: int) -> None:
    script: list[ExecutorMessage | None] = []
    for number in range(30):
        script += [StepPlan(number), *[None] * (number % 4)]
    device = Device([*script, StopExecutor()], polls)
    run(device, device, device.send)
    in_flight = 0
    for event in device.events:
        in_flight += event.startswith("launch")
        in_flight -= event.startswith("send")
        assert in_flight <= IN_FLIGHT
    assert [e for e in device.events if e.startswith("send")] == [f"send {n}" for n in range(30)]


def test_bad_logits_are_a_result_and_the_loop_goes_on() -> None:
    class Bad(Step):
        def result(self) -> StepResult:
            result = StepResult(self.number, pack([0, 1]), pack([5, -1]), 2, 0)
            raise BadLogits([1], [77], result)

    class BadDevice(Device):
        def launch(self, plan: StepPlan) -> Step:
            return Bad(self, plan.step) if plan.step == 1 else super().launch(plan)

    device = BadDevice([*plans(1, 2), StopExecutor()])
    sent: list[StepResult | PicturesSeen] = []
    run(device, device, sent.append)
    results = [result for result in sent if isinstance(result, StepResult)]
    assert [result.step for result in results] == [1, 2]
    assert list(unpack(results[0].tokens)) == [5, -1]


def test_error_of_a_launch_ends_the_loop() -> None:
    executor = FakeExecutor()
    device = Device([StepPlan(1), StepPlan(2, decodes=pack([3]))])
    with pytest.raises(Exception, match="row"):
        run(executor, device, device.send)
    assert device.events == ["send 1"]
