"""The loading of vocabularies and constraints from the bytes in plans, in threads.

Making a vocabulary takes a second, a large constraint tenths of one. No step waits for that: a future
tells when it is done. What the first automaton would need beyond the vocabulary (kernels, tables on a
device) is made right after it. llguidance's form of the vocabulary is made for the first grammar.
"""

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from threading import Lock

import msgspec

from ramify.gpu.constraints.bodies import constraint_of
from ramify.gpu.constraints.byte_automaton import anything
from ramify.gpu.constraints.grammar import GrammarVocabulary
from ramify.gpu.constraints.masks import MaskStore
from ramify.gpu.constraints.matcher import AutomatonConstraint, OutputConstraint, StatesConstraint
from ramify.gpu.constraints.token_automaton import TokenAutomaton
from ramify.gpu.constraints.vocabulary import Vocabulary
from ramify.protocol.constraints import VocabularyBody
from ramify.protocol.errors import ConstraintError

THREADS = 2  # so that one large constraint holds up no other

log = logging.getLogger(__name__)

Prepare = Callable[[int, OutputConstraint], None]
Loaded = OutputConstraint | ConstraintError  # or why it cannot be followed, for the client


@dataclass(slots=True)
class LoadCounters:
    """Counts since the start: constraints made, those that failed, and the seconds that it took."""

    loaded: int = 0
    failed: int = 0
    seconds: float = 0.0


class Loads:
    """Loader. `size`: ids in the model's logits. `store`: keeps masks. `prepare`: called in the thread
    with each constraint and its number before it is used; may raise ConstraintError.
    """

    def __init__(
        self, size: int, store: MaskStore | None = None, prepare: Prepare | None = None
    ) -> None:
        self.counters = LoadCounters()
        self._size = size
        self._store = store
        self._prepare = prepare
        self._vocabulary: Future[Vocabulary] | None = None
        self._threads: ThreadPoolExecutor | None = None
        self._words: GrammarVocabulary | None = None
        self._lock = Lock()

    def vocabulary(self, body: bytes) -> None:
        """Begin to make the vocabulary."""
        threads = ThreadPoolExecutor(1, "vocabulary")
        self._vocabulary = threads.submit(self._read, body)
        threads.shutdown(wait=False)  # the thread ends with its work

    def constraint(self, ident: int, body: bytes) -> "Future[Loaded]":
        """Begin to make a constraint. Raises ValueError without a vocabulary."""
        if self._vocabulary is None:
            raise ValueError("a constraint came before the vocabulary")
        if self._threads is None:
            self._threads = ThreadPoolExecutor(THREADS, "constraints")
        return self._threads.submit(self._make, ident, body)

    def close(self) -> None:
        """Start no more work."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)

    def _read(self, body: bytes) -> Vocabulary:
        vocabulary = read_vocabulary(body, self._size)
        try:
            self._warm_up(vocabulary)
        except Exception:
            log.exception("what constraints need was not made ahead")
        return vocabulary

    def _warm_up(self, vocabulary: Vocabulary) -> None:
        """Make, and drop, an automaton of one state that takes everything, as number 0."""
        first = AutomatonConstraint(TokenAutomaton(vocabulary, anything(), self._store))
        first.look_around()
        if self._prepare is not None:
            self._prepare(0, first)
        first.close()

    def _make(self, ident: int, body: bytes) -> Loaded:
        assert self._vocabulary is not None
        begun = time.perf_counter()
        try:
            words = self._vocabulary.result()
            begun = time.perf_counter()  # waiting for the vocabulary is not this one's work
            made = constraint_of(body, words, self._grammars, self._store)
            if self._prepare is not None:
                self._prepare(ident, made)
            if isinstance(made, StatesConstraint):
                made.look_around()
        except ConstraintError as error:
            log.error("a constraint cannot be followed: %s", error)
            self.counters.failed += 1
            return error
        except Exception:
            log.exception("a constraint could not be loaded")
            self.counters.failed += 1
            return ConstraintError("it could not be loaded, which the server's log says more of")
        finally:
            self.counters.seconds += time.perf_counter() - begun
        self.counters.loaded += 1
        return made

    def _grammars(self) -> GrammarVocabulary:
        with self._lock:
            if self._words is None:
                assert self._vocabulary is not None
                self._words = GrammarVocabulary(self._vocabulary.result())
            return self._words


def read_vocabulary(body: bytes, size: int) -> Vocabulary:
    """Make the vocabulary of a `VocabularyBody`, for logits of `size` ids."""
    import tokenizers

    words = msgspec.msgpack.decode(body, type=VocabularyBody)
    speller = tokenizers.Tokenizer.from_str(words.tokenizer)

    def encode(text: str) -> list[int]:
        ids: list[int] = speller.encode(text, add_special_tokens=False).ids
        return ids

    stops = [token for token in words.stops if token < size]  # others the model cannot sample
    return Vocabulary(words.tokens[:size], stops, encode, size)
