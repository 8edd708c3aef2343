"""`tree` with text and tokens: in pages, shared history once, and what clients make of it."""

import random
from collections.abc import Callable
from typing import Any

import pytest

from ramify.clients.trees import whole
from ramify.protocol import messages as m
from ramify.protocol import wire as w
from ramify.protocol.codec import Codec
from ramify.protocol.config import Limits
from ramify.protocol.errors import RamifyError
from tests.actors.session.alone import Alone


def tree(engine: Any, client: Any, **fields: Any) -> list[w.StateReply]:
    """The answers, asked for one after the other."""
    pages: list[w.StateReply] = []
    while not pages or pages[-1].next is not None:
        ident = client.id()
        after = pages[-1].next if pages else None
        client.send(w.Tree(id=ident, after=after, **fields))
        engine.pump()
        (page,) = client.replies[ident]
        assert isinstance(page, w.StateReply), page
        pages.append(page)
    return pages


def histories(engine: Any, client: Any) -> dict[str, list[tuple[int, int, str, list[int]]]]:
    """What the branches hold; a `tree` leaves out what has no tokens."""
    return {
        name: [(p.start, p.end, p.text, p.tokens.tolist()) for p in branch.segments if p.end > p.start]
        for name, branch in engine.cores[client.number].state.branches.items()
    }


def shown(state: w.StateReply) -> dict[str, list[tuple[int, int, str | None, list[int] | None]]]:
    assert all(branch.turns_from is None for branch in state.branches)
    return {
        b.branch: [(t.start, t.end, t.text, t.tokens) for t in b.turns or []] for b in state.branches
    }


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("size", [300, 1500, 1 << 18])
def test_pages_add_up_to_what_the_branches_hold(sim: Callable[..., Any], seed: int, size: int) -> None:
    """After forks of forks, rollbacks, renames and drops, of parents too."""
    rng = random.Random(seed)
    engine = sim(seed=seed, limits=Limits(tree_bytes=size))
    client = engine.session()
    client.send(w.Append(id=client.id(), tokens=[5, 6, 7]))
    for step in range(30):
        branches = engine.cores[client.number].state.branches
        name = rng.choice(list(branches))
        ident, position = client.id(), branches[name].position
        match rng.randrange(7):
            case 0 | 1:
                client.send(w.Append(id=ident, branch=name, tokens=[8, 9]))
            case 2:
                client.send(w.Generate(id=ident, branch=name, max_tokens=5, temperature=0))
            case 3 | 4:
                at = rng.choice([None, rng.randrange(position + 1)])
                client.send(w.Fork(id=ident, branch=name, as_=[f"n{step}", f"m{step}"], at=at))
            case 5:
                client.send(w.Rollback(id=ident, branch=name, to=rng.randrange(position + 1)))
            case _ if len(branches) > 2:
                gone = rng.choice([name, rng.choice(list(branches))])
                client.send(
                    w.Drop(id=ident, branch=gone), w.Fork(id=client.id(), branch=None, as_=[gone])
                )
        engine.pump()
    pages = tree(engine, client, text=True, tokens=True)
    held = histories(engine, client)
    assert shown(whole(pages)) == held
    sent = sum(turn.end - turn.start for page in pages for b in page.branches for turn in b.turns or ())
    segments = {
        id(segment): len(segment.tokens)
        for branch in engine.cores[client.number].state.branches.values()
        for segment in branch.segments
    }
    assert sent >= sum(segments.values())
    if seed % 3 == 0:
        assert sent < sum(end - start for turns in held.values() for start, end, *_ in turns)
    one = tree(engine, client, branch="main" if "main" in held else name, text=True, tokens=True)
    assert all(branch.turns_from is None for page in one for branch in page.branches)
    assert next(iter(shown(whole(one)).values())) == held[one[0].branches[0].branch]


def test_an_answer_is_bounded_and_history_is_sent_once(sim: Callable[..., Any]) -> None:
    """200 forks of a long branch: not 200 times its tokens."""
    engine = sim(limits=Limits(tree_bytes=20_000), context=512)
    client = engine.session()
    client.send(*(w.Append(id=client.id(), tokens=[5] * 40) for _ in range(10)))
    client.send(w.Fork(id=client.id(), as_=[f"f{i}" for i in range(200)]))
    engine.pump()
    pages = tree(engine, client, tokens=True, text=True)
    sizes = [len(Codec("json").encode([page])) for page in pages]
    assert len(pages) > 2
    assert max(sizes) < 2 * 20_000
    assert sum(sizes) < 100_000
    assert shown(whole(pages)) == histories(engine, client)


def test_a_page_goes_on_in_the_middle_of_a_branch(sim: Callable[..., Any]) -> None:
    """A turn that is larger than a page is a page."""
    engine = sim(limits=Limits(tree_bytes=500))
    client = engine.session()
    client.send(*(w.Append(id=client.id(), tokens=[5] * size) for size in (10, 200, 1, 1, 1)))
    client.send(w.Fork(id=client.id(), as_=["a"]), w.Append(id=client.id(), branch="a", tokens=[6]))
    engine.pump()
    pages = tree(engine, client, tokens=True)
    assert [page.next for page in pages][:2] == [w.Place("main", 10), w.Place("main", 210)]
    assert {b.branch: b.turns_from for b in pages[-1].branches}["a"] == 213
    full = whole(pages)
    assert [[t.start for t in b.turns or []] for b in full.branches] == [
        [0, 10, 210, 211, 212],
        [0, 10, 210, 211, 212, 213],
    ]


