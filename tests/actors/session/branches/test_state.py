"""What a session holds and what it tells the cache: branches, names, sizes."""

from typing import Any

import pytest

from ramify.actors.kit.memory import BRANCH, JSON, SEGMENT, TOKEN, json_size
from ramify.actors.session.branches.branch import Label, SessionBranch
from ramify.actors.session.branches.segments import Tail
from ramify.actors.session.branches.state import SessionState
from ramify.protocol.config import Limits
from ramify.protocol.errors import Exists, LimitExceeded, NoBranch, TooLong
from ramify.protocol.messages import DropBranches, ExtendBranch, ForkBranch, MoveBranch, OpenBranch
from ramify.protocol.plan import pack


def state_of(*, context: int = 100, number: int = 3, namespace: str = "", **limits: Any) -> SessionState:
    return SessionState(
        number,
        context=context,
        vocab=1000,
        limits=Limits(**limits),
        decode=lambda tokens: "x" * len(tokens),
        namespace=namespace,
    )


def told(state: SessionState) -> list[Any]:
    """What the cache was told since the last call."""
    state.out.seal()
    found = list(state.out.cache)
    state.out.cache.clear()
    return found


def grown(state: SessionState) -> int:
    """What it holds beside the session itself."""
    return state.meter.held - state_of().meter.held


def test_ids_are_the_sessions_own() -> None:
    state = state_of(number=3)
    assert [state.next_id() for _ in range(3)] == [(3 << 32) + i for i in (1, 2, 3)]
    other = state_of(number=4)
    assert other.next_id() == (4 << 32) + 1


def test_the_revision_rises_by_one() -> None:
    state = state_of()
    assert (state.revision, state.expects) == (0, 0)
    assert [state.bump(), state.bump(), state.revision] == [1, 2, 2]


def test_a_client_has_seen_more_than_there_is() -> None:
    state = state_of()
    state.restore(5, [], 0, None)
    state.bump()
    life = state.revision - 1
    assert not any(state.lost(revision) for revision in (None, 0, 5, life, life + 1))
    assert state.lost(6)  # of the life before, behind what was saved
    assert state.lost(life + 2)  # a server of the same life, which has saved nothing
    assert state.lost(2 * life)


def test_a_root_is_told_metered_and_born_with_the_next_revision() -> None:
    state = state_of(namespace="n")
    state.bump()
    branch = state.root("a")
    assert (branch.born, branch.position, branch.parent) == (2, 0, None)
    assert told(state) == [OpenBranch(branch.handle, "n")]
    assert grown(state) == BRANCH
    assert state.branch("a") is branch
    with pytest.raises(NoBranch) as error:
        state.branch("b")
    assert error.value.details == {"branch": "b"}


def test_names_are_checked_up_to_the_last_branch_there_may_be() -> None:
    state = state_of(branches=3)
    state.root("a")
    state.check_new(["b", "c"])
    with pytest.raises(LimitExceeded) as error:
        state.check_new(["b", "c", "d"])
    assert error.value.details == {"max": 3}
    state.check_new(["b", "c", "d"], moved=1)
    for names in (["a"], ["b", "b"]):
        with pytest.raises(Exists) as exists:
            state.check_new(names)
        assert exists.value.details == {"branch": names[-1]}


def test_new_branches_need_memory_and_moved_ones_none() -> None:
    state = state_of()
    state.meter.most = state.meter.held + 2 * BRANCH
    state.check_new(["a", "b"])
    with pytest.raises(LimitExceeded):
        state.check_new(["a", "b", "c"])
    state.check_new(["a", "b", "c"], moved=1)
    state.meter.most = state.meter.held - 1
    state.check_new(["a"], moved=1)
    with pytest.raises(LimitExceeded):
        state.check_new(["a"])


