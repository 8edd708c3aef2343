"""One `select`, or one `append` with log-probabilities, on one branch: what is to be scored, the scores
so far, what they cost. Pure data.

The scheduler knows it as several requests, one for each path of its choices' tree.
"""

from abc import ABC, abstractmethod
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from itertools import accumulate
from math import fsum
from typing import NamedTuple

from ramify.actors.kit.memory import SEGMENT, TOKEN
from ramify.actors.session.branches.branch import SessionBranch
from ramify.actors.session.branches.tasks import Joined, Task
from ramify.actors.tokenizer import Tokenizer
from ramify.protocol.messages import Finished
from ramify.protocol.plan import unpack_floats
from ramify.protocol.wire import Hit, JsonObject, Method, Ok, Select, Usage

NODE = 150  # bytes in memory of a token in the tree of choices
WINDOW = 16  # tokens of the branch's end that a text may change


class Path(NamedTuple):
    """A path of the tree of choices.

    `tokens` to run behind the point where the choices begin; nodes[i] is targets[i], which stands behind
    depths[i] of them. Depths ascend.
    """

    tokens: "array[int]"
    depths: "array[int]"
    targets: "array[int]"
    nodes: "array[int]"

    def below(self, depth: int) -> "Path":
        """Make this path without the targets behind fewer than `depth` tokens."""
        first = sum(each < depth for each in self.depths)
        return Path(self.tokens, self.depths[first:], self.targets[first:], self.nodes[first:])


class ChoiceTree:
    """Choices with a common beginning share nodes, and a node is scored once.

    The log-probability of a node is one number among the logits behind its parent, so whatever stands
    below one parent costs one position. A *path* is what one request runs: the tokens down to a node
    that has children, none of which has more. It scores the nodes below those of its nodes that no path
    before it passes.

        choices  Paris | Par + is + h | Lyon       paths  [] scores Paris, Par, Lyon
                                                          [Par, is] scores is, h

    `walks`: of each choice, its nodes from the first token on. Nodes are numbered from 0.
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
        """Divide the tree into paths, each of which goes on with the tallest child.

        So no path waits for more than log2(nodes) others that compute tokens which it shares.
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
        """The height of each node: how many nodes are below it on the longest way down."""
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
    """Find the best choice, the first among equals, and score each, as SGLang does (arXiv 2312.07104).

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
    """Choose greedily. A choice that has no more tokens continues with its mean."""
    left = list(range(len(walks)))
    for place in range(max(map(len, walks))):
        values = [logprobs[walks[i][place]] if place < len(walks[i]) else means[i] for i in left]
        best = max(values)
        left = [i for i, value in zip(left, values, strict=True) if value == best]
    return left[0]


class Scoring(NamedTuple):
    """A path to run behind `base` tokens, and where the log-probabilities of its nodes go.

    `behind`: those tokens are the branch's; else they are what every text begins with.
    """

    path: Path
    base: int
    into: "array[float]"
    behind: bool = True

    @property
    def length(self) -> int:
        """How many tokens its branch has."""
        return self.base + len(self.path.tokens)

    @property
    def places(self) -> "array[int]":
        """The positions whose logits are wanted: behind `depth` tokens of the path."""
        return array("i", [self.base - 1 + depth for depth in self.path.depths])


@dataclass(eq=False, repr=False)
class Measured(ABC):
    """What an op has scored on one branch.

    `at`: where its tokens begin; `before`: where the branch ended when the op began.
    """

    task: Task
    branch: SessionBranch
    _: KW_ONLY
    before: int
    at: int = 0
    priority: int = 0
    deadline: float | None = None
    ended: bool = False
    size: int = 0  # bytes that it is metered with
    tops: int = 0  # likely tokens that are wanted beside each target
    handles: dict[int, int] = field(default_factory=dict)  # its branches in the cache, by request
    waiting: deque[Scoring] = field(default_factory=deque)  # not submitted yet
    pending: dict[int, Scoring] = field(default_factory=dict)  # by request

    def take(self, most: int) -> list[Scoring]:
        """Take the next paths to submit, at most `most`."""
        return [self.waiting.popleft() for _ in range(min(most, len(self.waiting)))]

    def again(self) -> None:
        """Have what is pending submitted anew, before the rest."""
        self.waiting.extendleft(reversed(self.pending.values()))
        self.pending.clear()

    @abstractmethod
    def scored(self, scoring: Scoring, finished: Finished) -> None:
        """Take the scores of a request that is done."""


class Input(Measured):
    """An append whose tokens are scored before they are put on the branch.

    One request runs all of them but the last one. What stands at position 0 stands behind nothing: it
    has no log-probability. `then(entries)`: puts them there and makes the reply.
    """

    def __init__(
        self,
        task: Task,
        branch: SessionBranch,
        at: int,
        tokens: "array[int]",
        tops: int,
        then: Callable[[list[JsonObject]], Ok],
    ) -> None:
        super().__init__(task, branch, before=branch.position)
        self.at = at
        self.tops = tops
        self.then = then
        self._tokens = tokens
        self._scores: array[float] = array("f")
        self.size = (3 + 2 * tops) * TOKEN * len(tokens)
        numbers = array("i", range(len(tokens)))
        path = Path(tokens[:-1], numbers, tokens, numbers).below(0 if at else 1)
        if path.targets:
            self.waiting.append(Scoring(path, at, self._scores))

    def scored(self, scoring: Scoring, finished: Finished) -> None:
        """See `Measured`."""
        scoring.into.extend(unpack_floats(finished.scores))

    def entries(self) -> list[JsonObject]:
        """Make the reply's entries: each token with its log-probability, and the likely tokens."""
        width, scores = 1 + 2 * self.tops, self._scores.tolist()
        first = len(self._tokens) - len(scores) // width
        found: list[JsonObject] = [{"token": token, "logprob": None} for token in self._tokens[:first]]
        likely = [
            [
                [int(token), score]
                for token, score in zip(scores[i::width], scores[i + 1 :: width], strict=True)
            ]
            for i in range(1, width, 2)
        ]
        for token, score, *top in zip(self._tokens[first:], scores[::width], *likely, strict=True):
            found.append({"token": token, "logprob": score, "top": top})
        return found


