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
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ramify.gpu.constraints.vocabulary import MARK, TAIL, Vocabulary

WINDOW = 256  # bytes of forced text that are looked at from one state
MOST_FORCED = 64  # tokens of one plan
MOST_DRAFTS = TAIL  # tokens of one plan
_MOST_PLANS = 4096  # that are kept, of one constraint
_MOST_LOOKED_AT = 1024  # nodes, when it is asked whether a token may span the border


_EACH = -2
_POWERS = np.uint64(0x9E3779B97F4A7C15) ** np.arange(2 * WINDOW + 1, dtype=np.uint64)


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
        takes: NDArray[np.bool_] | None = None,
    ) -> None:
        """`takes`: `next >= 0`, if it is there."""
        self._vocabulary = vocabulary
        self._next = next
        self._classes = classes
        takes = next >= 0 if takes is None else takes
        single = np.flatnonzero((np.count_nonzero(takes, axis=1) == 1) & ~final)
        column = takes[single].argmax(axis=1)
        alone = np.bincount(classes, minlength=next.shape[1])[column] == 1
        single, column = single[alone], column[alone]
        first = np.zeros(next.shape[1], np.uint8)
        first[classes[::-1]] = np.arange(255, -1, -1)
        self._states: NDArray[np.int64] = single
        self._one = np.zeros(len(next), np.bool_)
        self._one[single] = True
        self._byte = np.zeros(len(next), np.uint8)
        self._byte[single] = first[column]
        self._then = np.full(len(next), -1, np.int32)
        self._then[single] = next[single, column]
        self._first: dict[int, tuple[int, int] | None] = {}
        self._plans: dict[int, Plan] = {}

    def token(self, state: int) -> int | None:
        """The only token that is legal in `state`, if its text is forced."""
        found = self._step(state)
        return None if found is None else found[0]

    def states(self) -> NDArray[np.int64]:
        """Those with one byte to go on with."""
        return self._states

    def tokens(self) -> NDArray[np.int32]:
        """Of each state what `token` says, -1 for None. At once, which takes a tenth of the time.

        Counted texts have the same forced text in thousands of states: what is asked of it is asked
        once, and what can follow it of all these states together.
        """
        found = np.full(len(self._one), -1, np.int32)
        going = self._states[self._byte[self._states] != MARK]
        left = self._states[self._byte[self._states] == MARK].tolist()
        for text, states, ends in self._alike(going, left):
            token, nodes = self._first_of(text)
            if token == _EACH:
                left += states.tolist()
            elif token >= 0:
                sure = np.ones(len(states), np.bool_)
                for node in nodes:
                    sure[sure] = ~self._may_span_any(node, ends[sure])
                found[states[sure]] = token
        for state in left:
            token_of = self.token(state)
            found[state] = -1 if token_of is None else token_of
        return found

    def _alike(
        self, going: NDArray[np.int64], left: list[int]
    ) -> Iterator[tuple[bytes, NDArray[np.int64], NDArray[np.int32]]]:
        """Each text that is forced from some of the states `going`, these, and the state behind it.

        Those with a longer text than `WINDOW` are appended to `left`.
        """
        count = len(going)
        if not count:
            return
        number = np.full(len(self._one) + 1, count)  # of -1 and of what is not going: the last one
        number[going] = np.arange(count)
        after = np.append(number[self._then[going]], count)
        byte = np.append(self._byte[going], 0)
        # how long each text is, a hash of it, and where it ends: from 1, 2, 4, .. bytes of it
        jump, length = after, np.append(np.ones(count, np.int64), 0)
        code = np.append(byte[:-1].astype(np.uint64) + np.uint64(1), np.uint64(0))
        end = np.append(self._then[going], -1)
        for _ in range(WINDOW.bit_length()):
            if (jump == count).all():
                break
            end = np.where(jump < count, end[jump], end)
            code = code + _POWERS[length] * code[jump]
            length = length + length[jump]
            jump = jump[jump]
        long = (length[:-1] > WINDOW) | (jump[:-1] < count)
        left += going[long].tolist()
        _, first, group = np.unique(
            code[:-1] * _POWERS[1] + length[:-1].astype(np.uint64),
            return_index=True,
            return_inverse=True,
        )
        one = np.append(first[group], count)  # of each text the first state
        if (byte != byte[one]).any() or (one[after] != one[after[one]]).any():  # two hashes are equal
            left += going[~long].tolist()
            return
        order = np.argsort(group, kind="stable")
        members = np.split(order, np.cumsum(np.bincount(group))[:-1])
        texts = {count: b""}
        for at in np.argsort(length[first], kind="stable").tolist():
            state = int(first[at])
            if long[state]:
                continue
            text = texts[state] = bytes([int(byte[state])]) + texts[int(one[after[state]])]
            yield text, going[members[at]], end[members[at]]

    def _first_of(self, text: bytes) -> tuple[int, list[int]]:
        """The first token of a forced text, or -1, and the nodes of the borders inside it: a token that
        spans one makes it unsure. `_EACH`: the states have to be looked at one by one.
        """
        try:
            whole = utf_8_decode(text, "strict", False)[1]
        except UnicodeDecodeError:
            return -1, []
        if whole < len(text):
            return _EACH if whole else -1, []
        spelling = self._vocabulary.spelled(text)
        if not spelling.tokens:
            return -1, []
        size = len(self._vocabulary.tokens[spelling.tokens[0]])
        return spelling.tokens[0], [node for at, node in spelling.borders if at < size]

    def _may_span_any(self, node: int, ends: NDArray[np.int32]) -> NDArray[np.bool_]:
        """`_may_span` of each of `ends`."""
        tree = self._vocabulary
        children = slice(int(tree.child[node]), int(tree.child[node]) + int(tree.children[node]))
        takes = self._next[ends[:, None], self._classes[tree.byte[children]]] >= 0
        whole = tree.token[children] >= 0
        found = np.zeros(len(ends), np.bool_)
        np.any(takes[:, whole], axis=1, out=found)
        for at in np.flatnonzero(takes[:, ~whole].any(axis=1) & ~found).tolist():
            found[at] = self._may_span(node, int(ends[at]))
        return found

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
