"""Constraints beyond finite automata: context-free grammars, by `llguidance`.

These are recursive schemas, and grammars in Lark's or llguidance's own form. The parser has a stack, so
states have no numbers: masks are computed each time (some 50 us), and an output has a parser of its own.
Forced text follows the same rule as for automata (`forced`).
"""

import importlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ramify.gpu.constraints.forced import MOST_DRAFTS, MOST_FORCED, WINDOW, Plan
from ramify.gpu.constraints.vocabulary import Vocabulary
from ramify.protocol.errors import ConstraintError, brief

llguidance: Any
try:
    llguidance = importlib.import_module("llguidance")
except ImportError:  # it has no wheel for this machine
    llguidance = None


class _Tokens:
    """A vocabulary in the form of llguidance's `TokenizerWrapper`."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary, end: int) -> None:
        self.eos_token_id = end
        # an id without text must have a name that is no text; 0xFF is never in UTF-8
        self.tokens = list(vocabulary.tokens)
        self.special_token_ids = [i for i in range(vocabulary.size) if not vocabulary.is_text(i)]
        for i in self.special_token_ids:
            self.tokens[i] = b"\xff<%d>" % i
        self._encode = vocabulary.encode

    def __call__(self, text: str | bytes) -> Sequence[int]:
        return self._encode(text if isinstance(text, str) else text.decode("utf-8", "replace"))


class GrammarVocabulary:
    """A vocabulary in llguidance's form. Made once for a model (a second, for a large one)."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        """Raises ConstraintError if llguidance is not installed."""
        if llguidance is None:
            raise ConstraintError("this server has no llguidance, which grammars need: install it there")
        self.vocabulary = vocabulary
        texts = [i for i in range(vocabulary.size) if vocabulary.is_text(i)]
        flags = np.zeros(vocabulary.size, np.bool_)
        flags[texts] = True
        self.texts = vocabulary.pack(flags)
        ends = [*vocabulary.stop_ids, *np.flatnonzero(~flags).tolist()]
        self._end = ends[0] if ends else 0
        tokens: Any = _Tokens(vocabulary, self._end)
        self.tokenizer = llguidance.LLTokenizer(tokens, n_vocab=vocabulary.size, eos_token=self._end)
        flags[:] = False
        flags[list(vocabulary.stop_ids)] = True
        self.stops = vocabulary.pack(flags)


class Grammar:
    """The constraint of a grammar. `text`: as `llguidance.LLMatcher.grammar_from_...` makes it."""

    def __init__(self, vocabulary: GrammarVocabulary, text: str) -> None:
        """Raises ConstraintError. A large grammar takes up to a second; other threads run meanwhile."""
        self._vocabulary = vocabulary
        self._first = llguidance.LLMatcher(vocabulary.tokenizer, text, log_level=0)
        _check(self._first)

    def matcher(self) -> "GrammarMatcher":
        return GrammarMatcher(self._vocabulary, self._first.deep_copy())

    def close(self) -> None:
        """Do nothing: there are no masks to drop."""


def _check(parser: Any) -> None:
    if parser.is_error():
        reason = (parser.get_error().splitlines() or ["unknown"])[0]
        if reason == "NoExtensionBias":  # llguidance's word for an empty mask
            reason = "nothing that it allows can follow: a rule or a pattern of it matches no text"
        raise ConstraintError(f"the grammar cannot be followed: {brief(reason)}")


