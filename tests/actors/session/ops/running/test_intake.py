"""A frame is taken apart: what it costs and what is refused, without a session."""

from typing import Any, TypeVar

import pytest

from ramify.actors.calls.toolbox import Toolbox
from ramify.actors.kit.memory import Holdings
from ramify.actors.kit.turns import Steps
from ramify.actors.session.branches.tasks import FrameRun
from ramify.actors.session.ops import op_bytes
from ramify.actors.session.ops.running.queues import take_apart
from ramify.actors.session.sockets.clients import ReplyLog
from ramify.protocol import wire as w
from ramify.protocol.config import Limits
from ramify.protocol.errors import BadRequest, Forbidden, LimitExceeded

T = TypeVar("T")


def taken(
    *ops: Any, last: int = -1, write: bool = True, in_flight: int = 0, queued: int = 0, place: Any = 0,
    **limits: Any,
) -> list[list[Any]]:  # fmt: skip
    """The tasks of each op."""
    settings = Limits(**limits)
    reply_log = ReplyLog(settings, Holdings(settings).open(""))
    reply_log.last = last
    frame = FrameRun(w.Open(client="c"), lambda: Toolbox(()))
    found = whole(
        take_apart(
            ops, frame, reply_log, settings, write=write, in_flight=in_flight, queued=queued, place=place
        )
    )
    assert [op for op, _ in found] == list(ops)
    assert reply_log.last == last
    return [tasks for _, tasks in found]


def whole(steps: Steps[T]) -> T:
    """The result, when all is done."""
    while True:
        try:
            assert next(steps) >= 0
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]


def append(ident: int, *branches: str) -> w.Append:
    return w.Append(id=ident, tokens=[5], branch=list(branches) or "main")


def test_tasks_of_one_op_share_a_bill() -> None:
    op = append(1, "a", "b", "c")
    (tasks,) = taken(op)
    assert [task.branch for task in tasks] == ["a", "b", "c"]
    assert len({id(task.bill) for task in tasks}) == 1
    assert (tasks[0].bill.size, tasks[0].bill.left) == (op_bytes(op), 3)


def test_what_was_seen_or_never_waits_has_no_tasks() -> None:
    found = taken(append(1), append(2), w.Cancel(id=3), w.Credit(branch="a", upto=1), last=1)
    assert [len(tasks) for tasks in found] == [0, 1, 0, 0]


def test_ops_in_flight_are_counted_by_branch() -> None:
    three = append(1, "a", "b", "c")
    assert len(taken(three, in_flight=1, ops_in_flight=4)[0]) == 3
    with pytest.raises(LimitExceeded) as error:
        taken(three, in_flight=2, ops_in_flight=4)
    assert error.value.details == {"max": 4}
    with pytest.raises(LimitExceeded):
        taken(append(1), append(2), in_flight=3, ops_in_flight=4)
    assert len(taken(append(1), append(2), in_flight=2, ops_in_flight=4)) == 2


def test_a_tree_counts_each_time_that_it_is_asked_and_a_cancel_never() -> None:
    taken(w.Cancel(id=1), in_flight=9, ops_in_flight=4)
    with pytest.raises(LimitExceeded):
        taken(w.Tree(id=1), in_flight=4, ops_in_flight=4)
    taken(w.Tree(id=1), in_flight=3, ops_in_flight=4)
    with pytest.raises(LimitExceeded):
        taken(w.Tree(id=1), append(2), last=1, in_flight=3, ops_in_flight=4)
    taken(append(1), append(2), last=1, in_flight=3, ops_in_flight=4)


def test_bytes_that_wait_are_bounded_but_for_a_single_frame() -> None:
    size = op_bytes(append(1))
    taken(append(1), append(2), queued_op_bytes=size)
    taken(append(1), queued=size, queued_op_bytes=2 * size)
    with pytest.raises(LimitExceeded) as error:
        taken(append(1), append(2), queued=1, queued_op_bytes=2 * size)
    assert error.value.details == {"max": 2 * size}
    taken(append(1), last=1, queued=3 * size, queued_op_bytes=2 * size)  # it takes nothing


def test_a_viewer_may_ask_for_the_tree_alone() -> None:
    assert taken(w.Tree(id=1), write=False) == [[]]
    for op in (append(1), w.Cancel(id=1), w.Drop(id=1, branch="a")):
        with pytest.raises(Forbidden, match=f"`{type(op).__name__.lower()}`") as error:
            taken(op, write=False)
        assert error.value.details == {"id": 1}


def test_a_fault_names_its_place_in_the_clients_frame() -> None:
    bad = w.Append(id=2, text="a", tokens=[5])
    for place, path in ((0, "$[1]"), (3, "$[4]"), (None, "$.")):
        with pytest.raises(BadRequest) as error:
            taken(append(1), bad, place=place)
        assert path in str((error.value.message, error.value.details))


def test_ids_are_checked_though_nothing_of_the_op_waits() -> None:
    with pytest.raises(BadRequest):
        taken(w.Cancel(id=2), w.Cancel(id=1))