def test_a_place_that_is_gone_is_an_error(sim: Callable[..., Any]) -> None:
    engine = sim()
    client = engine.session()
    client.send(
        w.Tree(id=1, text=True, after=w.Place("gone", 3)),
        w.Tree(id=2, text=True, branch="main", after=w.Place("other", 3)),
    )
    engine.pump()
    assert [client.replies[ident][0].code for ident in (1, 2)] == ["no_branch", "bad_request"]


def test_answers_come_one_by_one_and_wait_for_a_socket_that_is_behind(sim: Callable[..., Any]) -> None:
    engine = sim()
    client = engine.session()
    client.send(w.Append(id=1, tokens=[5] * 100))
    engine.pump()
    core = engine.cores[1]
    socket = client.socket
    core.throttled(socket, True, 1.0)
    core.frame(socket, [w.Tree(id=ident, tokens=True) for ident in range(2, 200)], 1.0)
    assert not core.state.out.cache  # the cache is not asked either
    core.throttled(socket, False, 1.0)
    assert len(core.state.out.cache) == 1
    client.unanswered = {i: (w.Tree(id=i), 1) for i in range(2, 200)}
    engine.pump()
    assert client.unanswered == {}


def test_trees_of_a_socket_that_went_are_looked_at_again(sim: Callable[..., Any]) -> None:
    """Each `tree` gets its answer, though the first socket never read one."""
    engine = sim()
    client = engine.session()
    client.send(w.Append(id=1, tokens=[5] * 10))
    engine.pump()
    engine.post_session(1, m.Throttled(client.socket))
    engine.pump()
    client.send(*(w.Tree(id=ident, tokens=True) for ident in range(2, 6)))
    engine.pump()
    assert len(client.unanswered) == 4
    client.drop()
    engine.pump()
    client.connect()
    engine.pump()
    assert client.unanswered == {}


def test_a_broken_engine_answers_trees_that_wait(sim: Callable[..., Any]) -> None:
    engine = sim()
    client = engine.session()
    client.send(w.Append(id=1, tokens=[5] * 10))
    engine.pump()
    engine.post_session(1, m.Throttled(client.socket))
    engine.pump()
    client.send(*(w.Tree(id=ident, tokens=True) for ident in range(2, 6)))
    engine.fail(1)
    assert client.unanswered == {}


def looks(session: Alone) -> list[Any]:
    """The questions to the cache since the last call."""
    found = [each for each in session.state.out.cache if isinstance(each, m.Inspect)]
    session.state.out.cache.clear()
    return found


def test_one_tree_is_looked_at_after_the_other(alone: Callable[..., Alone]) -> None:
    session = alone()
    session.send(w.Fork(id=1, branch=None, as_=["a", "b"]))
    session.state.out.cache.clear()
    session.send(w.Tree(id=2), w.Tree(id=3, branch="a"), w.Tree(id=4, branch="none"))
    (first,) = looks(session)
    assert first.branches == [session.branch(name).handle for name in ("main", "a", "b")]
    assert session.replies(2) == session.replies(4) == []
    session.core.inspected(m.Inspected(first.id, [0, 0, 0]), 10.0)
    (second,) = looks(session)
    assert second.branches == [session.branch("a").handle]
    assert [each.branch for each in session.reply(2).branches] == ["main", "a", "b"]
    session.core.inspected(m.Inspected(second.id, [0], [2]), 10.0)
    assert looks(session) == []
    assert (session.reply(2).branches[0].kv, session.reply(3).branches[0].kv) == ("none", "disk")
    assert (session.reply(4).code, session.reply(4).branch) == ("no_branch", "none")


def test_a_tree_goes_on_with_the_branch_that_after_names(alone: Callable[..., Alone]) -> None:
    session = alone()
    session.send(w.Fork(id=1, branch=None, as_=["a", "b"]))
    session.state.out.cache.clear()
    for ident, branch, after, shown in (
        (2, None, "a", ["a", "b"]),
        (3, None, "main", ["main", "a", "b"]),
        (4, "b", "b", ["b"]),
    ):
        session.send(w.Tree(id=ident, branch=branch, after=w.Place(after, 0)))
        (look,) = looks(session)
        assert look.branches == [session.branch(name).handle for name in shown]
        session.core.inspected(m.Inspected(look.id, [0] * len(shown)), 10.0)
    session.send(w.Tree(id=5, branch="b", after=w.Place("a", 0)), w.Tree(id=6, after=w.Place("z", 0)))
    assert (session.reply(5).code, session.reply(5).details) == ("bad_request", {"id": 5})
    assert session.reply(6).code == "no_branch"


def test_a_socket_that_does_not_read_gets_its_trees_when_it_does(alone: Callable[..., Alone]) -> None:
    session = alone()
    session.core.throttled(1, True, 10.0)
    session.send(w.Tree(id=1))
    assert looks(session) == []
    session.core.throttled(1, False, 10.0)
    assert len(looks(session)) == 1


def test_a_broken_engine_answers_trees_of_who_does_not_read(alone: Callable[..., Alone]) -> None:
    session = alone()
    session.core.throttled(1, True, 10.0)
    session.send(w.Tree(id=1), w.Tree(id=2))
    session.core.fail(RamifyError("broken"), 11.0)
    for ident in (1, 2):
        (shown,) = session.reply(ident).branches
        assert (shown.kv, shown.resident) == ("none", None)


def test_a_tree_of_a_socket_that_left_may_be_asked_for_again(alone: Callable[..., Alone]) -> None:
    session = alone()
    session.core.throttled(1, True, 10.0)
    session.send(w.Tree(id=1), w.Tree(id=2))
    (reply_log,) = session.core.publisher.reply_logs.values()
    assert reply_log.waits(1)
    assert reply_log.waits(2)
    session.detach()
    assert reply_log.idle
