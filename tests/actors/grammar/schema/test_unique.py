"""How many texts there are."""

import pytest

from ramify.actors.grammar.automaton import Automaton
from ramify.actors.grammar.schema.unique import MOST_COUNTED, how_many


@pytest.mark.parametrize(
    ("pattern", "count"),
    [("a|b|ab", 3), ("[0-9]{1,3}", 1110), ("a*", None), ("(ab)+c?", None), ("[a-z]{3}", None), ("", 1)],
)
def test_how_many(pattern: str, count: int | None) -> None:
    assert how_many(Automaton.from_regex(pattern)) == count
    assert MOST_COUNTED == 10_000
