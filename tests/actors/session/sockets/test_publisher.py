"""Who hears what: events for others, deltas at even distances."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from ramify.actors.session.branches.branch import SessionBranch
from ramify.actors.session.branches.segments import OutputSegment
from ramify.actors.session.branches.state import SessionState
from ramify.actors.session.sockets.publisher import REPLY_LOGS_KEPT, Publisher
from ramify.actors.session.sockets.subscriber import Subscriber
from ramify.protocol import messages as m
from ramify.protocol import wire as w
from ramify.protocol.config import Limits


def user(text: str) -> list[w.ChatMessage]:
    return [w.ChatMessage(role="user", content=text)]


def beside(engine: Any, name: str, *, write: bool = True, **opened: Any) -> Any:
    """Another client at session 1."""
    client = engine.session(name, **opened)
    engine.pump()
    client.number = 1
    attach = m.Attach(client.socket, w.Open(client=name, session="s_1", **opened), [], write)
    engine.post_session(1, attach)
    engine.pump()
    return client


def events(client: Any) -> list[tuple[str, str | None, dict[str, Any]]]:
    return [(e.op, e.branch, e.details) for e in client.events if isinstance(e, w.Event)]


def test_the_one_who_is_left_hears_of_what_an_author_who_has_gone_did(sim: Callable[..., Any]) -> None:
    engine = sim(eos_every=0)
    author = engine.session("author")
    other = beside(engine, "other")
    author.send(w.Append(id=1, text="x"), w.Generate(id=2, max_tokens=30))
    engine.pump(6)
    author.drop()
    engine.pump()
    assert [e[0] for e in events(other)] == ["append", "generate"]
    assert other.text("main") != ""


def test_a_rename_names_both_and_a_rebase_says_how_far_back_it_went(sim: Callable[..., Any]) -> None:
    engine = sim()
    author = engine.session("author")
    other = beside(engine, "other")
    author.send(w.Append(id=1, messages=user("a")))
    engine.pump()
    before = author.replies[1][0].position
    author.send(w.Append(id=2, messages=user("b")), w.Set(id=3, branch="main", name="trunk"))
    engine.pump()
    rebased = author.replies[2][0].result["rebased"]
    assert rebased < before
    assert [e[:2] for e in events(other)] == [("append", "main"), ("append", "main"), ("set", "trunk")]
    assert events(other)[1][2]["rebased"] == rebased
    assert events(other)[2][2]["from"] == "main"
    assert "rebased" not in events(other)[0][2]


def test_the_children_of_a_generation_are_announced(sim: Callable[..., Any]) -> None:
    engine = sim(eos_every=0)
    author = engine.session("author")
    other = beside(engine, "other")
    generate = w.Generate(id=2, n=2, as_=["a", "b"], max_tokens=3)
    author.send(w.Append(id=1, text="x"), generate, replies={2: 2})
    engine.pump()
    assert ("fork", "main", {"position": 1, "as": ["a", "b"]}) in events(other)


@pytest.mark.parametrize("end", ["credit", "drop", "rename"])
def test_nothing_about_children_is_told_before_their_fork(sim: Callable[..., Any], end: str) -> None:
    """The fork waits for deltas of its branch; what happens to children and grandchildren waits too."""
    engine = sim(eos_every=0)
    author = engine.session("author")
    other = beside(engine, "other", tokens=True)
    engine.post_session(1, m.Frame(other.socket, [w.Credit(branch="main", upto=0)]))
    author.send(
        w.Append(id=1, text="x"),
        w.Generate(id=2, max_tokens=4),
        w.Fork(id=3, as_=["child"]),
        w.Fork(id=4, branch="child", as_=["grandchild"]),
        w.Generate(id=5, branch="grandchild", max_tokens=3),
        w.Rollback(id=6, branch="child", to=1),
    )
    engine.pump()
    assert author.unanswered == {}
    text = author.text("grandchild")
    assert text != ""
    assert [e[:2] for e in events(other)] == [("append", "main")]
    assert other.chunks == {}
    if end == "credit":
        engine.post_session(1, m.Frame(other.socket, [w.Credit(branch="main", upto=99)]))
    elif end == "drop":
        author.send(w.Drop(id=7, branch="grandchild"))
    else:
        author.send(w.Set(id=7, branch="child", name="renamed"))
    engine.pump()
    told = [(op, branch) for op, branch, _ in events(other)]
    assert told[:4] == [("append", "main"), ("generate", "main"), ("fork", "main"), ("fork", "child")]
    assert {("generate", "grandchild"), ("rollback", "child")} <= set(told[4:])
    assert other.text("main") != ""
    assert other.text("grandchild") == text


def test_a_viewer_who_calls_itself_like_the_author_hears_of_changes(sim: Callable[..., Any]) -> None:
    engine = sim()
    author = engine.session("me")
    viewer = beside(engine, "me", write=False)
    author.send(w.Append(id=1, text="x"))
    engine.pump()
    assert [e[0] for e in events(viewer)] == ["append"]
    assert author.events == []


@pytest.mark.parametrize("every", [1, 6, 50])
@pytest.mark.parametrize("late", [0, 3])
def test_ticks_come_at_equal_distances(every: int, late: int) -> None:
    """Tokens every `every` ms, a timer that is up to `late` ms late: times in ms."""
    state = SessionState(1, context=10_000, vocab=100, limits=Limits(), decode=lambda tokens: "")
    publisher = Publisher(state, on_forget=lambda client: None)
    branches = [state.root(name) for name in ("a", "b")]
    segments = {branch: _running(branch) for branch in branches}
    opened = w.Open(client="c", tick_ms=200)
    subscriber = publisher.subscribers[1] = Subscriber(1, opened, state.meter, write=True)
    sent: list[int] = []
    wake: float | None = None
    for now in range(2000):
        publisher.now = now / 1e3
        if now % every == 0:
            for branch, segment in segments.items():
                segment.tokens.append(5)
                segment.release(len(segment.tokens), "x")
                publisher.flush((branch,))
        if wake is not None and publisher.now >= wake + late / 1e3:
            wake = None
            publisher.tick()
        if subscriber.out:
            assert [delta.branch for delta in subscriber.out if isinstance(delta, w.Delta)] == ["a", "b"]
            sent.append(now)
            subscriber.out = []
        if state.out.wake_at is not None:
            wake, state.out.wake_at = state.out.wake_at, None
    gaps = [b - a for a, b in pairwise(sent)]
    assert len(gaps) >= 8
    assert all(200 <= gap <= 201 + max(late, every if late else 0) for gap in gaps), gaps


def _running(branch: SessionBranch) -> OutputSegment:
    segment = OutputSegment(branch.position)
    branch.segments.append(segment)
    return segment


def test_what_a_reader_takes_up_again_between_ticks_is_sent_at_the_next(sim: Callable[..., Any]) -> None:
    """It used to wait for the next token, which never came for another client's last one."""
    state = SessionState(1, context=100, vocab=100, limits=Limits(), decode=lambda tokens: "")
    publisher = Publisher(state, on_forget=lambda client: None)
    branch = state.root("a")
    segment = _running(branch)
    subscriber = publisher.subscribers[1] = Subscriber(
        1, w.Open(client="c", tick_ms=200), state.meter, write=True
    )
    publisher.now = 1.0
    subscriber.throttled = True
    segment.tokens.append(5)
    segment.release(1, "x")
    publisher.flush((branch,))
    publisher.now = 1.1
    subscriber.throttled = False
    publisher.stream(subscriber, (branch,))
    assert subscriber.out == []
    assert state.out.wake_at == pytest.approx(1.2)
    publisher.now = 1.2
    publisher.tick()
    assert [type(message) for message in subscriber.out] == [w.Delta]


