"""Values in calls that are no JSON, one character after the other."""

from typing import Any

import pytest

from ramify.actors.calls.literals import key_of, literal
from ramify.actors.calls.scanner import Broken


def read(text: str) -> tuple[Any, str]:
    """The value, and what of the text was not read but for one character."""
    form = literal(text[0])
    next(form)
    for at, c in enumerate([*text[1:], ""], 1):
        try:
            form.send(c)
        except StopIteration as end:
            value, following = end.value
            return value, following + text[at + 1 :]
    raise AssertionError("it reads on behind the end")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("'it\\'s', ", "it's"),
        ('"a\\n\\t\\\\\\x41\\u00e9\\ud83c\\udf89\\U0001F389\\q",', "a\n\t\\Aé🎉🎉\\q"),
        ("'one\\\nline',", "oneline"),
        ("'\\ud83c',", "�"),
        ('<|"|>a "quoted" \\n \'text\'<|"|>,', "a \"quoted\" \\n 'text'"),
        ("[1, 2.5e3, -0, (True, False), None, [],],", [1, 2500.0, 0, [True, False], None, []]),
        ('{a: true, "b c": null, \'d\': {}, <|"|>e<|"|>: [false]},',
         {"a": True, "b c": None, "d": {}, "e": [False]}),
        (" 7 ,", 7),
    ],
)  # fmt: skip
def test_what_is_a_value(text: str, value: Any) -> None:
    assert read(text) == (value, "," + text[text.rindex(",") + 1 :])


@pytest.mark.parametrize(
    "text",
    ["", "'a", "[1", "[1 2]", "{a 1}", "{1: }", "007", "0x10", "1e999", "nan", "word", "1_000", "[,]",
     "'\\xzz'", "'\\U00110000'", "9" * 401, "[" * 33 + "]" * 33, "{:1}", '<|"|>a', "f(1)"],
)  # fmt: skip
def test_what_is_none(text: str) -> None:
    with pytest.raises(Broken):
        read(f"{text} " if text else " ")


def test_the_deepest_and_the_longest() -> None:
    assert str(read("[" * 32 + "]" * 32 + ",")[0]) == "[" * 32 + "]" * 32
    assert read("9" * 400 + ",")[0] == int("9" * 400)


def test_a_key_without_quotes_is_bounded() -> None:
    form = key_of("a", "=", 4)
    next(form)
    for c in "bcd":
        form.send(c)
    with pytest.raises(Broken):
        form.send("e")
