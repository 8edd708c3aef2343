"""Jump-forward: where a constraint leaves no choice, which tokens spell what must come. Pure.

Where the automaton can go on with one text only, that text is *forced*. The model would have to choose
among its spellings; we choose the tokenizer's. So in a state with a forced token nothing else is legal,
and a run of forced tokens can be appended without asking the model. That is the definition of a
constraint, not a short cut beside it: whether the tokens are appended or sampled one by one, the masks
are the same, and so is the output. (The idea of a compressed machine: Zheng et al. 2023, SGLang.)

At the end of the forced text its last tokens are not sure: the text that follows may make one token with
them. They are left to the model, and make good drafts.
"""

from codecs import utf_8_decode
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ramify.gpu.constraints.vocabulary import MARK, TAIL, Vocabulary

WINDOW = 256  # bytes of forced text that are looked at from one state
MOST_FORCED = 64  # tokens of one plan
MOST_DRAFTS = TAIL  # tokens of one plan
_MOST_PLANS = 4096  # that are kept, of one constraint
_MOST_LOOKED_AT = 1024  # nodes, when it is asked whether a token may span the border


class Plan(NamedTuple):
    """What must follow in a state: `forced` tokens, and `drafts` behind them that are likely."""

    forced: tuple[int, ...]
    drafts: tuple[int, ...]


NOTHING = Plan((), ())


class ForcedText:
    """The forced texts of one automaton and their tokens, found when they are asked for."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        next: NDArray[np.int32],
        classes: NDArray[np.uint8],
        final: NDArray[np.bool_],
    ) -> None:
        self._vocabulary = vocabulary
        self._next = next
        self._classes = classes
        sizes = np.bincount(classes, minlength=next.shape[1])
        choices = (next >= 0) @ sizes
        self._one = (choices == 1) & ~final
        first = np.zeros(next.shape[1], np.int64)
        first[classes[::-1]] = np.arange(255, -1, -1)
        column = (next >= 0).argmax(axis=1)
        self._byte = first[column].astype(np.uint8)
        self._then = next[np.arange(len(next)), column]
        self._first: dict[int, tuple[int, int] | None] = {}
        self._plans: dict[int, Plan] = {}

    def token(self, state: int) -> int | None:
        """The only token that is legal in `state`, if its text is forced."""
        found = self._step(state)
        return None if found is None else found[0]

    def states(self) -> NDArray[np.int64]:
        """Those with one byte to go on with."""
        return np.flatnonzero(self._one)

    def plan(self, state: int) -> Plan:
        """All that is forced from `state`, up to `MOST_FORCED` tokens, and drafts."""
        found = self._plans.get(state)
        if found is None:
            if not self._one[state]:
                return NOTHING
            if len(self._plans) >= _MOST_PLANS:
                self._plans = {}
            found = self._plans[state] = self._plan(state)
        return found

    def knows(self, state: int) -> bool:
        """Whether the plan of `state` was made, or there is none."""
        return state in self._plans or not self._one[state]

    def _plan(self, state: int) -> Plan:
        forced: list[int] = []
        while len(forced) < MOST_FORCED:
            step = self._step(state)
            if step is None:
                break
            token, state = step
            forced.append(token)
        else:
            return Plan(tuple(forced), ())
        tokens, _ = self._spelled(*self._text(state))
        return Plan(tuple(forced), tokens[:MOST_DRAFTS])

    def _step(self, state: int) -> tuple[int, int] | None:
        """The forced token in `state`, and the state behind it."""
        if not self._one[state]:
            return None
        try:
            return self._first[state]
        except KeyError:
            found = self._first[state] = self._find(state)
            return found

    def _find(self, state: int) -> tuple[int, int] | None:
        if self._byte[state] == MARK:
            return self._mark(state)
        text, states = self._text(state)
        tokens, sure = self._spelled(text, states)
        if not tokens:
            return None
        size = len(self._vocabulary.tokens[tokens[0]])
        return (tokens[0], states[size]) if size <= sure else None

    def _mark(self, state: int) -> tuple[int, int] | None:
        """The token that is no text and must come, if there is only one."""
        name = bytearray()
        while self._one[state] and name[-1:] != b"\xfe":
            name.append(self._byte[state])
            state = int(self._then[state])
        node = self._vocabulary.find(bytes(name))
        token = int(self._vocabulary.token[node]) if node >= 0 else -1
        return (token, state) if token >= 0 else None

    def _text(self, state: int) -> tuple[bytes, list[int]]:
        """The forced text from `state`, whole characters of it, and the state at each byte."""
        text, states = bytearray(), [state]
        while self._one[state] and self._byte[state] != MARK and len(text) < WINDOW:
            text.append(self._byte[state])
            state = int(self._then[state])
            states.append(state)
        try:
            size = utf_8_decode(text, "strict", False)[1]
        except UnicodeDecodeError:  # it begins inside a character
            size = 0
        return bytes(text[:size]), states[: size + 1]

    def _spelled(self, text: bytes, states: list[int]) -> tuple[tuple[int, ...], int]:
        """The tokens of `text`, and the bytes of it whose tokens nothing that follows can change."""
        spelling = self._vocabulary.spelled(text)
        for at, node in spelling.borders:
            if self._may_span(node, states[-1]):
                return spelling.tokens, at
        return spelling.tokens, len(text)

    def _may_span(self, node: int, state: int) -> bool:
        """Whether a token begins with the text of `node` and goes on with what is legal in `state`."""
        tree = self._vocabulary
        stack = [(node, state)]
        looked_at = 0
        while stack:
            node, state = stack.pop()
            row = self._next[state]
            begin = int(tree.child[node])
            for child in range(begin, begin + int(tree.children[node])):
                target = int(row[self._classes[tree.byte[child]]])
                if target < 0:
                    continue
                looked_at += 1
                if tree.token[child] >= 0 or looked_at > _MOST_LOOKED_AT:
                    return True
                stack.append((child, target))
        return False
