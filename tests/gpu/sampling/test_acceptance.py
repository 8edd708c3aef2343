"""Which drafts are accepted, against the definition."""

import random

import numpy as np

from ramify.gpu.sampling.acceptance import AcceptedTokens, accept, inputs_of, packed_rows
from ramify.gpu.step.step_rows import StepRows
from ramify.protocol.plan import NO_TOKEN, unpack


def drafted(drafts: list[list[int]]) -> StepRows:
    """Decodes alone, a row for each list."""
    lines = np.array([1 + len(one) for one in drafts], dtype=np.int64)
    total = int(lines.sum())
    index = np.arange(total)
    given = np.array([token for one in drafts for token in [NO_TOKEN, *one]], dtype=np.int32)
    nothing = np.empty(0, dtype=np.int32)
    rows = np.repeat(np.arange(len(lines)), lines)
    return StepRows(rows, index, np.ones_like(index), 0, nothing, index, index, given, lines=lines)


def by_definition(drafts: list[int], sampled: list[int]) -> list[int]:
    output = [sampled[0]]
    for draft, following in zip(drafts, sampled[1:], strict=True):
        if output[-1] != draft:
            break
        output.append(following)
    return output


def check(rows: int) -> None:
    draw = random.Random(1)
    for _ in range(300):
        drafts = [
            [draw.randrange(2) for _ in range(draw.randrange(5))] for _ in range(draw.randrange(rows))
        ]
        sampled = [[draw.choice([NO_TOKEN, 0, 1, 1]) for _ in range(len(one) + 1)] for one in drafts]
        tokens = np.array([token for row in sampled for token in row], dtype=np.int64)
        accepted = accept(drafted(drafts), tokens)
        expected = [by_definition(*pair) for pair in zip(drafts, sampled, strict=True)]
        assert tokens[accepted.kept].tolist() == [token for row in expected for token in row]
        assert accepted.counts.tolist() == [len(row) for row in expected]


def test_a_line_that_is_not_finite_is_the_last_one() -> None:
    """No token is never a draft, so nothing behind it is accepted."""
    accepted = accept(drafted([[5, 6]]), np.array([5, NO_TOKEN, 7]))
    assert accepted.kept.tolist() == [True, True, False]


def got(counts: list[int]) -> AcceptedTokens:
    return AcceptedTokens(np.ones(4, dtype=np.bool_), np.array(counts))


def test_guesses_of_rows_that_sat_the_step_out() -> None:
    step = drafted([[5, 6], []])
    step.asked = np.array([7, 0, 1])
    accepted = got([2, 1])
    accepted.guessed = np.array([[2, 1], [0, 0]])
    said = packed_rows(step, accepted)
    assert list(unpack(said["counts"])) == [0, 2, 1]
    assert list(unpack(said["drafted"])) == [0, 2, 0]
    assert list(unpack(said["guessed"])) == [0, 0, 2, 1, 0, 0]


def test_what_a_step_says_of_its_drafts() -> None:
    step = drafted([[5, 6], []])
    assert inputs_of(step).tolist() == [NO_TOKEN, 5, 6, NO_TOKEN]
    said = packed_rows(step, got([2, 1]))
    assert list(unpack(said["counts"])) == [2, 1]
    assert list(unpack(said["drafted"])) == [2, 0]
    step.lines = None
    assert list(packed_rows(step, got([1] * 4))) == ["rows"]
    assert list(unpack(packed_rows(step, got([1, 0, 1, 1]))["counts"])) == [1, 0, 1, 1]
    assert accept(step, np.array([1, 2, 3, NO_TOKEN])).counts.tolist() == [1] * 4
    assert inputs_of(step).tolist() == [NO_TOKEN] * 4


def test_acceptance_is_its_definition() -> None:
    """Few rows, and enough for arrays."""
    check(5)
    check(60)


def test_a_short_extend_runs_no_draft() -> None:
    """On CUDA one of one token is a decode whose input is given: the first line of its row still."""
    step = drafted([[5, 6], [7]]).with_short_extends_as_decodes()
    short = StepRows(
        rows=np.array([3, 0, 0, 0, 1, 1]), starts=np.zeros(6, np.int64), counts=np.ones(6, np.int64),
        extends=1, tokens=np.array([9], np.int32), sampling=np.arange(6), draws=np.arange(6),
        given=step.given, lines=np.array([1, 3, 2]),
    ).with_short_extends_as_decodes()  # fmt: skip
    assert short.given.tolist() == [9, NO_TOKEN, 5, 6, NO_TOKEN, 7]
    assert inputs_of(short).tolist() == [NO_TOKEN, NO_TOKEN, 5, 6, NO_TOKEN, 7]
    assert accept(short, np.array([4, 5, 6, 1, 7, 8])).counts.tolist() == [1, 3, 2]