def test_a_slower_socket_asks_for_its_own_tick_when_a_faster_ones_has_come() -> None:
    """There is one timer, and the last tokens come before either is due."""
    state = SessionState(1, context=100, vocab=100, limits=Limits(), decode=lambda tokens: "")
    publisher = Publisher(state, on_forget=lambda client: None)
    branch = state.root("a")
    segment = _running(branch)
    fast, slow = (
        Subscriber(i, w.Open(client=str(i), tick_ms=tick), state.meter, write=True)
        for i, tick in ((1, 50), (2, 200))
    )
    publisher.subscribers.update({1: fast, 2: slow})
    for publisher.now in (1.0, 1.01):
        segment.tokens.append(5)
        segment.release(len(segment.tokens), "x")
        publisher.flush((branch,))
    asked: list[float] = []
    while state.out.wake_at is not None:
        publisher.now, state.out.wake_at = state.out.wake_at, None
        asked.append(publisher.now)
        publisher.tick()
    assert asked[:2] == pytest.approx([1.05, 1.2])
    for subscriber in (fast, slow):
        assert [each.text for each in subscriber.out if isinstance(each, w.Delta)] == ["x", "x"]


def test_only_as_many_clients_are_forgotten_as_must_be(sim: Callable[..., Any]) -> None:
    """The ids of the last 64 are remembered; those who wait for replies are among them."""
    engine = sim()
    engine.session("here")
    engine.pump()
    forgotten: list[str] = []
    publisher = Publisher(engine.cores[1].state, on_forget=forgotten.append)
    for number in range(REPLY_LOGS_KEPT):
        publisher.reply_log(f"c{number}")
    assert forgotten == []
    publisher.reply_log("c0").begin(1, 1)  # it waits for a reply
    publisher.reply_log("new")
    assert forgotten == ["c1"]
    publisher.reply_log("newer")
    assert forgotten == ["c1", "c2"]
    assert len(publisher.reply_logs) == REPLY_LOGS_KEPT
    publisher.reply_log("viewer", write=False)
    assert forgotten == ["c1", "c2"]


