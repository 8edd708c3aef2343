"""What each method of `Session` and `Branch` sends, and what it makes of the answers; no sockets."""

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from ramify.clients.generation import Generation, Reply
from ramify.clients.handles import TREE_TRIES, Session
from ramify.protocol.errors import BadRequest, Conflict
from ramify.protocol.wire import (
    Append,
    BranchState,
    Cancel,
    ChatMessage,
    CloseSession,
    Drop,
    Fork,
    Generate,
    Join,
    Ok,
    Op,
    Place,
    Prune,
    Rollback,
    Select,
    Set,
    StateReply,
    Tree,
)

OK = Ok(id=1)

ASKED: dict[str, tuple[Callable[[Session], Awaitable[Any]], Op]] = {
    "append": (lambda s: s.main.append("x", expect=3), Append(id=0, text="x", expect=3)),
    "append tokens": (lambda s: s.main.append(tokens=(4, 5)), Append(id=0, tokens=[4, 5])),
    "append messages": (
        lambda s: s.main.append(messages=[{"role": "tool", "content": "t", "tool_call_id": "c"}]),
        Append(id=0, messages=[ChatMessage(role="tool", content="t", tool_call_id="c")]),
    ),
    "append structs": (
        lambda s: s.main.append(messages=[ChatMessage(role="user", content="t")]),
        Append(id=0, messages=[ChatMessage(role="user", content="t")]),
    ),
    "say": (lambda s: s.main.say("x"), Append(id=0, messages=[ChatMessage(role="user", content="x")])),
    "say as": (
        lambda s: s.main.say("x", role="system"),
        Append(id=0, messages=[ChatMessage(role="system", content="x")]),
    ),
    "fork": (lambda s: s.main.fork("a", "b"), Fork(id=0, as_=["a", "b"])),
    "fork of main": (lambda s: s.fork("a", at=4), Fork(id=0, as_=["a"], at=4)),
    "root": (lambda s: s.root("a"), Fork(id=0, branch=None, as_=["a"])),
    "rollback": (lambda s: s.branch("b").rollback(to=2), Rollback(id=0, branch="b", to=2)),
    "rollback turns": (lambda s: s.main.rollback(turns=2), Rollback(id=0, turns=2)),
    "set": (
        lambda s: s.main.set(retain_s=4.0, persist="sync", meta={"a": 1}),
        Set(id=0, branch="main", retain_s=4.0, persist="sync", meta={"a": 1}),
    ),
    "set the session": (
        lambda s: s.set(retain_s=4.0, persist="none", meta={}),
        Set(id=0, retain_s=4.0, persist="none", meta={}),
    ),
    "drop": (lambda s: s.branch("b").drop(), Drop(id=0, branch="b")),
    "join": (lambda s: s.main.join("a", s.branch("b")), Join(id=0, from_=["a", "b"])),
    "join with": (
        lambda s: s.main.join("a", prefix="<", each="{i}", suffix=">", role=None, keep=True),
        Join(id=0, from_=["a"], prefix="<", each="{i}", suffix=">", role=None, keep=True),
    ),
    "prune": (
        lambda s: s.main.prune("a", s.branch("b"), by="vote"),
        Prune(id=0, from_=["a", "b"], into=["main"], by="vote"),
    ),
    "prune with": (
        lambda s: s.prune(["a", "b"], k=2, score_from=["x", s.branch("y")], keep=True),
        Prune(id=0, from_=["a", "b"], k=2, score_from=["x", "y"], keep=True),
    ),
    "prune into": (
        lambda s: s.prune(["a"], into=[s.main]),
        Prune(id=0, from_=["a"], into=["main"]),
    ),
    "cancel": (lambda s: s.main.cancel(), Cancel(id=0, branch="main")),
    "cancel below": (lambda s: s.main.cancel(subtree=True), Cancel(id=0, branch="main", subtree=True)),
    "cancel all": (lambda s: s.cancel(), Cancel(id=0)),
    "cancel every op": (lambda s: s.cancel(subtree=True), Cancel(id=0, subtree=True)),
    "close": (lambda s: s.close(), CloseSession(id=0)),
    "detach": (lambda s: s.close(keep=True), CloseSession(id=0, keep=True)),
}


@pytest.mark.parametrize("name", ASKED)
async def test_a_method_is_one_op(offline: Any, name: str) -> None:
    call, op = ASKED[name]
    session, link = offline(OK)
    await call(session)
    assert link.frames == [[op]]


async def test_generations_are_the_last_op_of_their_frame(offline: Any) -> None:
    session, link = offline()
    one = session.main.generate(max_tokens=3, seed=1)
    chat = session.branch("b").chat("hi", role="tool", stop=["."])
    choice = session.main.select(["yes", "no"], priority=2)
    assert [each.branch for each in (one, chat, choice)] == ["main", "b", "main"]
    assert link.frames == [
        [Generate(id=0, max_tokens=3, seed=1)],
        [
            Append(id=0, branch="b", messages=[ChatMessage(role="tool", content="hi")]),
            Generate(id=0, branch="b", stop=["."]),
        ],
        [Select(id=0, choices=["yes", "no"], priority=2)],
    ]


def test_children_have_names_that_nobody_has(offline: Any) -> None:
    session, link = offline()
    named = session.main.generate(n=2, names=["a", "b"])
    assert [each.branch for each in named] == ["a", "b"]
    assert link.frames == [[Generate(id=0, n=2, as_=["a", "b"])]]
    session.core.heads.get("main.ent7b2")
    first = [each.branch for each in session.main.generate(n=2)]
    second = [each.branch for each in session.main.generate(n=1)]
    assert (first, second) == (["main.ent7b1", "main.ent7b3"], ["main.ent7b4"])
    deep = session.branch("x" * 64).generate(n=1)[0].branch
    assert deep == "x" * 40 + ".ent7b5"


