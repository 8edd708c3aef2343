"""What the compile workers made, as a constraint that outputs can be held to."""

import zlib
from collections.abc import Callable

import numpy as np

from ramify.gpu.constraints.grammar import Grammar, GrammarVocabulary
from ramify.gpu.constraints.masks import MaskStore
from ramify.gpu.constraints.matcher import Automaton, Constraint
from ramify.gpu.constraints.token_automaton import TokenAutomaton
from ramify.gpu.constraints.vocabulary import Vocabulary
from ramify.protocol.constraints import AutomatonBody, GrammarBody, decode_body


def constraint_of(
    data: bytes,
    vocabulary: Vocabulary,
    grammars: Callable[[], GrammarVocabulary],
    store: MaskStore | None = None,
) -> Constraint:
    """The constraint of a body. `grammars`: what makes, or has, llguidance's form of the vocabulary.
    `store`: where masks are kept.

    Raises ConstraintError. Takes milliseconds for most, and up to a second for grammars and the largest
    automata.
    """
    match decode_body(data):
        case AutomatonBody(states, columns, following, classes, final):
            table = np.frombuffer(zlib.decompress(following), "<i4").astype(np.int32)
            return Automaton(
                TokenAutomaton(
                    vocabulary,
                    table.reshape(states, columns),
                    np.frombuffer(classes, np.uint8),
                    np.frombuffer(zlib.decompress(final), np.bool_),
                    store,
                )
            )
        case GrammarBody(text):
            return Grammar(grammars(), text)
