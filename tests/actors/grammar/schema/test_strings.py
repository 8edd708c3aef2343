"""Strings as JSON spells them, against json."""

import json
import re
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from ramify.actors.grammar.schema.shapes import Check, String
from ramify.actors.grammar.schema.strings import Strings, any_string

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=6) | st.text(
    'ab"\\\n\x00\x1f/é', max_size=6
)
PATTERNS = ["a", "^a", "b$", "^[^a]*$", '"', r"\\", r"[\n\x1f]", "^.*$", r"^\S+$", "é?b"]


def spelled(text: str) -> bytes:
    return json.dumps(text, ensure_ascii=False).encode()


@given(TEXTS)
def test_every_string_has_one_spelling(text: str) -> None:
    assert any_string().accepts(spelled(text))
    escapes = "".join(f"\\u{ord(char):04x}" if ord(char) < 0x10000 else char for char in text)
    if escapes != json.dumps(text, ensure_ascii=False)[1:-1]:
        assert not any_string().accepts(f'"{escapes}"'.encode())


@settings(max_examples=60, deadline=None)
@given(
    TEXTS,
    st.lists(st.tuples(st.sampled_from(PATTERNS), st.booleans()), max_size=2),
    st.integers(0, 3),
    st.none() | st.integers(2, 5),
    st.frozensets(st.sampled_from(["", "a", "ab", '"']), max_size=2),
)
def test_tests_and_lengths(
    text: str, tests: list[tuple[str, bool]], least: int, most: int | None, excluded: frozenset[str]
) -> None:
    shape = String(
        None,
        excluded,
        tuple(Check("pattern", pattern, "", positive) for pattern, positive in tests),
        least,
        most,
    )
    strings = Strings()
    automaton = strings.spell(shape)
    expected = (
        least <= len(text)
        and (most is None or len(text) <= most)
        and text not in excluded
        and all((ecma(pattern).search(text) is not None) == positive for pattern, positive in tests)
    )
    assert (automaton is not None and automaton.accepts(spelled(text))) == expected
    assert strings.holds(shape, text) == expected


def ecma(pattern: str) -> re.Pattern[str]:
    """`pattern` of ECMA 262 in Python's syntax: `$` is the end only, and there are four line ends."""
    spaces = "\\s\u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff"
    pattern = (
        pattern.replace("$", r"\Z").replace(".", "[^\n\r\u2028\u2029]").replace(r"\S", f"[^{spaces}]")
    )
    return re.compile(pattern, re.ASCII)


def test_lists_are_filtered() -> None:
    shape = String(only=("a", "bb", "é"), tests=(Check("pattern", "^.$"),))
    automaton = Strings().spell(shape)
    assert automaton is not None
    assert [automaton.accepts(spelled(v)) for v in ("a", "bb", "é")] == [True, False, True]


def test_emptiness_and_whether_it_is_certain() -> None:
    def empty(*tests: Any) -> tuple[bool, bool]:
        return Strings().is_empty(String(tests=tests))

    assert empty(Check("pattern", "^a"), Check("pattern", "^b")) == (True, True)
    assert empty(Check("pattern", "^a"), Check("pattern", "b$")) == (False, True)
    assert empty(Check("format", "date"), Check("format", "ipv4")) == (True, False)
