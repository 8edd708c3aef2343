"""The search for triggers against Python's `find`."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ramify.actors.grammar.free_text import free_text
from ramify.protocol.errors import ConstraintError

LETTERS = st.text("ab<", min_size=1, max_size=4)


@settings(max_examples=300, deadline=None)
@given(st.lists(LETTERS, min_size=1, max_size=4, unique=True), st.text("ab<c", max_size=12))
def test_the_first_complete_trigger_ends_the_text(triggers: list[str], text: str) -> None:
    found = free_text([each.encode() for each in triggers])
    ends = [(text.find(each) + len(each), each) for each in triggers if each in text]
    state = 0
    for at in range(len(text) + 1):
        complete = [each for end, each in ends if end == at]
        if complete:
            longest = max(complete, key=len)
            assert state == found.ends[triggers.index(longest)] or any(
                other != longest and longest.startswith(other) for other in triggers
            )
            assert (found.automaton.next[state] < 0).all()
            assert not found.automaton.final[state]
            return
        assert found.automaton.final[state]
        if at < len(text):
            state = found.automaton.walk(text[at].encode(), state)
            assert state >= 0


def test_a_mark_is_one_symbol() -> None:
    found = free_text([b"\xff<t>\xfe", b"<t>"])
    walk = found.automaton.walk
    assert walk(b"a\xff<t>\xfe") == found.ends[0]
    assert walk(b"a<t>") == found.ends[1]
    assert walk(b"a\xff<tt>\xfe") == walk(b"") == walk(b"\xff\xfe") == walk(b"\xff<|x|>\xfe")
    assert walk(b"<t\xff<t>\xfe") == found.ends[0]
    assert walk(b"<t\xff<x>\xfe>") == 0  # a token between is no text between


def test_any_bytes_are_free() -> None:
    found = free_text([b"<t>"])
    assert (found.automaton.next[0, found.automaton.classes[:254]] >= 0).all()


def test_the_triggers_are_bounded() -> None:
    with pytest.raises(ConstraintError, match="shorten them"):
        free_text([b"x" * 9000])
