"""One `select`, or one `append` with log-probabilities, on one branch: what is to be scored, the scores
so far, what they cost. Pure data.

The scheduler knows it as several requests, one for each path of its choices' tree.
"""

from array import array
from collections import deque
from collections.abc import Callable
from math import fsum
from typing import NamedTuple

from ramify.actors.kit.memory import SEGMENT, TOKEN
from ramify.actors.session.branches.branch import Branch
from ramify.actors.session.branches.pending_appends import Joined
from ramify.actors.session.queues.tasks import Task
from ramify.actors.session.scoring.choices import Choices, ChoiceTree, Path, choose
from ramify.protocol.messages import Finished
from ramify.protocol.plan import unpack_floats
from ramify.protocol.wire import Hit, JsonObject, Ok, Select, Usage

NODE = 150  # bytes in memory of a token in the tree of choices


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
        """Tokens of its branch."""
        return self.base + len(self.path.tokens)

    @property
    def places(self) -> "array[int]":
        """Positions whose logits are wanted: behind `depth` tokens of the path."""
        return array("i", [self.base - 1 + depth for depth in self.path.depths])


class Measured:
    """What an op has scored on one branch.

    `at`: where its tokens begin; `before`: where the branch ended when the op began.
    """

    at = 0

    def __init__(
        self,
        task: Task,
        branch: Branch,
        *,
        before: int,
        priority: int = 0,
        deadline: float | None = None,
    ) -> None:
        self.task = task
        self.branch = branch
        self.before = before
        self.priority = priority
        self.deadline = deadline
        self.ended = False
        self.size = 0  # bytes that it is metered with
        self.tops = 0  # likely tokens that are wanted beside each target
        self.handles: dict[int, int] = {}  # its branches in the cache, by request
        self.waiting: deque[Scoring] = deque()  # not submitted yet
        self.pending: dict[int, Scoring] = {}  # by request

    def take(self, most: int) -> list[Scoring]:
        """The next paths to submit, at most `most` of them."""
        return [self.waiting.popleft() for _ in range(min(most, len(self.waiting)))]

    def again(self) -> None:
        """What is pending is to be submitted anew, before the rest."""
        self.waiting.extendleft(reversed(self.pending.values()))
        self.pending.clear()

    def scored(self, scoring: Scoring, finished: Finished) -> None:
        """One of its requests is done."""
        raise NotImplementedError


class Input(Measured):
    """An append whose tokens are scored before they are put on the branch.

    One request runs all of them but the last one. What stands at position 0 stands behind nothing: it
    has no log-probability. `then(entries)`: puts them there and makes the reply.
    """

    def __init__(
        self,
        task: Task,
        branch: Branch,
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
        """As in the reply: each token, its log-probability, and the likely tokens with theirs."""
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
    """`chat`: whether a turn is open where the branch ended when the op began."""

    def __init__(self, op: Select, task: Task, branch: Branch, *, chat: bool, before: int) -> None:
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
        """The choices' tokens are known; `start` tokens begin every text.

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
        """The paths that are scored a second time, behind the `start` tokens of a text alone.

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
        """The choice, and the score of each, once nothing is pending."""
        return choose(self.op.method, self.tree.walks, self._logprobs, self._unconditional)

    def mean(self, index: int) -> float:
        """The mean log-probability of a choice's tokens, whatever the method."""
        walk = self.tree.walks[index]
        return fsum(self._logprobs[node] for node in walk) / len(walk)

    def usage(self, output: int, now: float) -> Usage:
        """What it cost: the sum over its requests, each of which finds the branch cached."""
        parts, arrived = self._parts, self.task.arrived
        cached = sum(part.cached for part in parts)
        started = min(part.started for part in parts)
        return Usage(
            prompt=sum(part.prompt for part in parts),
            cached=cached,
            computed=sum(part.computed for part in parts),
            output=output,
            forced=0,
            hit=Hit(gpu=cached),
            queue_ms=round(max(0.0, started - arrived) * 1e3, 3),
            ttft_ms=None,
            total_ms=round((now - arrived) * 1e3, 3),
        )