def test_a_fork_is_told_once_for_all_children() -> None:
    state = state_of()
    root = state.root("a")
    state.extend(root, [1, 2, 3], "xxx", tail=Tail.RAW)
    told(state)
    before = state.meter.held
    assert state.fork(root, [], 2) == []
    assert told(state) == []
    state.bump()
    children = state.fork(root, ["b", "c"], 3)
    assert [child.name for child in children] == ["b", "c"]
    assert {child.born for child in children} == {2}
    assert {child.parent for child in children} == {"a"}
    assert told(state) == [ForkBranch(root.handle, [child.handle for child in children], 3)]
    assert state.meter.held - before == 2 * BRANCH
    assert set(state.branches) == {"a", "b", "c"}


def test_no_new_branch_takes_the_name_of_another() -> None:
    """The state does not trust its callers: the branch of that name would be lost."""
    state = state_of(branches=4)
    a, b = state.root("a"), state.root("b")
    told(state)
    held, revision = state.meter.held, state.revision
    for names in (["b"], ["c", "c"]):
        for make in (lambda names: state.fork(a, names, 0), state.roots):
            with pytest.raises(Exists):
                make(names)
    for make in (lambda names: state.fork(a, names, 0), state.roots):
        with pytest.raises(LimitExceeded):
            make(["c", "d", "e"])
    with pytest.raises(Exists):
        state.place([(a, "c"), (b, "c")])
    assert state.branches == {"a": a, "b": b}
    assert (told(state), state.meter.held, state.revision) == ([], held, revision)


def test_room_ends_with_the_context() -> None:
    state = state_of(context=10)
    root = state.root("a")
    state.extend(root, [1] * 4, "xxxx", tail=Tail.RAW)
    state.room(root, 6)
    for at_least, words in ((False, "; 7 more pass"), (True, "at least 7 more")):
        with pytest.raises(TooLong, match=words) as error:
            state.room(root, 7, at_least=at_least)
        assert error.value.details == {"max": 10, "position": 4, "tokens": 7}
    with pytest.raises(TooLong, match="; 7 more pass"):
        state.room(root, 7)


def test_input_is_told_and_metered_unless_it_has_no_tokens() -> None:
    state = state_of()
    root = state.root("a")
    told(state)
    before = state.meter.held
    segment = state.extend(root, [1, 2], "ab", tail=Tail.RAW)
    assert told(state) == [ExtendBranch(root.handle, pack([1, 2]))]
    assert state.meter.held - before == SEGMENT + 2 * TOKEN + 2
    assert (root.position, root.segments[-1] is segment) == (2, True)
    state.extend(root, [3], "c", packed=pack([3]), tail=Tail.RAW)
    assert told(state) == [ExtendBranch(root.handle, pack([3]))]
    state.extend(root, [], "", tail=Tail.RAW)
    state.extend_handle(root, [])
    assert told(state) == []
    state.extend_handle(root, [9])
    assert told(state) == [ExtendBranch(root.handle, pack([9]))]


def test_a_branch_that_ends_there_already_is_not_moved() -> None:
    state = state_of()
    root = state.root("a")
    state.extend(root, [1, 2, 3], "xxx", tail=Tail.RAW)
    told(state)
    state.truncate(root, 3)
    assert told(state) == []
    state.truncate(root, 2)
    assert (root.position, told(state)) == (2, [MoveBranch(root.handle, 2)])


def test_a_drop_gives_back_what_the_branch_held() -> None:
    state = state_of()
    root = state.root("a")
    state.annotate(root, {"k": "v" * 100})
    state.out.retained[root.handle] = 5.0
    told(state)
    state.out.retained[root.handle] = 5.0
    state.drop(root)
    assert (state.branches, root.label.gone, grown(state)) == ({}, True, 0)
    assert root.handle not in state.out.retained
    assert told(state) == [DropBranches([root.handle])]


def test_a_renamed_branch_is_a_new_one_for_who_knew_the_old_name() -> None:
    state = state_of()
    root = state.root("a")
    state.bump()
    state.rename(root, "b")
    assert (root.name, root.born, state.branches) == ("b", 2, {"b": root})


def test_a_name_that_another_branch_has_is_not_given_again() -> None:
    state = state_of()
    one, other = state.root("a"), state.root("b")
    with pytest.raises(Exists, match="'b' exists already"):
        state.rename(one, "b")
    assert (one.name, state.branches) == ("a", {"a": one, "b": other})


