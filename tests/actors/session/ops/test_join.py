"""`join`: what children generated becomes input of another branch."""

from collections.abc import Callable
from typing import Any

import pytest

from ramify.actors.session.branches.segments import OutputSegment
from ramify.protocol import wire as w
from ramify.protocol.errors import LimitExceeded
from ramify.protocol.joining import MOST, join_texts

Sim = Callable[..., Any]


def user(text: str) -> list[w.ChatMessage]:
    return [w.ChatMessage(role="user", content=text)]


def only(client: Any, ident: int) -> Any:
    (reply,) = client.replies[ident]
    return reply


def children(**fields: Any) -> list[w.Op]:
    """A chat turn, two children of it, an answer on each: ids 1 to 3."""
    return [
        w.Append(id=1, messages=user("Plan a trip.")),
        w.Fork(id=2, as_=["a", "b"]),
        w.Generate(id=3, branch=["a", "b"], temperature=0.9, seed=3, ignore_eos=True, **fields),
    ]


def test_the_texts_are_appended_in_order_and_the_children_go(sim: Sim) -> None:
    engine = sim(eos_every=0)
    client = engine.session()
    client.send(
        *children(max_tokens=6),
        w.Join(id=4, from_=["b", "a"], prefix="Two:\n", each="{i}. {name}: {text}\n", suffix="Merge."),
        w.Generate(id=5, max_tokens=4, temperature=0),
    )
    engine.pump()
    texts = {done.branch: done for done in client.replies[3]}
    assert set(texts) == {"a", "b"}
    state = engine.cores[1].state
    assert list(state.branches) == ["main"]
    ok = only(client, 4)
    assert ok.result == {"dropped": ["b", "a"], "rebased": ok.result["rebased"]}  # the prompt went back
    joined = next(
        m for segment in state.branches["main"].segments for m in segment.messages if segment.op == 4
    )
    assert joined.role == "user"
    b, a = client.said["b"], client.said["a"]
    assert joined.content == f"Two:\n1. b: {b}\n2. a: {a}\nMerge."
    assert only(client, 5).reason == "length"
    assert (engine.cache.referenced, len(engine.cache.branches)) == (0, 1)
    engine.check_outputs(1)


def test_raw_text_and_kept_children(sim: Sim) -> None:
    engine = sim(eos_every=0)
    client = engine.session()
    client.send(
        w.Append(id=1, text="hello"),
        w.Generate(id=2, n=2, as_=["a", "b"], max_tokens=4, temperature=0.9, seed=1),
        w.Join(id=3, from_=["a", "b"], role=None, each="[{text}]", keep=True),
    )
    engine.pump()
    branches = engine.cores[1].state.branches
    assert set(branches) == {"main", "a", "b"}
    assert only(client, 3).result == {"dropped": []}
    texts = [branches[name].answer().text for name in ("a", "b")]
    assert branches["main"].text() == "hello" + "".join(f"[{text}]" for text in texts)


def test_a_child_without_an_answer_of_its_own_says_nothing(sim: Sim) -> None:
    """Not what its parent said before the fork, and not what was rolled back."""
    engine = sim(eos_every=0)
    client = engine.session()
    client.send(
        w.Append(id=1, text="hello"),
        w.Generate(id=2, max_tokens=4, temperature=0),
        w.Fork(id=3, as_=["a", "b"]),
        w.Generate(id=4, branch="b", max_tokens=4, temperature=0),
        w.Rollback(id=5, branch="b", to=2),
        w.Generate(id=6, branch="b", max_tokens=2, temperature=0),
        w.Join(id=7, from_=["a", "b"], role=None, each="<{text}>"),
    )
    engine.pump()
    segment = engine.cores[1].state.branches["main"].segments[-1]
    assert not isinstance(segment, OutputSegment)
    assert segment.text.startswith("<><")
    assert segment.text != "<><>"


def test_texts_are_not_read_as_fields() -> None:
    op = w.Join(id=1, from_=["a", "b"], each="{name}={text}{x}{")
    assert join_texts(op, ["{name}{i}", "{text}"]) == "a={name}{i}{x}{b={text}{x}{"


