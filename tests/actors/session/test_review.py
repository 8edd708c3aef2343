"""Interleavings that a review found: slow readers, names that come back, takeovers, pauses, cancels."""

from collections.abc import Callable
from typing import Any

import pytest

from ramify.protocol import messages as m
from ramify.protocol import wire as w
from ramify.protocol.config import Limits


def kinds(client: Any) -> list[str]:
    """Record the order in which a client hears things: call before the frames of interest."""
    order: list[str] = []
    receive = client.receive

    def listen(messages: list[w.ServerMessage]) -> None:
        for message in messages:
            name = type(message).__name__.lower()
            order.append(name if isinstance(message, w.Delta) else f"{name} {message.id}")  # type: ignore[union-attr]
        receive(messages)

    client.receive = listen
    return order


def core(engine: Any, number: int = 1) -> Any:
    return engine.cores[number]


def test_a_dropped_branch_sends_what_was_held_for_a_slow_reader(sim: Callable[..., Any]) -> None:
    engine = sim(eos_every=0)
    client = engine.session()
    client.send(w.Append(id=1, text="x"))
    engine.pump()
    order = kinds(client)
    engine.post_session(1, m.Throttled(client.socket))
    client.send(w.Generate(id=2, max_tokens=5), w.Drop(id=3, branch="main"))
    engine.pump()
    assert order == ["delta", "done 2", "ok 3"]
    assert core(engine).subscribers[client.socket].throttled


def test_a_name_that_comes_back_starts_without_the_old_credit(sim: Callable[..., Any]) -> None:
    engine = sim(eos_every=0)
    client = engine.session()
    client.send(w.Append(id=1, text="x"), w.Credit(branch="main", upto=0), w.Drop(id=2, branch="main"))
    client.send(
        w.Fork(id=3, branch=None, as_=["main"]), w.Append(id=4, text="y"), w.Generate(id=5, max_tokens=4)
    )
    engine.pump()
    assert client.unanswered == {}
    assert client.text("main")


def test_a_renamed_branch_keeps_no_reply_back(sim: Callable[..., Any]) -> None:
    engine = sim(eos_every=0)
    client = engine.session()
    client.send(w.Append(id=1, text="x"))
    engine.pump()
    order = kinds(client)
    engine.post_session(1, m.Throttled(client.socket))
    client.send(w.Generate(id=2, max_tokens=5), w.Set(id=3, branch="main", name="trunk"))
    engine.pump()
    engine.post_session(1, m.Drained(client.socket))
    engine.pump()
    assert order == ["delta", "done 2", "ok 3"]
    assert client.text("main")
    assert not client.text("trunk")


def test_a_branch_can_be_renamed_when_the_session_is_full(sim: Callable[..., Any]) -> None:
    engine = sim(limits=Limits(branches=1))
    client = engine.session()
    client.send(w.Set(id=1, branch="main", name="trunk"))
    engine.pump()
    assert isinstance(client.replies[1][0], w.Ok)


def test_replies_held_across_a_rollback_come_before_new_text(sim: Callable[..., Any]) -> None:
    engine = sim(eos_every=0)
    client = engine.session()
    client.send(w.Append(id=1, tokens=[5, 6, 7]))
    engine.pump()
    order = kinds(client)
    engine.post_session(1, m.Throttled(client.socket))
    client.send(
        w.Generate(id=2, max_tokens=9, temperature=0),
        w.Rollback(id=3, to=3),
        w.Generate(id=4, max_tokens=5, temperature=0),
    )
    engine.pump()
    engine.post_session(1, m.Drained(client.socket))
    engine.pump()
    assert order == ["done 2", "ok 3", "delta", "done 4"]
    assert client.text("main") == core(engine).state.branches["main"].segments[-1].text


