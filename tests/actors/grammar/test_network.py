"""Automata in any order, against regexes."""

import random
import re

import pytest

from ramify.actors.grammar.automaton import Automaton
from ramify.actors.grammar.network import Exit, ends, network


def of(pattern: str) -> Automaton:
    return Automaton.from_regex(pattern)


@pytest.mark.parametrize(
    ("patterns", "exits", "final", "starts", "meant"),
    [
        (["ab", ",", "x*y"], [(0, [1]), (1, [0])], [0], [0], "ab(,ab)*"),
        (["a+", "b?"], [(0, [1]), (1, [0])], [1], [0], "a+b?(a+b?)*"),
        (["a*", "ab"], [(0, [1]), (1, [0])], [0, 1], [0], "a*(aba*)*"),
        (["ab", "ac"], [(1, [0, 1])], [0], [0, 1], "(ac)*ab"),
        (["a?", "a?", "b"], [(0, [1]), (1, [2])], [2], [0], "a?a?b"),
    ],
)
def test_networks(
    patterns: list[str],
    exits: list[tuple[int, list[int]]],
    final: list[int],
    starts: list[int],
    meant: str,
) -> None:
    parts = [of(pattern) for pattern in patterns]
    made = network(parts, [Exit(at, ends(parts[at]), into) for at, into in exits], final, starts)
    assert made.equals(of(meant))
    rng = random.Random(1)
    for _ in range(200):
        text = "".join(rng.choices("abc,xy", k=rng.randrange(8)))
        assert made.accepts(text.encode()) == (re.fullmatch(meant, text) is not None)
