"""`SegmentList` against a list, and what its copies cost."""

import sys
from array import array
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ramify.actors.session.branches import branch as branch_module
from ramify.actors.session.branches.branch import SegmentList, SessionBranch, input_segment
from ramify.actors.session.branches.segments import InputSegment, Tail


def segment(start: int, length: int) -> InputSegment:
    return InputSegment(start, array("i", [7] * length), "x" * length, tail=Tail.RAW)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9), st.integers(0, 3)), max_size=60))
def test_it_is_a_list(program: list[tuple[int, int, int]]) -> None:
    """Several that share their beginnings: each stays what a list of its own would be."""
    every: list[tuple[SegmentList, list[InputSegment]]] = [(SegmentList(), [])]
    for action, number, which in program:
        segments, model = every[which % len(every)]
        end = model[-1].end if model else 0
        if action <= 2:
            new = segment(end, number % 4)
            segments.append(new)
            model.append(new)
        elif action == 3:
            every.append((segments.copy(), list(model)))
        elif action == 4 and model:
            assert segments.pop() is model.pop()
        else:
            to = end * number // 9
            segments.cut(to)
            while model and model[-1].start >= to:
                model.pop()
        for segments, model in every:
            assert (list(segments), len(segments), bool(segments)) == (model, len(model), bool(model))
            assert list(reversed(segments)) == model[::-1]
            assert [segments[i] for i in range(len(model))] == model
            assert [segments[-i - 1] for i in range(len(model))] == model[::-1]
            assert segments[1:3] == model[1:3]
            for wrong in (len(model), -len(model) - 1):
                with pytest.raises(IndexError):
                    segments[wrong]


def test_one_is_taken_out_near_the_end() -> None:
    segments, made = SegmentList(), [segment(i, 1) for i in range(5)]
    for each in made:
        segments.append(each)
    segments.remove(made[3])
    assert list(segments) == [*made[:3], made[4]]
    with pytest.raises(IndexError):
        segments.remove(made[3])


def test_forks_of_a_long_branch_share_its_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fork makes one link at most, wherever it is."""
    branch, turns = SessionBranch("main", 1), 20_000
    for _ in range(turns):
        input_segment(branch, [1, 2, 3], "abc", tail=Tail.CLOSED, turn=True)
    made = []
    link = branch_module.SegmentLink

    class Counted(link):  # type: ignore[misc, valid-type]
        def __init__(self, *arguments: Any) -> None:
            made.append(1)
            super().__init__(*arguments)

    monkeypatch.setattr(branch_module, "SegmentLink", Counted)
    children = [
        branch.fork(str(at), at, at * 66, lambda tokens: "ab"[: len(tokens)]) for at in range(900)
    ]
    assert not made
    assert [child.position for child in children] == [66 * at for at in range(900)]
    inside = branch.fork("inside", 1000, 3001, lambda tokens: "a" * len(tokens))
    assert (len(made), inside.position, inside.segments[-1].text) == (1, 3001, "a")
    twins = [inside.twin(str(i), 2000 + i) for i in range(900)]
    assert (len(made), twins[5].position, twins[5].parent) == (1, 3001, "main")
    input_segment(twins[5], [9], "z", tail=Tail.RAW)
    assert (twins[5].position, twins[6].position, branch.position) == (3002, 3001, 3 * turns)


def test_a_cut_asks_few_links(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    class Asked(InputSegment):
        @property
        def start(self) -> int:  # type: ignore[override]
            asked.append(1)
            return self._start

        @start.setter
        def start(self, value: int) -> None:
            self._start = value

        __slots__ = ("_start",)

    segments = SegmentList()
    for i in range(1 << 15):
        segments.append(Asked(i, array("i", [1]), "x", tail=Tail.RAW))
    for to in (0, 1, 77, 1 << 14, (1 << 15) - 1):
        asked.clear()
        cut = segments.copy()
        cut.cut(to)
        assert len(cut) == to
        assert len(asked) < 200


def test_a_long_one_is_freed_without_recursion() -> None:
    segments = SegmentList()
    for i in range(20 * sys.getrecursionlimit() + 100_000):
        segments.append(segment(i, 1))
    del segments


def test_children_follow_a_rename() -> None:
    branch = SessionBranch("a", 1)
    input_segment(branch, [1], "x", tail=Tail.RAW)
    child = branch.fork("b", 2, 1, lambda tokens: "")
    branch.label.name = "c"
    assert (branch.name, child.parent, branch.parent) == ("c", "c", None)
