"""A frame is checked as a whole before any op of it runs."""

from collections.abc import Callable
from typing import Any

from ramify.actors.calls.toolbox import Toolbox
from ramify.actors.session.branches.tasks import ON_THE_LOOP, FrameRun, Kind, Task
from ramify.protocol import wire as w
from ramify.protocol.config import Limits


def codes(client: Any, *idents: int) -> list[str]:
    """How each op ended: the error's code, or the type of its reply."""
    found = []
    for ident in idents:
        (reply,) = client.replies[ident]
        found.append(reply.code if isinstance(reply, w.Error) else type(reply).__struct_config__.tag)
    return found


def test_ids_that_do_not_increase_refuse_the_frame(sim: Callable[..., Any]) -> None:
    engine = sim()
    client = engine.session()
    client.send(w.Append(id=3, tokens=[5, 6]), w.Append(id=2, tokens=[7]), w.Fork(id=5, as_=["a"]))
    engine.pump()
    assert codes(client, 2, 3, 5) == ["bad_request", "skipped", "skipped"]
    branches = engine.cores[1].state.branches
    assert set(branches) == {"main"}
    assert branches["main"].position == 0
    client.send(w.Append(id=3, tokens=[5, 6]), w.Append(id=4, tokens=[7]))  # none of them was used
    engine.pump()
    assert branches["main"].position == 3


def test_one_id_twice_in_a_frame_refuses_it(sim: Callable[..., Any]) -> None:
    engine = sim()
    client = engine.session()
    refused: list[w.Error] = []
    receive = client.receive

    def noting(messages: list[Any]) -> None:
        refused.extend(message for message in messages if isinstance(message, w.Error))
        receive(messages)

    client.receive = noting
    client.send(w.Append(id=1, tokens=[5]), w.Append(id=1, tokens=[6]))
    engine.pump()
    assert {error.code for error in refused} <= {"bad_request", "skipped"}
    assert refused
    assert engine.cores[1].state.branches["main"].position == 0


def test_ops_in_flight_are_bounded_and_the_last_one_that_fits_runs(sim: Callable[..., Any]) -> None:
    engine = sim(limits=Limits(ops_in_flight=4))
    client = engine.session()
    client.send(*(w.Append(id=i, tokens=[5]) for i in (1, 2, 3, 4)))
    engine.pump()
    assert codes(client, 1, 2, 3, 4) == ["ok"] * 4
    client.send(*(w.Append(id=i, tokens=[5]) for i in (5, 6, 7, 8, 9)))
    engine.pump()
    assert set(codes(client, 5, 6, 7, 8, 9)) <= {"limit", "skipped"}
    assert "limit" in codes(client, 5, 6, 7, 8, 9)
    client.send(w.Append(id=10, tokens=[5]), w.Cancel(id=11))
    engine.pump()
    assert codes(client, 10, 11) == ["ok", "ok"]
    assert engine.cores[1].state.branches["main"].position == 5


def test_a_viewer_may_look_and_leave_only(sim: Callable[..., Any]) -> None:
    engine = sim()
    client = engine.session()
    client.send(w.Append(id=1, tokens=[5]))
    engine.pump()
    core = engine.cores[1]
    for subscriber in core.subscribers.values():
        subscriber.write = False
    client.send(w.Append(id=2, tokens=[6]), w.Tree(id=3))
    engine.pump()
    assert codes(client, 2, 3) == ["forbidden", "skipped"]
    assert core.state.branches["main"].position == 1
    client.send(w.Tree(id=4))
    engine.pump()
    assert codes(client, 4) == ["state"]


def test_a_task_touches_each_branch_once_and_starts_with_nothing() -> None:
    frame = FrameRun(w.Open(client="c"), lambda: Toolbox(()))
    op = w.Generate(id=1, max_tokens=9)
    task = Task(Kind("x", generates=True), op, frame, "a", ["b", "a", "b"], expects=9, children=["c"])
    assert (task.touched, task.children, task.index, task.branch) == (("b", "a"), ("c",), 0, "a")
    assert (task.shared, task.spared, task.deadline_ms, task.race) == (None, frozenset(), None, None)
    assert (task.scored, task.arrived, task.bill, task.expects) == ((), 0.0, None, 9)
    kind = Kind("x")
    assert kind[1:] == (False,) * 6


def test_stop_strings_of_an_op_are_prepared_once_a_frame() -> None:
    frame = FrameRun(w.Open(client="c"), lambda: Toolbox(()))
    op, other = w.Generate(id=1, stop=["a"]), w.Generate(id=2, stop=["b"])
    assert frame.stops(op) is frame.stops(op)
    assert frame.stops(other) is not frame.stops(op)
    assert (frame.client, frame.failed, frame.prompts) == ("c", {}, {})


def test_what_may_be_tokenized_on_the_loop_is_counted_from_turn_to_turn() -> None:
    frame = FrameRun(w.Open(client="c"), lambda: Toolbox(()))
    assert ON_THE_LOOP == 4096
    assert frame.spend(4000, 0.0)  # the first turn may be at any time
    assert frame.spend(96, 0.0)
    assert not frame.spend(1, 0.0)
    assert frame.spend(0, 0.0)
    assert not frame.spend(4097, 1.0)
    assert frame.spend(4096, 1.0)  # what was refused took nothing
