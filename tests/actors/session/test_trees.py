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


def tree(engine: Any, client: Any, **fields: Any) -> list[w.State]:
    """The answers, asked for one after the other."""
    pages: list[w.State] = []
    while not pages or pages[-1].next is not None:
        ident = client.id()
        after = pages[-1].next if pages else None
        client.send(w.Tree(id=ident, after=after, **fields))
        engine.pump()
        (page,) = client.replies[ident]
        assert isinstance(page, w.State), page
        pages.append(page)
    return pages


def histories(engine: Any, client: Any) -> dict[str, list[tuple[int, int, str, list[int]]]]:
    """What the branches hold; a `tree` leaves out what has no tokens."""
    return {
        name: [(p.start, p.end, p.text, p.tokens.tolist()) for p in branch.segments if p.end > p.start]
        for name, branch in engine.cores[client.number].state.branches.items()
    }


def shown(state: w.State) -> dict[str, list[tuple[int, int, str | None, list[int] | None]]]:
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
