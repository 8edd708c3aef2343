"""A frame is checked as a whole before any op of it runs."""

from collections.abc import Callable
from typing import Any

from ramify.protocol import wire as w
from ramify.protocol.config import Limits


def codes(client: Any, *idents: int) -> list[str]:
    """How each op ended: the error's code, or the type of its reply."""
    found = []
    for ident in idents:
        (reply,) = client.replies[ident]
        found.append(reply.code if isinstance(reply, w.Error) else type(reply).__name__.lower())
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