@pytest.mark.parametrize("policy", ["pause", "cancel"])
def test_a_takeover_is_not_a_disconnect(sim: Callable[..., Any], policy: str) -> None:
    engine = sim(eos_every=0)
    client = engine.session(detach=policy)
    client.send(w.Append(id=1, text="x"), w.Generate(id=2, max_tokens=60))
    engine.pump(25)
    client.connect()  # the old socket has not been noticed to be dead
    engine.pump()
    (reply,) = client.replies[2]
    assert reply.reason == "length"


def test_only_the_last_of_two_quick_reconnects_stays(sim: Callable[..., Any]) -> None:
    engine = sim()
    client = engine.session()
    engine.pump()
    session = core(engine)
    for socket in (101, 102):
        session.attach(m.Attach(socket, w.Open(client="c", session="s_1"), [], True), engine.now)
    closed = [entry[:2] for entry in session.state.out.closes]
    assert closed == [(client.socket, 4409), (101, 4409)]
    engine.pump()
    assert session.sockets == [102]


def test_sockets_that_still_join_count(sim: Callable[..., Any]) -> None:
    engine = sim(limits=Limits(attachments=2))
    engine.session()
    engine.pump()
    session = core(engine)
    for socket in (101, 102):
        opened = w.Open(client=f"other {socket}", session="s_1")
        session.attach(m.Attach(socket, opened, [], True), engine.now)
    assert [note[0] for note in session.state.out.notes] == [102]


def test_a_client_lost_while_it_joins_is_away(sim: Callable[..., Any]) -> None:
    engine = sim(eos_every=0)
    client = engine.session(detach="pause")
    client.send(w.Append(id=1, text="x"), w.Generate(id=2, max_tokens=200))
    engine.pump(25)
    session, old = core(engine), client.socket
    session.attach(
        m.Attach(101, w.Open(client="c", session="s_1", detach="pause"), [], True), engine.now
    )
    session.detached(101, engine.now)
    engine.post_session(1, m.Detached(old))
    engine.pump()
    assert not session.generations.busy
    client.connect()
    engine.pump()
    assert client.replies[2][0].reason == "length"


def test_a_generation_that_starts_while_its_client_is_away_waits(sim: Callable[..., Any]) -> None:
    engine = sim(eos_every=0)
    other = engine.session("other")
    engine.pump()
    session = core(engine)
    session.attach(
        m.Attach(101, w.Open(client="c", session="s_1", detach="pause"), [], True), engine.now
    )
    engine.pump()
    other.send(w.Append(id=1, text="x"), w.Generate(id=2, max_tokens=30))
    engine.pump(20)
    session.frame(101, [w.Generate(id=1, max_tokens=30)], engine.now)
    session.detached(101, engine.now)
    engine.pump()
    assert other.unanswered == {}
    branch = session.state.branches["main"]
    assert branch.running is not None
    assert not session.generations.busy
    session.attach(m.Attach(102, w.Open(client="c", session="s_1"), [], True), engine.now)
    engine.pump()
    assert branch.running is None


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("when", [20, 30, 40, 50])
def test_a_stop_string_that_meets_a_pause_ends_the_generation(
    sim: Callable[..., Any], when: int, seed: int
) -> None:
    engine = sim(eos_every=0, seed=seed)
    client = engine.session(detach="pause")
    client.send(w.Append(id=1, text="x"), w.Generate(id=2, max_tokens=200, temperature=0, stop=["e"]))
    engine.pump(when)
    client.drop()
    engine.pump()
    generations = core(engine).generations
    assert not [
        g for kept in generations.waiting.paused.values() for g, _ in kept.values() if g.stopping
    ]


def test_cancelling_a_waiting_fork_answers_its_generations(sim: Callable[..., Any]) -> None:
    engine = sim(eos_every=0)
    client = engine.session()
    client.send(
        w.Append(id=1, text="x"), w.Generate(id=2, max_tokens=90), w.Generate(id=3, n=2, max_tokens=5)
    )
    engine.pump(20)
    client.send(w.Cancel(id=4, branch="main"))
    engine.pump()
    assert [r.code for r in client.replies[3]] == ["cancelled", "cancelled"]
    assert client.replies[4][0].result == {"cancelled": [2, 3]}


