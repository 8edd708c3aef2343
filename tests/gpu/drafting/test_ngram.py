"""The longest earlier match, against a search of the whole history; bounded memory."""

import random
from collections.abc import Sequence

import numpy as np
import pytest

from ramify.gpu.drafting import ngram
from ramify.gpu.drafting.ngram import SHORTEST, NgramDrafter
from ramify.gpu.step.step_rows import StepRows
from ramify.protocol.plan import NO_TOKEN, OpenRow, pack
from ramify.protocol.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0.0)


def drafter_of(*histories: Sequence[int]) -> NgramDrafter:
    made = NgramDrafter(max(1, len(histories)))
    for row, history in enumerate(histories):
        made.open(OpenRow(row, row, b"", 0, GREEDY, history=pack(history)))
    return made


def ask(made: NgramDrafter, most: int, row: int = 0) -> list[int]:
    guesses = made.propose(np.array([row]), np.array([most]))
    assert guesses.counts.tolist() == [len(guesses.tokens)]
    return guesses.tokens.tolist()


def tell(made: NgramDrafter, *tokens: int, row: int = 0) -> None:
    made.observe(np.array([row]), np.array([len(tokens)]), np.array(tokens, dtype=np.int32))


def longest_match(history: list[int]) -> int:
    """Length of the longest earlier match of the end."""
    ends = range(1, len(history))
    return max((_common(history[:end], history) for end in ends), default=0)


def _common(a: list[int], b: list[int]) -> int:
    count = 0
    for x, y in zip(reversed(a), reversed(b), strict=False):
        if x != y:
            break
        count += 1
    return count


def test_what_followed_before() -> None:
    made = drafter_of([1, 2, 3, 4, 5, 6, 7, 9, 3, 4, 5])
    assert ask(made, 2) == [6, 7]
    assert ask(made, 4) == [6, 7, 9, 3]
    assert ask(made, 0) == []


def test_a_match_that_is_right_goes_on_and_a_wrong_one_is_dropped() -> None:
    made = drafter_of([1, 2, 3, 4, 5, 6, 7, 8, 3, 4, 5])
    assert ask(made, 1) == [6]
    tell(made, 6, 7)
    assert ask(made, 1) == [8]
    tell(made, 1)
    assert ask(made, 1) == []
    tell(made, 2, 3, 4)
    assert ask(made, 2) == [5, 6]


def test_a_repetition_that_overlaps_its_end_goes_round() -> None:
    made = drafter_of([9, 1, 2, 1, 2, 1, 2])
    assert ask(made, 5) == [1, 2, 1, 2, 1]
    tell(made, 1, 2, 1)
    assert ask(made, 3) == [2, 1, 2]


@pytest.mark.parametrize("history", [[], [1], [1, 1], [1, 1, 1], [1, 2, 3, 4], [NO_TOKEN] * 3])
def test_short_histories(history: list[int]) -> None:
    made = drafter_of(history)
    assert ask(made, 3) == []
    tell(made, 5)
    tell(made, 6, 7)
    assert ask(made, 3) == []


def test_rows_do_not_mix_and_close() -> None:
    made = drafter_of([1, 2, 3, 4, 1, 2, 3], [1, 2, 3, 7, 1, 2, 3])
    guesses = made.propose(np.array([1, 0]), np.array([1, 2]))
    assert guesses.counts.tolist() == [1, 2]
    assert guesses.tokens.tolist() == [7, 4, 1]
    made.close(0)
    assert ask(made, 3) == []
    made.open(OpenRow(0, 5, b"", 0, GREEDY, history=pack([8] * 5)))
    assert ask(made, 2) == [8, 8]


def test_forced_tokens_are_taken_over() -> None:
    """An extend beyond the history; one within it changes nothing."""
    made = drafter_of([1, 2, 3, 4, 5, 1, 2, 3])
    assert ask(made, 1) == [4]
    index = np.array([0])
    for start, tokens in ((5, [1, 2, 3]), (8, [9, 2, 3, 4])):
        run = np.array(tokens, dtype=np.int32)
        made.runs(StepRows(index, np.array([start]), np.array([len(run)]), 1, run, index, index))
    assert ask(made, 1) == [5]


@pytest.mark.parametrize("kinds", [2, 5, 40])
def test_matches_are_as_long_as_a_search_finds(kinds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All candidates compared, random texts with copies: a guess wherever there is a match."""
    monkeypatch.setattr(ngram, "_CANDIDATES", 10_000)
    monkeypatch.setattr(ngram, "_LONGEST", 10_000)
    draw = random.Random(kinds)
    history = [draw.randrange(kinds) for _ in range(40)]
    made = drafter_of(history)
    for _ in range(150):
        guess = ask(made, 1)
        longest = longest_match(history)
        assert bool(guess) == (longest >= SHORTEST)
        if guess:
            matches = [
                end for end in range(1, len(history)) if _common(history[:end], history) == longest
            ]
            assert guess[0] in {history[end] for end in matches}
        count = draw.randrange(1, 4)
        at = draw.randrange(len(history) - count)
        added = history[at : at + count] if draw.random() < 0.7 else [draw.randrange(kinds)] * count
        tell(made, *added)
        history += added


def test_memory_is_bounded_and_old_places_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram, "_WINDOW", 128)
    draw = random.Random(4)
    history = [draw.randrange(1000) for _ in range(1000)]
    made = drafter_of([7, 7, 1, 2, *history, 7, 7, 1])
    assert ask(made, 1) == []  # it stood too far back
    for token in [draw.randrange(1000) for _ in range(1000)]:
        tell(made, token)
        ask(made, 1)
        index = made._indexes[0]
        assert len(index._before) <= 256
        assert len(index._heads) <= 1 << 16
    tell(made, 5, 6, 7, 8, 5, 6, 7)
    assert ask(made, 1) == [8]


def test_what_may_follow_drafts() -> None:
    """As if they had been sampled; nothing of that is remembered."""
    draw = random.Random(4)
    for _ in range(60):
        history = [draw.randint(0, 3) for _ in range(draw.randint(2, 80))]
        behind = [draw.randint(0, 3) for _ in range(draw.randint(0, 5))]
        made = drafter_of(history)
        told = drafter_of(history)
        told.observe(np.array([0]), np.array([len(behind)]), np.array(behind, dtype=np.int32))
        found = list(made.continued(0, behind, 3))
        whole = history + behind
        best = longest_match(whole)
        if best < SHORTEST:
            assert not found
            assert not ask(told, 3)
        else:
            # what lies in the drafts themselves is not looked at
            assert len(found) <= 3
        assert ask(made, 3) == ask(drafter_of(history), 3)
        tell(made, *behind, 9)
        assert ask(made, 3) == ask(drafter_of([*whole, 9]), 3)
    made = drafter_of([1, 2, 3, 4, 5, 6, 7, 9, 3])
    assert made.continued(0, [4, 5], 2) == [6, 7]
    assert made.continued(0, [4, 5, 6], 2) == [7, 9]
    assert made.continued(0, [4, 6], 2) == []
    assert drafter_of([1, 2]).continued(0, [1, 2, 1, 2], 2) == []
