"""Automata against Python's `re`, and their algebra against sets of texts."""

import itertools
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ramify.actors.grammar.automaton import Automaton
from ramify.actors.grammar.expression import Embedded, concat, literal, union
from ramify.actors.grammar.fragment import Fragment, has_loops, trim
from ramify.actors.grammar.limits import MAX_STATES
from ramify.protocol.errors import ConstraintError
from tests.amount import examples

TEXTS = ["".join(t) for n in range(6) for t in itertools.product("ab1", repeat=n)]


def language(pattern: str, *, search: bool = False) -> set[str]:
    automaton = Automaton.from_regex(pattern, search=search)
    return {text for text in TEXTS if automaton.accepts(text.encode())}


ATOMS = st.sampled_from(
    [
        "a",
        "b",
        "1",
        ".",
        "[ab]",
        "[^a]",
        r"\d",
        r"\w",
        r"\D",
        r"\W",
        r"\s",
        "",
        "é",
        "[a-é]",
        r"\b",
        "^",
        r"\Z",
    ]
)
COUNTS = st.sampled_from(["*", "+", "?", "{2}", "{0,2}", "{1,}", "{,2}", "{2,3}", "*?", "{0}"])


def regexes() -> st.SearchStrategy[str]:
    def grown(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
        return st.one_of(
            st.tuples(inner, inner).map("".join),
            st.tuples(inner, inner).map(lambda p: f"(?:{p[0]}|{p[1]})"),
            st.tuples(inner, COUNTS).map(lambda p: f"(?:{p[0]}){p[1]}"),
            inner.map(lambda p: f"({p})"),
        )

    return st.recursive(ATOMS, grown, max_leaves=8)


@settings(max_examples=examples(100, 300), deadline=None)
@given(regexes(), st.lists(st.text("ab1é \n", max_size=6), min_size=1, max_size=30))
def test_the_texts_of_a_regex_are_those_of_re(pattern: str, texts: list[str]) -> None:
    expected = re.compile(pattern, re.ASCII)
    automaton = Automaton.from_regex(pattern)
    searched = Automaton.from_regex(pattern, search=True)
    for text in texts:
        assert automaton.accepts(text.encode()) == (expected.fullmatch(text) is not None), text
        assert searched.accepts(text.encode()) == (expected.search(text) is not None), text


@pytest.mark.parametrize(
    "pattern", ["[a-z]*a[a-z]{18}", "(.|a.){1,900}b{1,900}|x{40}", "(?:é{1,100}.){1,100}"]
)
def test_too_many_states_are_refused_soon(pattern: str) -> None:
    with pytest.raises(ConstraintError, match=f"{MAX_STATES} states|ambiguous"):
        Automaton.from_regex(pattern)


def test_lookahead_that_something_follows_is_refused() -> None:
    with pytest.raises(ConstraintError, match="lookahead"):
        Automaton.from_regex("((?=a).)*b")


@settings(max_examples=examples(50, 150), deadline=None)
@given(regexes(), regexes())
def test_algebra(first: str, second: str) -> None:
    a, b = Automaton.from_regex(first), Automaton.from_regex(second)
    has_a, has_b = language(first), language(second)

    def texts(automaton: Automaton) -> set[str]:
        return {text for text in TEXTS if automaton.accepts(text.encode())}

    assert texts(a.union(b)) == has_a | has_b
    assert texts(a.intersect(b)) == has_a & has_b
    assert texts(a.minus(b)) == has_a - has_b
    assert texts(a.complement()) == set(TEXTS) - has_a
    assert a.union(b).includes(a)
    assert a.includes(a.intersect(b))
    assert a.minus(b).union(a.intersect(b)).equals(a)
    assert a.includes(b) == b.minus(a).is_empty()
    assert a.overlaps(b) == (not a.intersect(b).is_empty())
    embedded = Automaton.from_expression(
        union(concat(literal("1"), Embedded(a), literal("b")), Embedded(b))
    )
    assert (
        texts(embedded)
        == {t for t in TEXTS if t[1:-1] in has_a and len(t) > 1 and t[0] + t[-1] == "1b"} | has_b
    )


def test_no_text() -> None:
    assert Automaton.from_regex(r"a\bb").is_empty()


def test_equal_states_are_merged() -> None:
    assert len(Automaton.from_regex("(?:abcd|xbcd|ybc[d])")) == 5
    assert len(Automaton.from_regex("(?:a*b|a*c)*")) == 2
    assert len(Automaton.from_regex("a{0,200}")) == 201
    assert len(Automaton.from_regex("(?s:.*)")) <= 9


def test_the_bytes_are_utf_8() -> None:
    text = Automaton.from_regex("(?s:.*)")
    for data in (b"\xff", b"\xc3", b"\xc0\x80", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xe0\x80\x80"):
        assert not text.accepts(data)
    assert text.accepts("aé中😀".encode())


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_useless_states_go_by_the_definition(data: st.DataObject) -> None:
    """Those on no way from the start to an end; and loops are found where a state leads to itself."""
    size, symbols = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 3))
    rows = st.lists(st.integers(-1, size - 1), min_size=symbols, max_size=symbols)
    table = np.array(data.draw(st.lists(rows, min_size=size, max_size=size)), np.int32)
    final = np.array(data.draw(st.lists(st.booleans(), min_size=size, max_size=size)))
    start = data.draw(st.integers(0, size - 1))
    behind = [{target for target in row if target >= 0} for row in table.tolist()]
    for _ in range(size):  # all that can be reached in one step or more
        behind = [targets.union(*(behind[target] for target in targets)) for targets in behind]
    ends = set(np.flatnonzero(final).tolist())
    kept = [s for s in range(size) if s in behind[start] and {s, *behind[s]} & ends]
    kept = sorted({start, *kept})
    found = trim(Fragment(table, final, start))
    assert len(found) == len(kept)
    assert found.start == 0
    assert sorted(found.final.tolist()) == sorted(final[kept].tolist())
    edges = [(s, c) for s in kept for c in range(symbols) if table[s, c] in kept]
    assert (found.table >= 0).sum() == len(edges)
    loops = any(state in targets for state, targets in enumerate(behind))
    assert has_loops(Fragment(table, final)) == loops
