"""`cancel` of a branch with all that was made of it, and of what waits to be made."""

from collections.abc import Callable
from typing import Any

from ramify.actors.session.branches.branch import Label
from ramify.protocol import messages as m
from ramify.protocol import wire as w

Sim = Callable[..., Any]


def codes(client: Any, *idents: int) -> list[str]:
    """How each op ended: the error's code, the reason of a `done`, or "ok"."""
    found = []
    for ident in idents:
        for reply in client.replies[ident]:
            found.append(
                reply.code
                if isinstance(reply, w.Error)
                else reply.reason
                if isinstance(reply, w.Done)
                else "ok"
            )
    return found


def thoughts(levels: int, width: int) -> list[w.Op]:
    """A tree of thought in one frame: each level's winner is forked again."""
    ops: list[w.Op] = [w.Append(id=1, text="hello")]
    for level in range(levels):
        names = [f"t{level}.{i}" for i in range(width)]
        first = len(ops) + 1
        ops += [
            w.Fork(id=first, as_=names),
            *(w.Append(id=first + 1 + i, branch=n, tokens=[5 + i]) for i, n in enumerate(names)),
            w.Generate(
                id=first + 1 + width, branch=names, max_tokens=200, temperature=0, ignore_eos=True
            ),
            w.Prune(id=first + 2 + width, from_=names, into="main"),
        ]
    ops.append(w.Generate(id=len(ops) + 1, max_tokens=200, temperature=0, ignore_eos=True))
    return ops


def test_a_program_of_40_branches_stops_at_once(sim: Sim) -> None:
    """All its generations end within two steps, and the session is as good as new."""
    engine = sim(max_rows=64, step_tokens=512)
    client = engine.session()
    ops = thoughts(levels=3, width=40)
    client.send(*ops)
    state = engine.cores[1].state
    while sum(bool(b.running) for b in state.branches.values()) < 40:
        engine.pump(1)
    engine.pump(200)
    assert len(state.branches) == 41
    told: list[int] = []
    handle = engine.scheduler.handle

    def noting(event: Any, now: float) -> None:
        if isinstance(event, m.CancelRequest):
            told.append(engine.executor.counters.steps)
        handle(event, now)

    engine.scheduler.handle = noting
    client.send(w.Cancel(id=1000, branch="main", subtree=True))
    engine.pump()
    assert len(told) == 40
    assert engine.executor.counters.steps - told[-1] <= 2
    generate = next(op for op in ops if isinstance(op, w.Generate))
    assert codes(client, generate.id) == ["cancelled"] * 40
    later = [op.id for op in ops if op.id > generate.id]
    assert set(codes(client, *later)) == {"cancelled"}
    assert client.unanswered == {}
    assert engine.cache.referenced == 0
    assert engine.cache.free + engine.cache.evictable == engine.cache.total
    assert len(engine.cores[1].runner) == 0
    client.send(
        w.Drop(id=1001, branch=[name for name in state.branches if name != "main"]),
        w.Generate(id=1002, max_tokens=3, temperature=0, ignore_eos=True),
    )
    engine.pump()
    assert codes(client, 1002) == ["length"]


def test_what_is_beside_the_subtree_goes_on(sim: Sim) -> None:
    engine = sim(eos_every=0)
    client = engine.session()
    client.send(
        w.Append(id=1, text="hello"),
        w.Fork(id=2, as_=["a", "b"]),
        w.Fork(id=3, branch="a", as_=["a1", "a2"]),
        w.Generate(id=4, branch=["a1", "b"], max_tokens=100, temperature=0),
        w.Append(id=5, branch="a1", tokens=[5]),
        w.Fork(id=6, branch="a1", as_=["deep"]),
        w.Generate(id=7, branch="deep", max_tokens=100),
        w.Drop(id=8, branch="a1"),
        w.Join(id=9, from_=["b", "a2"]),
        w.Generate(id=10, max_tokens=3),
    )
    engine.pump(60)
    client.send(w.Cancel(id=11, branch="a", subtree=True), w.Append(id=12, tokens=[5]))
    engine.pump()
    ends = {reply.branch: reply.reason for reply in client.replies[4]}
    assert ends == {"a1": "cancelled", "b": "length"}
    assert codes(client, 5, 6, 7, 9, 10) == ["cancelled"] * 4 + ["skipped"]
    assert codes(client, 8, 12) == ["ok", "ok"]  # it cleans up; another frame
    assert only_result(client, 11) == [4, 5, 6, 7, 9]
    assert set(engine.cores[1].state.branches) == {"main", "a", "b", "a2"}


def only_result(client: Any, ident: int) -> list[int]:
    (reply,) = client.replies[ident]
    cancelled: list[int] = reply.result["cancelled"]
    return cancelled


def test_without_a_branch_all_ops_stop(sim: Sim) -> None:
    engine = sim(eos_every=0)
    client = engine.session()
    client.send(
        w.Append(id=1, text="hello"),
        w.Fork(id=2, branch=None, as_=["r"]),
        w.Append(id=3, branch="r", text="x"),
        w.Generate(id=4, branch=["main", "r"], max_tokens=100),
        w.Append(id=5, tokens=[5]),
        w.Drop(id=6, branch="r"),
    )
    engine.pump(40)
    client.send(w.Cancel(id=7, subtree=True))
    engine.pump()
    assert codes(client, 4, 5, 6) == ["cancelled", "cancelled", "cancelled", "ok"]


def test_descendants_are_found_though_those_between_are_gone(sim: Sim) -> None:
    engine = sim(eos_every=0)
    client = engine.session()
    client.send(
        w.Append(id=1, text="hello"),
        w.Fork(id=2, as_=["a"]),
        w.Fork(id=3, branch="a", as_=["b"]),
        w.Fork(id=4, branch="b", as_=["c"]),
        w.Set(id=5, branch="main", name="root"),
        w.Drop(id=6, branch=["a", "b"]),
        w.Generate(id=7, branch="c", max_tokens=100),
    )
    engine.pump(30)
    client.send(w.Cancel(id=8, branch="root", subtree=True))
    engine.pump()
    assert codes(client, 7) == ["cancelled"]


def test_dropped_ancestors_do_not_pile_up() -> None:
    label = Label("0")
    for i in range(1, 50):
        child = Label(str(i), label)
        label.gone = True
        label = child
    count, at = 0, label.above
    while at is not None:
        count, at = count + 1, at.above
    assert count <= 2
