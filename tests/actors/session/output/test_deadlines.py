"""`deadline_ms` counts from the op's arrival, wherever the generation waits."""

from collections.abc import Callable
from typing import Any

from ramify.protocol import messages as m
from ramify.protocol import wire as w
from ramify.protocol.config import Limits


def at(engine: Any, seconds: float) -> None:
    """So much later, the session's timer rings."""
    engine.now += seconds
    engine.post_session(1, m.Tick())
    engine.pump()


def wake_at(engine: Any) -> float | None:
    when: float | None = engine.cores[1].state.out.wake_at
    return when


def test_behind_the_sessions_other_generations(sim: Callable[..., Any]) -> None:
    """`limits.running`: it has a place on its branch, so it ends with `done`."""
    engine = sim(eos_every=0, limits=Limits(running=1), context=4096)
    client = engine.session()
    client.send(
        w.Append(id=1, text="x"),
        w.Fork(id=2, as_=["a"]),
        w.Generate(id=3, max_tokens=400),
        w.Generate(id=4, branch="a", max_tokens=5, deadline_ms=500),
        w.Generate(id=5, branch="a", max_tokens=5),
    )
    engine.pump(60)
    assert not {3, 4} & set(client.replies)
    engine.now += 0.5
    engine.cores[1].tick(engine.now)
    engine.flush(1)
    assert [(r.reason, r.usage.output) for r in client.replies[4]] == [("deadline", 0)]
    assert 3 not in client.replies
    engine.pump()
    assert client.replies[5][0].reason == "length"


def test_two_that_wait_for_each_other(sim: Callable[..., Any]) -> None:
    """The second one's deadline is the earlier: ending the first must not start the second."""
    engine = sim(eos_every=0, limits=Limits(running=1))
    client = engine.session()
    client.send(
        w.Append(id=1, text="x"),
        w.Fork(id=2, as_=["a"]),
        w.Generate(id=3, max_tokens=100),
        w.Generate(id=4, branch="a", max_tokens=5, deadline_ms=500),
    )
    client.send(w.Generate(id=5, branch="a", max_tokens=5, deadline_ms=400))
    client.send(w.Generate(id=6, branch="a", max_tokens=5))
    engine.pump(40)
    assert not {3, 4, 5} & set(client.replies)
    engine.now += 0.5
    engine.cores[1].tick(engine.now)
    engine.flush(1)
    assert [reply.reason for reply in client.replies[4]] == ["deadline"]
    assert [reply.code for reply in client.replies[5]] == ["deadline"]
    engine.pump()
    assert client.replies[3][0].reason == client.replies[6][0].reason == "length"


def test_behind_another_op_on_its_branch(sim: Callable[..., Any]) -> None:
    """It has not begun: an error, and what the frame builds on it is skipped."""
    engine = sim(eos_every=0, context=4096)
    client = engine.session()
    client.send(w.Append(id=1, text="x"), w.Generate(id=2, max_tokens=400))
    engine.pump(30)
    client.send(
        w.Generate(id=3, deadline_ms=500), w.Append(id=4, text="y"), w.Append(id=5, branch="z", text="z")
    )
    client.send(w.Append(id=6, text="w"))
    engine.pump(30)
    core = engine.cores[1]
    engine.now += 0.4
    core.tick(engine.now)
    assert 3 not in client.replies
    assert wake_at(engine) is not None  # it asks again
    engine.now += 0.2
    core.tick(engine.now)
    engine.flush(1)
    assert 2 not in client.replies
    assert client.replies[3][0].code == "deadline"
    client.send(w.Cancel(id=7))
    engine.pump()
    assert client.replies[4][0].code == "skipped"
    assert isinstance(client.replies[6][0], w.Ok)


def test_children_that_are_not_made_yet(sim: Callable[..., Any]) -> None:
    engine = sim(eos_every=0, context=4096)
    client = engine.session()
    client.send(w.Append(id=1, text="x"), w.Generate(id=2, max_tokens=400))
    engine.pump(30)
    client.send(w.Generate(id=3, n=3, deadline_ms=500), replies={3: 3})
    engine.pump(30)
    engine.now += 0.6
    engine.cores[1].tick(engine.now)
    engine.flush(1)
    assert [r.code for r in client.replies[3]] == ["deadline"] * 3
    client.send(w.Cancel(id=4))
    engine.pump()
    assert client.replies[2][0].reason == "cancelled"
    assert list(engine.cores[1].state.branches) == ["main"]


