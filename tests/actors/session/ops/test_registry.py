"""What holds for the handlers of all ops."""

import pytest

from ramify.actors.session.calls.toolbox import Toolbox
from ramify.actors.session.ops.registry import AT_ONCE, HANDLERS
from ramify.actors.session.queues.tasks import FrameRun
from ramify.protocol.wire import (
    Append,
    Drop,
    Fork,
    Generate,
    Join,
    Op,
    Open,
    Prune,
    Rollback,
    Select,
    Set,
)

OPS: list[tuple[Op, int]] = [
    (Append(id=1, text="x"), 1),
    (Append(id=1, branch=["a", "b"], text="x"), 2),
    (Generate(id=1), 1),
    (Generate(id=1, branch=["a", "b", "c"]), 3),
    (Generate(id=1, n=2), 3),  # the children, and the fork that makes them
    (Generate(id=1, n=1, as_=["a"]), 2),
    (Select(id=1, branch=["a", "b"], choices=["x"]), 2),
    (Fork(id=1, as_=["a", "b"]), 1),
    (Fork(id=1, branch=None, as_=["a"]), 1),
    (Rollback(id=1, to=0), 1),
    (Set(id=1), 1),
    (Drop(id=1, branch=["a", "b"]), 2),
    (Join(id=1, from_=["a", "b"]), 1),
    (Prune(id=1, from_=["a", "b"]), 1),
]


@pytest.mark.parametrize(("op", "count"), OPS)
def test_an_op_has_as_many_tasks_as_are_counted_before_they_are_made(op: Op, count: int) -> None:
    handler = HANDLERS[type(op)]
    tasks = handler.tasks(op, FrameRun(Open(client="c"), lambda: Toolbox(None)))
    assert len(tasks) == handler.count(op) == count
    assert all(task.op is op for task in tasks)


def test_every_op_has_one_handler() -> None:
    handled = {type(op) for op, _ in OPS}
    assert handled == set(HANDLERS)
    assert not handled & set(AT_ONCE)
    assert handled | set(AT_ONCE) == {
        kind for kind in Op.__subclasses__() if kind.__subclasses__() == []
    }
