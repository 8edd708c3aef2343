"""What `state` tells of a branch."""

from array import array

import pytest

from ramify.actors.session.branch import Branch
from ramify.actors.session.segments import OutputSegment
from ramify.actors.session.view import branch_state


@pytest.mark.parametrize(
    ("resident", "kv", "shown"), [(-1, "none", None), (0, "none", 0), (1, "gpu", 1), (5, "gpu", 5)]
)
def test_a_state_tells_what_is_known_of_the_kv(resident: int, kv: str, shown: int | None) -> None:
    state = branch_state(Branch("a", 1), None, resident)
    assert (state.kv, state.resident) == (kv, shown)
    assert (state.parent, state.at, state.running, state.started_at) == (None, None, None, None)


def test_a_state_tells_where_a_generation_began() -> None:
    segment = OutputSegment(0, op=7)
    segment.tokens = array("i", [1, 2])
    state = branch_state(Branch("a", 1), segment, -1)
    assert (state.running, state.started_at) == (7, 0)


def test_a_root_answers_with_what_it_generated_first() -> None:
    branch, segment = Branch("a", 1), OutputSegment(0, op=7)
    assert branch.answer() is None
    segment.tokens = array("i", [1])
    branch.segments.append(segment)
    assert branch.answer() is segment
