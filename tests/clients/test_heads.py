"""The branch table of a client: what replies, events and `state` change, in whatever order they come."""

import pytest
from msgspec import structs

from ramify.clients.heads import Heads
from ramify.protocol.wire import (
    Append,
    BranchState,
    Done,
    Drop,
    Event,
    Fork,
    Join,
    Ok,
    Prune,
    Rollback,
    Set,
)
from tests.messages import usage


def of(heads: Heads) -> dict[str, tuple[int, int]]:
    return {name: (head.position, head.received) for name, head in heads.by_name.items()}


def done(branch: str, position: int, revision: int) -> Done:
    used = usage()
    return Done(id=1, branch=branch, position=position, reason="stop", usage=used, revision=revision)


@pytest.fixture
def heads() -> Heads:
    """Attached at revision 10, with `main` at 20."""
    made = Heads(None)
    made.attached([BranchState(branch="main", position=20)], 10, set())
    return made


def test_a_state_has_all_branches_there_are(heads: Heads) -> None:
    heads.get("old").position = 5
    heads.attached(
        [
            BranchState(branch="main", position=24),
            BranchState(branch="runs", position=9, running=3, started_at=6),
            BranchState(branch="asked", position=7),
        ],
        12,
        {"asked"},
    )
    assert of(heads) == {"main": (24, 20), "runs": (9, 6), "asked": (7, 0)}
    assert heads.have() == {"main": 20, "runs": 6, "asked": 0}
    assert heads.revision == 12


def test_own_ops_move_their_branch(heads: Heads) -> None:
    heads.applied(Append(id=1, text="x"), Ok(id=1, branch="main", position=26, revision=11))
    assert of(heads) == {"main": (26, 20)}
    rolled = Ok(id=2, branch="main", position=8, revision=12)
    heads.applied(Rollback(id=2, to=8), rolled)
    assert of(heads) == {"main": (8, 8)}
    rebased = Ok(id=3, branch="main", position=12, revision=13, result={"rebased": 6})
    heads.applied(Append(id=3, text="x"), rebased)
    assert of(heads) == {"main": (12, 6)}
    heads.applied(Set(id=4, branch="main", name="m"), Ok(id=4, branch="m", position=12, revision=14))
    assert of(heads) == {"m": (12, 6)}
    assert heads.revision == 14


def test_a_reply_without_a_revision_counts(heads: Heads) -> None:
    heads.applied(Append(id=1, text="x"), Ok(id=1, branch="main", position=26))
    assert of(heads) == {"main": (26, 20)}
    assert heads.revision == 10


def test_a_reply_on_a_branch_that_has_gone_or_without_a_position_moves_nothing(heads: Heads) -> None:
    heads.applied(Rollback(id=1, branch="gone", to=2), Ok(id=1, branch="gone", position=2, revision=11))
    heads.applied(Append(id=2, branch="gone"), Ok(id=2, branch="gone", position=2, revision=12))
    heads.applied(Rollback(id=3, to=2), Ok(id=3, branch="main", revision=13))
    heads.applied(Append(id=4), Ok(id=4, branch="main", revision=14))
    heads.applied(Set(id=5, branch="gone", name="new"), Ok(id=5, branch="new", revision=15))
    assert of(heads) == {"main": (20, 20)}


def test_a_select_may_move_a_branch_back_first(heads: Heads) -> None:
    """A choice may begin with the branch's last text."""
    heads.ended(structs.replace(done("main", 18, revision=11), rebased=16))
    assert of(heads) == {"main": (18, 18)}


def test_joins_and_prunes_move_and_drop_branches(heads: Heads) -> None:
    heads.applied(Fork(id=1, as_=["a", "b", "c"]), Ok(id=1, branch="main", position=20, revision=11))
    kept = [{"from": "b", "into": "main", "position": 30, "rebased": 4}]
    ok = Ok(
        id=2,
        branch="main",
        position=30,
        revision=12,
        result={"kept": kept, "dropped": ["a", "b"], "scores": {"a": None, "b": 2}},
    )
    heads.applied(Prune(id=2, from_=["a", "b"], into="main"), ok)
    assert of(heads) == {"c": (20, 20), "main": (30, 30)}
    joined = Ok(id=3, branch="main", position=44, revision=13, result={"dropped": ["c"], "rebased": 28})
    heads.applied(Join(id=3, from_=["c"]), joined)
    assert of(heads) == {"main": (44, 28)}