def test_cancelling_one_child_leaves_its_siblings(sim: Callable[..., Any]) -> None:
    engine = sim(eos_every=0)
    client = engine.session()
    client.send(
        w.Append(id=1, text="x"),
        w.Generate(id=2, max_tokens=20),
        w.Generate(id=3, n=2, as_=["a", "b"], max_tokens=5),
    )
    engine.pump(12)
    client.send(w.Cancel(id=4, branch="a"))
    engine.pump()
    replies = {r.branch: r for r in client.replies[3]}
    assert replies["a"].code == "cancelled"
    assert replies["b"].reason == "length"


def test_a_later_op_on_a_failed_child_is_skipped(sim: Callable[..., Any]) -> None:
    engine = sim()
    client = engine.session()
    client.send(
        w.Append(id=1, text="x"),
        w.Generate(id=2, n=2, as_=["a", "b"], expect=99),
        w.Generate(id=3, branch="a"),
    )
    engine.pump()
    assert {r.code for r in client.replies[2]} == {"conflict"}
    assert [r.code for r in client.replies[3]] == ["skipped"]


def test_disconnect_cancels_generations_and_nothing_else(sim: Callable[..., Any]) -> None:
    engine = sim(eos_every=0)
    client = engine.session(detach="cancel")
    client.send(w.Append(id=1, text="x"), w.Generate(id=2, max_tokens=90), w.Append(id=3, text="y"))
    engine.pump(20)
    client.drop()
    engine.pump()
    client.connect()
    engine.pump()
    assert client.replies[2][0].reason == "cancelled"
    assert isinstance(client.replies[3][0], w.Ok)


def test_a_branch_that_took_a_known_name_is_replayed_from_its_beginning(sim: Callable[..., Any]) -> None:
    engine = sim(eos_every=0)
    client = engine.session("c")
    client.send(w.Append(id=1, tokens=[5, 6, 7]), w.Generate(id=2, max_tokens=9, temperature=0))
    engine.pump()
    client.drop()
    engine.pump()
    session = core(engine)
    session.attach(m.Attach(101, w.Open(client="d", session="s_1"), [], True), engine.now)
    session.frame(
        101,
        [
            w.Drop(id=1, branch="main"),
            w.Fork(id=2, branch=None, as_=["main"]),
            w.Append(id=3, tokens=[50, 60]),
            w.Generate(id=4, max_tokens=30, temperature=0),
        ],
        engine.now,
    )
    engine.pump()
    client.connect()
    engine.pump()
    assert client.text("main") == session.state.branches["main"].segments[-1].text


def test_a_tree_is_not_kept_and_looks_again(sim: Callable[..., Any]) -> None:
    engine = sim()
    client = engine.session()
    client.send(w.Tree(id=1, text=True), w.Append(id=2, text="x"))
    engine.pump()
    assert list(core(engine).publisher.reply_logs["c"].replies) == [2]
    client.replies.clear()
    client.send(w.Tree(id=1, text=True))
    engine.pump()
    assert client.replies[1][0].branches[0].position == 1


def test_held_replies_and_events_are_bounded(sim: Callable[..., Any]) -> None:
    engine = sim(limits=Limits(ops_in_flight=8), eos_every=0)
    client = engine.session()
    client.send(
        w.Append(id=1, text="x"), w.Credit(branch="main", upto=0), w.Generate(id=2, max_tokens=4)
    )
    engine.pump()
    for ident in range(3, 30):
        client.send(w.Append(id=ident, text="y"))
        engine.pump()
    subscriber = core(engine).subscribers[client.socket]
    assert subscriber.held == 8
    assert {type(r).__name__ for i in range(12, 30) for r in client.replies[i]} == {"Error"}
    client.send(w.Credit(branch="main", upto=10**6))
    engine.pump()
    assert subscriber.held == 0