class GrammarMatcher:
    """The matcher of an output: a parser."""

    quick = False  # a mask can take milliseconds

    def __init__(self, vocabulary: GrammarVocabulary, parser: Any) -> None:
        self._shared = vocabulary
        self._vocabulary = vocabulary.vocabulary
        self._parser = parser
        self._count = 0
        self._ended = False
        self._mask: NDArray[np.int32] | None = None
        self._forced: tuple[int | None, bytes] | None = None  # the token here, and the text it begins

    def mask(self) -> NDArray[np.int32]:
        if self._mask is None:
            self._mask = self._make_mask()
            self._mask.flags.writeable = False
        return self._mask

    @property
    def everything(self) -> NDArray[np.int32]:
        return self._vocabulary.everything

    def knows(self) -> bool:
        return False

    def only(self) -> int:
        if not self._ended:
            token, _ = self._forced_token()
            if token is not None:
                return token
        words = self.mask().view(np.uint32)
        some = np.flatnonzero(words)
        if len(some) != 1 or int(words[some[0]]).bit_count() != 1:
            return -1
        return 32 * int(some[0]) + int(words[some[0]]).bit_length() - 1

    def _make_mask(self) -> NDArray[np.int32]:
        if self._ended:
            return self._shared.stops.copy()
        token, _ = self._forced_token()
        if token is not None:
            row = np.zeros(self._vocabulary.words, np.int32)
            row.view(np.uint32)[token >> 5] = 1 << (token & 31)
            return row
        row = self._legal()
        if self._parser.is_accepting():
            row |= self._shared.stops
        return row

    def _legal(self) -> NDArray[np.int32]:
        """Compute the mask of the parser, without stop tokens."""
        row = np.frombuffer(self._parser.compute_bitmask(), np.int32)
        _check(self._parser)
        return row[: self._vocabulary.words] & self._shared.texts

    def advance(self, token: int) -> bool:
        if token in self._vocabulary.stop_ids:
            if not self.is_final():
                return False
            self._ended = True
        else:
            if (
                self._ended
                or not self._vocabulary.is_text(token)
                or self._parser.validate_tokens([token]) != 1
            ):
                return False
            self._parser.consume_token(token)
            _check(self._parser)
        self._moved(1)
        return True

    def rollback(self, count: int) -> None:
        if not 0 <= count <= self._count:
            raise ValueError(f"cannot take back {count} of {self._count} tokens")
        if count:
            stops, self._ended = int(self._ended), False
            self._parser.rollback(count - stops)
            _check(self._parser)
            self._moved(-count)

    def _moved(self, count: int) -> None:
        self._count += count
        self._mask = self._forced = None

    def plan(self) -> Plan:
        forced: list[int] = []
        text = b""
        while not self._ended and len(forced) < MOST_FORCED:
            token, text = self._forced_token()
            if token is None or not self.advance(token):
                break
            forced.append(token)
        drafts = () if len(forced) == MOST_FORCED else self._spelled(text)[:MOST_DRAFTS]
        found = Plan(tuple(forced), tuple(drafts))
        self.rollback(len(forced))
        return found

    def likely(self) -> tuple[int, ...]:
        return self.plan().drafts

    def is_final(self) -> bool:
        return self._ended or bool(self._parser.is_accepting())

    def has_ended(self) -> bool:
        return self._ended

    def __len__(self) -> int:
        return self._count

    def _forced_token(self) -> tuple[int | None, bytes]:
        """Find the only legal token here, if the text is forced, and the forced text."""
        if self._forced is None:
            text = bytes(self._parser.compute_ff_bytes())[:WINDOW]
            _check(self._parser)
            text = text.decode("utf-8", "ignore").encode()  # whole characters
            tokens = self._spelled(text)
            token = tokens[0] if tokens and self._sure(text, tokens) else None
            self._forced = (token, text)
        return self._forced

    def _spelled(self, text: bytes) -> list[int]:
        table = self._vocabulary.tokens
        tokens = self._vocabulary.encode(text.decode()) if text else []
        return tokens if b"".join(table[i] for i in tokens) == text else []

    def _sure(self, text: bytes, tokens: list[int]) -> bool:
        """Whether no token that may follow spans the border of the first one of `tokens`."""
        table = self._vocabulary.tokens
        first = len(table[tokens[0]])
        begin = len(text) - sum(len(table[i]) for i in tokens[-MOST_DRAFTS:])
        return not any(
            self._may_span(text[:at], text[at:]) for at in range(begin, min(first, len(text)))
        )

    def _may_span(self, before: bytes, beginning: bytes) -> bool:
        """Whether a token may follow `before` that begins with `beginning` and goes on."""
        longer = self._vocabulary.longer(beginning)
        if not len(longer):
            return False
        spelling = self._any_spelling(before)
        if not self._parser.consume_tokens(spelling):
            _check(self._parser)
        legal = self._legal()
        self._parser.rollback(len(spelling))
        _check(self._parser)
        return bool((legal[longer >> 5] >> (longer & 31) & 1).any())

    def _any_spelling(self, text: bytes) -> list[int]:
        """Find some tokens with these bytes."""
        found = []
        at = 0
        while at < len(text):
            token = self._vocabulary.longest(text, at)
            found.append(token)
            at += len(self._vocabulary.tokens[token])
        return found
