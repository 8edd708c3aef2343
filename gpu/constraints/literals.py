"""Likely texts where an automaton leaves a choice: the schema's own words. Pure.

Where the choice is between a few bytes, JSON by a schema mostly goes on with the next member's name,
another item of a list, or a value that the schema lists. So the first of the schema's words that fits is
a good draft, and then a comma, a string, an object or a list. The model decides: a wrong draft costs a
line of a step. In free text, and in numbers, nothing is likely.
"""

from collections.abc import Sequence

from ramify.gpu.constraints.byte_automaton import ByteAutomaton
from ramify.gpu.constraints.vocabulary import MARK

LONGEST = 48  # bytes of a text
CHOICES = 3  # that it may take
FEW = 40  # bytes to choose from; of more there is free text
_TOO_MANY = 1 << 14  # states whose text is kept
_PREFERRED = b',"{['
_DIGITS = frozenset(b"0123456789")


class Literals:
    """Drafts from the schema. `words`: each with its ending, likeliest first."""

    def __init__(self, automaton: ByteAutomaton, words: Sequence[bytes]) -> None:
        self._automaton, self._words = automaton, words
        self._known: dict[int, bytes] = {}
        self._bytes: dict[int, bytes] = {}  # by row: the bytes that may follow, if these are few

    def text(self, state: int) -> bytes:
        """Return a likely text in `state`; b"": nothing is likely."""
        if not self._words:
            return b""
        found = self._known.get(state)
        if found is None:
            if len(self._known) >= _TOO_MANY:
                self._known = {}
            found = self._known[state] = self._make(state)
        return found

    def _make(self, state: int) -> bytes:
        automaton, text, choices = self._automaton, bytearray(), 0
        while len(text) < LONGEST and not automaton.is_final(state):
            following = self._following(state)
            if len(following) == 1 and following[0] < MARK - 1:
                chosen = following
            else:
                choices += 1
                chosen = self._choice(state, following) if choices <= CHOICES else b""
            if not chosen:
                break
            text += chosen
            state = automaton.behind(state, chosen)
        return bytes(text)

    def _choice(self, state: int, following: bytes) -> bytes:
        if len(following) < 2 or not _DIGITS.isdisjoint(following):
            return b""
        for word in self._words:
            if word[0] in following and self._automaton.behind(state, word) >= 0:
                return word
        return next((bytes([byte]) for byte in _PREFERRED if byte in following), b"")

    def _following(self, state: int) -> bytes:
        """Return the bytes that may follow; none: they are many."""
        row = self._automaton.row_of(state)
        found = self._bytes.get(row)
        if found is None:
            some = bytes(byte for byte in range(256) if self._automaton.over(state, byte) >= 0)
            found = self._bytes[row] = some if len(some) <= FEW else b""
        return found
