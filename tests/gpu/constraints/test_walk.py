"""Walks down the tree, with numpy and with the kernel, against token by token."""

import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ramify.actors.grammar.automaton import Automaton
from ramify.gpu.constraints import walk as walking
from ramify.gpu.constraints.vocabulary import Vocabulary
from ramify.gpu.constraints.walk import NativeWalker, NumpyWalker, walker

TOKENS = st.lists(
    st.binary(max_size=4) | st.text("ab", max_size=5).map(str.encode), min_size=1, max_size=60
)
PATTERNS = ["[ab]*", "a{2,5}", "(?s:.*)", "ab|ba*", "[^a]*b", "é+|a", "(aa|b)*"]


@settings(max_examples=150, deadline=None)
@given(TOKENS, st.sampled_from(PATTERNS))
def test_both_walks_find_what_each_token_does(tokens: list[bytes], pattern: str) -> None:
    tree = Vocabulary(tokens, (), lambda text: [], size=len(tokens) + 3)
    automaton = Automaton.from_regex(pattern)
    walks = [
        walker(tree, automaton.next, automaton.classes),
        NumpyWalker(tree, automaton.next, automaton.classes),
    ]
    for state in range(len(automaton)):
        expected = np.full(tree.size, -1)
        for i, data in enumerate(tokens):
            if data:
                expected[i] = automaton.walk(data, state)
        for walk in walks:
            assert (walk.targets(state) == expected).all()
            assert (tree.unpack(walk.mask(state)) == (expected >= 0)).all()


def test_the_kernel_is_used_where_llvmlite_is() -> None:
    pytest.importorskip("llvmlite")
    automaton = Automaton.from_regex("a")
    tree = Vocabulary([b"a"], (), lambda text: [])
    assert isinstance(walker(tree, automaton.next, automaton.classes), NativeWalker)


def test_a_token_longer_than_the_kernel_takes() -> None:
    tree = Vocabulary([b"a" * 2000, b"a"], (), lambda text: [])
    automaton = Automaton.from_regex("a*")
    walk = walker(tree, automaton.next, automaton.classes)
    assert isinstance(walk, NumpyWalker)
    assert tree.unpack(walk.mask(0)).tolist() == [True, True]


def test_threads_that_ask_at_once_share_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Code that was compiled twice would be freed while one of them still walks."""
    made = []

    def slowly() -> object:
        time.sleep(0.05)
        made.append(object())
        return made[-1]

    monkeypatch.setattr(walking, "_compiled", cache(slowly))
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: walking._kernels(), range(4)))
    assert found == made * 4