def test_joins_and_prunes_of_others(heads: Heads) -> None:
    heads.noted(Event(revision=11, op="fork", branch="main", details={"as": ["a", "b"], "position": 20}))
    kept = [{"from": "a", "into": "a", "position": 24}, {"from": "b", "into": "c", "position": 25}]
    heads.get("a").position = 24
    heads.noted(
        Event(
            revision=12,
            op="prune",
            branch="a",
            details={"position": 24, "kept": kept, "dropped": ["b"]},
        )
    )
    assert of(heads) == {"main": (20, 20), "a": (24, 20), "c": (25, 25)}
    heads.noted(
        Event(revision=13, op="join", branch="main", details={"position": 33, "dropped": ["a", "c"]})
    )
    assert of(heads) == {"main": (33, 20)}


def test_forks_begin_where_they_leave_their_parent(heads: Heads) -> None:
    heads.applied(Fork(id=1, as_=["a"]), Ok(id=1, branch="main", position=20, revision=11))
    heads.applied(Fork(id=2, as_=["b"], at=4), Ok(id=2, branch="main", revision=12))
    heads.applied(Fork(id=3, as_=["c"]), Ok(id=3, branch="main", revision=13))
    heads.applied(Fork(id=4, branch=None, as_=["d"]), Ok(id=4, revision=14))
    assert of(heads) == {
        "main": (20, 20),
        "a": (20, 20),
        "b": (4, 4),
        "c": (20, 20),
        "d": (0, 0),
    }
    heads.applied(Drop(id=5, branch=["a", "b"]), Ok(id=5, branch="a", revision=15))
    assert set(of(heads)) == {"main", "b", "c", "d"}


def test_a_reply_that_the_state_includes_changes_nothing(heads: Heads) -> None:
    """It was missed, and is sent again after a resume."""
    heads.applied(Rollback(id=1, to=3), Ok(id=1, branch="main", position=3, revision=10))
    assert of(heads) == {"main": (20, 20)}
    assert heads.revision == 10


def test_a_reply_that_waited_for_its_deltas_still_counts(heads: Heads) -> None:
    """Replies on other branches, and events, may overtake it."""
    heads.applied(Fork(id=1, as_=["a"]), Ok(id=1, branch="main", position=20, revision=11))
    heads.applied(Append(id=3, branch="a", text="x"), Ok(id=3, branch="a", position=25, revision=14))
    assert heads.noted(Event(revision=15, op="append", branch="a", details={"position": 30})) == 30
    heads.applied(Rollback(id=2, to=8), Ok(id=2, branch="main", position=8, revision=12))
    assert of(heads) == {"main": (8, 8), "a": (30, 20)}
    assert heads.revision == 15


def test_a_done_that_is_sent_again_does_not_bring_a_branch_back(heads: Heads) -> None:
    heads.ended(done("gone", 9, revision=10))
    assert "gone" not in of(heads)
    heads.ended(done("main", 25, revision=10))
    heads.ended(done("child", 7, revision=11))  # of a generation with `n`
    assert of(heads) == {"main": (25, 25), "child": (7, 7)}
    assert heads.revision == 11


def test_renames_and_rebases_of_others(heads: Heads) -> None:
    heads.noted(Event(revision=11, op="set", branch="main"))  # settings: nothing moves
    assert of(heads) == {"main": (20, 20)}
    heads.noted(Event(revision=12, op="set", branch="new", details={"from": "main", "position": 20}))
    assert of(heads) == {"new": (20, 20)}
    heads.noted(Event(revision=13, op="append", branch="new", details={"position": 30, "rebased": 14}))
    assert of(heads) == {"new": (30, 14)}
    heads.noted(Event(revision=14, op="append", branch="new", details={"position": 40, "rebased": 28}))
    assert of(heads) == {"new": (40, 14)}


def test_a_branch_that_was_not_known_is_empty(heads: Heads) -> None:
    heads.get("new")
    assert of(heads) == {"main": (20, 20), "new": (0, 0)}


def test_events_of_others(heads: Heads) -> None:
    assert heads.noted(Event(revision=11, op="close")) is None
    heads.noted(Event(revision=12, op="rollback", branch="main", details={"position": 9}))
    assert of(heads) == {"main": (9, 9)}
    heads.noted(Event(revision=13, op="generate", branch="main", details={"position": 15}))
    assert of(heads) == {"main": (15, 9)}
    heads.noted(Event(revision=11, op="append", branch="new", details={"position": 3}))
    assert of(heads)["new"] == (3, 0)
    assert heads.revision == 13
