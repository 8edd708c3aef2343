"""States in a block against all short texts."""

import itertools
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from ramify.actors.grammar.automaton import Automaton
from ramify.gpu.constraints import token_automaton, vocabulary
from ramify.gpu.constraints.alike import alike
from ramify.gpu.constraints.vocabulary import Vocabulary
from tests.gpu.constraints.machines import machine_of


def lives(next: NDArray[np.int32], state: int, word: tuple[int, ...]) -> bool:
    for column in word:
        state = int(next[state, column])
        if state < 0:
            return False
    return True


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 12), st.integers(1, 3), st.integers(0, 4), st.randoms(use_true_random=False))
def test_blocks_are_what_short_words_tell_apart(
    states: int, columns: int, depth: int, rng: random.Random
) -> None:
    numbers = np.random.default_rng(rng.randrange(1 << 32))
    next = numbers.integers(-1, states, (states, columns)).astype(np.int32)
    blocks = alike(next, depth)
    words = [w for n in range(depth + 1) for w in itertools.product(range(columns), repeat=n)]
    expected = [tuple(lives(next, state, word) for word in words) for state in range(states)]
    for a, b in itertools.combinations(range(states), 2):
        assert (blocks[a] == blocks[b]) == (expected[a] == expected[b])


def test_counters_are_alike_far_from_their_end() -> None:
    automaton = Automaton.from_regex("[ab]{300}c")
    blocks = alike(automaton.next, 16)
    assert len(set(blocks.tolist())) == 18


@pytest.mark.parametrize("pattern", ["[ab]{40}c", '"(?:[^"]){0,30}"x', "(?:a{5}|b){3,20}", "é{20}[ab]*"])
def test_shared_masks_are_the_same(pattern: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("llvmlite")
    tokens = [bytes([b]) for b in range(256)]
    tokens += ["".join(t).encode() for n in range(2, 7) for t in itertools.product('ab"é', repeat=n)]
    tokens += [b"aa", b"aaaaa", b""]
    stop = len(tokens) - 1
    automaton = Automaton.from_regex(pattern)

    def masks() -> list[bytes]:
        known = Vocabulary(tokens, [stop], lambda text: [])
        machine = machine_of(known, automaton)
        assert (machine._blocks is None) == (len(automaton) < token_automaton.ALIKE_FROM)
        return [machine.mask(state).tobytes() for state in range(machine.end + 1)]

    expected = masks()
    monkeypatch.setattr(token_automaton, "ALIKE_FROM", 0)
    for short in (1, 3, 4, 9):
        for module in (vocabulary, token_automaton):
            monkeypatch.setattr(module, "SHORT", short)
        assert masks() == expected
