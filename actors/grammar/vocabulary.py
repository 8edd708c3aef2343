"""The vocabulary of a model as the executor gets it, once, ahead of the first constraint."""

from pathlib import Path

import msgspec

from ramify.actors.tokenizer import Tokenizer
from ramify.protocol.constraints import VocabularyBody


def vocabulary_of(folder: Path) -> bytes:
    """The body of constraint 0, read from the model's folder."""
    return packed(Tokenizer.load(folder))


def packed(tokenizer: Tokenizer) -> bytes:
    """The same of a tokenizer that was read."""
    return msgspec.msgpack.encode(VocabularyBody(*tokenizer.words))
