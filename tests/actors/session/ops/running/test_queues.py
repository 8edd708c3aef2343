"""Op queues: FIFO for each branch, independent between branches."""

from typing import Any

from ramify.actors.session.ops.running.queues import OpQueues


class Op:
    def __init__(self, *touched: str) -> None:
        self.touched = touched


def test_a_task_runs_when_it_is_first_everywhere() -> None:
    queues: Any = OpQueues()
    first, fork, other, last = Op("a"), Op("a", "b"), Op("c"), Op("b")
    for op in (first, fork, other, last):
        queues.add(op)
    assert [queues.start(op) for op in (first, fork, other, last)] == [True, False, True, False]
    assert queues.finish(first) == [fork]
    assert queues.start(fork)
    assert not queues.start(fork)  # once
    assert queues.finish(fork) == [last]
    queues.finish(other)
    assert queues.start(last)
    queues.finish(last)
    assert len(queues) == 0
    assert queues.on() == []
    assert queues._queues == {}  # names that clients made up are forgotten


def test_a_waiting_task_can_be_taken_out() -> None:
    queues: Any = OpQueues()
    running, fork, behind = Op("a"), Op("a", "b"), Op("b")
    for op in (running, fork, behind):
        queues.add(op)
    queues.start(running)
    assert queues.finish(fork) == [behind]  # it was first on b, not on a
    assert queues.start(behind)
    assert queues.running(running)
    assert queues.behind("a") == 1


def test_queues_know_who_is_in_them_and_in_which_order() -> None:
    queues: Any = OpQueues()
    one, two, three, stranger = Op("a"), Op("a", "b"), Op("b", "a"), Op("a")
    for op in (one, two, three):
        queues.add(op)
    assert (len(queues), one in queues, stranger in queues) == (3, True, False)
    assert [queues.behind(name) for name in "abc"] == [3, 2, 0]
    assert (queues.first("a"), queues.first("b"), queues.first("c")) == (one, two, None)
    assert (queues.ahead(three, "a"), queues.ahead(three, "b"), queues.ahead(one, "a")) == (
        [one, two],
        [two],
        [],
    )
    assert queues.on(["b"]) == [two, three]
    assert queues.on(["b", "a", "b"]) == [two, three, one]
    assert queues.on(["c"]) == []
    assert queues.on() == [one, two, three]
    assert not queues.running(one)
    assert queues.start(one)
    assert (queues.running(one), queues.running(two)) == (True, False)
    assert queues.finish(one) == [two]  # it was the first on b already
