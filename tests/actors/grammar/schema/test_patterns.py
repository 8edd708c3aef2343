"""Patterns of ECMA 262: line ends and white space, by the lists of its grammar."""

import pytest

from ramify.actors.grammar.automaton import Automaton
from ramify.actors.grammar.schema.patterns import from_ecma

SPACES = "\t\n\v\f\r \u00a0\u1680\u2000\u200a\u2028\u2029\u202f\u205f\u3000\ufeff"
OTHERS = "a!\x00\x1f\x85\u180e\u200b\u2027\u2030\uff00\U0010ffff"


@pytest.mark.parametrize(
    ("pattern", "yes", "no"),
    [
        (r"\s", SPACES, OTHERS),
        (r"\S", OTHERS, SPACES),
        (r"[\sx]", SPACES + "x", OTHERS),
        (r"[^\s]", OTHERS, SPACES),
        (r"[\S\n]", OTHERS + "\n", SPACES.replace("\n", "")),
        (r"[^\S\n]", SPACES.replace("\n", ""), OTHERS + "\n"),
        (".", "a\t\x85", "\n\r\u2028\u2029"),
        (r"[.]", ".", "a"),
        (r"\.", ".", "a"),
        (r"[\]\s]", "] ", "a"),
    ],
)
def test_single_characters(pattern: str, yes: str, no: str) -> None:
    automaton = Automaton.from_regex(from_ecma(pattern))
    assert [char for char in yes if not automaton.accepts(char.encode())] == []
    assert [char for char in no if automaton.accepts(char.encode())] == []


def test_what_is_wrong_stays() -> None:
    assert from_ecma("a\\") == "a\\"
    assert from_ecma("[a") == "[a"
