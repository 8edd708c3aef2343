"""What one `select` asks to be scored, and what it makes of the scores."""

from array import array
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from ramify.actors.kit.memory import SEGMENT, TOKEN
from ramify.actors.session.branches.tasks import Joined
from ramify.actors.session.ops.scoring.selection import Choices, ChoiceTree, Selection
from ramify.protocol import wire as w
from ramify.protocol.messages import Finished
from ramify.protocol.plan import pack_floats

TOKENS = [[7], [7, 8], [9]]
CHOICES = Choices(
    Joined(5, array("i"), "", [array("i", tokens) for tokens in TOKENS]), ChoiceTree(TOKENS)
)


def selection(method: Any, start: int = 1) -> Selection:
    op = w.Select(id=1, choices=["a", "ab", "c"], method=method)
    task: Any = SimpleNamespace(arrived=10.0)
    made = Selection(op, task, None, chat=False, before=5)  # type: ignore[arg-type]
    assert made.tokenized(CHOICES, start) > 0
    return made


def finished(scores: list[float], cached: int, computed: int) -> Finished:
    return Finished(
        1, "length", 0, cached + computed, cached, computed, 10.0, 10.5, 0.0, 11.0,
        scores=pack_floats(scores),
    )  # fmt: skip


def test_behind_the_branch() -> None:
    made = selection("token_length_normalized")
    (scoring,) = made.take(9)
    assert scoring.behind
    assert not made.waiting
    assert (list(scoring.path.tokens), scoring.length) == ([7], 6)
    assert (list(scoring.places), list(scoring.path.targets)) == ([4, 4, 5], [7, 9, 8])
    made.scored(scoring, finished([-1.0, -3.0, -2.0], 4, 2))
    assert made.best() == (0, [-1.0, -1.5, -3.0])
    assert [made.mean(i) for i in range(3)] == [-1.0, -1.5, -3.0]
    usage = made.usage(1, 12.0)
    assert (usage.prompt, usage.cached, usage.computed, usage.output) == (6, 4, 2, 1)
    assert (usage.queue_ms, usage.ttft_ms, usage.total_ms) == (500.0, None, 2000.0)


@pytest.mark.parametrize(
    ("start", "places", "targets"), [(1, [0, 0, 1], [7, 9, 8]), (2, [1, 1, 2], [7, 9, 8]), (0, [0], [8])]
)
def test_unconditionally(start: int, places: list[int], targets: list[int]) -> None:
    """Behind what begins every text; without that, a first token has no score, which counts as 0."""
    made = selection("unconditional_likelihood_normalized", start)
    (behind,) = made.take(1)
    made.scored(behind, finished([-1.0, -3.0, -2.0], 4, 2))
    (alone,) = made.take(1)
    assert (behind.behind, alone.behind) == (True, False)
    assert made.take(1) == []
    assert (list(alone.places), list(alone.path.targets)) == (places, targets)
    assert alone.length == start + 1
    less = {7: -0.5, 9: -4.0, 8: -6.0}
    made.scored(alone, finished([less[target] for target in targets], 0, 2))
    seven, nine = (-0.5, -4.0) if start else (0.0, 0.0)
    index, scores = made.best()
    assert scores == pytest.approx([-1.0 - seven, (-1.0 - seven - 2.0 + 6.0) / 2, -3.0 - nine])
    assert index == 1


def test_scoring_is_metered_by_choice_token_and_node() -> None:
    made = selection("token_length_normalized")
    assert made.tokenized(CHOICES, 1) == 3 * SEGMENT + 3 * TOKEN * 4 + 150 * 3
    assert (made.size, made.ended, made.handles, made.pending) == (0, False, {}, {})


def test_a_deadline_counts_from_the_ops_arrival() -> None:
    task: Any = SimpleNamespace(arrived=10.0)
    for deadline_ms, deadline in ((None, None), (1500, 11.5)):
        op = w.Select(id=1, choices=["a"], deadline_ms=deadline_ms)
        made = Selection(op, task, None, chat=False, before=0)  # type: ignore[arg-type]
        assert made.deadline == deadline


def test_paths_are_taken_in_order_and_no_more_than_there_are() -> None:
    made = selection("unconditional_likelihood_normalized")
    assert [len(made.waiting), len(made.take(1)), len(made.take(5)), made.take(5)] == [2, 1, 1, []]
    none = selection("unconditional_likelihood_normalized", 0)
    none.tokenized(Choices(Joined(5, array("i"), "", [array("i", [7])]), ChoiceTree([[7]])), 0)
    assert all(scoring.behind or scoring.path.targets for scoring in none.waiting)


def test_the_bill_is_the_sum_over_its_requests() -> None:
    made = selection("unconditional_likelihood_normalized")
    (first, second) = made.take(2)
    made.scored(first, finished([-1.0, -3.0, -2.0], 4, 2))
    made.scored(second, finished([-1.0, -3.0, -2.0], 1, 3))
    made._parts[0] = msgspec.structs.replace(made._parts[0], started=10.1234567)
    usage = made.usage(7, 12.5)
    assert usage.queue_ms == 123.457
    assert made.usage(7, 12.1234567).total_ms == 2123.457
    assert (usage.prompt, usage.cached, usage.computed, usage.output) == (10, 5, 5, 7)
    assert (usage.forced, usage.hit.gpu, usage.total_ms) == (0, 5, 2500.0)
