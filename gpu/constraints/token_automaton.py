"""An automaton over tokens: the legal tokens of a state, and the states after them.

The states are those of a byte automaton, and one more, `end`, after a stop token. A mask is made when
its state is first met, and kept; equal ones are kept once.

This file knows nothing of rows, steps or devices. Every method may be called from any thread.
"""

from array import array
from collections.abc import Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ramify.gpu.constraints.alike import alike
from ramify.gpu.constraints.byte_automaton import ByteAutomaton
from ramify.gpu.constraints.forced import NOTHING, ForcedText, Plan
from ramify.gpu.constraints.literals import Literals
from ramify.gpu.constraints.masks import MaskStore
from ramify.gpu.constraints.vocabulary import MARK, SHORT, Vocabulary
from ramify.gpu.constraints.walk import Walker, walker
from ramify.protocol.constraints import NO_STEP
from ramify.protocol.errors import ConstraintError

ALIKE_FROM = 512  # states from which on it is worth looking which are alike
_MARKS = 0xFE  # bytes from here on stand in the names of tokens that are no text
QUICK_NODES = 120_000  # of a token tree; a mask of fewer is made in less than 0.3 ms
MOST_LIKELY = 8  # tokens that may follow, of one state
_MOST_LIKELY = 4096  # states of which that is kept, and the only token
_UNKNOWN = -2


