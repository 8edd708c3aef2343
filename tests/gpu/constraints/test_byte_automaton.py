"""What a worker sends says what its automaton says."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ramify.actors.grammar.automaton import Automaton
from ramify.gpu.constraints.byte_automaton import anything
from tests.gpu.constraints.machines import byte_automaton

PATTERNS = ["(no|none)", r'"(?:[^"\\]|\\.){0,200}"', "(?:é|中){1,40}x", "[0-9]{1,3}(?:,[0-9]{3}){0,9}"]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_an_automaton(pattern: str) -> None:
    made = Automaton.from_regex(pattern)
    found = byte_automaton(made)
    assert (found.states, found.columns) == made.next.shape
    assert (found.next == made.next).all()
    assert (found.classes == made.classes).all()
    assert (found.final == made.final).all()


@given(st.sampled_from(PATTERNS), st.text('no"ea1,é中x\\', max_size=30), st.integers(0, 30))
def test_a_walk(pattern: str, text: str, start: int) -> None:
    made = Automaton.from_regex(pattern)
    found = byte_automaton(made)
    start %= len(made)
    assert found.behind(start, text.encode()) == made.walk(text.encode(), start)
    for byte in text.encode():
        assert max(found.over(start, byte), -1) == made.walk(bytes([byte]), start)


def test_counted_text_has_few_rows() -> None:
    made = Automaton.from_regex(r'"(?:[^"\\]|\\.){0,200}"')
    found = byte_automaton(made)
    assert len(found.words) * 5 < made.next.size
    assert len(np.unique(found.row)) < 40


def test_anything() -> None:
    found = anything()
    assert found.behind(0, bytes(range(256))) == 0
    assert found.next.tolist() == [[0]]
    assert found.final.tolist() == [True]
