"""Choices as a tree of tokens: which requests score them, and which of them is best. Pure.

Choices with a common beginning share nodes, and a node is scored once. The log-probability of a node is
one number among the logits behind its parent, so whatever stands below one parent costs one position. A
*path* is what one request runs: the tokens down to a node that has children, none of which has more. A
path scores the nodes below those of its nodes that no path before it passes.

    choices  Paris | Par + is + h | Lyon       paths  [] scores Paris, Par, Lyon
                                                      [Par, is] scores is, h

The methods are those of SGLang (arXiv 2312.07104; its `choices` module says the details).
"""

from array import array
from collections.abc import Sequence
from math import fsum
from typing import NamedTuple

from ramify.actors.session.branches.pending_appends import Joined
from ramify.protocol.wire import Method


class Path(NamedTuple):
    """`tokens` to run behind the point where the choices begin; nodes[i] is targets[i], which stands
    behind depths[i] of them. Depths ascend.
    """

    tokens: "array[int]"
    depths: "array[int]"
    targets: "array[int]"
    nodes: "array[int]"

    def below(self, depth: int) -> "Path":
        """This path without the targets behind fewer than `depth` tokens."""
        first = sum(each < depth for each in self.depths)
        return Path(self.tokens, self.depths[first:], self.targets[first:], self.nodes[first:])


class ChoiceTree:
    """`walks`: of each choice, its nodes from the first token on. Nodes are numbered from 0.

    `paths`: in an order in which those come first that others continue. To make them takes O(all tokens
    of the paths), a microsecond for each.
    """

    def __init__(self, choices: Sequence[Sequence[int]]) -> None:
        self.walks: list[array[int]] = []
        self._tokens = array("i")
        self._children: dict[int, list[int]] = {}  # by parent; the root is -1
        found: dict[tuple[int, int], int] = {}
        for choice in choices:
            node, walk = -1, array("i")
            for token in choice:
                key = node, token
                child = found.get(key)
                if child is None:
                    child = found[key] = len(self._tokens)
                    self._tokens.append(token)
                    self._children.setdefault(node, []).append(child)
                walk.append(child)
                node = child
            self.walks.append(walk)
        self.paths: list[Path] = self._paths() if choices else []

    def __len__(self) -> int:
        return len(self._tokens)

    def _paths(self) -> list[Path]:
        """The tallest child continues a path. So no path waits for more than log2(nodes) others to have
        computed the tokens that they share.
        """
        height = self._heights()
        paths: list[Path] = []
        begun = [(-1, array("i"))]  # a node with children, the tokens down to it
        while begun:
            node, tokens = begun.pop()
            path = Path(tokens, array("i"), array("i"), array("i"))
            following: int | None = node
            while following is not None:
                node, following = following, None
                tallest = 0
                for child in self._children[node]:
                    path.depths.append(len(path.tokens))
                    path.targets.append(self._tokens[child])
                    path.nodes.append(child)
                    if height[child] > tallest:
                        following, tallest = child, height[child]
                for child in self._children[node]:
                    if height[child] and child != following:
                        begun.append((child, path.tokens + array("i", [self._tokens[child]])))
                if following is not None:
                    path.tokens.append(self._tokens[following])
            paths.append(path)
        return paths

    def _heights(self) -> "array[int]":
        """Of each node, how many nodes there are below it on its longest way down."""
        height = array("i", bytes(4 * len(self._tokens)))
        for parent in reversed(range(len(self._tokens))):  # a child has a higher number
            below = self._children.get(parent, ())
            height[parent] = max((height[child] + 1 for child in below), default=0)
        return height


class Choices(NamedTuple):
    """The choices of a `select` as its branch sees them."""

    joined: Joined
    tree: ChoiceTree


def choose(
    method: Method,
    walks: Sequence[Sequence[int]],
    logprobs: Sequence[float],
    unconditional: Sequence[float] = (),
) -> tuple[int, list[float]]:
    """The best choice, the first among equals, and the score of each.

    `logprobs`: of each node; `unconditional`: the same without what the choices stand behind. A score is
    the mean log-probability of a choice's tokens; for "unconditional_likelihood_normalized", of what
    they have more than unconditionally. "greedy_token_selection" looks at one token after the other, and
    keeps the choices whose token is the most probable: the best one need not have the highest score.
    """
    if method == "unconditional_likelihood_normalized":
        logprobs = [each - less for each, less in zip(logprobs, unconditional, strict=True)]
    scores = [fsum(logprobs[node] for node in walk) / len(walk) for walk in walks]
    if method == "greedy_token_selection":
        return _greedy(walks, logprobs, scores), scores
    return max(range(len(scores)), key=scores.__getitem__), scores


def _greedy(walks: Sequence[Sequence[int]], logprobs: Sequence[float], means: Sequence[float]) -> int:
    """The greedy choice. A choice that has no more tokens continues with its mean."""
    left = list(range(len(walks)))
    for place in range(max(map(len, walks))):
        values = [logprobs[walks[i][place]] if place < len(walks[i]) else means[i] for i in left]
        best = max(values)
        left = [i for i, value in zip(left, values, strict=True) if value == best]
    return left[0]
