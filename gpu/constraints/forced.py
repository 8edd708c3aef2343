"""Jump-forward: the tokens that spell a text where a constraint leaves no choice. Pure.

Where the automaton can go on with one text only, that text is *forced*. The model would have to choose
among its spellings; we choose the tokenizer's. So in a state with a forced token nothing else is legal,
and a run of forced tokens can be appended without running the model. That is the definition of a
constraint, not a short cut beside it: whether the tokens are appended or sampled one by one, the masks
are the same, and so is the output. (The idea of a compressed machine: Zheng et al. 2023, SGLang.)

The last tokens of a forced text are not sure: the text that follows may make one token with them. They
are left to the model, and make good drafts.
"""

from codecs import utf_8_decode
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ramify.gpu.constraints.byte_automaton import ByteAutomaton
from ramify.gpu.constraints.vocabulary import MARK, TAIL, Vocabulary, hashes_of
from ramify.protocol.constraints import NO_STEP, ForcedTexts

WINDOW = 256  # bytes of forced text that are looked at from one state
MOST_FORCED = 64  # tokens of one plan
MOST_DRAFTS = TAIL  # tokens of one plan
_MOST_PLANS = 4096  # that are kept, of one constraint
_MOST_LOOKED_AT = 1024  # nodes, when it is asked whether a token may span the border


Flags = NDArray[np.bool_]


class Plan(NamedTuple):
    """The tokens that must follow in a state, `forced`, and likely `drafts` after them."""

    forced: tuple[int, ...]
    drafts: tuple[int, ...]


NOTHING = Plan((), ())


class ForcedTextTable:
    """The forced texts that a compile worker found: see `protocol.constraints.ForcedTexts`."""

    def __init__(self, forced: ForcedTexts, size: int) -> None:
        """`size`: the number of states of the automaton."""
        self.states = _numbers(forced.states)
        self.heads = forced.heads
        self.rests = _numbers(forced.rests).tolist()
        self.entries = _numbers(forced.entries)
        texts, ends = np.full(size, -1, np.int32), np.full(size, -1, np.int32)
        texts[self.states], ends[self.states] = _numbers(forced.texts), _numbers(forced.ends)
        self.of, self.behind = texts.data, ends.data
        self._all = texts, ends
        self._whole: dict[int, tuple[bytes, bool]] = {}

    def __len__(self) -> int:
        """The number of texts."""
        return len(self.heads)

    def places(self) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """List the states with a text, and the text of each."""
        return self.states.astype(np.int64), self._all[0][self.states]

    def ends(self, states: NDArray[np.int64]) -> NDArray[np.int32]:
        """Return the states after the texts of `states`."""
        return self._all[1][states]

    def whole(self, text: int) -> tuple[bytes, bool]:
        """Return whole characters of a text, up to a mark or `WINDOW` bytes, and whether that is all."""
        found = self._whole.get(text)
        if found is None:
            data, at = bytearray(), text
            while at >= 0 and self.heads[at] != MARK and len(data) < WINDOW:
                data.append(self.heads[at])
                at = self.rests[at]
            try:
                size = utf_8_decode(data, "strict", False)[1]
            except UnicodeDecodeError:  # it begins inside a character
                size = 0
            found = self._whole[text] = bytes(data[:size]), at < 0 and size == len(data)
        return found

    def mark(self, text: int) -> bytes:
        """Return the name of a token that is no text, with which a text begins; maybe a part of it."""
        name, at = bytearray(), text
        while at >= 0 and name[-1:] != b"\xfe":
            name.append(self.heads[at])
            at = self.rests[at]
        return bytes(name)

    def after(self, text: int, size: int) -> int:
        """Return the rest of a text after `size` bytes, -1: nothing."""
        data, whole = self._whole.get(text, (b"", False))
        for _ in range(size):
            text = self.rests[text]
        if whole and data[size:] and data[size] & 0xC0 != 0x80:  # not inside a character
            self._whole[text] = data[size:], True
        return text