def test_a_join_that_is_too_long_is_refused_before_it_is_made() -> None:
    op = w.Join(id=1, from_=["a", "b"], each="{text}" * 64)
    with pytest.raises(LimitExceeded):
        join_texts(op, ["x" * (MOST // 64), "y"])


def test_a_join_that_does_not_fit_changes_nothing(sim: Sim) -> None:
    engine = sim(context=64, eos_every=0)
    client = engine.session()
    client.send(
        w.Append(id=1, tokens=[5] * 30),
        w.Generate(id=2, n=2, as_=["a", "b"], max_tokens=8, temperature=0),
        w.Join(id=3, from_=["a", "b"], role=None, each="{text}{text}{text}{text}{text}{text}"),
        w.Append(id=4, branch="a", tokens=[5]),
        w.Append(id=5, tokens=[5]),
    )
    engine.pump()
    assert [only(client, i).code for i in (3, 4, 5)] == ["too_long", "skipped", "skipped"]
    branches = engine.cores[1].state.branches
    assert {name: branch.position for name, branch in branches.items()} == {"main": 30, "a": 38, "b": 38}


def test_long_text_is_tokenized_off_the_loop_and_counted(sim: Sim, monkeypatch: Any) -> None:
    monkeypatch.setattr("ramify.actors.session.branches.tasks.ON_THE_LOOP", 4)
    engine = sim(eos_every=0)
    client = engine.session()
    core = engine.cores[1]
    counted: list[int] = []
    encoded = core.encoded

    def watched(*args: Any) -> None:
        counted.append(core.state.meter.held)
        before = core.state.meter.held
        encoded(*args)
        counted.append(core.state.meter.held - before)

    core.encoded = watched
    client.send(*children(max_tokens=6), w.Join(id=4, from_=["a", "b"], prefix="x" * 50_000))
    engine.pump()
    assert only(client, 4).code == "too_long"
    assert len(counted) == 4  # the append, the join
    assert counted[2] > 100_000  # the op, and the text that it makes
    assert counted[3] < -90_000
    client.send(w.Join(id=5, from_=["a", "b"]))
    engine.pump()
    assert only(client, 5).result["dropped"] == ["a", "b"]


def test_a_failed_child_skips_the_join_and_what_follows(sim: Sim) -> None:
    engine = sim(eos_every=0)
    client = engine.session()
    client.send(
        w.Append(id=1, text="hello"),
        w.Fork(id=2, as_=["a", "b"]),
        w.Append(id=3, branch="a", tokens=[10**6]),
        w.Generate(id=4, branch=["a", "b"], max_tokens=3),
        w.Join(id=5, from_=["a", "b"]),
        w.Generate(id=6, max_tokens=3),
        w.Fork(id=7, branch=None, as_=["other"]),
    )
    engine.pump()
    assert {reply.branch: getattr(reply, "code", "done") for reply in client.replies[4]} == {
        "a": "skipped",
        "b": "done",
    }
    assert [only(client, i).code for i in (5, 6)] == ["skipped", "skipped"]
    assert isinstance(only(client, 7), w.Ok)


def test_hidden_children_are_seen_by_the_join_alone(sim: Sim) -> None:
    engine = sim(eos_every=0)
    client = engine.session()
    client.send(*children(max_tokens=6, hidden=True), w.Join(id=4, from_=["a", "b"], keep=True))
    engine.pump()
    assert client.chunks == {}
    assert [reply.text for reply in client.replies[3]] == [None, None]
    branches = engine.cores[1].state.branches
    content = branches["main"].segments[-2].messages[0].content
    assert content == "".join(branches[name].answer().text + "\n" for name in ("a", "b"))
    client.send(w.Generate(id=3))  # sent again: not even then
    engine.pump()
    kept = engine.cores[1].publisher.reply_logs["c"].replies[3]
    assert [reply.text for reply in kept] == [None, None]


def test_memory_is_given_back(sim: Sim) -> None:
    engine = sim(eos_every=0)
    client = engine.session()
    core = engine.cores[1]
    for i in range(1, 80, 4):
        client.send(
            w.Rollback(id=i, to=0) if i > 1 else w.Append(id=i, tokens=[5]),
            w.Append(id=i + 1, tokens=[5, 6]),
            w.Generate(id=i + 2, n=3, as_=["a", "b", "c"], max_tokens=4, temperature=0.9),
            w.Join(id=i + 3, from_=["a", "b", "c"]),
        )
        engine.pump()
        assert isinstance(only(client, i + 3), w.Ok), only(client, i + 3)
        assert core.state.meter.held - core.publisher.reply_logs["c"].held < 60_000