class Selection(Measured):
    """A `select` on one branch. `chat`: whether a turn was open at its end when the op began."""

    def __init__(
        self, op: Select, task: Task, branch: SessionBranch, *, chat: bool, before: int
    ) -> None:
        deadline = task.arrived + op.deadline_ms / 1e3 if op.deadline_ms is not None else None
        super().__init__(task, branch, before=before, priority=op.priority, deadline=deadline)
        self.op = op
        self.chat = chat
        self.joined: Joined  # from `tokenized` on
        self.tree: ChoiceTree
        self._logprobs: array[float] = array("d")
        self._unconditional: array[float] = array("d")
        self._parts: list[Finished] = []

    def tokenized(self, choices: Choices, start: int) -> int:
        """Note the choices' tokens. `start`: how many tokens begin every text.

        Returns what the scoring takes in memory, in bytes.
        """
        self.joined, self.tree = choices
        self.at = choices.joined.at
        joined, count = choices.joined, len(choices.tree)
        self._logprobs = array("d", bytes(8 * count))
        self._unconditional = array("d", bytes(8 * count))
        behind = (Scoring(path, joined.at, self._logprobs) for path in self.tree.paths)
        self.waiting.extend([*behind, *self._unconditionally(start)])
        walked = sum(map(len, joined.tokens))
        return SEGMENT * len(joined.tokens) + 3 * TOKEN * walked + NODE * count

    def _unconditionally(self, start: int) -> list[Scoring]:
        """Make the paths that are scored once more, behind the `start` tokens of a text alone.

        Without any, a choice's first token stands behind nothing: that counts as 0, as in SGLang.
        """
        if self.op.method != "unconditional_likelihood_normalized":
            return []
        paths = self.tree.paths
        if not start:
            paths = [path.below(1) for path in paths]
        into = self._unconditional
        return [Scoring(path, start, into, behind=False) for path in paths if path.targets]

    def scored(self, scoring: Scoring, finished: Finished) -> None:
        """See `Measured`."""
        self._parts.append(finished)
        for node, score in zip(scoring.path.nodes, unpack_floats(finished.scores), strict=True):
            scoring.into[node] = score

    def best(self) -> tuple[int, list[float]]:
        """The index of the best choice, and the score of each, once nothing is pending."""
        return choose(self.op.method, self.tree.walks, self._logprobs, self._unconditional)

    def mean(self, index: int) -> float:
        """The mean log-probability of a choice's tokens, whatever the method."""
        walk = self.tree.walks[index]
        return fsum(self._logprobs[node] for node in walk) / len(walk)

    def usage(self, output: int, now: float) -> Usage:
        """Sum up what its requests cost, each of which finds the branch cached."""
        parts, arrived = self._parts, self.task.arrived
        cached = sum(part.cached for part in parts)
        host, disk = (sum(getattr(part, tier) for part in parts) for tier in ("host", "disk"))
        started = min(part.started for part in parts)
        return Usage(
            prompt=sum(part.prompt for part in parts),
            cached=cached,
            computed=sum(part.computed for part in parts),
            output=output,
            forced=0,
            hit=Hit(gpu=cached - host - disk, host=host, disk=disk),
            queue_ms=round(max(0.0, started - arrived) * 1e3, 3),
            ttft_ms=None,
            total_ms=round((now - arrived) * 1e3, 3),
        )


