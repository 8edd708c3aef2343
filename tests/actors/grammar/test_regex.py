"""The syntax of regexes against Python's `re`; what is refused, and where."""

import itertools
import re

import pytest

from ramify.actors.grammar.automaton import Automaton
from ramify.protocol.errors import ConstraintError


@pytest.mark.parametrize(
    "pattern",
    [
        "(no|none)",
        "(?:a|ab)(?:c|bcd)?",
        "[1-9][0-9]*|12",
        "a*?b",
        "(?i)AbC",
        "(?i:ab)c",
        "(?s).",
        ".",
        r"\x41\u00e9",
        "[]a]",
        "[^]a]",
        "[a-]",
        "a{,2}",
        "a{x",
        "{",
        "x{2,}",
        "(?=a)[ab]{2}",
        "(?!ab)[ab]*",
        "b(?!ab$)[ab]*",
        "a|(?=b).b",
        "(?P<x>a)b",
        "(^a|b)1",
        "(?:a|b$)*",
        r"\ba+\b 1|a\B1",
        "(a?b?)*",
        "((a*)*)*",
        "(a|ab)(c|bcd)(d*)",
        "",
        "(|a)",
        "[😀-😂]+|\u0080|\ud7ff\ue000",
    ],
)
def test_syntax(pattern: str) -> None:
    expected = re.compile(pattern.replace("$", r"\Z"), re.ASCII)
    automaton = Automaton.from_regex(pattern)
    alphabet = "ab1cdx{]-,AC2 né\n😀"
    texts = ["".join(t) for n in range(4) for t in itertools.product(alphabet, repeat=n)]
    texts += [
        "none",
        "abcd",
        "abbcd",
        "Aé",
        "aBC",
        "abC",
        "babab",
        "bab",
        "aaaa",
        "12",
        "{x",
        "a{x",
        "bb1",
    ]
    for text in texts:
        assert automaton.accepts(text.encode()) == (expected.fullmatch(text) is not None), text


@pytest.mark.parametrize(
    ("pattern", "position", "says"),
    [
        ("a(b", 1, "never closed"),
        ("ab)", 2, "escape it"),
        ("[ab", 0, "never closed"),
        ("*a", 0, "nothing to repeat"),
        ("a{2}{3}", 4, "parentheses"),
        ("a{3,2}", 1, "smaller number"),
        ("a++", 2, "possessive"),
        (r"(a)\1", 3, "back reference"),
        (r"(?<=a)b", 0, "looking back"),
        (r"a\p{L}", 1, "ranges"),
        (r"\q", 0, "means nothing"),
        (r"\u12", 0, "hexadecimal"),
        ("[b-a]", 1, "backwards"),
        ("x" * 3 + "\\", 3, "double it"),
        ("[[:alpha:]]", 1, "named classes"),
        ("(?>a)", 0, "atomic"),
        (".{2000}", 0, "1000"),
        ("((((a{1,50}){1,50}){1,50}){1,50})", 0, "multiply"),
        ("(" * 40 + ")" * 40, 32, "32 deep"),
        ("a(?i)b", 1, "beginning"),
    ],
)
def test_what_cannot_be_compiled_is_named(pattern: str, position: int, says: str) -> None:
    with pytest.raises(ConstraintError, match=says) as caught:
        Automaton.from_regex(pattern)
    if says != "multiply":
        assert caught.value.details == {"position": position}


def test_a_regex_may_not_be_longer_than_the_limit() -> None:
    with pytest.raises(ConstraintError, match="65536"):
        Automaton.from_regex("é" * 40_000)
