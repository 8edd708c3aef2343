"""What plans bring of constraints, as bytes, and what is made of it.

Making the vocabulary takes tenths of a second, so that is done in a thread; the first constraint waits
for it. llguidance's form of it is made when the first grammar comes.
"""

from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache

import msgspec

from ramify.gpu.constraints.bodies import constraint_of
from ramify.gpu.constraints.grammar import GrammarVocabulary
from ramify.gpu.constraints.matcher import Constraint
from ramify.gpu.constraints.vocabulary import Vocabulary
from ramify.protocol.constraints import VocabularyBody


class Loads:
    """`size`: ids in the model's logits."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._vocabulary: Future[Vocabulary] | None = None
        self._grammars = cache(self._make_grammars)

    def vocabulary(self, body: bytes) -> None:
        """Begin to make the vocabulary."""
        threads = ThreadPoolExecutor(1, "vocabulary")
        self._vocabulary = threads.submit(read_vocabulary, body, self._size)
        threads.shutdown(wait=False)  # the thread ends with its work

    def constraint(self, body: bytes) -> Constraint:
        """Raises ConstraintError for what cannot be followed; ValueError without a vocabulary."""
        return constraint_of(body, self._words(), self._grammars)

    def _words(self) -> Vocabulary:
        if self._vocabulary is None:
            raise ValueError("a constraint came before the vocabulary")
        return self._vocabulary.result()

    def _make_grammars(self) -> GrammarVocabulary:
        return GrammarVocabulary(self._words())


def read_vocabulary(body: bytes, size: int) -> Vocabulary:
    """The vocabulary of a `VocabularyBody`, for logits of `size` ids."""
    import tokenizers

    words = msgspec.msgpack.decode(body, type=VocabularyBody)
    speller = tokenizers.Tokenizer.from_str(words.tokenizer)

    def encode(text: str) -> list[int]:
        ids: list[int] = speller.encode(text, add_special_tokens=False).ids
        return ids

    stops = [token for token in words.stops if token < size]  # others the model cannot sample
    return Vocabulary(words.tokens[:size], stops, encode, size)