def _numbers(data: bytes) -> NDArray[np.int32]:
    return np.frombuffer(data, "<i4").astype(np.int32, copy=False)


class ForcedText:
    """The forced texts of an automaton and their tokens, computed on demand."""

    def __init__(self, vocabulary: Vocabulary, automaton: ByteAutomaton) -> None:
        self._vocabulary = vocabulary
        self._automaton = automaton
        self._texts = ForcedTextTable(automaton.forced, automaton.states)
        self._takes: dict[int, bytes] = {}  # by row
        self._first: dict[int, tuple[int, int] | None] = {}
        self._plans: dict[int, Plan] = {}

    def token(self, state: int) -> int | None:
        """Return the only legal token in `state`; None: its text is not forced."""
        found = self._step(state)
        return None if found is None else found[0]

    def states(self) -> NDArray[np.int32]:
        """List the states that one byte alone can follow."""
        return self._texts.states

    def tokens(self) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """List the states with a forced token in which an output can stand, and these tokens.

        There may be more of them. An output enters a text at its beginning, or after a beginning of it
        that some token ends with, and from there by tokens. So few ends of most texts are spelled, each
        once for all states.
        """
        texts = self._texts
        states, text_of = texts.places()
        known = np.full(len(texts), -1, np.int32)  # the token of each text
        unsure = np.zeros(len(states), np.bool_)
        todo = self._entered()
        seen = set(todo)
        for text in todo:  # grows
            token, size, borders = self._first_of(text)
            every = token >= 0
            if borders:
                here = np.flatnonzero(text_of == text)
                unsure[here] = doubtful = self._may_span_any(borders, text, states[here])
                every = not doubtful.any()
                token = -1 if doubtful.all() else token
            following = [] if every else self._inside(text)
            if token >= 0:
                known[text] = token
                following.append(texts.after(text, size))
            for rest in following:
                if rest >= 0 and rest not in seen:
                    seen.add(rest)
                    todo.append(rest)
        tokens = known[text_of]
        tokens[unsure] = -1
        kept = tokens >= 0
        return states[kept], tokens[kept]

    def _first_of(self, text: int) -> tuple[int, int, list[int]]:
        """Find the first token of a text, or -1, its bytes, and the nodes of borders inside it: a token
        that spans one makes it unsure.
        """
        if self._texts.heads[text] == MARK:
            name = self._texts.mark(text)
            return self._vocabulary.token_of(name), len(name), []
        tokens, borders = self._vocabulary.spelled(self._texts.whole(text)[0])
        if not tokens:
            return -1, 0, []
        size = len(self._vocabulary.tokens[tokens[0]])
        if not borders or borders[0][0] >= size:
            return tokens[0], size, []
        return tokens[0], size, [node for at, node in borders if at < size]

    def _entered(self) -> list[int]:
        """List the texts into which a token leads that begins before them."""
        texts, tails = self._texts, self._vocabulary.tails
        rests = [*texts.rests, -1]  # the last one: of -1
        ways: list[list[int]] = [texts.entries.tolist()]
        while len(ways) <= self._vocabulary.depth and max(ways[-1], default=-1) >= 0:
            ways.append([rests[text] for text in ways[-1]])
        if len(ways) == 1 or not len(tails):
            return ways[0]
        at = np.array(ways)  # [bytes, entries]
        data = np.frombuffer(texts.heads, np.uint8)
        hashes = hashes_of(data[at[:-1]])
        found = tails[np.minimum(np.searchsorted(tails, hashes), len(tails) - 1)] == hashes
        return list(np.unique(np.concatenate([at[0], at[1:][found & (at[1:] >= 0)]])).tolist())

    def _inside(self, text: int) -> list[int]:
        """List the rests of a text after the tokens that it may begin with."""
        tree, node = self._vocabulary, 0
        found = []
        while text >= 0:
            node = tree.below(node, self._texts.heads[text])
            if node < 0:
                break
            text = self._texts.rests[text]
            if tree.token[node] >= 0:
                found.append(text)
        return found

    def _may_span_any(self, borders: list[int], text: int, states: NDArray[np.int64]) -> Flags:
        """Tell for each of the states with this text whether a token may span one of these borders."""
        data, whole = self._texts.whole(text)
        if whole:
            ends = self._texts.ends(states)
        else:
            ends = np.array([self._automaton.behind(state, data) for state in states.tolist()])
        rows = self._automaton.row[ends]
        found = np.zeros(len(states), np.bool_)
        for row in set(rows.tolist()):
            ways = [self._vocabulary.going_on(node, self._accepted(row)) for node in borders]
            if any(token for token, _ in ways):
                found[rows == row] = True
            elif any(more for _, more in ways):
                for at in np.flatnonzero(rows == row).tolist():
                    found[at] = any(self._may_span(node, int(ends[at])) for node in borders)
        return found

    def plan(self, state: int) -> Plan:
        """Return the tokens forced from `state`, up to `MOST_FORCED`, and drafts."""
        found = self._plans.get(state)
        if found is None:
            if self._texts.of[state] < 0:
                return NOTHING
            if len(self._plans) >= _MOST_PLANS:
                self._plans = {}
            found = self._plans[state] = self._plan(state)
        return found

    def knows(self, state: int) -> bool:
        """Whether the plan of `state` was made, or it has none."""
        return state in self._plans or self._texts.of[state] < 0

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
        tokens = self._vocabulary.spelled(self._text(state)[0]).tokens
        return Plan(tuple(forced), tokens[:MOST_DRAFTS])

    def _step(self, state: int) -> tuple[int, int] | None:
        """Find the forced token in `state`, and the state after it."""
        if self._texts.of[state] < 0:
            return None
        try:
            return self._first[state]
        except KeyError:
            found = self._first[state] = self._find(state)
            return found

    def _find(self, state: int) -> tuple[int, int] | None:
        text = self._texts.of[state]
        if self._texts.heads[text] == MARK:
            name = self._texts.mark(text)
            token = self._vocabulary.token_of(name)
            return (token, self._automaton.behind(state, name)) if token >= 0 else None
        data, end = self._text(state)
        spelling = self._vocabulary.spelled(data)
        if not spelling.tokens:
            return None
        token = spelling.tokens[0]
        size = len(self._vocabulary.tokens[token])
        for at, node in spelling.borders:
            if at < size and self._may_span(node, end):
                return None
        return token, self._automaton.behind(state, data[:size])

    def _text(self, state: int) -> tuple[bytes, int]:
        """Return the forced text from `state`, whole characters of it, and the state after that."""
        text = self._texts.of[state]
        if text < 0:
            return b"", state
        data, whole = self._texts.whole(text)
        return data, self._texts.behind[state] if whole else self._automaton.behind(state, data)

    def _may_span(self, node: int, state: int) -> bool:
        """Whether a token begins with the text of `node` and goes on with what is legal in `state`."""
        tree, over = self._vocabulary, self._automaton.over
        token, more = tree.going_on(node, self._accepted(self._automaton.row_of(state)))
        if token or not more:
            return token
        stack = [(node, state)]
        looked_at = 0
        while stack:
            node, state = stack.pop()
            begin = int(tree.child[node])
            for child in range(begin, begin + int(tree.children[node])):
                target = over(state, int(tree.byte[child]))
                if target < 0:
                    continue
                looked_at += 1
                if tree.token[child] >= 0 or looked_at > _MOST_LOOKED_AT:
                    return True
                stack.append((child, target))
        return False

    def _accepted(self, row: int) -> bytes:
        """Return a bit for each byte: whether states with this row take it."""
        found = self._takes.get(row)
        if found is None:
            takes = self._automaton.kinds[row] > NO_STEP
            found = self._takes[row] = np.packbits(takes[self._automaton.classes]).tobytes()
        return found
