"""What an op's check says, and which tasks it makes: no session is needed for either."""

import re
from typing import Any

import pytest

from ramify.actors.calls.toolbox import Toolbox
from ramify.actors.session.branches.tasks import FrameRun, Task
from ramify.actors.session.ops import HANDLERS
from ramify.actors.session.ops.handler import Faults
from ramify.protocol.config import Limits
from ramify.protocol.errors import BadRequest, LimitExceeded
from ramify.protocol.wire import Fork, Generate, Join, Op, Open, Rollback, Set

LIMITS = Limits(branches=3, n=4, priority=2, meta_bytes=20)


def check(op: Op) -> None:
    HANDLERS[type(op)].check(op, Faults(op, LIMITS, "$[1]"))


def tasks(op: Op) -> list[Task]:
    return HANDLERS[type(op)].tasks(op, FrameRun(Open(client="c"), lambda: Toolbox(None)))


def test_a_fault_names_its_place_and_its_op() -> None:
    faults = Faults(Set(id=7), Limits(), "$[2]")
    with pytest.raises(BadRequest, match=re.escape("No - at `$[2].x`")) as bad:
        faults.fail("x", "No")
    assert bad.value.details == {"path": "$[2].x", "id": 7}
    faults.limit("x", 5, 5)
    with pytest.raises(LimitExceeded, match=re.escape("`x` is 6: at most 5 - at `$[2].x`")) as caught:
        faults.limit("x", 6, 5)
    assert caught.value.details == {"max": 5, "id": 7}
    with pytest.raises(LimitExceeded, match=re.escape("`x` has 6 names: at most 5")):
        faults.limit("x", 6, 5, "names")


SOUND: list[Op] = [
    Fork(id=1, as_=["a", "b", "c"]),
    Fork(id=1, branch=None, as_=["a"]),
    Fork(id=1, as_=["a"], at=0),
    Generate(id=1, n=4),
    Generate(id=1, priority=2),
    Generate(id=1, branch=["a", "b"]),
    Generate(id=1, as_=["a"]),
    Generate(id=1, n=2, as_=["a", "b"]),
    Generate(id=1, n=2, branch="x" * 60),  # its children are "....1.1" and "....1.2"
    Rollback(id=1, to=0),
    Rollback(id=1, turns=1),
    Set(id=1, branch="a", name="b"),
    Set(id=1, branch=None),
    Set(id=1, meta={"a": "x" * 12}),  # {"a":"............"}: 20 bytes
    Join(id=1, branch="a", from_=["b", "c"]),
]


@pytest.mark.parametrize("op", SOUND, ids=range(len(SOUND)))
def test_what_is_sound_passes(op: Op) -> None:
    check(op)


UNSOUND: list[tuple[Op, str, str]] = [
    (Fork(id=1, as_=["a", "b", "c", "d"]), "limit", "`as` has 4 names: at most 3"),
    (Fork(id=1, branch=None, as_=["a"], at=0), "bad_request", "A new root has no position"),
    (Generate(id=1, n=5), "limit", "`n` is 5: at most 4"),
    (Generate(id=1, priority=3), "limit", "`priority` is 3: at most 2"),
    (Generate(id=1, n=2, as_=["a"]), "bad_request", "1 names for n = 2"),
    (Generate(id=1, n=2, branch=["a", "b"]), "bad_request", "need a single branch"),
    (Generate(id=1, as_=["c"], branch=["a", "b"]), "bad_request", "need a single branch"),
    (Generate(id=1, n=2, branch="x" * 61), "bad_request", "longer than 64 characters"),
    (Generate(id=1, branch=["a", "a"]), "bad_request", "A branch is named twice"),
    (Rollback(id=1), "bad_request", "exactly one of `to` and `turns`"),
    (Rollback(id=1, to=0, turns=1), "bad_request", "exactly one of `to` and `turns`"),
    (Set(id=1, branch=None, name="b"), "bad_request", "`name` needs a `branch`"),
    (Set(id=1, meta={"a": "x" * 13}), "limit", "`meta` has 21 bytes as JSON: at most 20"),
    (Join(id=1, branch="a", from_=["b", "b"]), "bad_request", "A branch is named twice"),
    (Join(id=1, branch="a", from_=["b", "a"]), "bad_request", "cannot be joined into itself"),
]


@pytest.mark.parametrize(("op", "code", "why"), UNSOUND, ids=range(len(UNSOUND)))
def test_what_is_not_is_refused_before_anything_runs(op: Op, code: str, why: str) -> None:
    with pytest.raises((BadRequest, LimitExceeded), match=re.escape(why)) as caught:
        check(op)
    assert caught.value.code == code
    assert (caught.value.details or {})["id"] == 1


def told(task: Task) -> tuple[Any, ...]:
    return task.kind.name, task.branch, list(task.touched), list(task.children)


def test_children_are_named_after_their_parent_and_their_op() -> None:
    spawn, first, second = tasks(Generate(id=5, n=2, branch="p", deadline_ms=9))
    assert told(spawn) == ("fork", "p", ["p", "p.5.1", "p.5.2"], ["p.5.1", "p.5.2"])
    assert told(first) == ("generate", "p.5.1", ["p.5.1"], [])
    assert told(second) == ("generate", "p.5.2", ["p.5.2"], [])
    assert (first.index, second.index) == (0, 1)
    assert spawn.kind.silent
    assert spawn.kind.forks
    assert first.kind.generates


def test_what_an_op_touches_it_waits_for() -> None:
    assert [told(task) for task in tasks(Fork(id=1, branch="p", as_=["a", "b"]))] == [
        ("fork", "p", ["p", "a", "b"], ["a", "b"])
    ]
    assert [told(task) for task in tasks(Fork(id=1, branch=None, as_=["a"]))] == [
        ("fork", None, ["a"], ["a"])
    ]
    assert [told(task) for task in tasks(Set(id=1, branch="a", name="b"))] == [
        ("set", "a", ["a", "b"], [])
    ]
    assert [told(task) for task in tasks(Set(id=1, branch=None))] == [("set", None, [], [])]
    (join,) = tasks(Join(id=1, branch="a", from_=["b", "c"]))
    assert told(join) == ("join", "a", ["a", "b", "c"], [])
    assert join.kind.adds
    assert join.shared is not None
    (rollback,) = tasks(Rollback(id=1, branch="a", to=0))
    assert told(rollback) == ("rollback", "a", ["a"], [])