def join_texts(tokenizer: Tokenizer, branch: SessionBranch, texts: Sequence[str]) -> Joined:
    """Tokenize each of `texts` behind the branch, all from the same position on.

    Tokens do not end where texts do: " wor" and "ld" are one token in " world". So the end of the branch
    is tokenized alone and with each text; the branch keeps its own tokens up to where the two differ.
    Nothing is joined across a control token, nor where the branch's end is no text by itself (half of a
    character). The branch's first token stays: something has to stand before what is scored.

    `Joined.at` is the first position at which one of them differs from the branch, or the branch's
    end. Strings that spell control tokens stay text. The branch must not change meanwhile.
    """
    own, before = _end(tokenizer, branch)
    text = _text(tokenizer, own)
    alone = tokenizer.encode(text, special=False, after=before) if text else []
    if _bytes(tokenizer, alone) != _bytes(tokenizer, own):  # a normalizer changed it
        own, before, text, alone = array("i"), own[-1] if own else before, "", []
    kept, found = len(own), list[tuple[int, list[int]]]()
    for added in texts:
        ids = tokenizer.encode(text + added, special=False, after=before)
        keep, first = _part(tokenizer, own, alone, ids)
        found.append((keep, ids[first:]))
        kept = min(kept, keep)
    return Joined(
        at=branch.position - len(own) + kept,
        own=own[kept:],
        tail=tokenizer.decode(own[kept:]),
        tokens=[own[kept:keep] + array("i", ids) for keep, ids in found],
    )


def _end(tokenizer: Tokenizer, branch: SessionBranch) -> tuple["array[int]", int | None]:
    """Find the tokens at the branch's end that a text may change, and the token before them."""
    own: array[int] = array("i")
    before: int | None = None
    for segment in reversed(branch.segments):
        for i in range(len(segment.tokens) - 1, -1, -1):
            before = segment.tokens[i]
            stops = segment.picture is not None or tokenizer.is_added(before)
            if stops or len(own) == WINDOW or segment.start + i == 0:
                break
            own.append(before)
        else:
            continue
        break
    while own and _inside(tokenizer.token_bytes[own[-1]]):
        before = own.pop()
    own.reverse()
    return own, before


def _inside(token: bytes) -> bool:
    """Whether a token begins inside a character."""
    return token != b"" and token[0] & 0xC0 == 0x80


def _text(tokenizer: Tokenizer, tokens: "array[int]") -> str:
    """ "" if they are no text by themselves."""
    try:
        return _bytes(tokenizer, tokens).decode()
    except UnicodeDecodeError:
        return ""


def _bytes(tokenizer: Tokenizer, tokens: Sequence[int]) -> bytes:
    return b"".join(tokenizer.token_bytes[token] for token in tokens)


def _part(
    tokenizer: Tokenizer, own: Sequence[int], alone: Sequence[int], ids: Sequence[int]
) -> tuple[int, int]:
    """Find how many of `own` stay, and which of `ids` is the first behind them.

    `alone`: their text's tokens; where those agree with `ids`, the added text has changed nothing. They
    may differ from `own`, whose tokens need not be what the tokenizer makes of the text.
    """
    sizes = tokenizer.token_bytes
    ends = {end: i for i, end in enumerate(accumulate(len(sizes[t]) for t in own), 1)}
    best, at = (0, 0), 0
    for i, (one, other) in enumerate(zip(alone, ids, strict=False), 1):
        if one != other:
            break
        at += len(sizes[one])
        if at in ends:
            best = ends[at], i
    return best
