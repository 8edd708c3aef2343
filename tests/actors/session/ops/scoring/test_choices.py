"""The tree of choices: each node is scored once, whatever the choices share; the three methods."""

import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ramify.actors.session.ops.scoring.selection import ChoiceTree, choose

words = st.lists(st.integers(0, 3), min_size=1, max_size=6)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.lists(words, min_size=1, max_size=12))
def test_every_node_is_scored_once_behind_its_own_tokens(choices: list[list[int]]) -> None:
    tree = ChoiceTree(choices)
    prefixes = {tuple(c[: i + 1]) for c in choices for i in range(len(c))}
    assert len(tree) == len(prefixes)
    behind: dict[int, tuple[int, ...]] = {}
    for path in tree.paths:
        assert len(path.depths) == len(path.targets) == len(path.nodes) > 0
        assert all(a <= b for a, b in pairwise(path.depths))
        assert path.depths[-1] == len(path.tokens)  # no token is run behind which nothing is asked
        for depth, target, node in zip(path.depths, path.targets, path.nodes, strict=True):
            assert node not in behind
            behind[node] = (*path.tokens[:depth], target)
    assert sorted(behind) == list(range(len(tree)))
    for choice, walk in zip(choices, tree.walks, strict=True):
        assert [behind[node] for node in walk] == [tuple(choice[: i + 1]) for i in range(len(choice))]


def test_no_path_waits_for_many_others() -> None:
    """A path shares tokens with one that comes before it, and so on: log2 of them at most."""
    choices = [[int(bit) for bit in f"{i:010b}"] for i in range(1024)]
    paths = ChoiceTree(choices).paths
    assert len(paths) == 512
    made = [tuple(path.tokens) for path in paths]
    own = [path.depths[0] for path in paths]
    waits: dict[tuple[int, ...], int] = {}
    for tokens, first in zip(made, own, strict=True):
        # whoever runs the tokens before its first own one
        shared = [waits[t] for t in waits if t[:first] == tokens[:first]]
        waits[tokens] = min(shared) + 1 if shared and first else 0
    assert max(waits.values()) <= 10


def test_long_choices_that_share_much_cost_what_they_hold() -> None:
    shared = list(range(5000))
    tree = ChoiceTree([[*shared, i] for i in range(1000)])
    (path,) = tree.paths
    assert (len(tree), len(path.tokens), len(path.targets)) == (6000, 5000, 6000)


def test_the_first_token_may_have_no_score() -> None:
    (path,) = ChoiceTree([[1, 2], [3]]).paths
    assert (list(path.targets), list(path.below(1).targets)) == ([1, 3, 2], [2])


def test_a_path_goes_on_where_the_longest_choice_is() -> None:
    paths = ChoiceTree([[1, 9], [1, 2, 3, 4, 5], [6, 7, 8]]).paths
    assert [list(path.tokens) for path in paths] == [[1, 2, 3, 4], [6, 7]]


CHOICES = [[1], [1, 2], [3, 4, 5]]
LOGPROBS = [-0.1, -0.3, -0.4, -0.25, -0.1]  # 1, 1 2, 3, 3 4, 3 4 5


def test_mean() -> None:
    tree = ChoiceTree(CHOICES)
    index, scores = choose("token_length_normalized", tree.walks, LOGPROBS)
    assert index == 0
    assert scores == pytest.approx([-0.1, -0.2, -0.25])


def test_greedy_follows_the_best_token() -> None:
    tree = ChoiceTree([[1], [1, 2], [3]])
    index, scores = choose("greedy_token_selection", tree.walks, [-0.5, -0.6, -0.52])
    assert index == 0  # it has ended and goes on with its mean, -0.5, which is more than -0.6
    assert scores == pytest.approx([-0.5, -0.55, -0.52])
    index, _ = choose("greedy_token_selection", tree.walks, [-0.5, -0.4, -0.52])
    assert index == 1
    # the best first token wins, whatever comes after it: not the highest score
    index, scores = choose(
        "greedy_token_selection", ChoiceTree([[1, 9], [2]]).walks, [-1.0, -30.0, -1.1]
    )
    assert (index, max(scores)) == (0, pytest.approx(-1.1))


def test_unconditional() -> None:
    tree = ChoiceTree(CHOICES)
    index, scores = choose(
        "unconditional_likelihood_normalized", tree.walks, LOGPROBS, [0.0, -5.0, -1.0, -0.2, -0.3]
    )
    assert index == 1
    assert scores == pytest.approx([-0.1, (-0.1 + 4.7) / 2, (0.6 - 0.05 + 0.2) / 3])


def test_the_first_of_equal_choices() -> None:
    tree = ChoiceTree([[4], [2], [2]])
    for method in ("token_length_normalized", "greedy_token_selection"):
        assert choose(method, tree.walks, [-2.0, -1.0]) == (1, [-2.0, -1.0, -1.0])  # type: ignore[arg-type]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(words, min_size=1, max_size=8), st.randoms(use_true_random=False))
def test_greedy_as_by_a_matrix(choices: list[list[int]], random: object) -> None:
    """Against the definition: rows of log-probabilities, filled up with their mean."""
    tree = ChoiceTree(choices)
    logprobs = [round(random.uniform(-3, 0), 1) for _ in range(len(tree))]  # type: ignore[attr-defined]
    rows = [[logprobs[node] for node in walk] for walk in tree.walks]
    longest = max(map(len, rows))
    means = [math.fsum(row) / len(row) for row in rows]
    table = [row + [mean] * (longest - len(row)) for row, mean in zip(rows, means, strict=True)]
    left = list(range(len(rows)))
    for place in range(longest):
        best = max(table[i][place] for i in left)
        left = [i for i in left if table[i][place] == best]
    index, scores = choose("greedy_token_selection", tree.walks, logprobs)
    assert index == left[0]
    assert scores == pytest.approx(means)


def test_a_path_goes_on_with_its_tallest_child() -> None:
    """The others become paths of their own, if they have children."""
    tree = ChoiceTree([[1, 2], [3, 4, 5], [6], [3, 7, 8]])
    shown = [
        (list(path.tokens), list(path.depths), list(path.targets), list(path.nodes))
        for path in tree.paths
    ]
    assert shown == [
        ([3, 4], [0, 0, 0, 1, 1, 2], [1, 3, 6, 4, 7, 5], [0, 2, 5, 3, 6, 4]),
        ([3, 7], [2], [8], [7]),
        ([1], [1], [2], [1]),
    ]
    assert [list(walk) for walk in tree.walks] == [[0, 1], [2, 3, 4], [5], [2, 6, 7]]
    assert list(tree._heights()) == [1, 0, 2, 1, 0, 0, 1, 0]
    assert (len(ChoiceTree([])), ChoiceTree([]).paths) == (0, [])


def test_below_a_depth_are_the_targets_behind_so_many_tokens() -> None:
    path = ChoiceTree([[1, 2, 3], [4]]).paths[0]
    assert list(path.depths) == [0, 0, 1, 2]
    for depth, targets, nodes in ((0, [1, 4, 2, 3], [0, 3, 1, 2]), (1, [2, 3], [1, 2]), (2, [3], [2])):
        cut = path.below(depth)
        assert (list(cut.targets), list(cut.nodes), cut.tokens) == (targets, nodes, path.tokens)
    assert list(path.below(3).depths) == []
