"""Op queues: FIFO for each branch, independent between branches."""

from ramify.actors.session.program import Program


class Op:
    def __init__(self, *touched: str) -> None:
        self.touched = touched


def test_a_task_runs_when_it_is_first_everywhere() -> None:
    program: Program[Op] = Program()
    first, fork, other, last = Op("a"), Op("a", "b"), Op("c"), Op("b")
    for op in (first, fork, other, last):
        program.add(op)
    assert [program.start(op) for op in (first, fork, other, last)] == [True, False, True, False]
    assert program.finish(first) == [fork]
    assert program.start(fork)
    assert not program.start(fork)  # once
    assert program.finish(fork) == [last]
    program.finish(other)
    assert program.start(last)
    program.finish(last)
    assert len(program) == 0
    assert program.on() == []


def test_a_waiting_task_can_be_taken_out() -> None:
    program: Program[Op] = Program()
    running, fork, behind = Op("a"), Op("a", "b"), Op("b")
    for op in (running, fork, behind):
        program.add(op)
    program.start(running)
    assert program.finish(fork) == [behind]  # it was first on b, not on a
    assert program.start(behind)
    assert program.running(running)
    assert program.behind("a") == 1