class TokenAutomaton:
    """A byte automaton over the tokens of a vocabulary.

    `start`: the first state; `end`: the state after a stop token. `elsewhere`: a device can hold the
    automaton, so no masks need be made ahead here.
    """

    start = 0

    def __init__(
        self,
        vocabulary: Vocabulary,
        automaton: ByteAutomaton,
        store: MaskStore | None = None,
        likely: Sequence[bytes] = (),
    ) -> None:
        """`store`: keeps masks. `likely`: see `Literals`.

        Raises ConstraintError if the vocabulary cannot spell all of the automaton's bytes.
        """
        self.vocabulary = vocabulary
        self.automaton = automaton
        self.end = automaton.states
        self._check_bytes()
        self.elsewhere = False
        self._forced = ForcedText(vocabulary, automaton)
        self._literals = Literals(automaton, likely)
        self._likely: dict[int, tuple[int, ...]] = {}
        # by state; masks of short tokens that states share: by -1 - the block's number
        self._kept = (MaskStore() if store is None else store).open()
        self._only = array("i", [_UNKNOWN]) * (self.end + 1)
        self._only_inside: dict[int, int] = {}  # values that no schema describes
        self._stops = vocabulary.stops

    def look_around(self) -> None:
        """Make what masks need, so that no step waits for it; not where a device makes them."""
        if not self.elsewhere and self._walker.halves and self._blocks is not None:
            _ = self.vocabulary.halves  # once for a model

    def is_final(self, state: int) -> bool:
        """Whether the output may end in `state`."""
        return state == self.end or self.automaton.is_final(state)

    def mask(self, state: int) -> NDArray[np.int32]:
        """Return the legal tokens: bit i % 32 of word i // 32, int32 [vocabulary.words], read-only.

        `vocabulary.everything` where all are legal: no mask is needed.
        """
        found = self._kept.get(state)
        return found if found is not None else self._remember(state)

    def only(self, state: int) -> int:
        """Return the only legal token in `state`, or -1 if there are several."""
        if state > self.end:
            return self._only_there(state)
        found = self._only[state]
        if found == _UNKNOWN:
            found = self._only[state] = self._one(state)
        return found

    def knows(self, state: int) -> bool:
        """Whether `plan`, `only` and `mask` are made already, or quickly."""
        if self._quick or state == self.end:
            return True
        if state > self.end:
            return self._kept.get(state) is not None
        if not self._forced.knows(state):
            return False
        found = self._only[state]
        return found != _UNKNOWN and (found >= 0 or self._kept.get(state) is not None)

    def close(self) -> None:
        """Drop the masks."""
        self._kept.close()

    def advance(self, state: int, token: int) -> int:
        """Return the state after `token`, or -1 if the automaton does not take it.

        It takes every spelling of a forced text, though `mask` has one only.
        """
        if token in self.vocabulary.stop_ids:
            return self.end if self.is_final(state) else -1
        if state == self.end or not 0 <= token < self.vocabulary.size:
            return -1
        return self.automaton.behind(state, self.vocabulary.tokens[token])

    def plan(self, state: int) -> Plan:
        """Return the tokens that must follow in `state`: see `forced`. `mask` agrees, token by token."""
        return NOTHING if state >= self.end else self._forced.plan(state)

    def likely(self, state: int) -> tuple[int, ...]:
        """Return likely tokens in `state`, where none must follow: `plan`'s drafts, and perhaps more.

        Where masks take long there are no more: each draft needs one after it.
        """
        if state == self.end:
            return ()
        found = self._likely.get(state)
        if found is None:
            found = self.plan(state).drafts
            text = self._literals.text(state) if self._quick else b""
            spelled = self.vocabulary.spelled(text).tokens if text.isascii() else ()
            if len(self._likely) >= _MOST_LIKELY:
                self._likely = {}
            found = self._likely[state] = spelled[:MOST_LIKELY] or found
        return found

    def forced_states(self) -> NDArray[np.int32]:
        """List the states in which a token may be forced."""
        return self._forced.states()

    def forced_tokens(self) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """List the states with a forced token in which an output can stand, and these tokens."""
        return self._forced.tokens()

    def forced_token(self, state: int) -> int | None:
        """Return the only legal token in `state`, whose text is forced; None at the end, inside values
        without a schema, and where it is not.
        """
        return None if state >= self.end else self._forced.token(state)

    def _remember(self, state: int) -> NDArray[np.int32]:
        row = self._make(state)
        if (row == self.vocabulary.everything).all():
            return self._kept.put(state, self.vocabulary.everything, counts=False)
        return self._kept.put(state, row)

    def _only_there(self, state: int) -> int:
        found = self._only_inside.get(state)
        if found is None:
            if len(self._only_inside) >= _MOST_LIKELY:
                self._only_inside = {}
            found = self._only_inside[state] = self._one(state)
        return found

    def _one(self, state: int) -> int:
        token = self.forced_token(state)
        if token is not None:
            return token
        words = self.mask(state).view(np.uint32)
        some = np.flatnonzero(words)
        if len(some) != 1 or int(words[some[0]]).bit_count() != 1:
            return -1
        return 32 * int(some[0]) + int(words[some[0]]).bit_length() - 1

    def _make(self, state: int) -> NDArray[np.int32]:
        if state == self.end:
            return self._stops
        token = self.forced_token(state)
        if token is not None:
            row = np.zeros(self.vocabulary.words, np.int32)
            row.view(np.uint32)[token >> 5] = 1 << (token & 31)
            return row
        row = self._legal(state)
        return row | self._stops if self.automaton.is_final(state) else row

    def _legal(self, state: int) -> NDArray[np.int32]:
        """Compute the mask of `state`. In a large automaton, masks of short tokens are shared."""
        if self._blocks is None or state > self.end:
            return self._walker.mask(state)
        key = -1 - int(self._blocks[state])
        short = self._kept.get(key)
        if short is None:
            short = self._kept.put(key, self._walker.mask(state, "short"))
        return short | self._walker.mask(state, "long")

    @cached_property
    def _walker(self) -> Walker:
        """The walker, for masks that are made here."""
        automaton = self.automaton
        return walker(self.vocabulary, automaton.table, automaton.classes, automaton.nesting)

    @cached_property
    def _quick(self) -> bool:
        return self._walker.halves and len(self.vocabulary.byte) < QUICK_NODES

    @cached_property
    def _blocks(self) -> NDArray[np.int64] | None:
        """The block of each state, in which masks of short tokens are equal; None: not computed.

        Computing takes tens of milliseconds.
        """
        if not self._walker.halves or self.end < ALIKE_FROM:
            return None
        return alike(self.automaton.next, SHORT)

    def _check_bytes(self) -> None:
        """Check that each byte which some state takes is a token: then every state has a legal token.

        Free text takes all of them, and needs none. Tokens that are no text are looked up.
        """
        automaton = self.automaton
        takes, classes = automaton.kinds > NO_STEP, automaton.classes
        text = np.unique(classes[:_MARKS])
        of_text = takes if len(text) == takes.shape[1] else takes[:, text]
        free = of_text.all(axis=1)
        used = np.any(takes[~free] if free.any() else takes, axis=0)[classes[:_MARKS]]
        missing = np.flatnonzero(used & ~self.vocabulary.alone[:_MARKS])
        if len(missing):
            raise ConstraintError(
                f"this model's tokenizer has no token for the byte {int(missing[0]):#04x} alone, so it "
                "cannot spell every text of the constraint: allow fewer characters"
            )
        marked = takes[:, classes[MARK]] & ~of_text.any(axis=1)
        if not marked.any():
            return
        for state in np.flatnonzero(marked[automaton.row] & ~automaton.final).tolist():
            if not self._begins_a_mark(automaton.over(state, MARK)):
                raise ConstraintError("this model has no token for a mark that the constraint needs")

    def _begins_a_mark(self, state: int) -> bool:
        """Whether a token of the vocabulary that is no text goes on from `state` to its end."""
        tree = self.vocabulary
        stack = [(tree.find(bytes([MARK])), state)]
        while stack:
            node, state = stack.pop()
            if node < 0 or state < 0:
                continue
            if tree.token[node] >= 0:
                return True
            begin = int(tree.child[node])
            for child in range(begin, begin + int(tree.children[node])):
                stack.append((child, self.automaton.over(state, int(tree.byte[child]))))
        return False