def test_what_others_hear_of_each_op(sim: Callable[..., Any]) -> None:
    engine = sim(eos_every=0)
    author = engine.session("author")
    other = beside(engine, "other")
    for op in (
        w.Append(id=1, tokens=[5, 6]),
        w.Fork(id=2, as_=["a", "b"]),
        w.Generate(id=3, branch=["a", "b"], max_tokens=3),
        w.Generate(id=4, branch="main", n=2, as_=["c", "d"], max_tokens=2),
        w.Set(id=5, branch="c", name="e"),
        w.Set(id=6, branch="e", meta={"x": 1}),
        w.Rollback(id=7, branch="e", to=2),
        w.Join(id=8, branch="e", from_=["a"], role=None),
        w.Prune(id=9, from_=["b", "d"], into="d", by="first"),
        w.Drop(id=10, branch="e"),
        w.Fork(id=11, branch=None, as_=["r"]),
    ):
        author.send(op, replies={3: 2, 4: 2})
        engine.pump()
    assert {event.by for event in other.events} == {"author"}
    kept = {"from": "b", "into": "d", "position": 5, "rebased": 2}
    assert events(other) == [
        ("append", "main", {"position": 2}),
        ("fork", "main", {"position": 2, "as": ["a", "b"]}),
        ("generate", "a", {"position": 5, "reason": "length"}),
        ("generate", "b", {"position": 5, "reason": "length"}),
        ("fork", "main", {"position": 2, "as": ["c", "d"]}),
        ("generate", "c", {"position": 4, "reason": "length"}),
        ("generate", "d", {"position": 4, "reason": "length"}),
        ("set", "e", {"position": 4, "from": "c"}),
        ("set", "e", {"position": 4}),
        ("rollback", "e", {"position": 2}),
        ("join", "e", {"position": 8, "dropped": ["a"]}),
        ("prune", "d", {"position": 5, "kept": [kept], "dropped": ["b"]}),
        ("drop", "e", {"position": None}),
        ("fork", None, {"position": 0, "as": ["r"]}),
    ]


def test_a_name_that_a_join_gave_up_is_told_before_it_comes_again(sim: Callable[..., Any]) -> None:
    """A join's reply waited for deltas that its reader held back; a new branch had the name then."""
    engine = sim(eos_every=0)
    author = engine.session("author")
    other = beside(engine, "other")
    author.send(
        w.Append(id=1, text="x"),
        w.Fork(id=2, as_=["into", "a"]),
        w.Generate(id=3, branch=["into", "a"], max_tokens=5),
        replies={3: 2},
    )
    engine.post_session(1, m.Frame(other.socket, [w.Credit(branch="into", upto=0)]))
    engine.pump()
    author.send(w.Join(id=4, branch="into", from_=["a"]), w.Fork(id=5, branch="main", as_=["a"]))
    engine.pump()
    told = [
        (e.op, e.branch) for e in other.events if isinstance(e, w.Event) and e.op in ("join", "fork")
    ]
    assert told == [("fork", "main"), ("join", "into"), ("fork", "main")]