def test_while_its_client_is_away_and_it_is_paused(sim: Callable[..., Any]) -> None:
    engine = sim(eos_every=0, context=4096)
    client = engine.session(detach="pause")
    client.send(w.Append(id=1, text="x"), w.Generate(id=2, max_tokens=400, deadline_ms=60_000))
    engine.pump(40)
    client.drop()
    engine.pump()
    at(engine, 61.0)
    client.connect()
    engine.pump()
    assert client.replies[2][0].reason == "deadline"
    assert client.replies[2][0].usage.output > 0


def test_one_that_the_scheduler_has_is_left_to_it(sim: Callable[..., Any]) -> None:
    engine = sim(eos_every=0, context=4096)
    client = engine.session()
    client.send(
        w.Append(id=1, text="x"), w.Generate(id=2, max_tokens=400, temperature=0, deadline_ms=300)
    )
    engine.pump(40)
    at(engine, 0.3)
    assert [r.reason for r in client.replies[2]] == ["deadline"]
    engine.check_outputs(1)


def test_deadlines_of_what_has_ended_do_not_pile_up(sim: Callable[..., Any]) -> None:
    engine = sim(eos_every=0)
    engine.integrity = False
    client = engine.session()
    client.send(w.Append(id=1, text="x"))
    engine.pump()
    for ident in range(2, 300):
        client.send(w.Generate(id=ident, max_tokens=1, deadline_ms=3_600_000))
        engine.pump()
    assert len(engine.cores[1].runner.deadlines) < 100


def test_in_a_program(sim: Callable[..., Any]) -> None:
    """What was said until then is joined; who was too late has lost; who never began is left out."""
    engine = sim(eos_every=0, context=4096)
    client = engine.session()
    client.send(
        w.Append(id=1, text="x"),
        w.Fork(id=2, as_=["a", "b", "c", "d"]),
        w.Generate(id=3, branch=["a", "c"], max_tokens=4000, deadline_ms=500),
        w.Generate(id=4, branch="b", max_tokens=5),
        w.Generate(id=5, branch="d", max_tokens=200),
        w.Generate(id=6, branch="d", max_tokens=5, deadline_ms=500),
        w.Prune(id=7, from_=["a", "b"], by="first", k=2),
        w.Join(id=8, from_=["c"], role=None, each="[{text}]"),
        w.Prune(id=9, from_=["b", "d"], by="logprob", into="e"),
        w.Generate(id=10, branch="e", max_tokens=3),
    )
    engine.pump(120)
    assert not {3, 7, 8, 9} & set(client.replies)
    at(engine, 0.6)
    (late, _) = client.replies[3]
    assert late.reason == "deadline"
    assert client.replies[6][0].code == "deadline"
    assert [kept["from"] for kept in client.replies[7][0].result["kept"]] == ["b", "a"]
    said = client.said["c"]
    assert said
    assert engine.cores[1].state.branches["main"].text() == f"x[{said}]"
    assert client.replies[5][0].reason == "length"
    result = client.replies[9][0].result
    assert (result["kept"][0]["from"], list(result["scores"])) == ("b", ["b"])
    assert client.replies[10][0].reason == "length"
    assert engine.cache.referenced == 0


def test_a_deadline_of_what_waits_asks_to_be_looked_at_then(sim: Callable[..., Any]) -> None:
    """The earliest of them, whichever came last."""
    engine = sim()
    client = engine.session()
    engine.pump()
    core = engine.cores[1]
    frame = [w.Append(id=1, text="x"), w.Generate(id=2, max_tokens=9)]
    frame += [w.Generate(id=3 + i, deadline_ms=1000 * seconds) for i, seconds in enumerate((9, 3, 5))]
    core.frame(client.socket, frame, engine.now)
    assert wake_at(engine) == engine.now + 3.0
