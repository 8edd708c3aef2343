"""The constraints of bodies that compile workers made."""

import zlib
from collections.abc import Callable

import numpy as np

from ramify.gpu.constraints.byte_automaton import read_words
from ramify.gpu.constraints.checked import CheckedAutomaton
from ramify.gpu.constraints.grammar import Grammar, GrammarVocabulary
from ramify.gpu.constraints.masks import MaskStore
from ramify.gpu.constraints.matcher import AutomatonConstraint, OutputConstraint
from ramify.gpu.constraints.token_automaton import TokenAutomaton
from ramify.gpu.constraints.vocabulary import Vocabulary
from ramify.protocol.constraints import AutomatonBody, GrammarBody, decode_body


def constraint_of(
    data: bytes,
    vocabulary: Vocabulary,
    grammars: Callable[[], GrammarVocabulary],
    store: MaskStore | None = None,
) -> OutputConstraint:
    """Make the constraint of a body. `grammars`: returns llguidance's form of the vocabulary.
    `store`: keeps masks.

    Raises ConstraintError. Takes a fraction of a millisecond for most automata, and up to a second for
    grammars.
    """
    match decode_body(data):
        case AutomatonBody(words, packed, forced, likely, checked):
            flat = np.frombuffer(zlib.decompress(words) if packed else words, "<i4")
            automaton = read_words(flat.astype(np.int32, copy=False), forced)
            machine = TokenAutomaton(vocabulary, automaton, store, likely)
            return CheckedAutomaton(machine, checked) if checked.places else AutomatonConstraint(machine)
        case GrammarBody(text):
            return Grammar(grammars(), text)