def test_meta_is_metered_as_objects_and_bounded_as_text() -> None:
    small, large = {"k": "v" * 10}, {"k": "v" * 30}
    state = state_of(session_meta_bytes=json_size(large))
    root = state.root("a")
    before = state.meter.held
    state.annotate(root, large)
    assert state.meter.held - before == JSON * json_size(large)
    with pytest.raises(LimitExceeded) as error:
        state.annotate(None, {"k": 1})
    assert error.value.details == {"max": json_size(large)}
    assert (state.meta, root.meta) == (None, large)
    state.annotate(root, small)
    assert state.meter.held - before == JSON * json_size(small)
    state.annotate(None, {"k": 1})
    assert state.meta == {"k": 1}


def test_meta_needs_memory_only_where_it_grows() -> None:
    state = state_of()
    large, small = {"k": "v" * 30}, {"k": 1}
    state.annotate(None, small)
    more = JSON * (json_size(large) - json_size(small))
    state.meter.most = state.meter.held + more
    state.annotate(None, large)
    state.meter.most = state.meter.held - more - 1  # full
    state.annotate(None, small)
    with pytest.raises(LimitExceeded):
        state.annotate(None, large)
    state.meter.most = state.meter.held - 1  # more than full: what is no larger passes
    state.annotate(None, {"k": 2})
    state.meter.most = state.meter.held + JSON - 1
    with pytest.raises(LimitExceeded):
        state.annotate(None, {"k": 22})
    state.meter.most += 1
    state.annotate(None, {"k": 22})


def family(state: SessionState) -> dict[str, SessionBranch]:
    a = state.root("a")
    (b,) = state.fork(a, ["b"], 0)
    (c,) = state.fork(b, ["c"], 0)
    state.fork(c, ["d"], 0)
    state.root("z")
    return state.branches


def test_below_are_descendants_through_dropped_ones_too() -> None:
    state = state_of()
    known = family(state)

    def below(*names: str) -> list[str]:
        return [branch.name for branch in state.below([known[name] for name in names])]

    assert below("a") == ["a", "b", "c", "d"]
    assert below("c", "z") == ["c", "d", "z"]
    assert below() == []
    state.drop(known["b"])
    assert below("a") == ["a", "c", "d"]


def test_below_looks_at_each_branch_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However deep they are: a chain of 200, and none of it is below `z`."""
    state, asked = state_of(branches=300), 0
    last = state.root("a")
    for number in range(200):
        (last,) = state.fork(last, [f"b{number}"], 0)
    z = state.root("z")
    ancestor = Label.ancestor

    def counted(label: Label) -> Label | None:
        nonlocal asked
        asked += 1
        return ancestor(label)

    monkeypatch.setattr(Label, "ancestor", counted)
    assert [branch.name for branch in state.below([z])] == ["z"]
    assert asked == 201
    # from the deepest on, what was found out on the way is known
    state.branches = dict(reversed(state.branches.items()))
    asked = 0
    assert [branch.name for branch in state.below([z])] == ["z"]
    assert asked == 201


def test_branches_are_placed_all_at_once() -> None:
    state = state_of()
    a, b = state.root("a"), state.root("b")
    state.extend(a, [1, 2], "aa", tail=Tail.RAW)
    state.extend(b, [3], "b", tail=Tail.RAW)
    state.bump()
    state.bump()
    told(state)
    before, handles = state.meter.held, (a.handle, b.handle)
    state.out.retained[b.handle] = 1.0
    assert state.place([(a, "b"), (b, "a"), (a, "n")]) == [0, 0, None]
    assert [state.branches[name].text() for name in "abn"] == ["b", "aa", "aa"]
    assert handles[1] not in state.out.retained
    assert state.branches["n"].born == 2
    assert state.meter.held - before == BRANCH
    made = [state.branches[name].handle for name in "ban"]
    assert told(state) == [
        ForkBranch(handles[0], [made[0]], 2),
        ForkBranch(handles[1], [made[1]], 1),
        ForkBranch(handles[0], [made[2]], 2),
        DropBranches([handles[1]]),
        DropBranches([handles[0]]),
    ]