async def test_a_rename_takes_the_handle_along(offline: Any) -> None:
    session, _ = offline(Ok(id=1, branch="new", position=9), Ok(id=2, branch="new", position=9))
    await session.main.set(name="new")
    assert session.main.name == "new"
    await session.main.set(persist="sync")
    assert session.main.name == "new"


async def test_forks_are_handles_of_their_names(offline: Any) -> None:
    session, _ = offline(OK, Ok(id=2))
    assert [branch.name for branch in await session.main.fork("a", "b")] == ["a", "b"]
    assert [branch.name for branch in await session.root("c")] == ["c"]


async def test_a_prune_tells_who_won(offline: Any) -> None:
    kept = [{"from": "b", "into": "main", "position": 12}]
    result = {"kept": kept, "dropped": ["a", "b"], "scores": {"a": None, "b": 2.0}}
    session, _ = offline(Ok(id=1, branch="main", position=12, result=result))
    pruned = await session.main.prune("a", "b")
    assert [branch.name for branch in pruned.branches] == ["main"]
    assert (pruned.kept, pruned.dropped) == (["b"], ["a", "b"])
    assert pruned.scores == {"a": None, "b": 2.0}


def page(ident: int, revision: int, *branches: str, after: str | None = None) -> StateReply:
    """One answer to `tree`."""
    return StateReply(
        id=ident,
        session="s",
        op=ident,
        revision=revision,
        branches=[BranchState(branch=name, position=revision) for name in branches],
        next=None if after is None else Place(branch=after),
    )


async def test_a_tree_is_asked_for_until_it_is_whole(offline: Any) -> None:
    session, link = offline(page(1, 5, "main", after="b"), page(2, 5, "b"))
    state = await session.tree(text=True)
    assert [branch.branch for branch in state.branches] == ["main", "b"]
    assert link.frames == [[Tree(id=0, text=True)], [Tree(id=0, text=True, after=Place(branch="b"))]]
    session, link = offline(page(1, 5, "main", "b"))
    assert (await session.branch("b").tree(tokens=True)).branch == "b"
    assert link.frames == [[Tree(id=0, branch="b", tokens=True)]]
    session, link = offline(page(1, 5, "main"))
    await session.tree()
    assert link.frames == [[Tree(id=0)]]


async def test_a_tree_that_changed_meanwhile_is_asked_for_again(offline: Any) -> None:
    """Pages of two revisions do not fit together."""
    session, link = offline(
        page(1, 5, "main", after="b"),
        page(2, 6, "b", after="c"),
        page(3, 7, "main", after="b"),
        page(4, 7, "c"),
    )
    state = await session.tree()
    assert [(branch.branch, branch.position) for branch in state.branches] == [("main", 7), ("c", 7)]
    after = [op.after for (op,) in link.frames if isinstance(op, Tree)]
    assert after == [None, Place(branch="b"), None, Place(branch="b")]


async def test_a_tree_that_never_holds_still_is_a_conflict(offline: Any) -> None:
    answers = [page(i, i, "main", after="b") for i in range(1, 2 * TREE_TRIES + 1)]
    session, link = offline(*answers)
    with pytest.raises(Conflict, match="changes faster"):
        await session.tree()
    assert len(link.frames) == 2 * TREE_TRIES


async def test_a_program_is_one_frame_and_a_handle_for_each_op(offline: Any) -> None:
    session, link = offline()
    ops = [
        {"type": "fork", "as": ["a", "b"]},
        Generate(id=7, branch="a", max_tokens=2),
        {"type": "generate", "branch": ["a", "b"]},
    ]
    fork, one, two = await session.send(ops)  # type: ignore[arg-type]
    assert isinstance(fork, Reply)
    assert isinstance(one, Generation)
    assert isinstance(two, list)
    assert [each.branch for each in [one, *two]] == ["a", "a", "b"]
    assert [type(op) for op in link.frames[0]] == [Fork, Generate, Generate]


@pytest.mark.parametrize("kind", ["open", "credit", "ping"])
async def test_what_is_no_op_cannot_be_part_of_a_program(offline: Any, kind: str) -> None:
    session, link = offline()
    with pytest.raises(BadRequest, match=f"'{kind}' is not an op"):
        await session.send([{"type": kind}])
    with pytest.raises(BadRequest, match="type"):
        await session.send([{"text": "x"}])
    assert link.frames == []


def test_credit_goes_to_the_link(offline: Any) -> None:
    session, link = offline()
    session.branch("b").credit(40)
    assert link.credits == [("b", 40)]


def test_what_a_session_knows_of_itself(offline: Any) -> None:
    session, _ = offline()
    assert session.model is None
    assert (session.id, session.key, session.view_key, session.error) == ("s", None, None, None)
    assert session.main.position == 9
    assert session.branch("nowhere").position is None
    assert [branch.name for branch in session.branches] == ["main"]
    assert repr(session.main) == "Branch('main', position=9)"


async def test_what_is_no_name_is_told_by_its_argument(offline: Any) -> None:
    session, link = offline()
    wrong: Any = 3
    for asked in (session.main.fork(wrong), session.fork("a", wrong), session.root(wrong)):
        with pytest.raises(TypeError, match=r"`names\[[01]\]` is 3, not a str"):
            await asked
    assert link.frames == []
    assert Fork(id=1, as_=[wrong]).as_ == [wrong]  # types are checked when it is sent
